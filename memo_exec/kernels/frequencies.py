"""Rotary frequencies, computed as in Hugging Face transformers, with every scaling that a model can have."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from memo_sim.contract.model import Model
from memo_sim.contract.rope_scaling import RopeScaling


def inverse_frequencies(model: Model, seq_tokens: int) -> Tensor:
    """Return ``theta ** (-2 i / size)`` for i < size / 2 in fp32, with the model's scaling applied.

    ``size``: the rotary features of a head (``Model.rotary_dim``).

    ``seq_tokens``, the sequence's length, matters for dynamic and longrope.
    """
    exponents = _exponents(model)
    plain = unscaled_frequencies(model, model.rope_theta)
    scaling = model.rope_scaling
    if scaling is None:
        return plain
    match scaling.kind:
        case "linear":
            return plain / scaling.factor
        case "llama3":
            return _llama3(plain, scaling)
        case "yarn":
            return _yarn(plain, scaling, model)
        case "dynamic":
            longer = max(seq_tokens, scaling.original_max_positions) / scaling.original_max_positions
            power = model.rotary_dim / (model.rotary_dim - 2)
            base = model.rope_theta * (scaling.factor * longer - (scaling.factor - 1)) ** power
            return 1.0 / torch.pow(base, exponents)
        case "longrope":
            long = seq_tokens > scaling.original_max_positions
            divisors = torch.tensor(scaling.long_factors if long else scaling.short_factors, dtype=torch.float32)
            return 1.0 / (divisors * torch.pow(model.rope_theta, exponents))


def unscaled_frequencies(model: Model, theta: float) -> Tensor:
    """Return ``theta ** (-2 i / head_dim)`` for i < head_dim / 2 in fp32."""
    return 1.0 / torch.pow(theta, _exponents(model))


def _exponents(model: Model) -> Tensor:
    return torch.arange(0, model.rotary_dim, 2, dtype=torch.int64).float() / model.rotary_dim


def _yarn(plain: Tensor, scaling: RopeScaling, model: Model) -> Tensor:
    """Divide by the factor what turns less than ``beta_slow`` times, keep what turns more than ``beta_fast`` times."""

    def frequency_of(turns: float) -> float:
        spread = math.log(scaling.original_max_positions / (turns * 2 * math.pi))
        return model.rotary_dim * spread / (2 * math.log(model.rope_theta))

    low, high = frequency_of(scaling.beta_fast), frequency_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, model.rotary_dim - 1)
    width = high - low if high != low else 0.001
    ramp = ((torch.arange(len(plain), dtype=torch.float32) - low) / width).clamp(0, 1)
    return plain / scaling.factor * ramp + plain * (1 - ramp)


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
