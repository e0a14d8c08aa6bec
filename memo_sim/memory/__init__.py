"""Placement solvers, and models of PyTorch's device and pinned allocators."""
