"""A user's code, as mypy checks it in strict mode: right calls pass, and wrong ones are errors (``type: ignore``)."""

from __future__ import annotations

import os
from pathlib import Path

import memo_exec
import memo_sim as memo


def plan_a_job(folder: Path) -> float:
    answer: memo.WhatIfResult = memo.what_if(
        "llama3-8b", cluster="h100-1x8", seq_len="1m", tp=8, recompute="tokenwise", mlp_chunk="16k", uneven_heads=False
    )
    if answer.best is None or answer.best.step_s is None:
        raise SystemExit("\n".join(answer.why))
    answer.save(folder / "plan.json")
    answer.plot(folder / "plan.png")
    rows: list[dict[str, str | int | float | bool | None]] = answer.table()
    again = memo.simulate(memo.load_plan(folder / "plan.json"), cluster="a800-1x8", device_memory_gib=79.5)
    return answer.best.step_s + len(rows) + len(again.plans)


def longest(path: os.PathLike[str]) -> int:
    knobs: memo.Knobs = {"tp": 2, "cp": None, "subsequences": "auto"}
    found = memo.longest(path, cluster="a800-1x8", step=65536, max_step_s=60.0, **knobs)
    return found.seq_tokens


def memory(path: str) -> int:
    try:
        return memo.plan_memory(path, solver="greedy", time_limit=1).document.peak_bytes
    except memo.BadInput as error:
        return error.exit_code


def many(files: list[Path]) -> list[str]:
    questions = memo.grid(model=["gpt-7b", "gpt-13b"], cluster="a800-1x8", seq_len=["64k", 131072], tp=8)
    answers = memo.sweep(questions, "sweep.jsonl", jobs=2, progress=print)
    memo.SweepResult([*answers.front, *memo.load_sweep(*files).lines]).save("sweep.csv")
    return memo.compare(files[0], memo.simulate(files[1]), cluster="h100-1x8").verdict


def buy(prices: dict[str, float]) -> str:
    found = memo.gpus(
        "llama3-8b", seq_len="1m", cluster=["h100", "a800"], within="10m", price_per_gpu_hour=prices, tp=8
    )
    if found.chosen is None or found.at_chosen is None:
        return "\n".join(found.why)
    found.save("plan.json")
    found.save_report("gpus.html", plan="plan.json")
    return f"{found.chosen.summary.devices} x {found.chosen.kind}, {found.at_chosen.plan.program_sha256}"


def several() -> list[float | None]:
    found: memo.ClustersResult = memo.what_if("llama3-8b", cluster=["a800-1x8", "h100-1x8"], seq_len="1m", tp=8)
    for answer in found.answers:
        answer.plot("front.png", of="front")
    return [answer.best.step_s if answer.best else None for answer in found.answers]


def understand(answer: memo.WhatIfResult, path: Path) -> list[str]:
    short: memo.OomResult = memo.oom(answer)
    asked = memo.oom("llama3-8b", cluster="h100-1x8", seq_len="1m", recompute="none")
    given = memo.oom(plan=path, device_memory_gib=40)
    fits = [short.fits, asked.fits, given.fits]
    options = [way.options for way in asked.ways]
    explained = memo.explain(answer, cluster="a800-1x8")
    return [*explained.verdict, *options, str(fits), str(explained.table("rivals")), str(short.table("tensors"))]


def hand_over(answer: memo.WhatIfResult, folder: Path) -> bool:
    exported: memo.ExportResult = memo.export(answer, to="megatron-lm", directory=folder, launcher="slurm")
    job = memo.import_job([folder / "train.sh"], set={"NODES": 2}, cluster="h100-2x8", search=False)
    priced: memo.WhatIfResult = memo.what_if(from_="train.sh", set={"NODES": 2}, cluster="h100-2x8")
    return exported.fits and job.job is not None and priced.best is not None and "run.sh" in exported.files


def validated() -> list[str]:
    found: memo.ValidationResult = memo.validate("memo-table5", system="memo", jobs=2)
    found.save_report("validation.html")
    return [case.case for case in found.document.cases]


def measured(trace: Path) -> memo.DoctorResult:
    found = memo.doctor(trace=trace, config=["train.sh"], nccl_tests="all_reduce.txt")
    found.save("profile.json")
    found.save_cluster("cluster.json", profile="profile.json")
    found.save("here.json")
    print(found.profile.name, found.changes, found.table("kinds"))
    return found


def trained(plan: Path) -> float:
    if (verdict := memo_exec.verify(plan, device="cpu", layers=2)) is None or not verdict.verified:
        raise SystemExit(str(verdict))
    if (profile := memo_exec.calibrate(budget_s=60)) is not None:
        profile.save("here.json")
    outcome = memo_exec.run(plan, steps=20)
    if outcome is None:
        return 0.0
    outcome.check(0.1)
    outcome.save_report("run.html", plan=plan)
    return memo_exec.compare(plan, "measured.json").document.measured.step_s + len(outcome.losses)


def wrong() -> None:
    memo.gpus("llama3-8b", seq_len="1m", within=["10m"])  # type: ignore[arg-type]
    memo.export("plan.json", to="megatron")  # type: ignore[arg-type]
    memo.oom(plan="plan.json", tp=8)  # type: ignore[call-overload]
    memo.import_job("train.sh", set=["NODES=2"])  # type: ignore[arg-type]
    memo_exec.verify("plan.json", device="gpu")  # type: ignore[arg-type]
    memo.what_if("llama3-8b", seq_length="1m")  # type: ignore[call-overload]
    memo.what_if("llama3-8b", cluster="h100-1x8", seq_len="1m", tpp=8)  # type: ignore[call-overload]
    memo.what_if("llama3-8b", cluster="h100-1x8", seq_len="1m", tp="8")  # type: ignore[call-overload]
    memo.what_if("llama3-8b", cluster="h100-1x8", seq_len="1m", recompute="nothing")  # type: ignore[call-overload]
    memo.plan_memory("plan.json", solver="best")  # type: ignore[arg-type]
    print(memo.what_if("llama3-8b", cluster="h100-1x8", seq_len="1m").bests)  # type: ignore[attr-defined]
