"""Small legal files of every kind that memo reads, made by memo itself, and a quick command that reads each."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from memo_sim.contract import codec
from memo_sim.contract.files import read_regular
from memo_sim.contract.hardware import AttentionTable, Hardware
from memo_sim.contract.model import Model
from memo_sim.contract.schemas import DOCUMENTS
from tests.campaign.mutations import SPECIAL, written_toml
from tests.contract import conftest as samples

ROOT = Path(__file__).parents[2]
OUT = "out"
"""The folder that a command may write to."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """A file of one kind and the command that reads it. Files lie in the target's own folder."""

    kind: str
    file: str
    form: str
    command: tuple[str, ...]
    """``memo-sim`` or ``memo-exec`` with its arguments, or ``read`` and the name of a document."""
    codes: frozenset[int] = frozenset({0, 3})
    """Exit codes that a changed file may lead to."""
    weight: float = 1
    """How often it is drawn. What is read in a millisecond is drawn more often than what trains a step."""
    tree: str | None = None
    """The file with the JSON that a TOML file stands for."""
    seal: Callable[[Path], None] | None = None
    """Makes sums fit the changed file, so that it is read at all."""
    kinds: dict[str, frozenset[int]] = field(default_factory=dict)
    """Exit codes for what is no regular file, where they are not 3 alone."""
    names: tuple[str, ...] = ()
    """Files of which an error may name one in place of the changed file."""
    folder: Path = field(default=Path())


SIM = frozenset({0, 3, 4})
"""A changed model, machine or plan may be one that does not fit."""
EXEC = frozenset({0, 3, 6})
"""A changed plan may be one that this machine cannot run."""


def machine() -> Hardware:
    """Return a profile of one small device that can price a model with heads of 128 features."""
    found = samples.hardware()
    rows = [[512.0, 16.0, 9e13], [16384.0, 16.0, 1.86e14]]
    forward = AttentionTable(
        kernel="flash2", dtype="bf16", attention_pass="forward", head_dim=128, rows=rows, source="bench"
    )
    return msgspec.structs.replace(found, attention=[*found.attention, forward], devices=1)


def model() -> Model:
    """Return a model with one head of 128 features."""
    sizes: dict[str, Any] = {"layers": 2, "hidden": 128, "heads": 1, "kv_heads": 1, "head_dim": 128, "ffn_hidden": 256}
    return msgspec.structs.replace(samples.model(), rope_scaling=None, **sizes)


QUESTION = ("--cluster", "machine.json", "--seq-len", "1k", "--system", "full-recompute", "--json")
SMALL = {
    **dict.fromkeys(("n_layer", "num_hidden_layers"), 2),
    **dict.fromkeys(("n_embd", "hidden_size", "head_dim"), 128),
    **dict.fromkeys(("n_head", "num_attention_heads", "num_key_value_heads"), 1),
    **dict.fromkeys(("vocab_size", "intermediate_size"), 256),
}
"""Sizes of a Hugging Face config that ``machine`` can price."""
CASE = {
    "case": "one",
    "source": "a-table",
    "system": "full-recompute",
    "model": "gpt",
    "layers": "2",
    "hidden": "128",
    "heads": "1",
    "ffn": "256",
    "vocab": "256",
    "cluster": "machine.json",
    "seq_tokens": "1024",
    "global_batch": "1",
    "micro_batch": "1",
    "tp": "1",
    "pp": "1",
    "dp": "1",
    "cp": "1",
    "ulysses": "1",
    "zero": "0",
    "recompute": "full",
    "memory_plan": "yes",
    "attention": "flash2",
    "expected_status": "ok",
    "expected_step_ms": "0.9",
    "note": "a test",
}
BUFFERS = "id,lower,upper,size\na,0,3,700\nb,2,4,300\nc,4,6,900\n"
LOG = "malloc a 700\nmalloc b 300\nfree a 700\nmalloc c 900\nfree b 300\n"


SCRIPT = """\
GPUS_PER_NODE=1
TP=${TP:-1}
MODEL=(--num-layers 2 --hidden-size 128 --num-attention-heads 1 --ffn-hidden-size 256 --vocab-size 256)
if [[ "$TP" == "1" ]]; then MODEL+=("--swiglu --normalization RMSNorm"); fi
torchrun --nproc_per_node $GPUS_PER_NODE pretrain_gpt.py ${MODEL[@]} --seq-length $((2*512)) --bf16 \\
    --max-position-embeddings 1024 --tensor-model-parallel-size ${TP} --disable-bias-linear
"""
ARGUMENTS_IN_YAML = """\
language_model: {num_layers: 2, hidden_size: 128, num_attention_heads: 1, activation_func: swiglu}
model_parallel: {tensor_model_parallel_size: 1, bf16: true}
seq_length: 1024
vocab_size: 256
"""


