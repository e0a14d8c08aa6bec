"""Where bytes lie: buffer stores, the planned arena, the host slab, pinning, the replaying allocator.

Which buffer lives when is the program's; this room only serves it.
"""
