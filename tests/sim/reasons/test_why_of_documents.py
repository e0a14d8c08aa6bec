"""What an answer says of packed documents: what they save, and what unequal shares of ranks and replicas cost."""

from __future__ import annotations

from typing import Any

import pytest

import memo_sim
from memo_sim.answers.assumptions import assumptions
from memo_sim.contract.catalog import load_cluster, load_model
from memo_sim.contract.documents import parse_documents
from memo_sim.contract.plan import Kernels, Layout
from memo_sim.engine.simulate import Simulation, simulate
from memo_sim.planning.question import Question
from memo_sim.program.ir.work import Attention
from memo_sim.reasons.documents import documents
from tests.sim.small_programs import decide

GIVEN = parse_documents("mean=2k,max=64k", option="--documents")


def played(**changes: Any) -> tuple[Question, Simulation]:
    model, (cluster, hardware) = load_model("llama3-8b"), load_cluster("h100-1x8")
    layout = changes.pop("layout", Layout(cp=4, dp=2, zero=1))
    fields = {
        "seq_tokens": 2**17,
        "documents": GIVEN,
        "global_batch": 2,
        "kernels": Kernels(attention="flash3"),
    } | changes
    plan = decide(model, layout, ("full", 0.0), **fields)
    return Question(model=model, cluster=cluster, hardware=hardware, seq_tokens=2**17, system="any"), simulate(
        plan, hardware, cluster
    )


def test_uneven_ranks_and_replicas_are_named_with_what_they_cost() -> None:
    question, simulation = played()
    whole, ranks, replicas = documents(question, simulation)
    assert "they attend 3.1 % of the pairs of one document" in whole
    assert "Counted as if each sequence were one document, MFU would read" in whole
    assert ranks.startswith("Cuts of whole sequences give the fullest of 4 cp ranks 1.36 times the mean pairs")
    assert "with --document-cuts documents it would take" in ranks
    assert replicas.startswith("The slowest of 2 replicas has 1.18 times the mean pairs")


def test_an_assumption_says_what_sequences_are_packed_from() -> None:
    question, simulation = played()
    (line,) = [each for each in assumptions(question, simulation) if each.name == "documents"]
    assert line.option == "--documents"
    assert "exponential, cut at max" in line.value
    assert "MFU counts no others" in line.value


def test_each_cut_prices_the_other_as_it_is() -> None:
    by_cut = [documents(*played(document_cuts=cut))[1] for cut in ("sequence", "documents")]
    taken = [text.split("attention's ")[-1].split(";")[0] if i == 0 else text for i, text in enumerate(by_cut)]
    assert f"with --document-cuts sequence it would take {taken[0]}" in by_cut[1]


def test_documents_take_less_time_and_no_more_memory() -> None:
    (_, packed), (_, whole) = played(), played(documents=None)
    assert packed.prediction.step_s is not None
    assert whole.prediction.step_s is not None
    assert packed.prediction.step_s < whole.prediction.step_s / 2
    ends = 4 * (GIVEN.most_pieces(2**17) + 1)
    assert packed.prediction.peak_device_bytes - whole.prediction.peak_device_bytes == pytest.approx(ends, abs=512)


def test_without_documents_nothing_is_said() -> None:
    question, simulation = played(documents=None)
    assert documents(question, simulation) == []
    works = [i.work for t in simulation.stages[0].program.templates for i in t.instructions]
    assert not any(work.segments or work.chunks for work in works if isinstance(work, Attention))


@pytest.mark.slow
def test_a_question_in_python_takes_the_text_of_the_option() -> None:
    pins = {"tp": 8, "cp": 1, "ulysses": 1, "recompute": "none", "attention": "flash3", "system": "memo"}
    asked = {"cluster": "h100-1x8", "seq_len": "4k", "global_batch": 1, "documents": "mean=200,max=1k"}
    found = memo_sim.what_if("llama3-8b", **asked, **pins)
    assert found.summary is not None
    assert "documents" in {each.name for each in found.summary.assumptions}
