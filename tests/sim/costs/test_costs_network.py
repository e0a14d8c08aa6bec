"""Prices of collectives against closed forms, groups on nodes, shared cards, contention of lanes and devices."""

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from memo_sim.contract.catalog import load_cluster, load_hardware
from memo_sim.contract.cluster import Cluster, Network
from memo_sim.contract.errors import Infeasible
from memo_sim.contract.hardware import CollectiveKind, Curve, Hardware, Quantity, Source
from memo_sim.contract.plan import Layout
from memo_sim.costs.collective import LARGE_BYTES, CollectiveTimes, volume_factor
from memo_sim.costs.contention import NodeRates
from memo_sim.costs.curves import LogCurve
from memo_sim.costs.pace import slowest
from memo_sim.costs.placement import Placement, hop, place
from memo_sim.program.ir.instruction import Lane
from memo_sim.program.ir.work import Collective, Exchange, Group
from memo_sim.program.layout.rank_order import (
    EXPERT_REPLICATE,
    EXPERT_SHARD,
    REPLICATE,
    SHARD,
    coordinate,
    degree,
    members,
)
from tests.refusals import refused

A800 = load_hardware("a800-sxm4-80gb")
A100 = load_hardware("a100-sxm4-80gb")
GB = 1e9


def cluster(nodes: int = 1, nics: int = 8, devices: int = 8, efficiency: float = 1.0) -> Cluster:
    network = Network(
        nics_per_node=nics,
        nic_bytes_per_s=Quantity(value=20 * GB, source="test"),
        latency_s=Quantity(value=1e-5, source="test"),
        size_efficiency=Curve(x=[1e6, 1e12], y=[efficiency, efficiency], source="test"),
    )
    return Cluster(
        name="test",
        hardware="a800-sxm4-80gb",
        nodes=nodes,
        devices_per_node=devices,
        network=network if nodes > 1 else None,
        sources={"test": Source(kind="assumed", text="a test")},
    )


def times(where: Cluster, layout: Layout, hardware: Hardware = A800) -> CollectiveTimes:
    return CollectiveTimes(hardware, where, layout)


def table(kind: CollectiveKind, ranks: int) -> tuple[float, Curve]:
    found = next(t for t in A800.collectives if (t.kind, t.ranks) == (kind, ranks))
    return found.alpha_s, found.bus_bytes_per_s


