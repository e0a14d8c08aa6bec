"""Pictures and text from documents: timelines, Chrome traces, tables, reports.

Nothing is computed here that a document does not already hold.
"""
