"""Independent checkers of programs: of one pipeline stage alone, and of all stages together.

They share no code with the lowering, so an error in the lowering cannot repeat here.
"""
