"""The time of one instruction on one machine: compute, copies, collectives, and how busy lanes slow each other.

When an instruction starts and what it waits for is decided in ``engine``.
"""
