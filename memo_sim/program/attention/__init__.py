"""Attention in every layout: one device, ring, all-gather, Ulysses, subsequences, chunks, ring self-attention.

The products around attention are in ``layers``.
"""
