"""Memory of a finished program: the requests that it makes, first-fit placement, and the checker of placements.

Placement solvers are in ``memo_sim.memory``. This package holds what the executor needs as well.
"""
