"""Published measurements against predictions: case files, errors, intervals, the accepted accuracy, fits of constants.

Figures and tables of papers are in ``papers``.
"""
