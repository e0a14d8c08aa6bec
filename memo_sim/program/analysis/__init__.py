"""Facts derived from a finished program: edges, liveness, integer columns, communicators.

Nothing here changes a program, and no lowering depends on it.
"""
