"""Pricers of layouts, shared by plans that differ in what does not change the price of any work.

A search prices thousands of small programs. Most of their works are equal: alphas of one layout differ only in rows
that are copied or recomputed, and how a pipeline divides its layers, cuts its sequences and orders its passes prices
nothing.
"""

from __future__ import annotations

from msgspec.structs import replace

from memo_sim.contract.cluster import Cluster
from memo_sim.contract.hardware import Hardware
from memo_sim.contract.knobs import RowwiseKernel
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.costs.pricing import Pricer
from memo_sim.planning.recent import Recent

MOST_PRICERS = 64
"""Number of pricers that are kept; each knows up to some thousand works, less than 1 MB."""


class Pricers:
    """The pricers of the layouts of one cluster."""

    def __init__(self, hardware: Hardware, cluster: Cluster) -> None:
        self._hardware, self._cluster = hardware, cluster
        self._made: Recent[tuple[Layout, RowwiseKernel, int], Pricer] = Recent(MOST_PRICERS)

    def of(self, decisions: Decisions, *, devices: int = 0) -> Pricer:
        """Return the pricer of a plan's layout and row-wise kernels.

        ``devices``: those that wait for each other, where they are not the layout's (0).
        """
        layout, rowwise = decisions.layout, decisions.kernels.rowwise
        # Where stages lie on nodes decides how fast ranks exchange; their layers and the order of passes do not.
        whole = replace(layout, subsequences=1, partition="flops", multiplexed=False)
        placed = replace(whole, schedule="1f1b", virtual_stages=1, pp_layers=())
        waiting = devices or layout.devices

        def made() -> Pricer:
            return Pricer(self._hardware, self._cluster, placed, rowwise=rowwise, devices=waiting)

        return self._made.of((placed, rowwise, waiting), made)
