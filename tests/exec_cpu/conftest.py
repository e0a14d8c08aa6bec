"""One thread for torch outside of the lanes: the references are small, and tests run beside each other."""

import torch

torch.set_num_threads(1)
