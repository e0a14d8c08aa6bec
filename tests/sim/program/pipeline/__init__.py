"""Tests of ``memo_sim.program.pipeline``: stage programs, subsequences, offload windows and multiplexing."""
