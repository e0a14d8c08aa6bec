"""Benchmarks that run from a checkout; they are not part of the wheel."""
