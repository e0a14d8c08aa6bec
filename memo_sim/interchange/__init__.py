"""Plans in the words of other training frameworks, both ways: one module for each framework.

What a framework can say, and how, lives here; pricing what it cannot say is ``answers/export_plan.py``. No framework is
imported.
"""
