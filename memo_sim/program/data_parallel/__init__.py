"""Data parallelism: gradient reduction over replicas, ZeRO sharding, and the optimizer's step.

The forward and backward of a layer are in ``layers``.
"""
