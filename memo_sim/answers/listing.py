"""Lists what the command line accepts by name: models, clusters, systems, case files, hardware profiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from memo_sim.contract.catalog import (
    CLUSTER_FORM,
    list_clusters,
    list_hardware,
    list_models,
    load_cluster,
    load_hardware,
    load_model,
)
from memo_sim.contract.units import counted
from memo_sim.planning.presets import SYSTEMS
from memo_sim.validation.cases import list_case_files, load_cases


def describe(what: str) -> list[str]:
    """Return the lines of ``memo-sim list WHAT``: a name and its description."""
    makers: dict[str, Callable[[], Iterator[tuple[str, str]]]] = {
        "models": _models,
        "clusters": _clusters,
        "systems": _systems,
        "cases": _cases,
        "hardware": _hardware,
    }
    rows = list(makers[what]())
    width = max((len(name) for name, _ in rows), default=0)
    return [f"{name:<{width}}  {about}".rstrip() for name, about in rows]


def _models() -> Iterator[tuple[str, str]]:
    for name in list_models():
        model = load_model(name)
        size = f"{model.layers} layers x {model.hidden}, {model.heads} heads ({model.kv_heads} kv)"
        used = f", {model.active_params / 1e9:.3g} B of them for a token" if model.mixture else ""
        several = sorted({shape.window for shape in model.layer_shapes if shape.window})
        seen = f", windows of {', '.join(f'{window:,}' for window in several)}" if several else ""
        yield name, f"{model.family}, {size}, {model.total_params / 1e9:.3g} B parameters{used}{seen}"


def _clusters() -> Iterator[tuple[str, str]]:
    for name in list_clusters():
        yield name, "one node, rough" if load_cluster(name)[1].rough else "one node"
    yield CLUSTER_FORM, "any other cluster; cards per node of 100 (edr), 200, 400 or 800 (xdr) Gb/s, 8 unless given"


def _systems() -> Iterator[tuple[str, str]]:
    yield from ((s.name, s.about) for s in SYSTEMS.values())


def _cases() -> Iterator[tuple[str, str]]:
    yield from ((name, counted(len(load_cases(name)), "case")) for name in list_case_files())


def _hardware() -> Iterator[tuple[str, str]]:
    for name in list_hardware():
        hardware = load_hardware(name)
        peak = ", ".join(f"{dtype} {q.value / 1e12:.4g} TFLOP/s" for dtype, q in hardware.peak_flops.items())
        rough = ", rough: made from a data sheet" if hardware.rough else ""
        yield name, f"{peak}, {hardware.device_memory_bytes.value / 2**30:.4g} GiB{rough}"
