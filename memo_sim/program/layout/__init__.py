"""Arithmetic on decisions: shapes, rank order, pipeline stages, schedules, partitions, where parameters lie.

``compatibility.py`` is the table of knobs that do not go together.

No instruction is written here; everything above reads these sizes instead of working them out again.
"""
