"""The training loop around a played step: data, hyperparameters, checkpoints, Hugging Face weights.

The step itself is the program, played by ``interpreter``.
"""
