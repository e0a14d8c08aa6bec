"""What an allocation is for follows from the innermost frame of its stack that a rule knows."""

import pytest

from memo_sim.memory.allocation_class import (
    ACTIVATIONS,
    GATHERED,
    GRADIENTS,
    LOGITS,
    OLDER,
    OPTIMIZER,
    UNKNOWN,
    WEIGHTS,
    WITHOUT_STACK,
    WORKSPACE,
    allocation_class,
)

TORCH = "/usr/lib/python3/site-packages/torch"
CALL = (f"{TORCH}/nn/modules/module.py", "_call_impl")
FORWARD = (f"{TORCH}/nn/modules/linear.py", "forward")
BACKWARD = ("??", "torch::autograd::Engine::evaluate_function")
MAIN = ("/job/train.py", "main")


@pytest.mark.parametrize(
    ("frames", "found"),
    [
        ([FORWARD, CALL, MAIN], ACTIVATIONS),
        ([(f"{TORCH}/nn/functional.py", "cross_entropy"), ("/job/model.py", "forward"), CALL], LOGITS),
        ([(f"{TORCH}/optim/adamw.py", "_init_group"), (f"{TORCH}/optim/optimizer.py", "wrapper"), MAIN], OPTIMIZER),
        ([FORWARD, CALL, ("/job/train.py", "closure"), (f"{TORCH}/optim/lbfgs.py", "step")], ACTIVATIONS),
        ([("??", "at::native::mm"), BACKWARD], GRADIENTS),
        ([FORWARD, (f"{TORCH}/utils/checkpoint.py", "unpack_hook"), BACKWARD], ACTIVATIONS),
        ([(f"{TORCH}/distributed/fsdp/_fully_shard/_fsdp_param_group.py", "unshard"), CALL], GATHERED),
        ([("??", "at::cuda::getCurrentCUDABlasHandle"), FORWARD, CALL], WORKSPACE),
        ([(f"{TORCH}/nn/modules/linear.py", "__init__"), ("/job/model.py", "__init__"), MAIN], WEIGHTS),
        ([MAIN], UNKNOWN),
        ([("??", "c10::alloc")], WITHOUT_STACK),
        ([], WITHOUT_STACK),
    ],
)
def test_classes_of_stacks(frames: list[tuple[str, str]], found: str) -> None:
    assert allocation_class([{"filename": file, "line": 1, "name": name} for file, name in frames]) == found


@pytest.mark.parametrize("frames", [None, [], "text", 3])
def test_without_frames(frames: object) -> None:
    assert allocation_class(frames) == WITHOUT_STACK
    assert allocation_class(frames, older=True) == OLDER


def test_frames_that_are_no_frames() -> None:
    assert allocation_class([3, {"name": 4}, {"filename": None}]) == WITHOUT_STACK
