"""How much slower a step is on many devices that wait for each other than on the devices of one node.

Devices of one kind differ in their clocks under load, and so in their rates of products and attention. A step runs at
the pace of its slowest device, and the slowest of more devices is slower. A profile says by how much devices differ
(``device_deviation``: a 2.85th of the range that is expected of eight), and ``SPREAD`` says how they are distributed.
z(n), in such deviations above the mean, is the expected longest of n draws from it:

    z(n) = integral of SPREAD(u) n u^(n-1) du        8: 1.51    32: 2.40    64: 2.90    512: 4.22    (normal: 3.04)

The distribution has a longer end than a normal one, and nodes do not differ more than their devices do: in the
measurement that it comes from, devices of one node differ by 1.6 % and nodes by 0.2 % (standard deviations).

A profile's rates are already those of the slowest of ``rated_devices`` (by default, the node's devices). Only more
devices slow the step further:

    seconds x (1 + deviation x (z(n) - z(rated_devices)))
"""

from __future__ import annotations

from itertools import pairwise
from statistics import NormalDist

import msgspec

from memo_sim.contract.boards import OPTION_SOURCE
from memo_sim.contract.hardware import Hardware, Quantity, Source

SPREAD = (
    *((0.0, -2.80), (0.01, -2.14), (0.05, -1.54), (0.25, -0.70), (0.5, 0.0), (0.75, 0.66), (0.9, 1.22), (0.95, 1.57)),
    *((0.975, 2.10), (0.986, 2.40), (0.991, 2.93), (0.9936, 3.20), (0.9962, 3.67), (0.9987, 4.51), (1.0, 4.51)),
)
"""How long a product takes on a fraction of devices at most, in deviations above the mean.

Measured with one single-precision product (25,536 squared, at the power limit) on 391 V100 of Longhorn (Sinha et al.,
SC22; each device's median of aggregated_data/sim/sgemm-longhorn-agg.csv in hal-uw/blox-pal@da726ca). Their expected
range of eight is 4.8 %. Left out is a device that took 20 % longer, because such a device is replaced (MegaScale, NSDI
2024, removes hosts that take 10 % longer). The slowest of the others took 7.6 % longer: a bound for any number.
From eight devices to 32 their expected slowest rises by 1.5 %, that of 213 A100 of Lonestar6 by 2.0 %
(aggregated_data/ls6/resnet-ls6-agg.csv, without those that take 10 % longer), that of normal draws by 1.1 %."""


def slowest(draws: int) -> float:
    """Return how many standard deviations the slowest of ``draws`` normal draws lies from the mean (Blom 1958)."""
    return NormalDist().inv_cdf((draws - 0.375) / (draws + 0.25))


def slowest_device(devices: int) -> float:
    """Return z(n): by how many deviations the slowest of ``devices`` devices takes longer than they do on average."""
    n, z = devices, 0.0
    for (low, first), (high, last) in pairwise(SPREAD):
        slope = (last - first) / (high - low)
        z += last * high**n - first * low**n - slope * (high ** (n + 1) - low ** (n + 1)) / (n + 1)
    return z


def pace(hardware: Hardware, devices: int) -> float:
    """Return the factor (>= 1) on the time of products and attention, for ``devices`` that wait for each other."""
    deviation = hardware.device_deviation
    rated = hardware.rated_devices or hardware.devices
    if deviation is None or devices <= rated:
        return 1.0
    return 1.0 + deviation.value * (slowest_device(devices) - slowest_device(rated))


def with_spread(hardware: Hardware, deviation: float) -> Hardware:
    """Return the profile of devices that differ by ``deviation``: the standard deviation of the time of one product."""
    source = Source(kind="assumed", text="given on the command line")
    return msgspec.structs.replace(
        hardware,
        device_deviation=Quantity(value=deviation, source=OPTION_SOURCE),
        sources={**hardware.sources, OPTION_SOURCE: source},
    )
