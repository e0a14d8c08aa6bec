"""The program's data types: lanes, buffers, operands, instructions, templates, and the builder that writes them.

Other folders decide which instructions a model needs.
"""
