"""Scripts that start a job on every node: ``torchrun`` by hand, or under SLURM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from memo_sim.contract.interchange import Launcher
from memo_sim.interchange import memory_fraction

_BY_HAND = """\
# On each of several nodes: NODE_RANK=0, 1, ... and MASTER_ADDR, the first node's name or address.
NNODES=${{NNODES:-{nodes}}}
NODE_RANK=${{NODE_RANK:-0}}
MASTER_ADDR=${{MASTER_ADDR:-localhost}}
MASTER_PORT=${{MASTER_PORT:-29500}}
"""
_TORCHRUN = (
    "torchrun --nnodes ${NNODES} --nproc-per-node %d --node-rank ${NODE_RANK}"
    " --master-addr ${MASTER_ADDR} --master-port ${MASTER_PORT}"
)
_SBATCH = """\
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={per_node}
#SBATCH --exclusive
"""
_SRUN = (
    "srun torchrun --nnodes %d --nproc-per-node %d --rdzv-id ${SLURM_JOB_ID} --rdzv-backend c10d"
    " --rdzv-endpoint ${MASTER_ADDR}:${MASTER_PORT}"
)
_INSIDE = 'cd "${SLURM_SUBMIT_DIR:-$(dirname "${BASH_SOURCE[0]}")}"'
_ACCELERATE = (
    "accelerate launch --config_file %s --num_machines %s --num_processes %d%s"
    " --main_process_ip ${MASTER_ADDR} --main_process_port ${MASTER_PORT}"
)


@dataclass(frozen=True, slots=True)
class Launch:
    """On how many nodes a job runs, with how many processes each, and what starts them."""

    nodes: int
    per_node: int
    launcher: Launcher = "torchrun"
    memory_fraction: float | None = None
    """The part of a device's memory that PyTorch's allocator may reserve; None: all of it."""

    @property
    def devices(self) -> int:
        """Number of processes."""
        return self.nodes * self.per_node

    def script(
        self,
        command: Sequence[str],
        *,
        header: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        before: str = "",
        accelerate: str = "",
        inside: bool = False,
    ) -> str:
        """Return a bash script that starts ``command`` (the program and its arguments, quoted) on every device.

        ``header`` is written as comments, ``environment`` is exported, and ``before`` stands before the command.
        ``accelerate`` names a configuration of accelerate, which then starts the processes in place of torchrun.
        ``inside``: the command runs in the script's folder (under SLURM the one where it was submitted).
        """
        lines = ["#!/bin/bash"]
        if self.launcher == "slurm":
            lines += _SBATCH.format(nodes=self.nodes, per_node=self.per_node).splitlines()
        lines += [f"# {line}" for line in header]
        lines += ["set -euo pipefail", ""]
        if inside:
            lines.append(_INSIDE)
        lines += [f"export {name}={value}" for name, value in (environment or {}).items()]
        if self.memory_fraction is not None:
            lines += memory_fraction.lines(self.memory_fraction)
        if self.launcher == "slurm":
            lines.append('MASTER_ADDR=$(scontrol show hostnames "${SLURM_JOB_NODELIST}" | head -n 1)')
            lines.append("MASTER_PORT=${MASTER_PORT:-29500}")
            start = _SRUN % (self.nodes, self.per_node)
            if accelerate:
                start = "srun " + _ACCELERATE % (accelerate, self.nodes, self.devices, " --rdzv_backend c10d")
        else:
            lines += _BY_HAND.format(nodes=self.nodes).splitlines()
            start = _TORCHRUN % self.per_node
            if accelerate:
                start = _ACCELERATE % (accelerate, "${NNODES}", self.devices, " --machine_rank ${NODE_RANK}")
        lines += ["", *before.splitlines(), ""] if before else [""]
        return "\n".join(lines) + "\n" + f"{start} \\\n    {' '.join(command)}\n"


def launch_of(devices: int, devices_per_node: int, launcher: Launcher, memory_fraction: float | None = None) -> Launch:
    """Return the launch of a job on so many devices: some of one node, or whole nodes."""
    if devices <= devices_per_node:
        return Launch(1, devices, launcher, memory_fraction)
    return Launch(devices // devices_per_node, devices_per_node, launcher, memory_fraction)
