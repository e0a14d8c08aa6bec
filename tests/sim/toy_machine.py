"""A machine with round numbers, prices linear in the work, and small random plans, used by the engine's tests."""

from __future__ import annotations

from hypothesis import strategies as st

from memo_sim.contract.cluster import Cluster
from memo_sim.contract.hardware import CopyRates, Curve, Hardware, Quantity, Source
from memo_sim.contract.model import Model
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.contract.units import GIB
from memo_sim.engine.event_loop import Rates
from memo_sim.engine.simulate import Simulation, simulate
from memo_sim.engine.stage_run import Prices
from memo_sim.program.ir.instruction import Lane
from memo_sim.program.ir.work import Attention, Gemm, HostUpdate, Rowwise, Work

FLOPS = 200e12
LAYOUTS = [
    Layout(),
    Layout(dp=2),
    Layout(tp=2),
    Layout(tp=2, sequence_parallel=True),
    Layout(cp=2, zero=1),
    Layout(cp=2, zero=2),
    Layout(tp=2, sequence_parallel=True, dp=2, zero=3),
    Layout(ulysses=2, zero=3),
    Layout(cp=2, ulysses=2, dp=2, zero=3),
    Layout(tp=2, sequence_parallel=True, cp=2, dp=2, zero=1),
]
POLICIES = [
    *[("none", 0.0), ("none", 0.5), ("none", 1.0)],
    *[("full", 0.0), ("full", 1.0)],
    *[("tokenwise", 0.0), ("tokenwise", 0.5)],
]
SOURCES = {"toy": Source(kind="assumed", text="round numbers")}


def _quantity(value: float) -> Quantity:
    return Quantity(value=value, source="toy")


def _curve(value: float) -> Curve:
    return Curve(x=[1.0], y=[value], source="toy")


def toy_hardware(device_bytes: float = 80 * GIB, host_bytes: float = 2048 * GIB) -> Hardware:
    copies = CopyRates(alone=_curve(20e9), duplex=_quantity(10e9), all_devices=_quantity(10e9))
    return Hardware(
        name="toy",
        device="cuda",
        peak_flops={"bf16": _quantity(300e12)},
        device_memory_bytes=_quantity(device_bytes),
        reserve_bytes={"context": _quantity(400e6), "libraries": _quantity(100e6)},
        gemm=[],
        attention=[],
        memory_bound_bytes_per_s=_curve(1e12),
        launch_floor_s=_quantity(5e-6),
        d2h=copies,
        h2d=copies,
        devices_per_uplink=_quantity(2),
        collectives=[],
        compute_slowdown={},
        device_malloc_s=_quantity(0),
        device_free_s=_quantity(0),
        host_register_bytes_per_s=_quantity(1e9),
        host_memory_bytes=_quantity(host_bytes),
        host_copy_bytes_per_s=_quantity(100e9),
        devices=8,
        sources=SOURCES,
    )


TOY_CLUSTER = Cluster(name="toy-1x8", hardware="toy", nodes=1, devices_per_node=8)


class ToyPrices:
    """Prices linear in FLOPs or bytes, with a minimum; ``factor`` scales all, ``copy_s_per_byte`` the copies."""

    def __init__(self, factor: float = 1.0, copy_s_per_byte: float = 1 / 20e9) -> None:
        self.outside_of: dict[Work, frozenset[str]] = {}
        self.factor = factor
        self.copy_s_per_byte = copy_s_per_byte

    def seconds(self, work: Work) -> float:
        if isinstance(work, Gemm | Attention):
            seconds = 5e-6 + work.flops / FLOPS
        elif isinstance(work, Rowwise):
            seconds = 5e-6 + work.moved_bytes / 1e12
        elif isinstance(work, HostUpdate):
            seconds = work.moved_bytes / 20e9
        elif type(work).__name__ == "Copy":
            seconds = work.bytes * self.copy_s_per_byte
        else:
            seconds = 1e-5 + work.bytes / 100e9
        return self.factor * seconds


def alone(busy: int) -> tuple[float, ...]:
    """Lanes do not slow each other."""
    assert busy >= 0
    return (1.0,) * len(Lane)


def contended(busy: int) -> tuple[float, ...]:
    """Every busy lane slows all others, by different factors."""
    return tuple(1 / (1 + 0.07 * (lane + 1) * ((busy & ~(1 << lane)).bit_count())) for lane in Lane)


def small_model(*, layers: int = 3, llama: bool = False) -> Model:
    return Model(
        name="small",
        family="llama" if llama else "gpt",
        layers=layers,
        hidden=64,
        heads=4,
        kv_heads=2 if llama else 4,
        head_dim=16,
        ffn_hidden=128,
        vocab=96,
        tied_embeddings=not llama,
        qk_norm=llama,
        activation="silu" if llama else "gelu",
    )


def decide(
    policy: tuple[str, float], *, layout: Layout | None = None, layers: int = 3, llama: bool = False, **knobs: object
) -> Decisions:
    """Return small decisions with 512 tokens per tensor-parallel rank."""
    layout = layout or Layout()
    recompute, alpha = policy
    tokens = 512 * layout.tp
    knobs = {"global_batch": layout.dp, **knobs}
    return Decisions(
        model=small_model(layers=layers, llama=llama),
        layout=layout,
        seq_tokens=tokens * layout.cp * layout.ulysses,
        recompute=recompute,
        swapped_tokens=int(alpha * tokens),
        **knobs,
    )


@st.composite
def small_decisions(draw: st.DrawFn) -> Decisions:
    layout = draw(st.sampled_from(LAYOUTS))
    recompute = draw(st.sampled_from(["none", "full", "tokenwise"]))
    return decide(
        (recompute, draw(st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]))),
        layout=layout,
        mlp_chunk_tokens=draw(st.sampled_from([0, 256])) if recompute == "full" else 0,
        layers=draw(st.integers(1, 6)),
        llama=draw(st.booleans()),
        states=draw(st.sampled_from(["fp32", "bf16", "host"])),
        loss_chunk_tokens=draw(st.sampled_from([0, 256])),
        global_batch=layout.dp * draw(st.integers(1, 2)),
    )


def run_layout(
    layout: Layout,
    micro_batches: int,
    policy: tuple[str, float] = ("none", 0.0),
    *,
    prices: Prices,
    rates: Rates = alone,
    played: int | None = None,
    layers: int = 8,
    **knobs: object,
) -> Simulation:
    """Return the simulation of a small plan; ``played`` micro-batches are played, by default enough for the period."""
    decisions = decide(policy, layout=layout, layers=layers, global_batch=micro_batches * layout.dp, **knobs)
    return simulate(decisions, toy_hardware(), TOY_CLUSTER, pricer=prices, rates=rates, micro_batches_played=played)
