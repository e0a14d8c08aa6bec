"""Limits torch to one thread outside the lanes, because references are small and tests run in parallel."""

import torch

torch.set_num_threads(1)
