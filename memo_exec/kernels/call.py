"""Arguments of a kernel: its instruction, its operands by role, and the state that a whole step shares.

An operand's tensor is a view of exactly the tokens that the instruction names. Its shape is (tokens, features), or flat
if the buffer has one feature. Ranges of parameter blocks are flat too; the kernel views them in the parameter's shape.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod

import torch
from torch import Tensor

from memo_exec.distributed.groups import Groups
from memo_exec.distributed.mesh import MeshCoordinates
from memo_exec.kernels.fp8_scales import Fp8Scales
from memo_exec.kernels.frequencies import inverse_frequencies, unscaled_frequencies
from memo_sim.contract.documents import packed
from memo_sim.contract.model import Model
from memo_sim.contract.plan import Decisions
from memo_sim.program.ir.instruction import Instruction, Lane
from memo_sim.program.ir.work import Rowwise
from memo_sim.program.layout.attention_chunks import in_chunks
from memo_sim.program.layout.heads import divided_heads, shares
from memo_sim.program.layout.partition import partition
from memo_sim.program.layout.rowwise_blocks import routed_at_once
from memo_sim.program.layout.stage import stages_of
from memo_sim.program.layout.token_order import (
    Run,
    clipped,
    clipped_runs,
    cuts_documents,
    row_blocks,
    shard_runs,
    token_runs,
)
from memo_sim.program.operators.workspaces import SCRATCH_ALIGNMENT_BYTES, merge_scratch_bytes

Ends = tuple[tuple[int, ...], ...]
"""For each sequence of a micro-batch, where its documents end; the last end is that of the sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepScalars:
    """Numbers that may change from step to step; ``step`` counts from 1."""

    lr: float = 0.0
    step: int = 1
    loss_scale: float = 1.0
    """1 / number of counted targets in the global batch."""
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float | None = None
    """Largest allowed global norm of the gradients; None means no clipping."""
    clip_ratio: float = 0.2
    """Of a policy's objective: the ratio of probabilities is clipped below 1 - this ..."""
    clip_ratio_high: float = 0.2
    """... and above 1 + this."""
    kl_weight: float = 0.0
    """Of a policy's objective: the weight of the KL term against the reference model."""


