"""Placement solvers, a model of PyTorch's device allocator, sizes of pinned blocks, and readers of memory requests.

The checker that every placement must pass is in ``memo_sim.program.arena``; it shares no code with the solvers.
"""