class TestInsideANode:
    @pytest.mark.parametrize("ranks", [2, 4, 8])
    @pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
    def test_closed_form_at_a_table_point(self, kind: CollectiveKind, ranks: int) -> None:
        alpha_s, curve = table(kind, ranks)
        size = int(curve.x[-1])
        factor = {"all_reduce": 2.0}.get(kind, 1.0) * (ranks - 1) / ranks
        expected = alpha_s + factor * size / curve.y[-1]
        work = Collective(kind, size, ranks, "tp")
        assert times(cluster(), Layout(tp=8)).seconds(work, set()) == pytest.approx(expected)

    @pytest.mark.parametrize(
        ("ranks", "bytes_", "microseconds"),
        # nccl-tests, all-reduce on A100 (vTrain; ml-engineering at 16 GiB), at sizes where the bus rate does not dip.
        [
            *[(2, 2**20, 45.1), (2, 2**24, 129.4), (2, 2**30, 5453), (4, 2**20, 52.7), (4, 2**24, 177.8)],
            *[(4, 2**30, 7276), (8, 2**20, 92.2), (8, 2**25, 356), (8, 2**28, 2158), (8, 2**34, 127997)],
        ],
    )
    def test_published_all_reduce_times(self, ranks: int, bytes_: int, microseconds: float) -> None:
        work = Collective("all_reduce", bytes_, ranks, "tp")
        found = times(cluster(), Layout(tp=ranks), A100).seconds(work, set())
        assert found == pytest.approx(microseconds * 1e-6, rel=0.01)

    def test_missing_group_sizes_lie_between(self) -> None:
        here = times(cluster(), Layout(tp=8))
        found = [here.seconds(Collective("all_to_all", 2**28, n, "tp"), set()) for n in (4, 6, 8)]
        assert found[0] < found[1] < found[2]

    def test_one_rank_or_no_bytes_cost_nothing(self) -> None:
        here = times(cluster(), Layout())
        assert here.seconds(Collective("all_reduce", 2**20, 1, "tp"), set()) == 0
        assert here.seconds(Collective("all_reduce", 0, 8, "tp"), set()) == 0

    def test_kinds_alike_serve_each_other(self) -> None:
        few = replace(A800, collectives=[t for t in A800.collectives if t.kind == "all_reduce"])
        here = times(cluster(), Layout(tp=4), few)
        reduce = here.seconds(Collective("all_reduce", 2**30, 4, "tp"), set())
        scatter = here.seconds(Collective("reduce_scatter", 2**30, 4, "tp"), set())
        assert scatter == pytest.approx(reduce / 2, rel=0.01)
        with pytest.raises(Infeasible, match="all_reduce"):
            here.seconds(Collective("all_to_all", 2**30, 4, "tp"), set())

    def test_beyond_the_curve_is_marked_unless_alpha_decides(self) -> None:
        here, outside = times(cluster(), Layout(tp=8)), set[str]()
        here.seconds(Collective("all_reduce", 1024, 8, "tp"), outside)
        assert outside == set()
        here.seconds(Collective("all_reduce", 2**40, 8, "tp"), outside)
        times(cluster(devices=16), Layout(tp=16)).seconds(Collective("all_gather", 2**30, 16, "tp"), outside)
        assert outside == {"collective.all_reduce", "collective.all_gather"}

    def test_a_hop_of_the_ring(self) -> None:
        alpha_s, curve = table("send_recv", 2)
        found = times(cluster(), Layout(tp=4, cp=2)).exchange_seconds(Exchange(2**28, 2, "cp"), set())
        assert found == pytest.approx(alpha_s + 2**28 / curve.y[-1])


class TestPlacement:
    layout = Layout(tp=4, cp=2, dp=4)

    @pytest.mark.parametrize(
        ("group", "ranks", "expected"),
        [
            ("tp", 4, Placement(4, 4, 1, 2, 1)),
            ("cp", 2, Placement(2, 2, 1, 4, 1)),
            ("dp", 4, Placement(4, 1, 4, 8, 4)),
            ("grads", 8, Placement(8, 2, 4, 4, 4)),
        ],
    )
    def test_groups_of_a_layout(self, group: Group, ranks: int, expected: Placement) -> None:
        assert place(group, ranks, self.layout, 8) == expected

    @pytest.mark.parametrize(
        ("layout", "shard", "replicate"),
        [
            (Layout(dp=32, zero=1, zero_ranks=8), Placement(8, 8, 1, 1, 1), Placement(4, 1, 4, 8, 4)),
            (Layout(tp=2, dp=16, zero=3, zero_ranks=4), Placement(4, 4, 1, 2, 1), Placement(4, 1, 4, 8, 4)),
            (Layout(dp=32, zero=3, zero_ranks=2), Placement(2, 2, 1, 4, 1), Placement(16, 4, 4, 2, 4)),
            (Layout(tp=4, dp=8, zero=1, zero_ranks=4), Placement(4, 2, 2, 4, 2), Placement(2, 1, 2, 8, 3)),
        ],
    )
    def test_groups_of_replicas(self, layout: Layout, shard: Placement, replicate: Placement) -> None:
        assert place("shard", shard.ranks, layout, 8) == shard
        assert place("replicate", replicate.ranks, layout, 8) == replicate

    def test_a_group_across_two_nodes_sets_the_pace(self) -> None:
        """Of four groups of six ranks, the second and the third begin inside a node and end in the next one."""
        layout = Layout(dp=24, zero=1, zero_ranks=6)
        assert place("shard", 6, layout, 8) == Placement(6, 4, 2, 2, 2)

    def test_a_group_wider_than_a_node_is_alone_on_it(self) -> None:
        assert place("tp", 16, Layout(tp=16), 8) == Placement(16, 8, 2, 1, 2)

    def test_a_ring_of_whole_nodes(self) -> None:
        assert place("cp", 4, Layout(tp=8, cp=4), 8) == Placement(4, 1, 4, 8, 4)

    def test_a_group_spans_the_nodes_that_it_passes_over(self) -> None:
        assert place("pp", 2, Layout(tp=8, cp=4, pp=2), 8) == Placement(2, 1, 2, 8, 8)
        assert hop(0, 1, Layout(tp=8, cp=4, pp=2), 8) == Placement(2, 1, 2, 8, 5)
        assert hop(0, 1, Layout(tp=2, pp=4), 8).span == 1


