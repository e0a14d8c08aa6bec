"""What the functions of ``memo_sim.api`` return: documents with tables, pictures and files.

Every result is a ``TypedResult`` (``views/typed_result.py``): it compares, copies and pickles by its document.
"""
