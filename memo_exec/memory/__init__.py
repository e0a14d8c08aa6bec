"""Memory of a run: buffer stores, the planned arena, the host slab, pinning, the replaying allocator.

The program decides when each buffer is alive, and ``memo_sim/memory`` plans where; this folder only provides the bytes.
"""
