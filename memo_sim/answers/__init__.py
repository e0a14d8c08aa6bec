"""The questions that users ask, one function each: what-if, longest, plan-memory, list.

Each returns a document. Options are parsed in ``cli``; tables and pictures are in ``views``.
"""
