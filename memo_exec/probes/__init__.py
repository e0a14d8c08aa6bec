"""Calibration: measures operators, copies and collectives of this machine and writes a hardware profile.

No probe times the model that the profile is later asked about.
"""
