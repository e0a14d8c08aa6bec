"""Memory of a finished program: the requests that it makes, the first-fit placement, the checker of placements.

Placement solvers are in ``memo_sim.memory``; this room is what the executor needs too.
"""
