"""What follows from a finished program: derived edges, liveness, integer columns, communicators.

Nothing here changes a program, and no lowering depends on it.
"""
