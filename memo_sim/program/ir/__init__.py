"""The program's own vocabulary: lanes, buffers, operands, instructions, templates, and the builder that writes them.

Which instructions a model needs is decided above; this room only defines what they are.
"""
