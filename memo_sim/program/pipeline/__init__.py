"""The whole program of a pipeline stage: templates of each subsequence, order of passes, stage p2p, multiplexing.

What happens inside a layer is in ``layers``.
"""
