"""Proof of a plan: the plan, reduced to a small size, against keep-everything and against plain autograd.

It plays programs and compares gradients; it neither trains nor measures time, and changes no plan.
"""
