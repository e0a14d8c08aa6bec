"""Calibration probes: measure this machine's operators, copies and collectives, and turn them into a hardware profile.

Probes time single operators of small models, never the model for which the profile later makes predictions. The
command that runs them is ``memo_exec/commands/calibrate.py``.
"""
