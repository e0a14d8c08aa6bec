"""Sentences that explain an answer: what limits it, why the runner-up is slower, which options would help.

These modules read finished results and change none of them.
"""
