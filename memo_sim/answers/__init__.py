"""Use cases as functions: what-if, longest, plan-memory, list.

Each returns a document; parsing options is in ``cli`` and text in ``views``.
"""
