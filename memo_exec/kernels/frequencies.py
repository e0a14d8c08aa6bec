"""Rotary frequencies, computed as in Hugging Face transformers: unscaled, linear scaling, Llama 3 scaling."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from memo_sim.contract.model import Model, RopeScaling


def inverse_frequencies(model: Model) -> Tensor:
    """Return ``theta ** (-2 i / head_dim)`` for i < head_dim / 2 in fp32, with the model's scaling applied."""
    exponents = torch.arange(0, model.head_dim, 2, dtype=torch.int64).float() / model.head_dim
    plain = 1.0 / (model.rope_theta**exponents)
    scaling = model.rope_scaling
    if scaling is None:
        return plain
    if scaling.kind == "linear":
        return plain / scaling.factor
    return _llama3(plain, scaling)


def _llama3(plain: Tensor, scaling: RopeScaling) -> Tensor:
    """Divide low frequencies by the factor, keep high ones, and interpolate between the two."""
    low_wavelength = scaling.original_max_positions / scaling.low_freq_factor
    high_wavelength = scaling.original_max_positions / scaling.high_freq_factor
    wavelength = 2 * math.pi / plain
    scaled = torch.where(wavelength > low_wavelength, plain / scaling.factor, plain)
    band = scaling.high_freq_factor - scaling.low_freq_factor
    smooth = (scaling.original_max_positions / wavelength - scaling.low_freq_factor) / band
    blended = (1 - smooth) * scaled / scaling.factor + smooth * scaled
    medium = (wavelength >= high_wavelength) & (wavelength <= low_wavelength)
    return torch.where(medium, blended, scaled)
