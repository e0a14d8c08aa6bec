"""Plays a priced program in SimPy: lanes, node topology and host memory."""
