"""What this machine is and can run: device, libraries, memory budget, checks before a run, a plan's placement file.

Measuring its speed is the work of ``probes``.
"""
