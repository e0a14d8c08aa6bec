"""Options that ``memo-sim`` questions share, and the question they make.

Everything heavier than click is imported inside the functions that need it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import click

from memo_sim.contract.errors import UsageError
from memo_sim.views.command_line import Finite, typed

if TYPE_CHECKING:
    from memo_sim.answers.what_if import Outputs
    from memo_sim.contract.plan import Plan
    from memo_sim.planning.question import Question

GIB = 2**30
MEMORY_GIB = (0.001, 100_000)
"""Least and most memory that is taken for meant."""
SEARCHED = (
    *("model", "seq_len", "system", "tp", "cp", "cp_exchange", "ulysses", "metp", "overlap_exchanges", "keep_norms"),
    *(
        "pp",
        "schedule",
        "virtual_stages",
        "subsequences",
        "partition",
        "offload_window",
        "multiplexed",
        "dp",
        "zero",
        "alpha",
        "recompute",
    ),
    *("states", "loss_chunk", "mlp_chunk", "attention_chunk", "overlap", "memory_policy", "replay_allocator"),
    *("micro_batch", "global_batch"),
)
"""What a plan decides, so that none of it can be given beside ``--plan``."""
OF_A_SEARCH = ("pareto", "one_more_gib")
"""What has no answer where one plan is priced."""
MOST_SEQUENCES = 2**16
MOST_SUBSEQUENCES = 2**16
Options = dict[str, Any]
Command = TypeVar("Command", bound=Callable[..., Any])


KNOBS = (
    click.option("--system", default="any", show_default=True, help="A preset of `memo-sim list systems`."),
    click.option("--tp", type=click.IntRange(1), help="Tensor parallelism (with sequence parallelism when above 1)."),
    click.option("--cp", type=click.IntRange(1), help="Context parallelism (zigzag)."),
    click.option(
        "--cp-exchange",
        type=click.Choice(["ring", "all_gather", "rsa"]),
        help="Keys and values of cp ranks: hop by hop, all at once, or hop by hop with all scores in memory (ring"
        " self-attention). The system's own unless given.",
    ),
    click.option("--ulysses", type=click.IntRange(1), help="All-to-all around attention, heads divided."),
    click.option(
        "--metp", type=click.IntRange(1), help="Memory-efficient tensor parallelism: weights pass round a ring."
    ),
    click.option(
        "--overlap-exchanges/--no-overlap-exchanges",
        default=None,
        help="METP's ranks compute beside what they exchange (double buffers), or stand still meanwhile; beside,"
        " unless given.",
    ),
    click.option(
        "--keep-norms",
        is_flag=True,
        help="METP's layers keep what their norms make, as its authors do, and do not make it again.",
    ),
    click.option("--pp", type=click.IntRange(1), help="Pipeline stages of equal numbers of layers."),
    click.option(
        "--schedule",
        type=click.Choice(["gpipe", "1f1b", "interleaved", "zero-bubble"]),
        help="Order in which a stage plays micro-batches; 1f1b with --pp, else the system's are tried.",
    ),
    click.option(
        "--virtual-stages", type=click.IntRange(1), help="Chunks of layers a stage, for the interleaved schedule."
    ),
    click.option(
        "--subsequences",
        metavar="N|auto",
        help="Parts of a sequence, one behind the other; auto: searched. Unless given: searched by sppo, terapipe and"
        " seq1f1b, one elsewhere.",
    ),
    click.option(
        "--partition",
        type=click.Choice(["length", "flops"]),
        default="flops",
        show_default=True,
        help="Subsequences of equal length, or of equal forward work.",
    ),
    click.option(
        "--offload-window",
        type=click.IntRange(0, 64),
        help="Passes during which a subsequence's swapped rows leave, in buffers of its own; 0: in two buffers"
        " that layers take in turn. Unless given the system's own are tried, with --subsequences auto 1 and 4 besides.",
    ),
    click.option(
        "--multiplexed/--no-multiplexed",
        default=None,
        help="Idle stages play rows of subsequences while the pipeline fills and drains.",
    ),
    click.option("--dp", type=click.IntRange(1), help="Data parallelism."),
    click.option(
        "--zero",
        type=click.IntRange(0, 3),
        help="Over cp x ulysses x dp: 1 divides optimizer states, 2 gradients too, 3 parameters too (FSDP).",
    ),
    click.option("--alpha", type=Finite(0, 1), help="Fraction of tokens swapped (full recompute: of its inputs)."),
    click.option(
        "--recompute", type=click.Choice(["none", "full", "selective", "tokenwise"]), help="What happens to the others."
    ),
    click.option("--states", type=click.Choice(["fp32", "bf16", "host"]), default="fp32", show_default=True),
    click.option(
        "--overlap",
        type=click.Choice(["none", "gradients", "both"]),
        help="ZeRO 0 and 1: reduce gradients beside backward, gather parameters beside the next forward. The system's"
        " own unless given.",
    ),
    click.option(
        "--memory-policy",
        type=click.Choice(["planned", "caching", "eager"]),
        help="One planned arena; PyTorch's caching allocator; that under an eager framework. The system's own unless"
        " given.",
    ),
    click.option(
        "--replay-allocator", is_flag=True, help="CUDA: memo-exec's allocator serves libraries from the arena."
    ),
    click.option("--loss-chunk", help="Tokens whose logits exist at once; 0 = all. Chosen when not given."),
    click.option(
        "--mlp-chunk", help="Full recompute: tokens whose MLP exists at once; 0 = all. Chosen when not given."
    ),
    click.option(
        "--attention-chunk",
        help="Full recompute: tokens of the sequence whose attention exists at once, while the others' keys and values "
        "wait on the host; 0 = all. Chosen when not given.",
    ),
    click.option(
        "--micro-batch", type=click.IntRange(1, MOST_SEQUENCES), default=1, show_default=True, help="Sequences."
    ),
    click.option(
        "--global-batch",
        type=click.IntRange(1, MOST_SEQUENCES),
        default=1,
        show_default=True,
        help="Sequences of a step.",
    ),
    click.option("--device-memory-gib", type=Finite(*MEMORY_GIB), help="Instead of the profile's."),
    click.option("--host-memory-gib", type=Finite(*MEMORY_GIB), help="Of one node, instead of its own."),
)
"""What is asked beside the model and the sequence; each knob can be pinned."""


def question_options(command: Command) -> Command:
    """Give ``command`` every knob."""
    for option in reversed(KNOBS):
        command = option(command)
    return command


def asked(options: Options) -> tuple[Outputs, Plan | None, Question]:
    """Return the files that the answer is written to, and what ``question_of`` returns.

    Raises:
        UsageError: when a file cannot be written, or would replace what the question is read from; as ``question_of``.
        BadInput: as ``question_of``.
    """
    from memo_sim.answers.what_if import Outputs
    from memo_sim.contract.catalog import profile_path

    plan, picture, timeline = (Path(options[n]) if options[n] else None for n in ("output", "plot", "trace_path"))
    read = tuple(Path(options[n]) for n in ("model", "cluster", "plan_path") if options[n])
    outputs = Outputs(plan=plan, picture=picture, timeline=timeline, read=read)
    outputs.check()
    given, question = question_of(options)
    replace(outputs, read=(profile_path(options["cluster"], question.cluster),)).check()
    return outputs, given, question


def question_of(options: Options) -> tuple[Plan | None, Question]:
    """Return the question, and the plan that is to be priced in place of a search (None without ``--plan``).

    Raises:
        UsageError: when the options contradict each other, or name what there is not.
        BadInput: when a file cannot be read.
    """
    from memo_sim.contract.catalog import load_cluster, load_model
    from memo_sim.contract.codec import read
    from memo_sim.contract.plan import Plan
    from memo_sim.contract.units import parse_tokens
    from memo_sim.planning.presets import find_system
    from memo_sim.planning.question import Pins, Question, with_memory

    find_system(options["system"])
    plan = read(options["plan_path"], Plan) if options["plan_path"] else None
    if plan is None and not (options["model"] and options["seq_len"]):
        raise UsageError("a question needs MODEL and --seq-len, or --plan", hint="memo-sim what-if --help")
    if plan is not None and (given := typed(*SEARCHED)):
        raise UsageError("--plan brings its own knobs", got=", ".join(given), hint="leave those out")
    if plan is not None and (given := typed(*OF_A_SEARCH)):
        hint = "leave it out, or ask with MODEL and --seq-len in place of --plan"
        raise UsageError("--plan is priced alone, nothing is searched", got=", ".join(given), hint=hint)
    cluster, hardware = with_memory(
        *load_cluster(options["cluster"]),
        device_bytes=gib(options["device_memory_gib"]),
        host_bytes=gib(options["host_memory_gib"]),
    )
    pins = Pins(
        tp=options["tp"],
        cp=options["cp"],
        cp_exchange=options["cp_exchange"],
        ulysses=options["ulysses"],
        metp=options["metp"],
        overlap_exchanges=options["overlap_exchanges"],
        keep_norms=options["keep_norms"],
        pp=options["pp"],
        schedule=options["schedule"],
        virtual_stages=options["virtual_stages"],
        subsequences=_subsequences(options["subsequences"]),
        partition=options["partition"],
        offload_window=options["offload_window"],
        multiplexed=options["multiplexed"],
        dp=options["dp"],
        zero=options["zero"],
        alpha=options["alpha"],
        recompute=options["recompute"],
        loss_chunk_tokens=_chunk(options["loss_chunk"], "--loss-chunk"),
        mlp_chunk_tokens=_chunk(options["mlp_chunk"], "--mlp-chunk"),
        attention_chunk_tokens=_chunk(options["attention_chunk"], "--attention-chunk"),
        overlap=options["overlap"],
        memory_policy=options["memory_policy"],
        replay_allocator=options["replay_allocator"],
    )
    question = Question(
        model=plan.decisions.model if plan else load_model(options["model"]),
        cluster=cluster,
        hardware=hardware,
        seq_tokens=plan.decisions.seq_tokens if plan else parse_tokens(options["seq_len"]),
        system=options["system"],
        pins=pins,
        states=options["states"],
        micro_batch=options["micro_batch"],
        global_batch=options["global_batch"],
    )
    if pins.replay_allocator and question.memory_policy != "planned":
        raise UsageError(
            "libraries are served from a planned arena, and memory is not planned here",
            got=f"--replay-allocator with memory policy {question.memory_policy}",
            hint="--memory-policy planned, or leave --replay-allocator out",
        )
    return plan, question


def _subsequences(text: str | None) -> int | Literal["auto"] | None:
    """Return a number of subsequences, ``auto``, or None where neither was given."""
    if text is None:
        return None
    if text == "auto":
        return "auto"
    if text.isascii() and text.isdigit() and 0 < int(text) <= MOST_SUBSEQUENCES:
        return int(text)
    raise UsageError(
        "not a number of subsequences",
        got=repr(text),
        wanted=f"a whole number from 1 to {MOST_SUBSEQUENCES}, or auto",
        hint="--subsequences 32",
    )


def _chunk(text: str | None, option: str) -> int | None:
    """Return a number of tokens, 0 for all of them, None where none was given."""
    from memo_sim.contract.units import parse_tokens

    return None if text is None else parse_tokens(text, option=option, least=0)


def gib(value: float | None) -> int | None:
    """Return bytes."""
    return None if value is None else int(value * GIB)
