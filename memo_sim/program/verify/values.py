"""Checks which value every row of every buffer holds, and that every reader gets the value that the model asks for.

``memo_sim/program/verify/program.py`` asks whether rows were written before they are read. This checker asks what they
hold. A value is a tensor of the model ("the output of the first norm of layer 3, micro-batch 1"), and every row of it
belongs to one token. Values begin at the token ids, the labels and the parameters. An instruction is checked against
the mathematics of the model (``value_rules.py``): what a product with this weight reads, what it makes, which terms the
gradient of a sum has. Copies, collectives and exchanges carry values along. So the checker needs no names of
instructions: a product with the QKV weight of layer 3 has to read the first norm of layer 3, and its result is the Q, K
and V of layer 3, whether forward or recompute wrote it.

It finds a copy or a rebuild that is left out, late by a row, from another tensor, layer or micro-batch; a buffer that
is used again too early; a kernel that is left out; terms of a gradient that are missing or added twice. Each parameter
has to get the gradient of every token of every micro-batch once. Rows copied to the host have to come back once.

It shares no code with the lowering. Of ``layout/`` it reads what a plan's file means: where a parameter lies in its
block, and the lengths of subsequences. Values of instructions may be played in any order that the program's edges
allow, so memo-exec's debug mode plays them in the order in which they really ran.

What it takes on trust:

- Ranks run the same program. What a rank receives is what it sends itself, one rank on.
- Token shards of sequence parallelism: which of the rows of one gather belongs to which rank.
- Features: a row is one value. A kernel that mixes up features of the right rows is for a numerical check to find.
- Rows that other stages compute for a task (``layout/multiplex.py``) are what the message is for; sums of gradients
  that such a message brings complete a sum, whatever terms are missing.
- The optimizer: gradients are complete, summed over ranks and used once; what its kernels compute is not looked at,
  nor are the sums of the gradient norm and of the loss over ranks.
- The rank of a ring: values are right if one rank's mask fits all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, pairwise

import numpy as np

from memo_sim.contract.plan import Decisions
from memo_sim.program.analysis.columns import Columns
from memo_sim.program.ir.instruction import Family
from memo_sim.program.ir.kinds import BlockKind, FamilyKind
from memo_sim.program.ir.program import Program
from memo_sim.program.ir.work import Exchange
from memo_sim.program.layout.expert_load import capacity_rows
from memo_sim.program.layout.fp8 import narrow_elements
from memo_sim.program.layout.parameters import Block, Parameter, embed_block, experts_block, head_block, layer_block
from memo_sim.program.layout.partition import partition
from memo_sim.program.layout.rowwise_blocks import routed_at_once
from memo_sim.program.verify.value_call import Call
from memo_sim.program.verify.value_experts import ROUTED
from memo_sim.program.verify.value_rows import Held, ParameterKey, Sum, Value
from memo_sim.program.verify.value_rules import RULES

MOST_FAULTS = 50
"""After so many, the rest mostly follows from the first."""


_BLOCKS = (
    FamilyKind.PARAMS,
    FamilyKind.PARAMS_FP8,
    FamilyKind.MASTER,
    FamilyKind.MOMENT1,
    FamilyKind.MOMENT2,
    FamilyKind.HOST_PARAMS,
)
_UPDATED = (FamilyKind.GRADS, FamilyKind.MOMENT1, FamilyKind.PARAMS, FamilyKind.PARAMS_FP8)


class Values:
    """The values of all buffers while a program plays.

    Instructions may come in any order in which their edges hold. A fault is one line: the instruction's id, what it
    reads, and what it should read.
    """

    def __init__(self, program: Program, columns: Columns, decisions: Decisions) -> None:
        self.program, self.decisions = program, decisions
        self.model, self.layout = decisions.model, decisions.layout
        self.families: list[Family] = list(program.all_families)
        self._template, self._position = columns.template.tolist(), columns.position.tolist()
        self._instance = columns.instance.tolist()
        self._buffer = columns.operand_buffer.tolist()
        self._family: list[int] = columns.buffer_family.tolist()
        count = len(self._template)
        self._first_operand = np.searchsorted(columns.operand_instruction, np.arange(count + 1)).tolist()
        self._uses = np.bincount(columns.operand_buffer, minlength=len(self._family)).tolist()
        self._base = list(accumulate((f.count for f in self.families), initial=0))
        self._parts = {f.name: number for number, f in enumerate(self.families) if f.region}
        self._part_buffers: dict[tuple[int, int], int] = {}
        """By region buffer and number of a family in the region: the number under which its rows are held."""
        self._region_of: dict[int, int] = {}
        self.held: dict[int, list[Held]] = {}
        self.sums: dict[int, dict[ParameterKey, Sum]] = {}
        self.reduced: set[tuple[int, str]] = set()
        """Buffers of gradients that were summed over the ranks of a group: with the same parameters ("replicas"), or
        with a part of the gradient of some vectors ("vectors") or of a matrix ("matrices")."""
        self.normed: set[int] = set()
        """Buffers of gradients whose norm was added."""
        self.updated: dict[tuple[BlockKind, int], list[tuple[int, int]]] = {}
        """Elements of each block's states that the optimizer updated."""
        self.offloaded: dict[int, int] = {}
        """Host buffers, with the number of rows that were copied there and did not come back."""
        self.loss: dict[tuple[int, object], list[tuple[int, int]]] = {}
        self.tiles: dict[tuple[int, int], int] = {}
        """By micro-batch and row: columns of the classifier's gradient that tiles have added so far."""
        self.ring_ranks = set(range(self.layout.ring))
        """The ranks of the ring whose masks fit all attention so far."""
        self._measure()
        self.sent_chunks, self.tp_rank = _own_chunks(program)
        self._begin()

    def expert_rows(self, tokens: int) -> int:
        """Return the rows of the experts' tensors for ``tokens`` that are routed at once.

        They are dispatched rows, or with ``ep`` as many as all its ranks can send here.
        """
        of, layout, decisions = self.model.mixture, self.layout, self.decisions
        dispatched = tokens * of.per_token if of else 0
        if of is None or layout.ep == 1:
            return dispatched
        given = decisions.expert_capacity
        return layout.ep * capacity_rows(of, dispatched, decisions.expert_load, layout.ep, given)

    def has_experts(self, layer: int) -> bool:
        """Return whether a layer of the model has experts in place of an MLP."""
        return 0 <= layer < self.model.layers and self.model.layer(layer).experts is not None

    def _measure(self) -> None:
        """Work out the sizes on one rank from the plan."""
        layout, model, decisions = self.layout, self.model, self.decisions
        self.tp = layout.tp
        self.gathered = layout.sequence_parallel and layout.tp > 1
        self.full = "*" if self.gathered else ""
        """End of the name of a tensor whose token shards were gathered."""
        self.tokens = decisions.local_tokens
        self.shard_tokens = self.tokens // self.tp if self.gathered else self.tokens
        self.routed_tokens = self.shard_tokens if layout.whole_experts else self.tokens
        """Rows of which this rank chooses the experts."""
        self.routed_at_once = routed_at_once(decisions)
        """Those of them that are routed at once: of each subsequence, or of each row block of row-wise recompute."""
        self.routed_full = "" if layout.whole_experts else self.full
        """End of the name of a tensor as the router reads it."""
        self.vocab = -(-model.vocab // self.tp)
        """Columns of this rank's logits."""
        self.attended = self.tokens * layout.ulysses
        """Rows inside attention."""
        self.starts = (0, *accumulate(partition(decisions)))
        self.attention_starts = self._parts_in_attention()
        """First rows inside attention of each subsequence or chunk, and the end of the last."""
        self.divided_parts = self._parts_of_a_ring()
        self.blocks_of_parts = self._blocks_of_parts()
        runs = layout.pp * layout.virtual_stages
        given = layout.pp_layers or _nearly_equal(model.layers, runs)
        ends = (0, *accumulate(given))
        stage = 0 if self.program.stage == "rank" else int(self.program.stage.removeprefix("stage"))
        self.layers = [n for run in range(stage, runs, layout.pp) for n in range(ends[run], ends[run + 1])]
        self.first_stage, self.last_stage = stage == 0, stage == layout.pp - 1
        self._ends = {
            BlockKind.EMBED: embed_block(model, layout.tp, positions=self.first_stage, adapters=decisions.lora),
            BlockKind.HEAD: head_block(model, layout.tp, adapters=decisions.lora),
        }
        self._kinds = model.layer_kinds
        ep, lora, whole = layout.ep, decisions.lora, layout.whole_experts
        self._layer_blocks = [
            layer_block(model, layout.divided, shape, ep=ep, whole_experts=whole, adapters=lora)
            for shape in model.layer_shapes
        ]
        self._expert_blocks = [
            experts_block(model, layout.expert_divided, ep, s.experts, lora) for s in model.layer_shapes
        ]

    def _blocks_of_parts(self) -> tuple[int, ...]:
        """Return of how many row blocks the tokens of each subsequence are routed."""
        ends = list(accumulate(self.routed_at_once))
        parts = [start * self.routed_tokens // self.tokens for start in self.starts]
        return tuple(sum(before < end <= after for end in ends) for before, after in pairwise(parts))

    def _parts_in_attention(self) -> tuple[int, ...]:
        decisions, total = self.decisions, self.decisions.seq_tokens
        chunk, batch = decisions.attention_chunk_tokens, decisions.micro_batch
        if not 0 < chunk < total:
            return tuple(self.layout.ulysses * start for start in self.starts)
        return tuple(min(first, total) * batch // self.layout.ring for first in range(0, total + chunk, chunk))

    def _parts_of_a_ring(self) -> tuple[tuple[int, int], ...]:
        """Return the rows inside attention of each chunk or subsequence that ranks of a ring divide in zigzag order.

        None where they divide whole sequences.
        """
        chunk, total, ring = self.decisions.attention_chunk_tokens, self.decisions.seq_tokens, self.layout.ring
        if ring == 1:
            return ()
        if len(self.starts) > 2:
            return tuple(pairwise(self.layout.ulysses * start for start in self.starts))
        if not 0 < chunk < total:
            return ()
        batch = self.decisions.micro_batch
        ends = [min(first, total) * batch // ring for first in range(0, total + chunk, chunk)]
        return tuple(pairwise(ends))

    def block(self, kind: BlockKind, layer: int) -> Block:
        """Return the parameters of the embedding, of the head, or of a layer."""
        if kind is BlockKind.EXPERTS:
            block = self._expert_blocks[self._kinds[layer]]
            assert block is not None  # only layers with experts have buffers of that kind
            return block
        return self._layer_blocks[self._kinds[layer]] if kind is BlockKind.LAYER else self._ends[kind]

    def block_of(self, buffer: int) -> Block | None:
        """Return the parameters that a buffer of the step is about; None where it is about no block."""
        kind = self.family(buffer).block
        return None if kind is None else self.block(kind, self.layer_of(buffer))

    def narrow(self, buffer: int) -> int:
        """Return the elements that lie in FP8 alone, before the other parameters of a buffer's block."""
        block = self.block_of(buffer)
        return 0 if block is None else narrow_elements(self.decisions, block)

    def kind_of_block(self, buffer: int) -> Block:
        """Return the parameters of the layers of a buffer's kind, or of embedding or head; buffers may be shared."""
        family = self.family(buffer)
        assert family.block is not None
        return (
            self._layer_blocks[family.layer_kind or 0] if family.block is BlockKind.LAYER else self._ends[family.block]
        )

    def parameter(self, kind: BlockKind, name: str, layer: int | None) -> Parameter | None:
        """Return a parameter of a block, or None when the model has none; without ``layer``, that of the first one."""
        known = layer if layer is not None and 0 <= layer < self.model.layers else 0
        return self.block(kind, known).find(name)

    def _begin(self) -> None:
        """Write what buffers hold before the first instruction: parameters and inputs."""
        for number, family in enumerate(self.families):
            given = family.kind in _BLOCKS or family.kind is FamilyKind.INPUT
            if family.kind is FamilyKind.PARAMS_FP8 and not self.decisions.fp8_params:
                given = False  # copies, which the step makes
            for index in range(family.count if given else 0):
                buffer = self._base[number] + index
                if family.kind is FamilyKind.INPUT:
                    value = Value(family.name, -1, index)
                else:
                    value = Value("params", self.layer_of(buffer), -1, None, family.block)
                first = self.narrow(buffer) if family.kind is FamilyKind.PARAMS else 0
                self.held[buffer] = [Held(0, family.tokens, value, first)]

    def family(self, buffer: int) -> Family:
        """Return the family of a buffer."""
        return self.families[self._family[buffer]]

    def layer_of(self, buffer: int) -> int:
        """Return the number of the layer in the model whose block a buffer of the step holds; -1 for the ends."""
        family, index = self.family(buffer), buffer - self._base[self._family[buffer]]
        if family.block is None or not family.block.of_layer:
            return -1
        return [n for n in self.layers if family.layer_kind in (None, self._kinds[n])][index]

    def play(self, number: int) -> list[str]:
        """Check what instruction ``number`` reads, record what it writes, and return its faults."""
        call = self.begin(number)
        self.finish(number, call)
        return call.faults

    def begin(self, number: int) -> Call:
        """Check what instruction ``number`` reads when it starts. It writes nothing until ``finish``."""
        instruction = self.program.templates[self._template[number]].instructions[self._position[number]]
        buffers = self._buffer[self._first_operand[number] : self._first_operand[number + 1]]
        if self._parts:
            slots = self.program.templates[self._template[number]].slots
            names = [slots[operand.slot] for operand in instruction.operands]
            buffers = [self._part_of(name, buffer) for name, buffer in zip(names, buffers, strict=True)]
        call = Call(self, instruction, self.program.instances[self._instance[number]], buffers)
        rule = RULES.get(instruction.op)
        if rule is None:
            call.fault(f"the checker of values has no rule for op {instruction.op!r}")
        else:
            rule(call)
        return call

    def _part_of(self, name: str, buffer: int) -> int:
        """Return the number of the buffer that a slot of the family ``name`` is; a part of a region has its own."""
        if name not in self._parts:
            return buffer
        key = (buffer, self._parts[name])
        if key not in self._part_buffers:
            self._part_buffers[key] = len(self._family)
            self._region_of[len(self._family)] = buffer
            self._family.append(self._parts[name])
        return self._part_buffers[key]

    def finish(self, number: int, call: Call) -> None:
        """Record what instruction ``number`` wrote, when it ends; ``call`` is what ``begin`` returned."""
        call.finish()
        for buffer in self._buffer[self._first_operand[number] : self._first_operand[number + 1]]:
            self._uses[buffer] -= 1
            if not self._uses[buffer] and self.family(buffer).lifetime == "dynamic":
                self.held.pop(buffer, None)
                self.sums.pop(buffer, None)

    def end(self) -> list[str]:
        """Return what is missing when every instruction has been played."""
        missing = [self._missing_gradients(), self._missing_prefetches(), self._missing_losses()]
        return [fault for each in (*missing, self._missing_updates()) for fault in each]

    def _missing_updates(self) -> Iterator[str]:
        updates = any(i.op.startswith("adamw") for t in self.program.templates for i in t.instructions)
        for number, family in enumerate(self.families if updates else ()):
            for index in range(family.count if family.kind in _UPDATED else 0):
                buffer = self._base[number] + index
                layer = self.layer_of(buffer)
                name = f"{family.block}" + (f" {layer}" if layer >= 0 else "")
                assert family.block is not None
                counted = family.block is not BlockKind.EMBED or self.first_stage  # a tied one, by the first stage
                if family.kind is FamilyKind.GRADS and counted and buffer not in self.normed:
                    yield f"end: the gradient norm is without that of {name}"
                done = self.updated.get((family.block, layer), [])
                shards = self.shards(family.block) if self.layout.zero in (1, 2) else 1
                trained = self.block(family.block, layer).trained_elements > 0
                narrow = family.kind is FamilyKind.PARAMS_FP8 and self.decisions.fp8_params
                if narrow and (buffer, "quantised") not in self.reduced:
                    yield f"end: the parameters of {name} in FP8 are not those that were updated"
                held = (narrow or family.kind is FamilyKind.PARAMS) and shards > 1 and trained
                if held and (buffer, "gathered") not in self.reduced:
                    yield f"end: the parameters of {name} were not gathered"
                if family.kind is FamilyKind.MOMENT1 and done != [(0, family.tokens)]:
                    yield f"end: elements {done} of {family.tokens} of {name} were updated"

    def replicas(self, kind: BlockKind) -> int:
        """Return the number of ranks with the same parameters of a block."""
        if kind is BlockKind.EXPERTS:
            return self.layout.expert_replicas
        ends = self.layout.whole_ends and kind is not BlockKind.LAYER
        return self.layout.replicas * (self.layout.metp if ends else 1)

    def shards(self, kind: BlockKind) -> int:
        """Return the number of ranks over which a block's states are divided."""
        if kind is BlockKind.EXPERTS:
            return self.layout.expert_shards
        return (self.layout.zero_ranks or self.replicas(kind)) if self.layout.zero else 1

    def copies(self, kind: BlockKind | None) -> int:
        """Return the number of ranks with the same shard of a block's states (``zero_ranks``)."""
        shards = self.shards(kind) if kind is not None else 1
        return self.replicas(kind) // shards if kind is not None and shards > 1 else 1

    def unreduced(self, buffer: int) -> list[str]:
        """Return over which ranks a buffer of gradients has yet to be summed before it is used."""
        kind = self.family(buffer).block
        if kind is None:
            return []
        layout, missing = self.layout, []
        if self.replicas(kind) > 1 and (buffer, "replicas") not in self.reduced:
            missing.append("replicas")
        divided = layout.whole_ends and kind is BlockKind.LAYER
        shards = divided or layout.sequence_parallel
        if kind is BlockKind.EXPERTS:
            return missing  # a rank has all of its vectors' gradients
        if divided or layout.tp > 1:
            block = self.kind_of_block(buffer)
            for first, elements in block.partial_runs(sequence_parallel=shards):
                what = "vectors" if first + elements == block.trained_elements else "matrices"
                missing += [] if (buffer, what) in self.reduced else [what]
        return missing

    def _missing_gradients(self) -> Iterator[str]:
        for number, family in enumerate(self.families):
            if family.kind is not FamilyKind.GRADS or family.block is None:
                continue
            for index in range(family.count):
                buffer = self._base[number] + index
                layer = self.layer_of(buffer)
                for parameter in (p for p in self.block(family.block, layer).parameters if not p.frozen):
                    yield from self._missing_terms(buffer, (family.block, layer, parameter.name))

    def _missing_terms(self, buffer: int, key: ParameterKey) -> Iterator[str]:
        found = self.sums.get(buffer, {}).get(key)
        kind, layer, name = key
        what = f"the gradient of {name}" + (f" of layer {layer}" if layer >= 0 else "")
        if found is not None and found.anything:
            return
        tokens = self.shard_tokens if _on_shards(name) else self.tokens
        if name in ROUTED:
            tokens = self.routed_tokens
        elif name.startswith("experts_"):
            tokens = sum(map(self.expert_rows, self.routed_at_once))
        if name == "sinks":
            tokens = self.attended
        for micro_batch in range(self.program.micro_batches):
            for source in self._sources(kind, name):
                ranges = found.tokens.get((micro_batch, source), []) if found is not None else []
                if ranges != [(0, tokens)]:
                    of = "" if source == 0 else f" ({source})"
                    yield f"end: {what}, micro-batch {micro_batch}{of} has rows {ranges} of {tokens}"

    def _sources(self, kind: BlockKind, name: str) -> list[object]:
        """Return where terms of a parameter's gradient come from: one place, but for tied embeddings and METP."""
        if kind is BlockKind.EMBED and name == "tokens.weight":
            last = self.last_stage and self.model.tied_embeddings
            return [*["lookup"] * self.first_stage, *["classifier"] * last]
        metp = self.layout.metp
        if kind is BlockKind.LAYER and metp > 1:
            if name in ("qkv.weight", "qkv.bias", "proj.weight", "q_norm.weight", "k_norm.weight"):
                return [("root", rank) for rank in range(metp)]
            if name in ("ffn_up.weight", "ffn_up.bias", "ffn_down.weight"):
                return [0, *(("hop", hop) for hop in range(1, metp))]
        return [0]

    def _missing_prefetches(self) -> Iterator[str]:
        for buffer, rows in self.offloaded.items():
            if rows:
                yield f"end: {rows} rows of {self.family(buffer).name} were offloaded and never prefetched"

    @property
    def policy(self) -> bool:
        """Whether the objective reads the numbers of a rollout."""
        return any(f.name == "input.rollout" for f in self.families)

    def _missing_losses(self) -> Iterator[str]:
        if not any(f.name == "input.labels" for f in self.families):
            return
        for micro_batch in range(self.program.micro_batches):
            if self.loss.get((micro_batch, 0)) != [(0, self.tokens)]:
                yield f"end: the loss of micro-batch {micro_batch} does not have every token once"

    def read(self, buffer: int, first: int, end: int) -> Iterator[Held]:
        """Yield what rows [first, end) hold, in order; rows that hold nothing are left out."""
        for low, high, value, row in self.held.get(buffer, ()):
            if low < end and first < high:
                begun = max(low, first)
                yield Held(begun, min(high, end), value, row + begun - low)

    def write(self, buffer: int, new: Held) -> None:
        """Let rows of a buffer hold a value, in place of what they held."""
        if buffer in self._region_of:
            self._overwrite(buffer, new)
        old = self.held.get(buffer)
        first, end = new.first, new.end
        if not old or (first <= old[0].first and end >= old[-1].end):
            self.held[buffer] = [new]
            return
        kept = _without(old, first, end)
        kept.append(new)
        kept.sort(key=_first_row)
        self.held[buffer] = self._joined(kept)

    def _overwrite(self, buffer: int, new: Held) -> None:
        """Forget what other parts of a region held in the bytes of rows that are written."""
        family, region = self.family(buffer), self._region_of[buffer]
        first, end = (family.offset + row * family.row_bytes for row in (new.first, new.end))
        for (of, number), other in self._part_buffers.items():
            if of != region or other == buffer or other not in self.held:
                continue
            part = self.families[number]
            low = max(0, (first - part.offset) // part.row_bytes)
            high = min(part.tokens, -((part.offset - end) // part.row_bytes))
            if low < high:
                self.held[other] = _without(self.held[other], low, high)

    @staticmethod
    def _joined(rows: list[Held]) -> list[Held]:
        """Return rows with neighbours joined that hold neighbouring rows of one value."""
        joined: list[Held] = []
        for each in rows:
            if joined:
                last = joined[-1]
                follows = last.end == each.first and last.value == each.value
                if follows and (each.value is None or last.row + last.end - last.first == each.row):
                    joined[-1] = Held(last.first, each.end, last.value, last.row)
                    continue
            joined.append(each)
        return joined


def _own_chunks(program: Program) -> tuple[dict[tuple[int, int, int], int], int]:
    """Return where ranks put their own chunk of rows that they gather chunk by chunk (``tp_overlap``), and the rank.

    The keys are template, slot and first row; the values are the rows. The chunks of all ranks lie in the order of
    ranks, so a rank has as many chunks before its own as there are ranks before it.
    """
    own: dict[tuple[int, int, int], int] = {}
    rank = 0
    for number, template in enumerate(program.templates):
        received: dict[tuple[int, int], list[int]] = {}
        for each in template.instructions:
            if isinstance(each.work, Exchange) and each.work.group == "tp":
                send, recv = each.operands
                if send.slot == recv.slot:
                    received.setdefault((send.slot, send.first), []).append(recv.first)
                    own[number, send.slot, send.first] = send.tokens
        for (_, first), others in received.items():
            rank = sum(other < first for other in others)
    return own, rank


def _without(old: list[Held], first: int, end: int) -> list[Held]:
    """Return what rows hold without rows [first, end)."""
    kept: list[Held] = []
    for low, high, value, row in old:
        if high <= first or low >= end:
            kept.append(Held(low, high, value, row))
            continue
        if low < first:
            kept.append(Held(low, first, value, row))
        if high > end:
            kept.append(Held(end, high, value, row + end - low))
    return kept


def _first_row(held: Held) -> int:
    return held.first


def _nearly_equal(layers: int, runs: int) -> tuple[int, ...]:
    """Return the layers of each run of a pipeline without ``pp_layers``: nearly equal, most in the middle."""
    least, extra = divmod(layers, runs)
    longer = [*range(1, runs - 1), 0][:extra]
    return tuple(least + (run in longer) for run in range(runs))


def _on_shards(name: str) -> bool:
    """Return whether a gradient sums over the rank's token shard, not over gathered rows."""
    latent = name in ("latent.weight", "q_latent_norm.weight", "kv_latent_norm.weight")
    return latent or name.startswith(("norm", "post_")) or name in ("proj.bias", "ffn_down.bias")


def check_values(program: Program, columns: Columns, decisions: Decisions) -> list[str]:
    """Return the faults of a program's values, played in program order."""
    values = Values(program, columns, decisions)
    faults: list[str] = []
    for number in range(len(columns.lane)):
        faults += values.play(number)
        if len(faults) >= MOST_FAULTS:
            return faults
    return faults + values.end()
