"""Figures and tables of the MEMO, SPPO and METP papers, computed again; one module for each paper.

The comparison of predictions with published measurements, case by case, is in ``validation``.
"""
