"""Placement solvers, models of PyTorch's device and pinned allocators, and readers of memory requests.

The checker that every placement must pass is in ``memo_sim.program.arena``; it shares no code with the solvers.
"""
