"""The documents that memo reads and writes: typed schemas, units, errors, and the catalogue of named models and GPUs.

Nothing here decides, prices or plays anything. Nothing here imports another package of memo.
"""
