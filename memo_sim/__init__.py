"""Simulator and planner: what a training step costs in time and memory, before it runs."""

__version__ = "0.1.0"
