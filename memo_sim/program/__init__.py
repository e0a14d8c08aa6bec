"""The lowering: ``lower(decisions)`` turns a plan's decisions into one program for each pipeline stage.

Prices, placements and devices are unknown here; both interpreters start from the same program.
"""
