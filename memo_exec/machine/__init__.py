"""Describes this machine and checks that it can run a plan: device, libraries, kernels, memory, placement file.

``probes`` measures its speed.
"""
