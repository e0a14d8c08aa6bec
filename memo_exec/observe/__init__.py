"""Records the memory requests of a step, on a GPU or with fake tensors, and compares them with the program's buffers.

``interpreter`` records times.
"""
