"""How much slower a step is on many devices that wait for each other than on the devices of one node.

Devices of one kind differ in their clocks under load, and so in their rates of products and attention. A step runs at
the pace of its slowest device, and the slowest of more devices is slower. If the rates are normally distributed, the
expected slowest of n devices lies z(n) standard deviations below the mean (Blom 1958):

    z(n) = quantile((n - 3/8) / (n + 1/4))          8: 1.43    32: 2.07    64: 2.34    512: 3.04

A profile's rates are already those of the slowest of ``rated_devices`` (by default, the node's devices). Only more
devices slow the step further:

    seconds x (1 + deviation x (z(n) - z(rated_devices)))
"""

from __future__ import annotations

from statistics import NormalDist

from memo_sim.contract.hardware import Hardware


def slowest(devices: int) -> float:
    """Return z(n): how many standard deviations the slowest of ``devices`` devices lies below the mean."""
    return NormalDist().inv_cdf((devices - 0.375) / (devices + 0.25))


def pace(hardware: Hardware, devices: int) -> float:
    """Return the factor (>= 1) on the time of products and attention, for ``devices`` that wait for each other."""
    deviation = hardware.device_deviation
    rated = hardware.rated_devices or hardware.devices
    if deviation is None or devices <= rated:
        return 1.0
    return 1.0 + deviation.value * (slowest(devices) - slowest(rated))
