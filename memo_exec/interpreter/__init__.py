"""Plays a program: lanes, streams, events, records, and the race checks of debug mode.

What an instruction computes is in ``kernels``; where its bytes lie is in ``memory``.
"""
