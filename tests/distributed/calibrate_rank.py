"""Runs one rank of a calibration with a few small sizes.

``python -m tests.distributed.calibrate_rank OUTPUT [RANK THAT DIES]``, with the environment variables of torchrun.
"""

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from memo_exec.commands.calibrate import calibrate
from memo_exec.interpreter import lanes
from memo_exec.probes import collectives, memory
from memo_exec.probes import grid as grids
from memo_sim.contract import codec
from memo_sim.contract.errors import MemoError

QUICK = replace(
    grids.CPU,
    experts=((4, 32),),
    expert_widths=(64,),
    expert_lengths=(64,),
    dtype="bf16" if torch.cuda.is_available() else "fp32",
    widths=(64,),
    lengths=(256,),
    head_dims=(32,),
    heads=(2,),
    attention_lengths=(128,),
    copy_bytes=(2**14, 2**18),
    beside_s=0.01,
    copied_bytes=2**20,
    updated_elements=2**16,
    message_bytes=(2**10, 2**16, 2**20),
    message_s=0.002,
    budget_s=0.0,
)
CACHE_BYTES = 2**20
"""Repeats have to outgrow the cache, which has hundreds of MiB on some machines."""
CORES = 4
"""Cores to divide between the ranks, of which each leaves one to its copies: one thread for operators is left."""
DIED = 9


def main(output: str, dies: str = "") -> None:
    memory.cache_bytes = lambda device: CACHE_BYTES
    lanes.available_cores = lambda: CORES
    if dies == os.environ["RANK"]:
        call = collectives.call_of

        def stops(kind: str, *rest: Any) -> Any:
            if kind == "all_to_all":
                os._exit(DIED)
            return call(kind, *rest)  # type: ignore[arg-type]

        collectives.call_of = stops  # type: ignore[assignment]
    try:
        profile = calibrate(grid=QUICK, command="a test")
    except MemoError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    if profile is not None:
        codec.write(Path(output), profile)


if __name__ == "__main__":
    main(*sys.argv[1:])
