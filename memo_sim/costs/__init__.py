"""Instruction and machine profile to seconds: compute, transfer and collective costs."""
