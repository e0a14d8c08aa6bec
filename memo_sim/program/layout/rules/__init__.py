"""Rules between knobs, each feature's in a module of its own.

``../compatibility.py`` puts them into one table, whose order decides which broken rule a message names.
"""