class TestAcrossNodes:
    def test_a_wide_ring_is_bound_by_all_cards_or_by_the_links(self) -> None:
        work = Collective("all_gather", 2**34, 16, "tp")
        bus = table("all_gather", 8)[1].y[-1]
        assert 160 * GB < bus < 180 * GB
        for nics, rate in ((4, 80 * GB), (8, 160 * GB), (16, bus)):
            found = times(cluster(2, nics), Layout(tp=16)).seconds(work, set())
            assert found == pytest.approx(15 / 16 * 2**34 / rate, rel=1e-3)

    def test_strided_groups_share_the_cards(self) -> None:
        # Eight gradient groups cross at once, so each gets one of eight cards, or half a card when there are four.
        work, layout = Collective("all_reduce", 2**30, 2, "grads"), Layout(tp=8, dp=2)
        for nics, rate in ((8, 20 * GB), (4, 10 * GB)):
            found = times(cluster(2, nics), layout).seconds(work, set())
            assert found == pytest.approx(2**30 / rate, rel=0.01)

    def test_ranks_of_one_node_add_their_cards(self) -> None:
        work, layout = Collective("reduce_scatter", 2**30, 4, "grads"), Layout(tp=4, cp=2, dp=2)
        found = times(cluster(2, 8), layout).seconds(work, set())
        assert found == pytest.approx(0.75 * 2**30 / (40 * GB), rel=0.01)

    def test_over_two_nodes_a_tree_crosses_once_but_a_channel_a_card_carries_it_twice(self) -> None:
        work, ring = (Collective(kind, 2**34, 16, "tp") for kind in ("all_reduce", "reduce_scatter"))
        bus = table("all_reduce", 8)[1].y[-1]
        channels = 2 * 2**34 / (4 * 23.6 * GB)
        for nics, seconds in ((4, min(channels, 1.875 * 2**34 / (80 * GB))), (16, 1.875 * 2**34 / bus)):
            here = times(cluster(2, nics), Layout(tp=16))
            assert here.seconds(work, set()) == pytest.approx(seconds, rel=0.02)
            assert here.seconds(work, set()) <= 2 * here.seconds(ring, set()) * 1.001
        four = times(cluster(4, 4), Layout(tp=32)).seconds(Collective("all_reduce", 2**34, 32, "tp"), set())
        assert four == pytest.approx(2 * 31 / 32 * 2**34 / (80 * GB), rel=0.02)

    def test_switches_that_reduce_leave_one_crossing(self) -> None:
        # A node whose all-reduces have a higher bus rate than a ring's collectives: NVLink SHARP.
        slower = [
            replace(t, bus_bytes_per_s=replace(t.bus_bytes_per_s, y=[y / 2 for y in t.bus_bytes_per_s.y]))
            if t.kind == "all_gather"
            else t
            for t in A800.collectives
        ]
        work = Collective("all_reduce", 2**34, 16, "tp")
        here = times(cluster(2, 4), Layout(tp=16), replace(A800, collectives=slower))
        assert here.seconds(work, set()) == pytest.approx(2**34 / (0.92 * 80 * GB), rel=0.02)

    def test_a_hop_uses_no_more_than_its_own_card(self) -> None:
        found = times(cluster(2, 8), Layout(tp=8, cp=2)).exchange_seconds(Exchange(2**30, 2, "cp"), set())
        assert found == pytest.approx(2**30 / (20 * GB), rel=0.01)
        found = times(cluster(2, 8), Layout(cp=2, tp=1), A800).exchange_seconds(Exchange(2**30, 2, "cp"), set())
        assert found < 0.01  # both ranks are on one node

    def test_an_all_to_all_leaves_through_one_card_a_rank(self) -> None:
        work = Collective("all_to_all", 2**30, 16, "tp")
        found = times(cluster(2, 8), Layout(tp=16)).seconds(work, set())
        assert found == pytest.approx(0.5 * 2**30 / (20 * GB), rel=0.01)

    def test_efficiency_by_size_and_its_mark(self) -> None:
        work, outside = Collective("all_reduce", 2**30, 2, "grads"), set[str]()
        layout = Layout(tp=8, dp=2)
        whole = times(cluster(2), layout).seconds(work, outside)
        assert times(cluster(2, efficiency=0.5), layout).seconds(work, outside) == pytest.approx(2 * whole, rel=0.01)
        assert outside == set()
        times(cluster(2), layout).seconds(Collective("all_reduce", 10**13, 2, "grads"), outside)
        assert outside == {"network"}

    @pytest.mark.parametrize(
        ("work", "layout", "cards"),
        [
            (Collective("reduce_scatter", 2**30, 16, "tp"), Layout(tp=16), 8),
            (Collective("all_to_all", 2**30, 16, "tp"), Layout(tp=16), 1),
            (Exchange(2**30, 2, "cp"), Layout(tp=8, cp=2), 1),
            (Exchange(2**30, 16, "cp"), Layout(cp=16), 1),
        ],
    )
    def test_efficiency_is_read_at_equal_bytes_per_card(
        self, work: Collective | Exchange, layout: Layout, cards: int
    ) -> None:
        def seconds(efficiency_at: float) -> float:
            two = cluster(2)
            assert two.network is not None
            # A quarter of the rate at that size, half at twice that size and from there on.
            curve = Curve(x=[efficiency_at, 2 * efficiency_at], y=[0.25, 0.5], source="test")
            here = times(replace(two, network=replace(two.network, size_efficiency=curve)), layout)
            if isinstance(work, Exchange):
                return here.exchange_seconds(work, set())
            return here.seconds(work, set())

        asked = 2**30 * 8 / cards
        assert seconds(asked) == pytest.approx(2 * seconds(asked / 2), rel=0.04)

    @pytest.mark.parametrize("nodes", [2, 4])
    def test_more_than_two_nodes_are_outside_the_curve(self, nodes: int) -> None:
        here, outside = times(cluster(nodes), Layout(tp=8, dp=nodes)), set[str]()
        here.seconds(Collective("all_reduce", 2**30, nodes, "grads"), outside)
        assert outside == (set() if nodes == 2 else {"network"})

    def test_a_transfer_beyond_its_leaf_switch_shares_the_links_to_the_spine(self) -> None:
        work = Collective("reduce_scatter", 2**34, 64, "tp")
        flat = times(cluster(8), Layout(tp=64)).seconds(work, set())

        def seconds(**switches: object) -> float:
            where = cluster(8)
            assert where.network is not None
            return times(replace(where, network=replace(where.network, **switches)), Layout(tp=64)).seconds(work, set())

        assert seconds(oversubscription=2.0) == flat  # 32 nodes share a leaf
        assert seconds(oversubscription=2.0, rail_optimised=False) == pytest.approx(2 * flat, rel=1e-3)
        assert seconds(oversubscription=2.0, leaf_ports=4) == pytest.approx(2 * flat, rel=1e-3)

    def test_a_hop_over_many_nodes_waits_for_the_slowest(self) -> None:
        def seconds(ranks: int) -> float:
            where = cluster(ranks)
            assert where.network is not None
            deviation = Quantity(value=0.03, source="test")
            where = replace(where, network=replace(where.network, transfer_deviation=deviation))
            return times(where, Layout(tp=8, cp=ranks)).exchange_seconds(Exchange(2**34, ranks, "cp"), set())

        assert seconds(64) / seconds(2) == pytest.approx((1 + 0.03 * slowest(64)) / (1 + 0.03 * slowest(2)), rel=1e-3)

    def test_no_network_is_said(self) -> None:
        with refused(Infeasible, what="network", wanted="one node"):
            times(cluster(), Layout(tp=16)).seconds(Collective("all_reduce", 2**20, 16, "tp"), set())

    @given(st.integers(1, 2**36), st.sampled_from([2, 4, 8, 16, 32]), st.sampled_from([1, 4, 8]))
    def test_time_grows_with_bytes(self, size: int, ranks: int, nics: int) -> None:
        here = times(cluster(4, nics), Layout(tp=ranks))
        kinds: tuple[CollectiveKind, ...] = ("all_reduce", "all_gather", "all_to_all", "broadcast")
        for kind in kinds:
            small, large = (here.seconds(Collective(kind, b, ranks, "tp"), set()) for b in (size, size * 2))
            assert 0 < small < large

    def test_volume_factors(self) -> None:
        kinds: tuple[CollectiveKind, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv")
        assert [volume_factor(kind, 4) for kind in kinds] == [1.5, 0.75, 0.75, 0.75, 1.0]


def large(kind: CollectiveKind, ranks: int) -> float:
    """Return the bus rate of a large transfer, in bytes/s."""
    return LogCurve.of(table(kind, ranks)[1])(LARGE_BYTES)


@pytest.mark.parametrize(("distance", "senders"), [(1, 1), (3, 3), (8, 8), (13, 3), (15, 1)])
def test_ranks_that_send_far_share_the_cards_of_their_node(distance: int, senders: int) -> None:
    """On two nodes of eight ranks, as many ranks send to the other node as the distance, or its rest to 16, has."""
    size = 2**30
    found = times(cluster(2, nics=2), Layout(tp=16)).exchange_seconds(Exchange(size, 16, "tp", distance), set())
    alone = times(cluster(2, nics=2), Layout(tp=16)).exchange_seconds(Exchange(size, 16, "tp"), set())
    assert found == pytest.approx(alone * max(1.0, senders / 2), rel=0.02)


class TestDemands:
    """What large transfers use of a link whose highest rate is that of an all-gather over eight ranks."""

    most = large("all_gather", 8)

    def test_inside_a_node_it_is_the_ratio_of_rates(self) -> None:
        share = large("all_to_all", 4) / self.most
        assert 0.5 < share < 1.0
        found = times(cluster(), Layout(ulysses=4)).demands
        assert found[Lane.ULYSSES] == pytest.approx({"node out": share, "node in": share})
        share = large("reduce_scatter", 4) / self.most
        assert found[Lane.REPLICA] == pytest.approx({"node out": share, "node in": share})

    def test_without_nvlink_copies_demand_the_same_link(self) -> None:
        """An RTX 4090's ring over eight takes .44 of PCIe, a copy .79: together more than copies alone can have."""
        rtx4090 = load_hardware("rtx4090-pcie-24gb")
        found = times(cluster(), Layout(tp=8), rtx4090).demands
        assert found[Lane.D2H] == pytest.approx({"node out": 1.0})
        assert found[Lane.H2D] == pytest.approx({"node in": 24.8 / 25.0})
        share = 0.44 * 31.504 / 25.0
        assert found[Lane.TP]["node out"] == pytest.approx(share, rel=1e-3)
        rates = NodeRates(rtx4090, cluster(), demands=found).rates
        beside = rates(mask(Lane.D2H, Lane.TP))
        assert beside[Lane.D2H] == beside[Lane.TP] == pytest.approx(1 / (1 + share), rel=1e-3)
        assert rates(mask(Lane.D2H))[Lane.D2H] == rates(mask(Lane.TP))[Lane.TP] == 1.0
        assert Lane.D2H not in times(cluster(), Layout(tp=8)).demands

    def test_a_ring_over_nodes_is_as_fast_inside_them_as_their_cards(self) -> None:
        links = times(cluster(2, nics=4), Layout(dp=16)).demands[Lane.REPLICA]
        node = 4 * 20 * GB / self.most
        assert links == pytest.approx({"node out": node, "node in": node, "network out": 1.0, "network in": 1.0})

    def test_ranks_of_an_all_to_all_have_a_part_of_a_card_each(self) -> None:
        links = times(cluster(2, nics=4), Layout(ulysses=16)).demands[Lane.ULYSSES]
        node = 0.5 * 20 * GB * (7 / 8) / self.most
        assert links == pytest.approx({"node out": node, "node in": node, "network out": 1.0, "network in": 1.0})

    def test_a_send_and_a_receive_use_one_direction_each(self) -> None:
        across = times(cluster(2, nics=16), Layout(tp=8, pp=2)).demands
        assert across[Lane.SEND] == pytest.approx({"network out": 0.5})  # eight ranks on sixteen cards
        assert across[Lane.RECV] == pytest.approx({"network in": 0.5})
        inside = times(cluster(), Layout(tp=4, pp=2)).demands
        assert (set(inside[Lane.SEND]), set(inside[Lane.RECV])) == ({"node out"}, {"node in"})

    def test_chunks_of_tensor_parallelism_use_the_link_as_sends_do(self) -> None:
        layout = Layout(tp=4, sequence_parallel=True, tp_overlap="chunked")
        share = large("send_recv", 4) / self.most
        assert times(cluster(), layout).demands[Lane.P2P] == pytest.approx({"node out": share, "node in": share})
        plain = replace(layout, tp_overlap="none")
        assert Lane.P2P not in times(cluster(), plain).demands

    def test_switches_that_add_do_not_make_the_link_faster(self) -> None:
        h100 = load_hardware("h100-sxm5-80gb")
        rates = {(t.kind, t.ranks): LogCurve.of(t.bus_bytes_per_s)(LARGE_BYTES) for t in h100.collectives}
        link = max(rate for (kind, _), rate in rates.items() if kind != "all_reduce")
        assert rates["all_reduce", 8] > link
        gathered = times(cluster(), Layout(tp=8), h100).demands[Lane.TP]
        assert gathered["node out"] == pytest.approx(rates["reduce_scatter", 8] / link, rel=1e-6)


class TestByNodes:
    """Rings over 2 to 128 nodes: SimAI's table, which the clusters hold, and what the model derives without it."""

    NODES = (4, 8, 16, 32, 64, 128)

    def gather(self, nodes: int, size: float, *, name: str = "h100", measured: bool = True) -> float:
        where, hardware = load_cluster(f"{name}-{nodes}x8")
        if not measured:
            assert where.network is not None
            where = replace(where, network=replace(where.network, efficiency_by_nodes=[]))
        layout = Layout(dp=8 * nodes)
        work = Collective("all_gather", int(size), 8 * nodes, "grads")
        return CollectiveTimes(hardware, where, layout).seconds(work, set())

    def test_a_measured_ring_takes_its_measured_time(self) -> None:
        network = load_cluster("h100-2x8")[0].network
        assert network is not None
        assert [curve.nodes for curve in network.efficiency_by_nodes] == list(self.NODES)
        rate = network.nics_per_node * network.nic_bytes_per_s.value
        for curve in network.efficiency_by_nodes:
            for size, efficiency in list(zip(curve.x, curve.y, strict=True))[3:]:
                ranks = 8 * curve.nodes
                expected = (ranks - 1) / ranks * size / (rate * efficiency)
                # Above the table: a shorter ring was measured slower, or NVLink is the slower link.
                assert 0.99 * expected <= self.gather(curve.nodes, size) <= 1.2 * expected

    def test_two_nodes_tell_about_more_by_the_messages_of_a_step(self) -> None:
        sizes = [2**i * 1e6 for i in range(6, 14)]
        errors = [
            self.gather(nodes, size, measured=False) / self.gather(nodes, size) - 1
            for nodes in self.NODES
            for size in sizes
        ]
        assert sum(abs(error) for error in errors) / len(errors) < 0.15
        # The same bytes in every step have the same efficiency.
        for nodes in self.NODES:
            few, many = (self.gather(n, 2**26 * n, measured=False) / n for n in (nodes, 2 * nodes))
            assert many == pytest.approx(few, rel=0.05)

    @pytest.mark.parametrize(
        ("name", "nodes", "size", "bus"),
        [
            # nccl-tests#119, #175 and #100, and NVIDIA's eight cards in nccl#812
            *[("a100-3x8-hdr4", 3, 2**27, 96), ("a100-2x8-hdr4", 2, 2**32, 88.5), ("a100-2x8-hdr8", 2, 2**32, 192)],
            # ml-engineering, eight 400 Gb/s EFA cards, whose latency is higher: 256 MiB are a quarter too fast here
            *[("b200-4x8-ndr8", 4, 2**30, 362), ("b200-4x8-ndr8", 4, 2**28, 229), ("b200-4x8-ndr8", 4, 2**34, 382)],
        ],
    )
    def test_other_published_all_reduces(self, name: str, nodes: int, size: int, bus: float) -> None:
        where, hardware = load_cluster(name)
        ranks = 8 * nodes
        work = Collective("all_reduce", size, ranks, "grads")
        found = CollectiveTimes(hardware, where, Layout(dp=ranks)).seconds(work, set())
        assert volume_factor("all_reduce", ranks) * size / found / GB == pytest.approx(bus, rel=0.3)

    def test_a_small_all_reduce_is_a_tree(self) -> None:
        # nccl#652: 63 to 71 us over 32 nodes of eight A100 with four HDR cards.
        where, hardware = load_cluster("a100-32x8-hdr4")
        work = Collective("all_reduce", 4, 256, "grads")
        found = CollectiveTimes(hardware, where, Layout(dp=256)).seconds(work, set())
        assert 50e-6 < found < 150e-6

    @given(
        st.sampled_from(["all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send_recv"]),
        st.integers(1, 2**35),
        st.sampled_from([1, 2, 8]),
        st.integers(1, 300),
        st.sampled_from(["a100", "h100", "b200"]),
    )
    def test_more_nodes_are_never_cheaper_and_more_bandwidth_is_never_slower(
        self, kind: CollectiveKind, size: int, per_node: int, nodes: int, name: str
    ) -> None:
        def seconds(nodes: int, size: int, faster: float = 1.0) -> float:
            where, hardware = load_cluster(f"{name}-{nodes}x8")
            assert where.network is not None
            card = where.network.nic_bytes_per_s
            quick = replace(where.network, nic_bytes_per_s=replace(card, value=card.value * faster))
            layout = Layout(tp=8 // per_node, dp=nodes * per_node)
            here = CollectiveTimes(hardware, replace(where, network=quick), layout)
            return here.seconds(Collective(kind, size, nodes * per_node, "grads"), set())

        asked = seconds(nodes, size)
        assert asked <= seconds(nodes + 1, size) * (1 + 1e-9)
        assert asked <= seconds(2 * nodes, size) * (1 + 1e-9)
        assert seconds(nodes, size, 1.5) <= asked
        if nodes > 1:  # inside a node the rate between two measured sizes may grow faster than the bytes
            assert asked <= seconds(nodes, size + size // 3 + 1) * (1 + 1e-3)


def mask(*lanes: Lane) -> int:
    return sum(1 << lane for lane in lanes)


class TestContention:
    alone = NodeRates(A800, cluster(devices=1))
    node = NodeRates(A800, cluster())

    def test_a_single_device_copies_as_if_alone(self) -> None:
        assert self.alone.rates(mask(Lane.D2H)) == (1.0,) * len(Lane)

    def test_a_copy_is_slower_while_the_other_direction_is_busy(self) -> None:
        rates = self.alone.rates(mask(Lane.D2H, Lane.H2D))
        assert rates[Lane.H2D] == pytest.approx(11 / 24.8)
        assert rates[Lane.D2H] == pytest.approx(24.5 / 25)

    def test_eight_devices_at_once(self) -> None:
        assert self.node.rates(mask(Lane.D2H))[Lane.D2H] == pytest.approx(A800.d2h.all_devices.value / (25 * GB))
        assert self.node.rates(mask(Lane.H2D))[Lane.H2D] == pytest.approx(A800.h2d.all_devices.value / (24.8 * GB))

    def test_a_pair_shares_its_uplink(self) -> None:
        assert NodeRates(A800, cluster(), 2).rates(mask(Lane.D2H))[Lane.D2H] == pytest.approx(0.5)
        assert NodeRates(A800, cluster(), 4).rates(mask(Lane.D2H))[Lane.D2H] == pytest.approx(0.5)

    def test_compute_is_slower_beside_traffic(self) -> None:
        slowed = A800.compute_slowdown["collective"].value
        assert self.node.rates(mask(Lane.COMPUTE, Lane.ULYSSES))[Lane.COMPUTE] == pytest.approx(1 / slowed)
        both = self.node.rates(mask(Lane.COMPUTE, Lane.ULYSSES, Lane.P2P))[Lane.COMPUTE]
        assert both == pytest.approx(1 / slowed / A800.compute_slowdown["p2p"].value)
        assert self.node.rates(mask(Lane.COMPUTE, Lane.D2H))[Lane.COMPUTE] == 1.0

    def test_host_memory_is_shared_both_ways(self) -> None:
        poor = replace(A800, host_copy_bytes_per_s=Quantity(value=80 * GB, source="host-dram"))
        rates = NodeRates(poor, cluster()).rates(mask(Lane.D2H, Lane.H2D, Lane.HOST))
        assert A800.host_update_bytes_per_s is not None
        updated = A800.host_update_bytes_per_s.value / 8
        moved = rates[Lane.D2H] * 25 * GB + rates[Lane.H2D] * 24.8 * GB + rates[Lane.HOST] * updated
        assert moved * 8 == pytest.approx(80 * GB)
        assert NodeRates(poor, cluster()).rates(mask(Lane.HOST))[Lane.HOST] == 1.0

    @given(st.integers(0, 2 ** len(Lane) - 1), st.sampled_from([1, 2, 4, 8]))
    def test_every_multiplier_is_a_positive_fraction(self, busy: int, devices: int) -> None:
        rates = NodeRates(A800, cluster(), devices).rates(busy)
        assert all(0 < rate <= 1 for rate in rates)
        assert all(rates[lane] == 1.0 for lane in Lane if not busy & (1 << lane))

    @given(st.integers(0, 2 ** len(Lane) - 1), st.sampled_from(list(Lane)))
    def test_another_busy_lane_never_helps(self, busy: int, more: Lane) -> None:
        before, after = self.node.rates(busy), self.node.rates(busy | 1 << more)
        assert all(after[lane] <= before[lane] + 1e-12 for lane in Lane if busy & (1 << lane))


@pytest.mark.parametrize("devices_per_node", [3, 4, 8])
@pytest.mark.parametrize("group", [SHARD, REPLICATE, EXPERT_SHARD, EXPERT_REPLICATE])
def test_groups_of_zero_ranks_are_placed_as_their_ranks_lie(group: Group, devices_per_node: int) -> None:
    """Ranks are counted one by one, of every group of the layout."""
    degrees = itertools.product([1, 2], [1, 3], [1, 2], [2, 6, 12], [1, 3])
    for tp, ulysses, cp, dp, pp in degrees:
        replicas = ulysses * cp * dp
        for zero_ranks in (each for each in (2, 6, replicas) if replicas % each == 0):
            layout = Layout(tp=tp, ulysses=ulysses, cp=cp, dp=dp, pp=pp, ep=2, zero=1, zero_ranks=zero_ranks)
            firsts = [rank for rank in range(layout.devices) if coordinate(group, layout, rank) == 0]
            groups = [Counter(rank // devices_per_node for rank in members(group, layout, first)) for first in firsts]
            widest = max(groups, key=len)
            sharing = Counter(node for each in groups if len(each) == len(widest) for node in each)
            span = max(widest) - min(widest) + 1
            wanted = Placement(widest.total(), max(widest.values()), len(widest), max(sharing.values()), span)
            assert place(group, degree(group, layout), layout, devices_per_node) == wanted
