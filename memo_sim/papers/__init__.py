"""Figures and tables of the MEMO, SPPO and METP papers, computed again.

The measurements that predictions are compared with case by case are in ``validation``.
"""
