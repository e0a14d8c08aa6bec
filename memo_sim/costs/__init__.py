"""Seconds of one instruction on one machine: compute, copies, collectives, and how lanes slow each other.

When an instruction runs, and what it waits for, is decided in ``engine``.
"""
