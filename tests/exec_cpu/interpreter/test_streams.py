"""Lanes as CUDA streams, on fakes of torch's streams and events."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from memo_exec.interpreter import streams
from memo_exec.interpreter.streams import StreamTimekeeper
from memo_sim.program.ir.instruction import Lane


class Event:
    """A fake event, whose time is the number of records before it."""

    made = 0
    records = 0

    def __init__(self) -> None:
        Event.made += 1
        self.at = -1

    def record(self, stream: object) -> None:
        del stream
        self.at = Event.records
        Event.records += 1

    def synchronize(self) -> None:
        assert self.at >= 0

    def elapsed_time(self, other: Event) -> float:
        return float(other.at - self.at)


@pytest.fixture
def keeper(monkeypatch: pytest.MonkeyPatch) -> StreamTimekeeper:
    monkeypatch.setattr(Event, "made", 0)
    monkeypatch.setattr(Event, "records", 0)
    monkeypatch.setattr(streams, "_event", Event)
    monkeypatch.setattr(streams, "_stream", lambda device: object())
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: object())
    return StreamTimekeeper([Lane.COMPUTE, Lane.D2H, Lane.HOST], torch.device("cuda"))


def play(keeper: StreamTimekeeper, lanes: list[Lane]) -> tuple[Any, Any]:
    keeper.begin_step(len(lanes))
    for number, lane in enumerate(lanes):
        keeper.start(lane, number)
        keeper.end(lane, number)
    return keeper.times()


def test_events_are_made_once_and_recorded_in_every_step(keeper: StreamTimekeeper) -> None:
    lanes = [Lane.COMPUTE, Lane.D2H, Lane.COMPUTE]
    first = play(keeper, lanes)
    assert Event.made == 1 + 2 * len(lanes)
    second = play(keeper, lanes)
    assert Event.made == 1 + 2 * len(lanes)
    for one, other in zip(first, second, strict=True):
        assert (one == other).all()  # times count from the step's own zero
    assert first[0].tolist() == [0.001, 0.003, 0.005]
    assert first[1].tolist() == [0.002, 0.004, 0.006]


def test_the_host_lane_needs_no_events(keeper: StreamTimekeeper) -> None:
    play(keeper, [Lane.HOST, Lane.HOST])
    assert Event.made == 1
