"""Tests of ``memo_sim.program.attention``: the instructions that each form of attention writes."""
