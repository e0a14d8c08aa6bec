"""TRL 1.16: the YAML of ``trl sft``, with accelerate's configuration (FSDP2).

Sources, in TRL 1.16: ``trainer/sft_config.py``, ``trainer/sft_trainer.py``, ``trainer/model_config.py``,
``scripts/utils.py``, ``kernels/chunked_logprob.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from memo_sim.contract.attention_kernels import AttentionName
from memo_sim.contract.errors import UsageError
from memo_sim.contract.plan import Decisions
from memo_sim.interchange.accelerate import (
    ACCELERATE,
    LAUNCH,
    LAYOUTS,
    hugging_face_sayings,
    model_files,
    model_variable,
    unknown,
)
from memo_sim.interchange.accelerate import (
    jobs as accelerate_jobs,
)
from memo_sim.interchange.eager_words import exact, near
from memo_sim.interchange.framework import Framework, Read, Saying, Source
from memo_sim.interchange.hf_read import kind_of, read_files
from memo_sim.interchange.hf_words import accelerate_yaml, arguments_of, yaml_text
from memo_sim.interchange.job import Job
from memo_sim.interchange.launch import Launch
from memo_sim.interchange.model_names import hub_name
from memo_sim.interchange.peft_words import KEYS, arguments_of_adapters, check_adapters

ARGUMENTS = "sft.yaml"
PACKS: tuple[AttentionName, ...] = ("flash2", "flash3")
"""Attention kernels by which TRL keeps packed documents apart; it warns of others (``FLASH_ATTENTION_VARIANTS``)."""
TOKENWISE, TOKENWISE_LAUNCH = "sft_tokenwise.py", "train_tokenwise.sh"

_NO_TP = "it starts no tensor parallelism; context parallelism takes its ranks"
SAYINGS = hugging_face_sayings(
    {
        "layout.tp": Saying("none", lost=_NO_TP),
        "layout.sequence_parallel": Saying("none", lost=_NO_TP),
        "layout.cp": exact("parallelism_config_cp_size", lost="it replaces the other ways to divide a sequence"),
        "layout.cp_exchange": exact("parallelism_config_cp_comm_strategy", lost="keys and values are gathered"),
        "layout.dp": exact("parallelism_config_dp_replicate_size", "parallelism_config_dp_shard_size"),
        "layout.zero": exact(
            "fsdp_reshard_after_forward",
            lost="FSDP2 has ZeRO 3, or 2 where parameters stay gathered; it divides over cp",
        ),
        "layout.zero_ranks": exact("parallelism_config_dp_replicate_size", lost="shards divide over whole cp groups"),
        "decisions.states": exact(
            "dtype",
            "fsdp_offload_params",
            lost="moments are fp32 as the master weights, or all bf16; on the host, parameters and gradients wait there"
            " too, which memo does not price",
        ),
        "decisions.swapped_tokens": exact(
            "gradient_checkpointing_kwargs",
            lost="it offloads the inputs of recomputed layers, all of them or none; of a plan that swaps tokens and"
            f" has no adapters, {TOKENWISE_LAUNCH} has memo's own alpha, which the system trl-tokenwise prices",
        ),
        "decisions.zero_params": Saying("own", lost="FSDP2 keeps fp32 shards and casts them before every gather"),
        "decisions.loss": Saying(
            "own",
            lost="the likelihood in tiles whose product runs again in backward (loss_type nll); priced as TRL's earlier"
            " chunks under checkpoint",
        ),
        "decisions.adapters": exact(*KEYS, lost="alpha is a whole number, and Q, K and V are modules by themselves"),
        "decisions.documents": near(
            "packing",
            "packing_strategy",
            lost="it fits whole documents into sequences, longest first, so that some rows stay empty, and lengths are"
            " those of the data set",
        ),
        "decisions.document_cuts": Saying("none", lost="it packs no documents beside context parallelism"),
        "decisions.loss_chunk_tokens": Saying("own", lost="TRL fixes the tiles of its loss"),
    }
)


TOKENWISE_TEXT = '''"""trl sft whose decoder layers swap and recompute by token; its options are those of trl sft.

