"""Draws pictures and writes text from documents: timelines, Chrome traces, tables, reports.

These modules show only what a document holds; predictions and plans are computed elsewhere.
"""
