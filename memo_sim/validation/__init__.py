"""Compares predictions with published measurements: case files, errors, intervals, accepted accuracy, fitted constants.

Figures and tables of papers are in ``papers``.
"""
