"""Hugging Face's model types, by family: what the fields of a ``config.json`` say about a ``Model``, and back.

``../huggingface.py`` has the functions that other rooms call.
"""
