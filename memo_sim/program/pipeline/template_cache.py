"""Cache of layer templates, shared by plans.

A sequence of a hundred subsequences has a hundred forwards and backwards, and a layer under METP has a ring hop for
every pair of ranks. Writing these is most of a lowering. A search lowers the same layers many times: with a few layers
and with all, with several numbers of stages, with several offload windows. The key is the plan without the fields that
no layer template reads, and the rank: ranks may have other keys and other numbers of heads. New fields enter the key
automatically.

      N 64, pp 4, window 1   written     N 64, pp 8, window 4   cached     N 64, half the rows kept   written
"""

from __future__ import annotations

from collections import OrderedDict

from msgspec.structs import replace

from memo_sim.contract.knobs import Schedule
from memo_sim.contract.plan import Decisions
from memo_sim.program.layout.recomputed_layers import ALL
from memo_sim.program.layout.rowwise_blocks import ROWWISE
from memo_sim.program.layout.shape import Shape
from memo_sim.program.pipeline.shared_instructions import Made

MOST_INSTRUCTIONS = 128 * 1024
"""Maximum number of instructions of the cached templates, of about 1 KiB each.

The least recently used plan is dropped first. Templates of the plan that is lowered now are counted at the next plan.
"""
_Ranks = tuple[int, int, int]


class _Kept:
    """The templates that are kept, by plan and ranks."""

    def __init__(self) -> None:
        self._plans: OrderedDict[tuple[Decisions, _Ranks], Made] = OrderedDict()
        self._counted: dict[tuple[Decisions, _Ranks], int] = {}
        """Instructions of the templates of every plan; those of the last one may grow until the next plan."""
        self._instructions = 0

    def of(self, key: tuple[Decisions, _Ranks]) -> Made:
        if self._plans:
            last = next(reversed(self._plans))
            count = sum(len(template.instructions) for template, _ in self._plans[last].values())
            self._instructions += count - self._counted.get(last, 0)
            self._counted[last] = count
        made = self._plans.setdefault(key, {})
        self._plans.move_to_end(key)
        while len(self._plans) > 1 and self._instructions > MOST_INSTRUCTIONS:
            dropped, _ = self._plans.popitem(last=False)
            self._instructions -= self._counted.pop(dropped, 0)
        return made

    def forget(self) -> None:
        """Drop all."""
        self._plans.clear()
        self._counted.clear()
        self._instructions = 0


_kept = _Kept()


def cached_templates(decisions: Decisions, shape: Shape) -> Made:
    """Return the layer templates that were written for plans like this one; the caller adds to them.

    ``shape``: of the rank that plays them. Without subsequences and METP there are few instructions, and they are not
    cached.
    """
    if decisions.layout.subsequences == 1 and decisions.layout.metp == 1:
        return {}
    return _kept.of((seen_by_layers(decisions), (shape.cp_rank, shape.ulysses_rank, shape.tp_rank)))


def forget() -> None:
    """Empty the cache."""
    _kept.forget()


def seen_by_layers(decisions: Decisions) -> Decisions:
    """Return the plan with defaults in the fields that no layer template reads.

    These are the numbers of layers beside their kinds, of stages and micro-batches, the layers of each stage, the
    schedule, and the size of the offload window. In a multiplexed pipeline stages stay in the key, because row blocks
    end where stages divide a task. Zero-bubble schedules stay in the key, because backward then leaves
    weight gradients to the W pass. ZeRO 1 divides optimizer states alone, which no layer reads.
    """
    layout, model = decisions.layout, decisions.model
    schedule: Schedule = "zero-bubble" if layout.pp > 1 and layout.schedule == "zero-bubble" else "1f1b"
    zero = (layout.zero, layout.zero_ranks) if layout.zero > 1 else (0, 0)
    return replace(
        decisions,
        model=model.of_layers(model.layer_shapes),
        layout=replace(
            layout,
            pp=layout.pp if layout.multiplexed else 1,
            pp_layers=(),
            schedule=schedule,
            virtual_stages=1,
            overlap_p2p=True,
            zero=zero[0],
            zero_ranks=zero[1],
        ),
        global_batch=decisions.micro_batch * layout.dp,
        offload_window=min(1, decisions.offload_window),
    )


def seen_by_instructions(decisions: Decisions) -> Decisions:
    """Return the plan of ``seen_by_layers`` with defaults in what no instruction of a layer's passes depends on.

    Beside families, these are ZeRO, the replicas where no documents are dealt to them, and the number of swapped tokens
    where it cuts no rows.
    """
    alike, dp = seen_by_layers(decisions), decisions.layout.dp if decisions.documents is not None else 1
    return replace(
        alike,
        layout=replace(alike.layout, dp=dp, zero=0, zero_ranks=0),
        global_batch=decisions.micro_batch * dp,
        swapped_tokens=decisions.swapped_tokens if decisions.recompute == "tokenwise" else 0,
    )


def seen_without_recompute(decisions: Decisions) -> Decisions:
    """Return the plan of ``seen_by_instructions`` for a backward that recomputes no rows.

    Where recompute begins still divides what ranks exchange (``operators/library_calls.py``), the chunks of tensor
    parallelism (``operators/chunks.py``), and the heads that are made from latents again.
    """
    layout = decisions.layout
    exchanged = layout.sequence_parallel or layout.ulysses > 1
    cut = exchanged or layout.tp_overlap != "none" or decisions.model.latent is not None
    seen = seen_by_instructions(decisions)
    return seen if cut else replace(seen, swapped_tokens=0)


def seen_by_ends(decisions: Decisions) -> Decisions:
    """Return the plan of ``seen_by_instructions`` for embedding and head, which see no activations of layers.

    They see how many of a sequence's tokens a rank has, but not which ranks exchange those for attention. What divides
    a rank's rows stays: chunks of attention, documents, and where recompute cuts them with chunks of tensor parallelism
    or row blocks that ranks gather.
    """
    seen, layout = seen_by_instructions(decisions), decisions.layout
    cut = layout.sequence_parallel and decisions.recompute in ("tokenwise", ROWWISE)
    if cut or layout.tp_overlap != "none" or decisions.attention_chunk_tokens or decisions.documents is not None:
        return seen
    together = {"cp": layout.cp * layout.ulysses, "ulysses": 1, "uneven_heads": False, "cp_exchange": "ring"}
    return replace(
        seen,
        layout=replace(seen.layout, **together),
        recompute="none",
        recompute_layers=ALL,
        rounding_buffers=False,
        swapped_tokens=0,
        offload_window=0,
    )