{header}
Needs memo[tokenwise]. Transformers' modules save more than memo's operators do, so host memory may be too small for the
plan's alpha, unless it is a plan of the system trl-tokenwise: ALPHA=0.3 bash train_tokenwise.sh takes another.
"""

import os
import sys

import memo_exec
import trl
from trl.scripts import sft

ALPHA = float(os.environ.get("ALPHA", "{alpha}"))  # share of the tokens that is swapped; by default as in plan.json
SFTTrainer = trl.SFTTrainer


def tokenwise_trainer(*args, **named):
    trainer = SFTTrainer(*args, **named)
    memo_exec.tokenwise(trainer.model, alpha=ALPHA)
    return trainer


sys.argv += ["--gradient_checkpointing", "false", "--torch_compile", "false"]
trl.SFTTrainer = tokenwise_trainer  # sft.main takes it by this name
sft.main(*sft.make_parser().parse_args_and_config(fail_with_unknown_args=False))
'''


def jobs(decisions: Decisions) -> tuple[Job, ...]:
    """Return the jobs that come nearest to a plan.

    Raises:
        UsageError: when transformers has no model of this shape.
    """
    check_adapters(decisions)
    found = accelerate_jobs(decisions, tp=False, own_program=False)
    return tuple(map(partial(_packing, decisions), found)) if decisions.documents else found


def _packing(decisions: Decisions, job: Job) -> Job:
    """Return a job that packs the plan's documents, by flash attention, which alone keeps them apart in TRL.

    Raises:
        UsageError: with context parallelism, whose attention sees whole sequences.
    """
    if (job.pins.cp or 1) > 1:
        raise UsageError(
            "TRL packs no documents beside context parallelism, which takes the place of tp and Ulysses there",
            where="decisions.documents",
            got=f"cp {job.pins.cp}",
            wanted="a plan of whole sequences on every rank",
            hint="search a plan with --tp 1 --cp 1, or memo-exec runs the plan itself",
        )
    attention = job.pins.attention if job.pins.attention in PACKS else PACKS[0]
    return replace(job, documents=decisions.documents, pins=replace(job.pins, attention=attention))


def files(job: Job, launch: Launch, header: tuple[str, ...]) -> dict[str, str]:
    """Return the arguments, accelerate's configuration, and the script that starts both."""
    cp = job.pins.cp or 1
    arguments = {
        "model_name_or_path": hub_name(job.model) or ".",
        "dataset_name": "trl-lib/Capybara",
        **arguments_of(job),
        **arguments_of_adapters(job.adapters),
        **({"packing": True, "packing_strategy": "bfd_split"} if job.documents else {"packing": False}),
        "activation_offloading": False,
        "loss_type": "nll",
        **({"pad_to_multiple_of": 2 * cp} if cp > 1 else {}),
        "learning_rate": 2e-5,
        "max_steps": 100,
        "logging_steps": 1,
        "output_dir": "output",
    }
    note = "dataset_name: yours, of documents as long as max_length; shorter ones take less time and memory."
    if job.documents:
        note = "dataset_name: yours, whose documents are packed; the plan's lengths are in plan.json."
    command = ("-m", "trl.scripts.sft", "--config", ARGUMENTS, "--model_name_or_path", '"${MODEL}"', '"$@"')
    return {
        ARGUMENTS: yaml_text(arguments, (*header, note)),
        ACCELERATE: yaml_text(accelerate_yaml(job, launch.devices, launch.nodes), header),
        LAUNCH: launch.script(command, header=header, before=model_variable(job), accelerate=ACCELERATE, inside=True),
        **model_files(job),
    }


def beside(decisions: Decisions, job: Job, launch: Launch, header: tuple[str, ...]) -> dict[str, str]:
    """Return a program that swaps tokens inside TRL, and its script, for a plan that recomputes by token or swaps all.

    The layers stay transformers'; ``memo_exec.tokenwise`` wraps them, in place of checkpointing.
    """
    if decisions.lora is not None:
        return {}
    if decisions.recompute != "tokenwise" and not (decisions.recompute == "none" and decisions.alpha == 1):
        return {}
    command = (*(TOKENWISE, "--config", ARGUMENTS, "--model_name_or_path", '"${MODEL}"', '"$@"'),)
    before = model_variable(job)
    return {
        TOKENWISE: TOKENWISE_TEXT.format(header="\n".join(header), alpha=f"{decisions.alpha:.6g}"),
        TOKENWISE_LAUNCH: launch.script(command, header=header, before=before, accelerate=ACCELERATE, inside=True),
    }


def reads(source: Source) -> bool:
    """Return whether a file is the arguments of TRL, or part of a job that it runs."""
    return kind_of(source) != "none"


def read(sources: tuple[Source, ...], given: Mapping[str, str]) -> Read:
    """Return the job of TRL's arguments, with accelerate's or DeepSpeed's configuration."""
    return read_files(sources, given, "trl")


FRAMEWORK = Framework(
    name="trl",
    title="TRL",
    version="TRL 1.16 with accelerate 1.15 and transformers 5.23",
    system="trl-fsdp2",
    layouts=LAYOUTS,
    unknown=unknown,
    sayings=SAYINGS,
    jobs=jobs,
    files=files,
    beside=beside,
    reads=reads,
    read=read,
)