@dataclass
class Context:
    """State that every kernel of a step may read in addition to its operands."""

    decisions: Decisions
    device: torch.device
    scalars: StepScalars = field(default_factory=StepScalars)
    rank: int = 0
    """This process's rank in the layout; it decides which tokens the rows of a buffer are."""
    groups: Groups = field(default_factory=dict)
    """Process groups by lane and kind of group; empty if the layout has one device."""
    debug: bool = False
    """Whether reads of NaN are faults, so that rows which no product writes must not hold what was there before."""

    def __post_init__(self) -> None:
        """Allocate the constants once, so that no kernel allocates them."""
        self._cells = {host: torch.zeros(4, device="cpu" if host else self.device) for host in (False, True)}
        self.inverse_frequencies = inverse_frequencies(self.model, self.decisions.seq_tokens).to(self.device)
        """Rotary frequencies in fp32; the length is half of a head's rotary features."""
        self.own_frequencies = {
            shape.rope_theta: unscaled_frequencies(self.model, shape.rope_theta).to(self.device)
            for shape in self.model.layer_shapes
            if shape.rope_theta
        }
        """Those of layers whose tables have a base of their own, by base."""
        self.mesh = MeshCoordinates(self.decisions.layout, self.rank)
        """This rank's mesh coordinates."""
        parts = partition(self.decisions)
        self._starts = (0, *accumulate(parts))
        self.row_blocks = [row_blocks(self.decisions, number) for number in range(len(parts))]
        """Row blocks of each subsequence, counted in the subsequence's own rows."""
        self.heads, self.kv_heads = divided_heads(self.model, self.decisions.layout)
        """Query heads and key/value heads of a tensor-parallel (or METP) rank."""
        self.shares = shares(self.heads, self.kv_heads, self.decisions.layout.ulysses)
        """The heads of each rank of Ulysses."""
        mixture = self.model.mixture
        sizes = (self.model.layers, mixture.count) if mixture else (0, 0)
        self.loads = torch.zeros(*sizes, dtype=torch.int64, device=self.device)
        """By layer: rows of a micro-batch's fullest expert, of the next one, and so on, summed over micro-batches."""
        self.rows = torch.zeros_like(self.loads)
        """By layer and expert: rows, summed over micro-batches."""
        self._ends: list[Ends] = [self._drawn_ends()] if self.decisions.documents else []
        """For each micro-batch of the step, where its documents end; the drawn ones until a step brings its own."""
        self._runs = self._order()
        self.routed = sorted(set(routed_at_once(self.decisions)), reverse=True)
        """How many tokens are routed at once: all, or those of a row block, of which the last may be shorter."""
        self.overflow = torch.zeros(2 + len(self.routed), dtype=torch.int64, device=self.device)
        """With expert parallelism: dispatched rows that were dropped, all dispatched rows, and for each number of
        tokens that are routed at once the most rows that a layer sent to a rank, of all forwards so far."""
        self.fp8 = None if self.decisions.fp8 == "none" else Fp8Scales(self.device)
        """The scales of FP8 copies, and scratch of their kernels; None without FP8."""
        self._stage_layers = {layer: i for i, layer in enumerate(stages_of(self.decisions)[self.mesh.at("pp")].layers)}
        self.merging = self._merging()
        """Scratch bytes for merging partial attention results; None if the plan merges nothing."""

    def _merging(self) -> Tensor | None:
        model, layout = self.model, self.decisions.layout
        if layout.ring == 1 and layout.subsequences == 1 and not in_chunks(self.decisions):
            return None
        heads = self.shares[self.mesh.at("ulysses")].heads
        size = merge_scratch_bytes(heads, model.value_dim, self.decisions.dtype)
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def _drawn_ends(self) -> Ends:
        """Return the ends of the documents that the plan's figures are drawn for."""
        decisions = self.decisions
        assert decisions.documents is not None
        drawn = packed(decisions.documents, decisions.seq_tokens)
        return tuple(tuple(accumulate(drawn[i % len(drawn)])) for i in range(decisions.micro_batch))

    def bring(self, ends: Sequence[Ends]) -> None:
        """Keep where the documents of a step's micro-batches end."""
        self._ends = list(ends)
        if cuts_documents(self.decisions):
            self._runs = self._order()

    def _order(self) -> list[tuple[tuple[Run, ...], tuple[Run, ...]]]:
        """Return the runs of this rank's rows and of its token shard: one pair, or one for each micro-batch."""
        every = self._ends if cuts_documents(self.decisions) else [()]
        return [tuple(of(self.decisions, self.rank, ends) for of in (token_runs, shard_runs)) for ends in every]  # type: ignore[misc]

    def runs(self, micro_batch: int, *, shard: bool = False) -> tuple[Run, ...]:
        """Return the runs of this rank's rows, or with ``shard`` of its sequence-parallel token shard."""
        return self._runs[micro_batch % len(self._runs)][shard]

    def ends(self, micro_batch: int) -> Ends:
        """Return where the documents of a micro-batch end; empty where a sequence is one document."""
        return self._ends[micro_batch % len(self._ends)] if self._ends else ()

    def positions(
        self, first: int, rows: int, *, shard: bool = False, micro_batch: int = 0
    ) -> Iterator[tuple[slice, int]]:
        """Yield (rows, position of the first in its document) for each contiguous run in rows [first, first + rows).

        The yielded rows count from ``first``. With ``shard``, rows are those of the sequence-parallel token shard.
        """
        ends, length = self.ends(micro_batch), self.decisions.seq_tokens
        for run in clipped(self.runs(micro_batch, shard=shard), first, rows):
            sequence, token = divmod(run.token, length)
            row, last = run.row - first, token + run.tokens
            begin = 0
            for end in ends[sequence] if ends else (length,):
                low, high = max(token, begin), min(last, end)
                if low < high:
                    yield slice(row + low - token, row + high - token), low - begin
                begin = end

    def start(self, subsequence: int, offset: int = 0, *, shard: bool = False) -> int:
        """Return the index of a subsequence's row ``offset`` among all the rank's rows, or in its token shard."""
        first, layout = self._starts[subsequence] + offset, self.decisions.layout
        return first // layout.tp if shard and layout.sequence_parallel else first

    @property
    def model(self) -> Model:
        """The model of the plan."""
        return self.decisions.model

    def stage_layer(self, layer: int) -> int:
        """Return the place of a layer of the model on this rank's pipeline stage."""
        return self._stage_layers[layer]

    def cell(self, lane: Lane, index: int) -> Tensor:
        """Return one fp32 scratch number of a lane, shape (1,), for kernels that compute scalars."""
        return self._cells[lane is Lane.HOST][index : index + 1]


