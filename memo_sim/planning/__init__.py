"""Chooses decisions: systems as presets, candidate layouts, alpha, number of subsequences, lower bounds, the search.

Explanations of the answer are in ``explain``, rendering in ``views``.
"""