def targets(folder: Path, *, quick: bool = False) -> list[Target]:
    """Make the files of every target in a folder of its own, and return the targets.

    ``quick``: only those that need neither a plan nor torch.
    """
    found: list[Target] = []

    def add(kind: str, file: str, form: str, *command: str, **more: Any) -> Path:
        """Add a target; return its folder, in which the caller puts the files."""
        place = folder / f"{len(found):02}-{kind.replace(' ', '-')}"
        place.mkdir(parents=True)
        found.append(Target(kind=kind, file=file, form=form, command=command, folder=place, **more))
        return place

    def toml(place: Path, name: str, document: msgspec.Struct) -> None:
        tree = json.loads(codec.encode(document))
        (place / f"{name}.tree").write_text(json.dumps(tree))
        (place / f"{name}.toml").write_text(written_toml(tree))

    _simulated(add, toml)
    if not quick:
        _plans(add)
    _cases(add)
    _documents(add)
    _memory(add)
    _jobs(add)
    _measured(add)
    if quick:
        _questions(add)
    else:
        _executed(add, folder)
    return found


def _simulated(add: Callable[..., Path], toml: Callable[[Path, str, msgspec.Struct], None]) -> None:
    """Models, machines and clusters."""
    place = add("model", "model.json", "json", "memo-sim", "what-if", "model.json", *QUESTION, codes=SIM, weight=2)
    _write(place, model=model(), machine=machine())
    place = add(
        "model in TOML",
        "model.toml",
        "toml",
        "memo-sim",
        "what-if",
        "model.toml",
        *QUESTION,
        codes=SIM,
        tree="model.tree",
    )
    toml(place, "model", model())
    _write(place, machine=machine())
    for name, config in json.loads((ROOT / "tests/contract/huggingface_configs.json").read_text()).items():
        if name not in ("gpt2", "Llama-3.2-1B", "Qwen2.5-0.5B", "Qwen3-0.6B"):
            continue
        command = ("memo-sim", "what-if", "config.json", *QUESTION)
        place = add("Hugging Face config", "config.json", "json", *command, codes=SIM, weight=0.4)
        (place / "config.json").write_text(json.dumps({k: SMALL.get(k, v) for k, v in config["config"].items()}))
        _write(place, machine=machine())
    ask = ("memo-sim", "what-if", "model.json", "--cluster", "cluster.json", *QUESTION[2:])
    for nodes, devices in ((1, "machine.json"), (2, "h100-sxm5-80gb")):
        place = add("cluster", "cluster.json", "json", *ask, codes=SIM, names=("machine.json",))
        cluster = msgspec.structs.replace(
            samples.cluster(),
            hardware=devices,
            nodes=nodes,
            devices_per_node=1,
            **({} if nodes > 1 else {"network": None}),
        )
        _write(place, model=model(), machine=machine(), cluster=cluster)
    ask = ("memo-sim", "what-if", "model.json", "--cluster", "cluster.toml", *QUESTION[2:])
    place = add(
        "cluster in TOML", "cluster.toml", "toml", *ask, codes=SIM, tree="cluster.tree", names=("machine.json",)
    )
    toml(place, "cluster", cluster)
    _write(place, model=model(), machine=machine())
    ask = ("memo-sim", "what-if", "model.json", *QUESTION)
    place = add("hardware profile", "machine.json", "json", *ask, codes=SIM, weight=2.5)
    _write(place, model=model(), machine=machine())


_FIT = ("fit", "cases.csv", "--case", "one", "--from", "1", "--to", "3", "--unfitted", "2")


def _cases(add: Callable[..., Path]) -> None:
    """Published cases, for ``validate`` and ``fit``."""
    for command, weight in ((("validate", "cases.csv", "--json"), 1.5), (_FIT, 0.03)):
        place = add(
            "cases", "cases.csv", "table", "memo-sim", *command, codes=SIM, weight=weight, names=("machine.json",)
        )
        _write(place, machine=machine())
        (place / "cases.csv").write_text(_table_of_cases())


