"""A model's weights by name, in the flat blocks that the program trains: initialised, loaded, saved.

Names are ``embed/tokens.weight``, ``layer.3/qkv.weight``, ``head/norm.weight``. Where there are fp32 masters they are
written first and the parameters rounded from them, so that weights do not depend on dtype, states or activation policy.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from memo_exec import huggingface
from memo_exec.interpreter import Interpreter
from memo_sim.program.parameters import Block, embed_block, head_block, layer_block

INIT_STD = 0.02


def initialize(interpreter: Interpreter, seed: int = 0, *, draw_on: torch.device | str = "cpu") -> None:
    """Draw weights as GPT-2 does; ``draw_on`` says where, and another device draws other numbers."""
    layers = interpreter.decisions.model.layers
    for name, target in _writable(interpreter):
        target.copy_(initial(name, target.shape, layers=layers, seed=seed, device=draw_on))
    publish(interpreter)


def initial(name: str, shape: Sequence[int], *, layers: int, seed: int, device: torch.device | str = "cpu") -> Tensor:
    """Return the first value of a parameter in fp32, as GPT-2 draws it.

    Normal with deviation 0.02, products into the residual stream 0.02 / sqrt(2 layers); norms start at 1, biases at 0.
    Every tensor has its own generator, seeded by seed and name.
    """
    last = name.rpartition("/")[2]
    if last.endswith(".bias"):
        return torch.zeros(*shape, device=device)
    if len(shape) == 1:
        return torch.ones(*shape, device=device)
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:7]))
    residual = INIT_STD / math.sqrt(2 * layers)
    std = residual if last in ("proj.weight", "ffn_down.weight") else INIT_STD
    return torch.normal(0.0, std, tuple(shape), generator=generator, device=device)


def load(interpreter: Interpreter, directory: Path) -> None:
    """Read a Hugging Face directory (config.json and safetensors).

    Raises:
        BadInput: when it is of another model, or a tensor is missing, unknown or misshapen; nothing is read then.
        UsageError: when no model type of Hugging Face has this shape.
    """
    targets = dict(_writable(interpreter))
    for name, value in huggingface.read(directory, interpreter.decisions.model, list(targets)):
        targets[name].copy_(value)
    publish(interpreter)


def save(interpreter: Interpreter, directory: Path) -> None:
    """Write a Hugging Face directory that ``transformers`` loads, in the parameters' dtype.

    Raises:
        UsageError: when no model type of Hugging Face has this shape, or the directory cannot be written.
    """
    model = interpreter.decisions.model
    huggingface.write(directory, model, named_parameters(interpreter), positions=interpreter.decisions.seq_tokens)


def named_parameters(interpreter: Interpreter) -> dict[str, Tensor]:
    """Return every parameter by name, as views of what the kernels read."""
    return dict(_views(interpreter, "params"))


def named_gradients(interpreter: Interpreter) -> dict[str, Tensor]:
    """Return every parameter's gradient by name, in fp32."""
    return dict(_views(interpreter, "grads"))


def publish(interpreter: Interpreter) -> None:
    """Round the parameters from their fp32 masters, where there are masters."""
    known = {family.name for family in interpreter.program.families}
    for kind, count, _ in _blocks(interpreter):
        if f"master.{kind}" in known:
            for i in range(count):
                interpreter.buffer(f"params.{kind}", i).copy_(interpreter.buffer(f"master.{kind}", i))


def _writable(interpreter: Interpreter) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter where it is kept most precisely."""
    known = {family.name for family in interpreter.program.families}
    yield from _views(interpreter, "master" if "master.layer" in known else "params")


def _views(interpreter: Interpreter, state: str) -> Iterator[tuple[str, Tensor]]:
    for kind, count, block in _blocks(interpreter):
        for i in range(count):
            flat = interpreter.buffer(f"{state}.{kind}", i)
            place = f"layer.{i}" if kind == "layer" else kind
            for p in block.parameters:
                yield f"{place}/{p.name}", flat[p.first : p.first + p.elements].view(p.shape)


def _blocks(interpreter: Interpreter) -> list[tuple[str, int, Block]]:
    """Return (kind, how many, block)."""
    model, tp = interpreter.decisions.model, interpreter.decisions.layout.tp
    return [
        ("embed", 1, embed_block(model, tp)),
        ("layer", model.layers, layer_block(model, tp)),
        ("head", 1, head_block(model, tp)),
    ]
