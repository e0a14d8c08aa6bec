"""Single operators as instructions: products, norms, activations, and the workspace that each kernel needs.

The order in which a layer calls them is not here but in ``layers`` and ``attention``.
"""