def _table_of_cases() -> str:
    from memo_sim.validation.cases import COLUMNS

    rows = [CASE, CASE | {"case": "two", "seq_tokens": "2048"}]
    return "\n".join([",".join(COLUMNS), *(",".join(row.get(name, "") for name in COLUMNS) for row in rows)]) + "\n"


def _plans(add: Callable[..., Path]) -> None:
    """A plan that a search wrote, with its placement and its trace."""
    from tests.cli.commands import memo_sim

    place = add(
        "plan", "plan.json", "json", "memo-sim", "what-if", "--plan", "plan.json", *QUESTION[:2], codes=SIM, weight=2
    )
    _write(place, model=model(), machine=machine())
    ask = ("what-if", "model.json", *QUESTION, "-o", "plan.json")
    done = memo_sim(*ask, cwd=place)
    assert done.returncode == 0, done
    beside = add("plan", "plan.json", "json", "memo-sim", "plan-memory", "plan.json", "--json", codes=SIM)
    shutil.copytree(place, beside, dirs_exist_ok=True)
    kinds = {"folder": frozenset({2, 3})}  # click refuses a folder as wrong usage
    for command in (("doctor", "plan.json"), ("profile", "plan.json", "--requests", "-o", f"{OUT}/r.json")):
        weight = 1 if command[0] == "doctor" else 0.1
        beside = add(
            "plan",
            "plan.json",
            "json",
            "memo-exec",
            *command,
            codes=EXEC,
            weight=weight,
            names=("placement",),
            kinds=kinds,
        )
        shutil.copytree(place, beside, dirs_exist_ok=True)
    beside = add("placement", "plan.placement.json", "json", "memo-exec", "doctor", "plan.json", codes=EXEC, weight=0.4)
    shutil.copytree(place, beside, dirs_exist_ok=True)
    both = ("memo-exec", "compare", "plan.json", "measured.json")
    for file, more in (("plan.trace.json", ("--json",)), ("measured.json", ("--trace", f"{OUT}/t.json"))):
        kinds = {"no file": frozenset({0, 3}), "folder": frozenset({2, 3})}  # a plan may have no trace
        beside = add("trace", file, "json", *both, *more, weight=1.5, names=("plan", "measured"), kinds=kinds)
        shutil.copytree(place, beside, dirs_exist_ok=True)
        tree = json.loads((place / "plan.trace.json").read_bytes()) | {"origin": "measured"}
        (beside / "measured.json").write_text(json.dumps(tree))


def _jobs(add: Callable[..., Path]) -> None:
    """What other frameworks start from, for ``import``."""
    for file, text in (("train.sh", SCRIPT), ("arguments.yaml", ARGUMENTS_IN_YAML)):
        place = add("job", file, "words", "memo-sim", "import", file, "--json", codes=SIM, weight=4)
        (place / file).write_text(text)


def _measured(add: Callable[..., Path]) -> None:
    """Traces, snapshots and outputs of benchmarks, for ``doctor``."""
    from tests.memory.test_snapshot import event, freed
    from tests.sim.observed.recorded import one_step
    from tests.sim.observed.test_link_benchmarks import OUTPUT, json_of, report

    # 2: a changed trace may be of another device than the profile, a changed run be one over nodes
    asked: dict[str, Any] = {"codes": frozenset({0, 2, 3}), "weight": 2}
    on = ("--cluster", "a800-1x8")
    place = add("profiler trace", "t.json", "json", "memo-sim", "doctor", "--trace", "t.json", *on, "--json", **asked)
    (place / "t.json").write_bytes(one_step().raw())
    command = ("memo-sim", "doctor", "--trace", "ranks", *on, "-o", f"{OUT}/here.json")
    fewer = {"no file": frozenset({0})}  # the other rank's trace is there
    place = add("folder of traces", "ranks/b.json", "json", *command, kinds=fewer, **asked)
    (place / "ranks").mkdir()
    for name in ("a", "b"):
        (place / "ranks" / f"{name}.json").write_bytes(one_step().raw())
    command = ("memo-sim", "doctor", "--trace", "t.json", "--memory", "s.pickle", *on, "--json")
    place = add("snapshot beside a trace", "s.pickle", "pickle", *command)
    (place / "t.json").write_bytes(one_step().raw())
    frames = [{"filename": "/x/torch/optim/adam.py", "line": 57, "name": "step"}]
    events = [event("alloc", 8192, 9, frames=frames), *freed(8192, 9), event("alloc", 9216, 5)]
    (place / "s.pickle").write_bytes(pickle.dumps({"segments": [], "device_traces": [events]}))
    for file, form, option, raw in (
        ("n.txt", "words", "--nccl-tests", OUTPUT.encode()),
        ("n.json", "json", "--nccl-tests", json_of()),
        ("nv.json", "json", "--nvbandwidth", report(device_to_host_memcpy_ce=[["55.2", "54.1"]])),
    ):
        command = ("memo-sim", "doctor", option, file, *on, "-o", f"{OUT}/here.json")
        place = add(f"output of {option.removeprefix('--')}", file, form, *command, **asked)
        (place / file).write_bytes(raw)


