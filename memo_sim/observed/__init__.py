"""What other programs measured of a step or a machine: profiler traces, tables of link benchmarks.

They become typed events and curves here. Comparing them with predictions is ``reasons/recorded_step.py``'s work.
"""
