"""A layer's forward, backward, recompute and weight gradients; embedding and head; METP's layer.

Which layers a stage plays, and in which order, is decided in ``pipeline``.
"""