def _questions(add: Callable[..., Path]) -> None:
    """A file of questions, for ``sweep``; values that no question may have are wrong usage.

    Only where inputs are played in the process that made the targets: the server of processes that a sweep starts there
    is no child of a forked one.
    """
    command = ("memo-sim", "sweep", "--questions", "q.jsonl", "--jobs", "1", "-o", f"{OUT}/s.jsonl")
    codes = frozenset({0, 2, 3, 4})
    place = add("questions", "q.jsonl", "words", *command, codes=codes, weight=2, names=("question", "machine.json"))
    question = {"model": "model.json", "cluster": "machine.json", "seq_len": "1k", "system": "full-recompute", "tp": 1}
    (place / "q.jsonl").write_text(json.dumps(question) + "\n")
    _write(place, model=model(), machine=machine())


def _documents(add: Callable[..., Path]) -> None:
    """Documents that memo writes for other programs, and the files of accepted accuracy and published errors."""
    for name in sorted(DOCUMENTS):
        place = add(f"document {name}", "document.json", "json", "read", name, "document.json", weight=2)
        codec.write(place / "document.json", getattr(samples, name)())


def _memory(add: Callable[..., Path]) -> None:
    """Buffers, requests, logs and snapshots, for ``plan-memory``."""
    from tests.memory.test_snapshot import event, freed

    place = add("buffers in CSV", "b.csv", "table", "memo-sim", "plan-memory", "b.csv", weight=6)
    (place / "b.csv").write_text(BUFFERS)
    place = add("buffers in CSV", "b.csv", "table", "memo-sim", "plan-memory", "b.csv", "-o", f"{OUT}/p.csv", weight=2)
    (place / "b.csv").write_text(BUFFERS)
    place = add("requests", "r.json", "json", "memo-sim", "plan-memory", "r.json", "-o", f"{OUT}/p.pickle", weight=4)
    codec.write(place / "r.json", samples.requests())
    place = add("allocator log", "a.log", "words", "memo-sim", "plan-memory", "a.log", "-o", f"{OUT}/p.json", weight=4)
    (place / "a.log").write_text(LOG)
    frames = [{"filename": "/x/model.py", "line": 57, "name": "block"}]
    blocks = [{"size": 1024, "requested_size": 1000, "state": "active_allocated", "frames": frames}]
    tree = {
        "segments": [{"device": 0, "address": 4096, "total_size": 2048, "stream": 0, "blocks": blocks}],
        "device_traces": [[event("alloc", 8192, 9, frames=frames), *freed(8192, 9), event("alloc", 9216, 5)]],
        "allocator_settings": {},
    }
    place = add("snapshot", "s.pickle", "pickle", "memo-sim", "plan-memory", "s.pickle", "--json", weight=8)
    (place / "s.pickle").write_bytes(pickle.dumps(tree))
    from tests.cli.commands import memo_sim

    again = add("snapshot of a placement", "s.pickle", "pickle", "memo-sim", "plan-memory", "s.pickle", weight=4)
    (again / "b.csv").write_text(BUFFERS)
    done = memo_sim("plan-memory", "b.csv", "-o", "s.pickle", cwd=again)
    assert done.returncode == 0, done


