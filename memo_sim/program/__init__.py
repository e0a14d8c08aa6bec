"""A plan as instructions on lanes over buffers: ``lower(decisions)``, derived edges, liveness, independent checkers."""
