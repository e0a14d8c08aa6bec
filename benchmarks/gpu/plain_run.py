"""Runs the steps of a torch rival with memo's batches, weights, loss scale and update; times batch to update."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from benchmarks.gpu import huggingface
from benchmarks.gpu.backend import best_backend
from benchmarks.gpu.case import SEED, SEQUENCES, Case
from benchmarks.gpu.model import Layer, build
from benchmarks.gpu.optimizer import MasterAdamW
from benchmarks.gpu.rivals import RIVALS, host_bytes
from benchmarks.gpu.row import Row, row_of, timed
from memo_exec.machine.machine import this_machine
from memo_exec.memory.dtypes import TORCH_DTYPES
from memo_exec.training.dataset import IGNORED_LABEL, Dataset, load_dataset
from memo_exec.training.hyperparameters import Hyperparameters
from memo_exec.training.weights import initial

Loss = Callable[[Tensor, Tensor, float], Tensor]


def measure(case: Case) -> Row:
    """Run a rival that is available here and return its row.

    Raises:
        CannotRun: if no attention backend runs the shape.
        torch.OutOfMemoryError: if the device is too small.
    """
    assert case.model is not None
    machine = this_machine()
    device, dtype = torch.device(machine.device), TORCH_DTYPES[case.dtype]
    if device.type == "cpu":
        torch.set_num_threads(machine.compute_threads)  # the same number as memo's compute lane
    backend = best_backend(case.model, case.seq_tokens, device, dtype)
    loss, optimizer = (_hugging_face if case.kind == "hugging face" else _plain)(case, device, dtype)
    steps = _Steps()
    with sdpa_kernel([backend]):  # also around backward, because it runs checkpointed attention again
        steps.play(case, device, loss, optimizer)
    return msgspec.structs.replace(
        timed(row_of(case, "ok"), case, steps.step_s, machine.name),
        losses=steps.losses,
        grad_norms=steps.norms,
        backend=f"sdpa {backend.name.lower().removesuffix('_attention')}",
        message=huggingface.ON_CPU if case.kind == "hugging face" and device.type == "cpu" else "",
        host_bytes=host_bytes(case.rival, device),
        **peaks(device),
    )


@dataclass
class _Steps:
    """Runs steps and collects their times, losses and gradient norms."""

    step_s: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)

    def play(self, case: Case, device: torch.device, loss: Loss, optimizer: MasterAdamW) -> None:
        """Run the warm-up and the measured steps of the case."""
        assert case.model is not None
        dataset = load_dataset(Path(case.data), case.model.vocab)
        for step in range(1, case.warm_ups + case.steps + 1):
            if step == case.warm_ups + 1 and device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            _synchronise(device)
            begin = time.perf_counter()
            value = loss(*_batch(dataset, case, step, device))
            value.backward()  # type: ignore[no-untyped-call]
            self.norms.append(optimizer.update(step))
            self.losses.append(float(value.detach()))
            _synchronise(device)
            if step > case.warm_ups:
                self.step_s.append(time.perf_counter() - begin)


def peaks(device: torch.device) -> dict[str, Any]:
    """Return the peaks of allocated and reserved bytes in torch's allocator since the warm-up; empty on a CPU."""
    if device.type == "cpu":
        return {}
    return {
        "peak_device_bytes": torch.cuda.max_memory_allocated(),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
    }


def _plain(case: Case, device: torch.device, dtype: torch.dtype) -> tuple[Loss, MasterAdamW]:
    assert case.model is not None
    rival, layers = RIVALS[case.rival], case.model.layers
    model = build(case.model, case.seq_tokens, device, dtype)
    pairs = (
        (parameter, initial(name, parameter.shape, layers=layers, seed=SEED, device=device))
        for name, parameter in model.by_memo_name()
    )
    optimizer = MasterAdamW(pairs, Hyperparameters())
    if rival.compiled:
        for layer in model.layers:
            assert isinstance(layer, Layer)
            layer.compiled = True
            layer.compile(dynamic=False)
    return lambda ids, labels, scale: model.loss(ids, labels, scale, rival.run_layers), optimizer


def _hugging_face(case: Case, device: torch.device, dtype: torch.dtype) -> tuple[Loss, MasterAdamW]:
    assert case.model is not None
    model, layers = huggingface.HuggingFaceModel(case.model, case.seq_tokens, device, dtype), case.model.layers
    shapes: dict[str, tuple[int, ...]] = {}
    parts = list(model.parts())
    for parameter, name, rows in parts:
        shapes[name] = (rows.stop, *parameter.shape[1:])
    pairs = (
        (parameter, initial(name, shapes[name], layers=layers, seed=SEED, device=device)[rows].clone())
        for parameter, name, rows in parts
    )
    return model.loss, MasterAdamW(pairs, Hyperparameters())


def _batch(dataset: Dataset, case: Case, step: int, device: torch.device) -> tuple[Tensor, Tensor, float]:
    """Return ids and labels on the device, and 1 / number of counted targets."""
    batch = dataset.batch(SEED, step, SEQUENCES, case.seq_tokens)
    ids, labels = torch.from_numpy(batch.ids).to(device), torch.from_numpy(batch.labels).to(device)
    return ids, labels, 1.0 / int((batch.labels != IGNORED_LABEL).sum())


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
