"""Trains a model by a plan: data, hyperparameters, training loop, checkpoints, Hugging Face weights.

A step itself is the program; ``interpreter`` plays it.
"""
