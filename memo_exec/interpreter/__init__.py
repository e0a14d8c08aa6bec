"""Plays a program step by step: lanes, streams, events, records, and the race checks of debug mode.

The kernels of the instructions live in ``kernels``; the buffers and their addresses live in ``memory``.
"""
