"""Everything about several ranks: processes and their groups, mesh coordinates, a rank's own program and its shards.

Collective kernels are in ``kernels``; checkpoints of shards are in ``training``.
"""
