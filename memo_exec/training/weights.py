"""Initialises, loads and saves a model's weights by name, in the flat blocks that the program trains.

Names are ``embed/tokens.weight``, ``layer.3/qkv.weight``, ``head/norm.weight``. A rank holds shards of the weights,
which are rectangles; a single process holds all of them. Parameters are rounded from the same fp32 numbers as their
masters, so the weights do not depend on dtype, states, activation policy or layout.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from memo_exec.distributed.shards import parts_of, shards_of
from memo_exec.interpreter.interpreter import Interpreter
from memo_exec.memory.dtypes import TORCH_DTYPES
from memo_exec.training import huggingface, peft_folder
from memo_sim.contract.plan import Decisions
from memo_sim.program.layout.fp8 import products

INIT_STD = 0.02
RESIDUAL = ("proj.weight", "ffn_down.weight", "experts_down.weight", "shared_down.weight")
"""The matrices whose product is added to the residual stream."""


@dataclass(frozen=True)
class Held:
    """A shard of a whole tensor on this rank: the rectangle at ``offsets``, as a view of its buffer."""

    name: str
    whole: tuple[int, ...]
    offsets: tuple[int, ...]
    view: Tensor

    def of(self, whole: Tensor) -> Tensor:
        """Return the same rectangle of ``whole``."""
        return whole[tuple(slice(o, o + n) for o, n in zip(self.offsets, self.view.shape, strict=True))]


def is_adapter(name: str) -> bool:
    """Return whether a name is that of a side of an adapter."""
    return name.endswith((".lora_a", ".lora_b"))


def in_fp8_alone(decisions: Decisions, name: str) -> bool:
    """Return whether the weight of this name is kept in FP8 alone, beside its fp32 master."""
    of = name.rpartition("/")[2]
    return decisions.fp8_params and of.removesuffix(".weight") in products(decisions) and of.endswith(".weight")


def initialize(
    interpreter: Interpreter, seed: int = 0, *, draw_on: torch.device | str = "cpu", adapters: bool = False
) -> None:
    """Draw random weights as GPT-2 does.

    ``draw_on`` is the device that draws them; another kind of device draws other numbers. ``adapters``: draw them
    alone.
    """
    layers = interpreter.decisions.model.layers
    for name, found in by_name(interpreter).items():
        if adapters and not is_adapter(name):
            continue
        whole = initial(name, found[0].whole, layers=layers, seed=seed, device=draw_on)
        for held in found:
            held.view.copy_(held.of(whole))
    interpreter.weights_changed()


def initial(name: str, shape: Sequence[int], *, layers: int, seed: int, device: torch.device | str = "cpu") -> Tensor:
    """Return the initial value of a parameter in fp32, as GPT-2 draws it.

    Matrices are normal with standard deviation 0.02, or 0.02 / sqrt(2 layers) if their product is added to the
    residual stream. Norms start at 1, biases and sinks at 0. Of adapters, A is uniform as PEFT draws it, and B is zero,
    so they add nothing at first. Each tensor has its own generator, seeded by ``seed`` and its name.
    """
    last = name.rpartition("/")[2]
    if last.endswith(".bias") or last == "sinks":
        return torch.zeros(*shape, device=device)
    if len(shape) == 1:
        return torch.ones(*shape, device=device)
    if last.endswith(".lora_b"):
        return torch.zeros(*shape, device=device)
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:7]))
    if last.endswith(".lora_a"):
        bound = 1 / math.sqrt(shape[1])  # of kaiming_uniform_ with a = sqrt(5)
        return torch.empty(*shape, device=device).uniform_(-bound, bound, generator=generator)
    residual = INIT_STD / math.sqrt(2 * layers)
    std = residual if last in RESIDUAL else INIT_STD
    return torch.normal(0.0, std, tuple(shape), generator=generator, device=device)


def load(interpreter: Interpreter, directory: Path) -> None:
    """Read a Hugging Face directory (config.json and safetensors).

    Raises:
        BadInput: when it is of another model, or a tensor is missing, unknown or of another shape. No weight is
            changed then.
        UsageError: when no model type of Hugging Face has this shape.
    """
    targets = {name: found for name, found in by_name(interpreter).items() if not is_adapter(name)}
    for name, whole in huggingface.read(directory, interpreter.decisions.model, list(targets)):
        for held in targets[name]:
            held.view.copy_(held.of(whole))
    interpreter.weights_changed()


def load_adapters(interpreter: Interpreter, directory: Path) -> None:
    """Read the adapters of a plan that has some from a folder of PEFT.

    Raises:
        BadInput: when it has other adapters, or a tensor is missing, unknown or of another shape.
        UsageError: when PEFT has other adapters for the model.
    """
    model, adapters, targets = interpreter.decisions.model, interpreter.decisions.lora, by_name(interpreter)
    assert adapters is not None  # the caller refuses a folder otherwise
    for name, whole in peft_folder.read(directory, model, adapters):
        for held in targets.get(name, []):
            held.view.copy_(held.of(whole))


def save(
    interpreter: Interpreter,
    directory: Path,
    *,
    named: dict[str, Tensor] | None = None,
    source: dict[str, Any] | None = None,
    base: Path | None = None,
) -> None:
    """Write a Hugging Face directory that ``transformers`` can load, in the parameters' dtype; of adapters, a PEFT one.

    ``named`` are the whole trained parameters. Give them when this process does not hold all of them. ``source`` is the
    config.json of the weights that training began from, whose fields are kept, and ``base`` their folder.

    Raises:
        UsageError: when no model type of Hugging Face has this shape, or the directory cannot be written.
    """
    decisions = interpreter.decisions
    whole = named_parameters(interpreter) if named is None else named
    dtype = TORCH_DTYPES[decisions.dtype]
    whole = {name: value if value.dtype == dtype else value.cpu().to(dtype) for name, value in whole.items()}
    if decisions.lora is not None:
        kind = source["model_type"] if source is not None else ""
        peft_folder.write(directory, decisions.model, decisions.lora, whole, base=base, kind=kind)
        return
    huggingface.write(directory, decisions.model, whole, positions=decisions.seq_tokens, source=source)


def named_parameters(interpreter: Interpreter) -> dict[str, Tensor]:
    """Return every parameter by name, as views of the kernels' buffers. Works only in a run of one process.

    Of those that are kept in FP8 alone, the master weights.
    """
    found = {held.name: held.view for held in held_by(interpreter, "params")}
    if interpreter.decisions.fp8_params:
        found = {held.name: held.view for held in held_by(interpreter, "master")} | found
    return found


def held_by(interpreter: Interpreter, state: str) -> Iterator[Held]:
    """Yield the shards of each whole tensor in this rank's buffers of ``state`` (params, grads, master, ...)."""
    decisions, mesh = interpreter.decisions, interpreter.mesh
    for part, family, blocks in parts_of(decisions, mesh):
        if f"{state}.{family}" not in interpreter.program.family_bases:
            continue
        shards = shards_of(decisions, mesh, state, part)
        for i, block in enumerate(blocks):
            flat = interpreter.buffer(f"{state}.{family}", i)
            for p in shards:
                view = flat[p.first : p.first + math.prod(p.sizes)].view(p.sizes)
                yield Held(f"{block}/{p.name}", p.whole, p.offsets, view)


def by_name(interpreter: Interpreter) -> dict[str, list[Held]]:
    """Return this rank's shards of each weight: of the parameter, and of the fp32 master if there is one."""
    found: dict[str, list[Held]] = {}
    for state in ("params", "master"):
        for held in held_by(interpreter, state):
            found.setdefault(held.name, []).append(held)
    return found
