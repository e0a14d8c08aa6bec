"""Arithmetic on decisions: shapes, rank order, pipeline stages, schedules, partitions, offsets of parameters.

No instruction is written here. All other folders of ``program`` read these sizes instead of computing them again.
``compatibility.py`` is the table of options that exclude each other; ``rules`` has each feature's part of it.
"""
