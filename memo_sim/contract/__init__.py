"""Typed, versioned documents, units, errors, and what users can name: models, clusters, profiles.

Nothing here decides, prices or plays anything, and nothing here imports another room of memo.
"""
