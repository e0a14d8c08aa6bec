"""Arithmetic on decisions: shapes, rank order, pipeline stages, schedules, partitions, where parameters lie.

No instruction is written here; everything above reads these sizes instead of working them out again.
"""
