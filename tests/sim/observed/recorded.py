"""A small trace of a GPU, written as Kineto writes it: one step of two products, attention, a copy, an all-reduce."""

from __future__ import annotations

import json
from typing import Any

CPU, GPU = 100, 0
STEP_US = 10_000.0


class Trace:
    """Collects events; ``launch`` adds an operator, its launch, and its kernel."""

    def __init__(self, device: str = "NVIDIA A100-SXM4-80GB") -> None:
        self.events: list[dict[str, Any]] = []
        self.device = device
        self.distributed: dict[str, Any] = {}
        self._number = 0
        self.now = 0.0
        """When ``next`` launches the next kernel, in microseconds."""

    def add(self, cat: str, name: str, start: float, length: float, **args: Any) -> None:
        pid = GPU if cat in {"kernel", "gpu_memcpy", "gpu_memset"} else CPU
        self.events.append(
            {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": 1, "ts": start, "dur": length, "args": args}
        )

    def launch(
        self,
        operator: str,
        kernel: str,
        at: float,
        runs: tuple[float, float],
        *,
        cat: str = "kernel",
        shapes: list[list[int]] | None = None,
        of: str = "c10::BFloat16",
        kinds: list[str] | None = None,
        values: list[str] | None = None,
        stream: int = 7,
        **args: Any,
    ) -> None:
        self._number += 1
        inputs: dict[str, Any] = {}
        if shapes is not None:
            inputs = {"Input Dims": shapes, "Input type": kinds or [of] * len(shapes), "Concrete Inputs": values or []}
        self.add("cpu_op", operator, at, 20.0, **inputs)
        self.add("cuda_runtime", "cudaLaunchKernel", at + 5, 3.0, correlation=self._number)
        start, end = runs
        self.add(cat, kernel, start, end - start, correlation=self._number, stream=stream, **args)

    def next(self, operator: str, kernel: str, runs: tuple[float, float], **more: Any) -> None:
        """Launch a kernel after all others."""
        self.launch(operator, kernel, self.now + 5, runs, **more)
        self.now += 40

    def raw(self) -> bytes:
        head = {"schemaVersion": 1, "deviceProperties": [{"name": self.device}]}
        ranks = {"distributedInfo": self.distributed} if self.distributed else {}
        return json.dumps({**head, **ranks, "traceEvents": self.events}).encode()


def one_step() -> Trace:
    trace = Trace()
    trace.add("user_annotation", "ProfilerStep#3", 0.0, STEP_US)
    trace.launch("aten::mm", "ampere_bf16_s16816gemm", 100, (200, 1200), shapes=[[4096, 1024], [1024, 512]])
    trace.launch(
        "aten::_scaled_dot_product_flash_attention",
        "void pytorch_flash::flash_fwd_kernel<...>",
        150,
        (1200, 1700),
        shapes=[[1, 8, 4096, 64], [1, 8, 4096, 64], [1, 8, 4096, 64], [], []],
        values=["", "", "", "0.", "True"],
    )
    trace.add("cpu_op", "autograd::engine::evaluate_function: MmBackward0", 300, 200)
    trace.launch("aten::mm", "ampere_bf16_s16816gemm", 310, (2000, 3000), shapes=[[1024, 4096], [4096, 512]])
    trace.launch("aten::mm", "ampere_bf16_s16816gemm", 400, (3000, 4000), shapes=[[4096, 512], [512, 1024]])
    trace.launch(
        "c10d::allreduce_",
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL",
        600,
        (3500, 4500),
        stream=20,
        **{
            "Collective name": "allreduce",
            "In msg nelems": 1048576,
            "Out msg nelems": 1048576,
            "Group size": 8,
            "dtype": "BFloat16",
            "Process Group Ranks": "[0, 1, 2, 3, 4, 5, 6, 7]",
        },
    )
    trace.launch(
        "aten::copy_",
        "Memcpy DtoH (GPU -> Pinned)",
        700,
        (4400, 5400),
        cat="gpu_memcpy",
        stream=21,
        bytes=20_000_000,
    )
    return trace
