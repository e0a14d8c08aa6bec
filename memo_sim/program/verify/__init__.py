"""Independent checkers of programs: of one stage alone, and of all stages together.

They share no code with the lowering, so that an error there cannot hide here.
"""
