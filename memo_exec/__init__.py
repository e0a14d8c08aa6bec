"""Executor: plays a plan's program with torch on real devices and times each instruction."""
