"""The simulator: plays a priced program in SimPy, with lanes, shared links, host memory and device memory over time.

It does not choose decisions; ``planning`` does.
"""
