"""Process groups, this rank's mesh coordinates, its own operands and shards.

Collective kernels are in ``kernels``; saving and loading shards is in ``training``.
"""
