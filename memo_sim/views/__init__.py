"""Contracts to pictures and text: timeline, Perfetto trace, report and diff."""
