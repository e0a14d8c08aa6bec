"""Jobs that each framework of eager PyTorch says exactly; every option appears in one of them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import msgspec

from memo_sim.contract.catalog import load_model
from memo_sim.contract.knobs import Pins
from memo_sim.contract.model import Model
from memo_sim.interchange.hf_read import Choice, Parallel, Tiles, loss_of, pins_of
from memo_sim.interchange.job import Job

TORCHTITAN = Pins(
    tp=1,
    sequence_parallel=False,
    cp=1,
    pp=1,
    dp=8,
    zero=3,
    recompute="full",
    recompute_layers="all",
    loss_chunk_tokens=0,
    rowwise="eager",
    adamw="fused",
    dtype="bf16",
)


@cache
def model(name: str) -> Model:
    """Return a preset."""
    return load_model(name)


def _titan(name: str = "llama3-8b", *, seq_tokens: int = 8192, global_batch: int = 8, **changes: object) -> Job:
    of_job = {key: changes.pop(key) for key in ("states", "micro_batch", "deterministic") if key in changes}
    return Job(
        model=model(name),
        seq_tokens=seq_tokens,
        global_batch=global_batch,
        pins=replace(TORCHTITAN, **changes),
        **of_job,
    )


SMALL_QWEN = msgspec.structs.replace(model("qwen3-8b"), layers=12, hidden=2048, heads=16, ffn_hidden=6144)
STAGES = {"pp": 2, "dp": 4, "zero": 1, "schedule": "1f1b", "virtual_stages": 1}


WHOLE = Tiles()


def hugging_face(
    parallel: Parallel,
    choice: Choice,
    *,
    trl: bool = False,
    adamw: str = "fused",
    attention: str | None = None,
    dtype: str = "bf16",
    global_batch: int = 8,
    tiles: Tiles = WHOLE,
    **of_job: object,
) -> Job:
    """Return a job as ``hf_read.py`` would read it."""
    copied = parallel.zero == 0 and not parallel.deepspeed and "states" not in of_job
    return Job(
        **{
            "model": model("qwen3-8b"),
            "seq_tokens": 32768,
            "global_batch": global_batch,
            "grad_sums": "autocast" if copied else "auto",
            "loss": loss_of(parallel, tiles, trl=trl),
            "pins": pins_of(
                parallel, choice, adamw=adamw, attention=attention, dtype=dtype, tiles=None if trl else tiles
            ),
            **of_job,
        }
    )


FULL, OFFLOADED = Choice("full", "all", False, False), Choice("full", "all", True, False)
KEPT = Choice("none", "all", False, True)
SHARDED = Parallel(dp=8, zero=3)


def _fsdp(*, trl: bool) -> dict[str, Job]:
    return {
        "sharded": hugging_face(SHARDED, FULL, trl=trl),
        "offloaded": hugging_face(SHARDED, OFFLOADED, trl=trl, adamw="foreach", states="host"),
        "hybrid": hugging_face(Parallel(dp=8, zero=3, zero_ranks=4), FULL, trl=trl, micro_batch=2, global_batch=32),
        "context": hugging_face(Parallel(cp=4, dp=2, zero=3), OFFLOADED, trl=trl, seq_tokens=131072, global_batch=4),
        "kept": hugging_face(Parallel(dp=8, zero=2), KEPT, trl=trl, attention="flash2"),
        "pure": hugging_face(SHARDED, Choice("full", "every-2", False, False), trl=trl, states="pure-bf16"),
        "copied": hugging_face(Parallel(dp=8), FULL, trl=trl, attention="flash3", deterministic=True),
    }


def _deepspeed(choice: Choice = FULL, **changes: object) -> Job:
    of_parallel = {key: changes.pop(key) for key in ("ulysses", "dp", "zero", "overlap") if key in changes}
    parallel = Parallel(**{"dp": 8, "zero": 3, "deepspeed": True, **of_parallel})
    return hugging_face(parallel, choice, **{"attention": "torch-flash", **changes})


JOBS: dict[str, dict[str, Job]] = {
    "torchtitan": {
        "sharded": _titan(),
        "tensor": _titan(tp=4, sequence_parallel=True, dp=2, zero=2, recompute="operators", deterministic=True),
        "context": _titan(
            cp=4, dp=2, seq_tokens=262144, recompute="none", loss_chunk_tokens=4096, states="host", global_batch=2
        ),
        "hybrid": _titan(zero_ranks=4, states="bf16", micro_batch=2, global_batch=32, cuda_graphs=True),
        "stages": _titan(**STAGES, recompute_layers="every-2", states="pure-bf16", global_batch=16),
        "uneven": _titan(**STAGES, pp_layers=(15, 17), recompute_layers="first-4"),
        "interleaved": _titan(**{**STAGES, "schedule": "interleaved", "virtual_stages": 2}, adamw="foreach"),
        "compiled": _titan(tp=8, sequence_parallel=True, dp=1, zero=0, rowwise="compiled", tp_overlap="chunked"),
        "copied": _titan("qwen3-8b", zero=0, dtype="fp32"),
        "other_shape": _titan("llama-7b", seq_tokens=4096),
        "other_qwen": replace(_titan(), model=SMALL_QWEN),
    },
    "accelerate": {
        **_fsdp(trl=False),
        "tensor": hugging_face(Parallel(tp=2, cp=1, dp=4, zero=3), FULL),
        "tiled": hugging_face(SHARDED, FULL, tiles=Tiles(256)),
    },
    "trl": _fsdp(trl=True),
    "deepspeed": {
        "sharded": _deepspeed(states="host"),
        "ulysses": _deepspeed(OFFLOADED, ulysses=4, dp=2, seq_tokens=131072, global_batch=4, attention="flash2"),
        "overlapped": _deepspeed(KEPT, zero=1, overlap="gradients", grad_sums="params", adamw="foreach"),
        "copied": _deepspeed(zero=0, overlap="none", attention="flash3"),
        "tiled": _deepspeed(OFFLOADED, ulysses=8, dp=1, seq_tokens=262144, global_batch=1, tiles=Tiles(2048, 4096)),
        "pure": _deepspeed(zero=2, states="pure-bf16", micro_batch=2, global_batch=32, deterministic=True),
    },
}
