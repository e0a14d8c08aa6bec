"""Offloading for any torch model: what autograd saves goes to host memory and comes back before backward needs it.

    with memo_exec.offload_activations(fraction=0.5) as offload:
        loss = model(tokens).sum()
    loss.backward()
    print(offload.statistics)

It plays by the executor's rules (one D2H and one H2D lane beside compute, a host slab of exactly the bytes in use, an
event for every hazard) but needs no plan and nothing of memo_sim except its errors.
"""

from memo_exec.offload.context import OffloadActivations, keep_activations

__all__ = ["OffloadActivations", "keep_activations"]
