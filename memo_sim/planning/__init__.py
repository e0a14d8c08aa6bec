"""Chooses decisions: alpha, number of subsequences, layout, and the named presets."""
