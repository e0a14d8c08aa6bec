"""Commands of ``memo-sim`` that ``cli.py`` does not hold itself: each parses, calls one function, and renders.

No command knows another one; what they share stands in ``question_options.py``.
"""
