"""How much slower many devices that wait for each other are than those of one node.

Devices of a kind differ: clocks under load, and with them the rates of products and attention. A step goes at the pace
of its slowest device, and of more devices the slowest is slower. With rates normal around their mean, the expected
slowest of n lies z(n) standard deviations below it (Blom 1958):

    z(n) = quantile((n - 3/8) / (n + 1/4))          8: 1.43    32: 2.07    64: 2.34    512: 3.04

A profile's rates are what its node keeps, or fewer devices where it says so (``rated_devices``), so only devices beyond
those slow it further:

    seconds x (1 + deviation x (z(n) - z(devices that the rates are of)))
"""

from __future__ import annotations

from statistics import NormalDist

from memo_sim.contract.hardware import Hardware


def slowest(devices: int) -> float:
    """Return how many standard deviations the slowest of ``devices`` is expected to lie below their mean."""
    return NormalDist().inv_cdf((devices - 0.375) / (devices + 0.25))


def pace(hardware: Hardware, devices: int) -> float:
    """Return the factor (at least 1) on the time of products and attention of ``devices`` that wait for each other."""
    deviation = hardware.device_deviation
    rated = hardware.rated_devices or hardware.devices
    if deviation is None or devices <= rated:
        return 1.0
    return 1.0 + deviation.value * (slowest(devices) - slowest(rated))
