"""Attention in every layout: one device, ring, all-gather, Ulysses, subsequences, chunks, ring self-attention.

The products before and after attention (Q K V and the projection) are in ``layers``.
"""