@dataclass(slots=True)
class Call:
    """One kernel call.

    The layer's tensors hold the rows of ``subsequence``, starting at its row ``offset``. ``layer`` is its number.
    """

    instruction: Instruction
    context: Context
    tensors: dict[str, Tensor]
    subsequence: int = 0
    offset: int = 0
    micro_batch: int = 0
    layer: int = 0

    def __getitem__(self, role: str) -> Tensor:
        """Return the operand with this role."""
        return self.tensors[role]

    def get(self, role: str) -> Tensor | None:
        """Return the operand with this role, or None if the instruction has none (a bias, for example)."""
        return self.tensors.get(role)

    def numbered(self, role: str) -> dict[str, Tensor]:
        """Return the operands named ``role.x``, keyed by their suffix ``x``."""
        return {name.partition(".")[2]: value for name, value in self.tensors.items() if name.startswith(f"{role}.")}

    def matrix(self, role: str) -> Tensor:
        """Return the operand as (tokens, features), even if it has only one feature."""
        tensor = self.tensors[role]
        return tensor if tensor.dim() == 2 else tensor.unsqueeze(1)

    def first(self, role: str) -> int:
        """Return the index of the operand's first token in its buffer."""
        return next(operand.first for operand in self.instruction.operands if operand.role == role)

    def row(self, role: str) -> int:
        """Return the row, counted within the call's subsequence, of the operand's first token."""
        work = self.instruction.work
        return self.first(role) + (work.first if isinstance(work, Rowwise) else 0)

    def positions(self, first: int, rows: int, *, shard: bool = False) -> Iterator[tuple[slice, int]]:
        """Yield what ``Context.positions`` yields, with ``first`` counted within the call's subsequence."""
        start = self.context.start(self.subsequence, self.offset, shard=shard)
        return self.context.positions(first + start, rows, shard=shard, micro_batch=self.micro_batch)

    @property
    def row_blocks(self) -> list[tuple[int, int]]:
        """The row blocks of the call's subsequence, counted in rows of the call's buffers."""
        blocks = self.context.row_blocks[self.subsequence]
        if not self.offset:
            return blocks
        end = blocks[-1][0] + blocks[-1][1]
        return [(first - self.offset, rows) for first, rows in clipped_runs(blocks, self.offset, end - self.offset)]

    def scratch(self) -> Scratch:
        """Return the call's workspace, from which the kernel takes pieces."""
        return Scratch(self.tensors.get("workspace"))


class Scratch:
    """A workspace that a kernel takes pieces from.

    Sizes follow ``memo_sim/program/operators/workspaces.py``, which the program uses to declare the workspace.
    """

    def __init__(self, workspace: Tensor | None) -> None:
        self._bytes = None if workspace is None else workspace.reshape(-1).view(torch.uint8)
        self._used = 0

    def take(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the next piece.

        Raises:
            ValueError: if the program declares less workspace than the kernel takes.
        """
        size = prod(shape) * dtype.itemsize
        declared = 0 if self._bytes is None else self._bytes.numel()
        if self._bytes is None or self._used + size > declared:
            raise ValueError(
                f"the kernel needs {size} more workspace bytes, but {self._used} of the declared {declared} are taken"
            )
        piece = self._bytes[self._used : self._used + size]
        self._used += -(-size // SCRATCH_ALIGNMENT_BYTES) * SCRATCH_ALIGNMENT_BYTES
        return piece.view(dtype).view(shape)