def _executed(add: Callable[..., Path], folder: Path) -> None:
    """Plans that train on this machine, their data, weights and checkpoints."""
    from tests.cli.commands import memo_exec
    from tests.exec_cpu.plans import byte_decisions, write_plan
    from tests.exec_cpu.small import gpt

    sizes = {
        "layers": 1,
        "hidden": 16,
        "heads": 2,
        "kv_heads": 2,
        "head_dim": 8,
        "ffn_hidden": 32,
        "max_positions": 128,
        "vocab": 256,
    }
    policy = {"seq_tokens": 128, "swapped_tokens": 0, "recompute": "full", "global_batch": 1}
    origin = folder / "trained"
    origin.mkdir()
    write_plan(origin / "plan.json", byte_decisions(model=gpt(**sizes), **policy))
    np.save(origin / "ids.npy", np.arange(300, dtype=np.int64) % 256)
    (origin / "ids.ids").write_text(" ".join(str(n % 256) for n in range(300)))
    (origin / "ids.bin").write_bytes((np.arange(300, dtype="<u2") % 256).tobytes())
    (origin / "text.txt").write_text("to be or not to be\n" * 20)
    trained = ("run", "plan.json", "--data", "ids.npy", "--steps", "1", "--json")
    done = memo_exec(*trained, "--save", "run", cwd=origin)
    assert done.returncode == 0, done
    first = ("memo-exec", *trained)

    def of(kind: str, file: str, form: str, *command: str, **more: Any) -> None:
        kinds = dict.fromkeys(SPECIAL, frozenset({0, 2, 3})) if "run/" in file else {"folder": frozenset({2, 3})}
        place = add(kind, file, form, *command, **({"codes": EXEC, "kinds": kinds, "weight": 0.16} | more))
        shutil.copytree(origin, place, dirs_exist_ok=True)

    of("plan", "plan.json", "json", *first, weight=0.4, names=("placement",))
    of("placement", "plan.placement.json", "json", *first)
    for name, form in (("ids.npy", "npy"), ("ids.ids", "words"), ("ids.bin", "bytes"), ("text.txt", "words")):
        of(
            "tokens",
            name,
            form,
            "memo-exec",
            "run",
            "plan.json",
            "--steps",
            "1",
            "--json",
            "--data",
            name,
            codes=frozenset({0, 3}),
        )
    load = (*first, "--weights", "run/weights")
    of("weights", "run/weights/model.safetensors", "safetensors", *load, names=("weights",))
    of("weights", "run/weights/config.json", "json", *load, names=("weights",))
    resume = (
        "memo-exec",
        "run",
        "plan.json",
        "--data",
        "ids.npy",
        "--steps",
        "2",
        "--save",
        "run",
        "--resume",
        "--json",
    )
    step = "run/step-00000001"
    # 2: a checkpoint of more steps than the run is to have
    of("run.json", f"{step}/run.json", "json", *resume, names=("run",), codes=frozenset({0, 2, 3}))
    of(
        "run.json, sealed",
        f"{step}/run.json",
        "json",
        *resume,
        seal=seal_run,
        codes=frozenset({0, 2, 3}),
        names=("run",),
    )
    of("metadata", f"{step}/state/.metadata", "bytes", *resume, weight=0.05, names=("run",))
    of("metadata, sealed", f"{step}/state/.metadata", "bytes", *resume, seal=seal_files, names=("state",))
    of("shard", f"{step}/state/__0_0.distcp", "bytes", *resume, weight=0.05, names=("run",))
    of("shard, sealed", f"{step}/state/__0_0.distcp", "bytes", *resume, seal=seal_files, names=("state",))
    of("lock", "run/.lock", "json", *resume, weight=0.05, codes=frozenset({0, 2, 3}), names=("run",))


def seal_run(path: Path) -> None:
    """Give a changed run.json the sum of itself, as somebody who means harm would."""
    from memo_exec.training.checkpoint import RunState

    try:
        tree = json.loads(read_regular(path))
        tree["identity"] = ""
        path.write_text(json.dumps(tree))
        state = codec.read(path, RunState)
        path.write_text(json.dumps(tree | {"identity": codec.sha256_of(state)}))
    except Exception:  # what cannot be read needs no sum
        return


def seal_files(path: Path) -> None:
    """Put the sum of a changed file of the state into run.json."""
    from memo_exec.training.checkpoint import RUN_FILE, sum_of

    run = path.parents[1] / RUN_FILE
    if path.is_file() and not path.is_symlink():
        tree = json.loads(run.read_bytes())
        tree["files"][path.name] = sum_of(path)
        run.write_text(json.dumps(tree))
        seal_run(run)


def _write(place: Path, **documents: msgspec.Struct) -> None:
    for name, document in documents.items():
        codec.write(place / f"{name}.json", document)
