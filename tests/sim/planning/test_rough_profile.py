"""How rough a data sheet's profile is: that of a GPU whose profile was measured, priced with the same plan."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from memo_sim.contract.catalog import cluster_from_datasheet, load_cluster, load_model
from memo_sim.contract.knobs import Pins
from memo_sim.contract.units import KIB
from memo_sim.planning.question import Question
from memo_sim.planning.search import play, search

H200 = "tflops=989,memory=141,pcie=5x16,bandwidth=4800,fp32=67,nvlink=900,like=h100"


def test_an_h200_from_its_data_sheet_is_near_its_profile() -> None:
    """Its reference is the H100, which has the same tensor cores.

    The H100's profile has torch's row-wise kernels one by one, the H200's has none of them: 11 % at 64K tokens.
    """
    cluster, measured = load_cluster("h200-1x8")
    _, rough = cluster_from_datasheet(H200)
    model = msgspec.structs.replace(load_model("llama3-8b"), layers=8)
    pins = Pins(tp=8, cp=1, recompute="none", alpha=0.0)
    asked = Question(model=model, cluster=cluster, hardware=measured, seq_tokens=64 * KIB, system="any", pins=pins)
    best = search(asked).best
    assert best is not None
    there, here = (play(each, best.decisions).prediction.step_s for each in (asked, replace(asked, hardware=rough)))
    assert there is not None
    assert here is not None
    assert abs(here / there - 1) < 0.2
