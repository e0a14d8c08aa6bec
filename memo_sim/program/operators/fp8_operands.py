"""Copies of a layer's operands in FP8, by rows and by columns (``layout/fp8.py``), and what makes them.

Quantisation is a kernel of its own after the operator that makes an input or a gradient. It reads the tensor in the
plan's dtype, with current scaling twice (first for the largest value), and writes every copy at once, as Transformer
Engine's kernels do. A copy that was gathered over tensor-parallel ranks is transposed by another kernel.

With delayed scaling, quantisation reads the scale that earlier steps left and notes the largest value it sees. The
largest values of all micro-batches are reduced over ranks at the end of the step, and enter the history there.

    fp8_amaxes, fp8_scales   row: an operand of a product (``layout/fp8.py``)   column: a layer of the stage
    fp8_history              the same row, and for each layer the largest values of the last steps
"""

from __future__ import annotations

from memo_sim.contract.plan import Decisions
from memo_sim.contract.units import DTYPE_BYTES
from memo_sim.program.ir.builder import Access, Rows, TemplateBuilder, accumulates, reads, writes
from memo_sim.program.ir.instruction import BufferClass, Family, Lane
from memo_sim.program.ir.kinds import FamilyKind
from memo_sim.program.ir.work import Rowwise
from memo_sim.program.layout import fp8
from memo_sim.program.layout.parameters import Block
from memo_sim.program.layout.shape import Shape

WEIGHTS = "params_fp8"
"""Slot of the FP8 copies of a layer's weights: all by rows, then all for the gradients of inputs."""
COLUMNS = "params_fp8_columns"
"""Slot of the transposed weights, for the gradients of inputs, where weights are kept in FP8 alone."""
AMAXES, SCALES, HISTORY = "fp8_amaxes", "fp8_scales", "fp8_history"
"""Families of delayed scaling: largest values of this step, scales, and largest values of earlier steps."""
EXPERT_WEIGHTS, EXPERT_COLUMNS = "expert_params_fp8", "expert_params_fp8_columns"
"""The same slots for the experts that ranks divide."""


_READ_BY = {
    "norm1": "qkv",
    "q_latent": "q_up",
    "kv_latent": "kv_up",
    fp8.ATTENTION_OUTPUT: "proj",
    "norm2": "ffn_up",
    "act": "ffn_down",
    "shared_act": "shared_down",
}
"""The product that reads an input which is kept in FP8."""


def delayed_families(decisions: Decisions, layers: int) -> list[Family]:
    """Return the states of delayed scaling of a stage with this number of layers."""
    rows = len(fp8.scaled_operands(decisions))
    return [
        Family(name, BufferClass.STATE, "fp32", rows, features, lifetime="step", kind=FamilyKind.SCALAR)
        for name, features in ((AMAXES, layers), (SCALES, layers), (HISTORY, layers * fp8.HISTORY))
    ]


class Fp8Weights:
    """The FP8 copies of the weights of a block."""

    def __init__(self, decisions: Decisions, block: Block, slots: tuple[str, str] = (WEIGHTS, COLUMNS)) -> None:
        self._slots, self._alone = slots, decisions.fp8_params
        self._twice = fp8.weight_copies(decisions) > 1
        self._weights = {weight.name.removesuffix(".weight"): weight for weight in fp8.weights(decisions, block)}
        self._elements = sum(weight.elements for weight in self._weights.values())

    def has(self, name: str) -> bool:
        """Return whether the product ``name`` runs in FP8."""
        return name in self._weights

    def of(self, name: str, *, for_dgrad: bool) -> Rows:
        """Return the copy of a weight that a product, or the gradient of its input, reads."""
        weight, again = self._weights[name], for_dgrad and self._twice
        if again and self._alone:
            return Rows(self._slots[1], weight.first, weight.elements)
        return Rows(self._slots[0], weight.first + self._elements * again, weight.elements)


class Fp8Operands:
    """The FP8 copies of one template's operands."""

    def __init__(self, builder: TemplateBuilder, decisions: Decisions, shape: Shape, block: Block) -> None:
        self.builder, self.decisions, self.shape = builder, decisions, shape
        self.recipe = decisions.fp8
        self.size = DTYPE_BYTES[decisions.dtype]
        self.weights = Fp8Weights(decisions, block)
        self._inputs = fp8.quantised_inputs(decisions, dense=shape.experts is None)
        self._read_by = _READ_BY | ({} if shape.experts is None else {"act": "experts_down"})
        self._gradients: dict[tuple[str, Rows], tuple[Rows, Rows]] = {}
        """Copies by rows and by columns of the gradients that were quantised so far, by suffix and rows."""

    def made(self, rows: Rows, features: int) -> Rows:
        """Return the rows of a buffer in the plan's dtype where the producer of ``rows`` writes them."""
        if rows.slot not in self._inputs:
            return rows
        name = f"{self.builder.phase}.{rows.slot}.wide"
        if not self.builder.has(name):
            tokens = self.builder.all(rows.slot).tokens
            self.builder.own(name, BufferClass.TRANSIENT, self.decisions.dtype, tokens, features)
        return Rows(name, rows.first, rows.tokens)

    def by_rows(self, slot: str) -> str:
        """Return the slot of the copy that a product in forward reads; an input that is not quantised is read itself.

        The other copy is kept in ``slot``.
        """
        quantised = slot in self._inputs or slot == fp8.ATTENTION_OUTPUT
        return f"{self.builder.phase}.{slot}.rows" if quantised and self._two_copies_of(slot) else slot

    def quantise_input(self, made: Rows, rows: Rows, suffix: str, *, for_wgrad: bool) -> None:
        """Quantise an input to the copy that is kept, ``rows``, and to the one that its product reads.

        With ``for_wgrad`` only to the kept one, which the gradient of the product's weight reads.
        """
        read = self.by_rows(rows.slot)
        copies = {"out" if read == rows.slot else "columns": rows}
        if read != rows.slot and not for_wgrad:
            copies = {"out": Rows(read, rows.first, rows.tokens), **copies}
            if not self.builder.has(read):
                kept, features = self.builder.all(rows.slot).tokens, self.builder.features(rows.slot)
                self.builder.own(read, BufferClass.TRANSIENT, fp8.ACTIVATIONS, kept, features)
        product = self._read_by[rows.slot]
        self._quantise(f"{rows.slot}.quantize{suffix}", made, copies, product=product, operand="input")

    def input(self, source: Rows, suffix: str, product: str, *, for_wgrad: bool = False) -> Rows:
        """Return an input as ``product`` reads it, or with ``for_wgrad`` the gradient of its weight.

        One that others read in the plan's dtype is not kept in FP8, so each of the two quantises it for itself.
        """
        if self._is_quantised(source.slot):
            return source
        builder, kind = self.builder, "columns" if for_wgrad else "rows"
        name = f"{builder.phase}.{source.slot}.{kind}"
        if not builder.has(name):
            features = fp8.row_features(self.recipe, builder.features(source.slot))
            builder.own(name, BufferClass.TRANSIENT, fp8.ACTIVATIONS, builder.all(source.slot).tokens, features)
        copy = Rows(name, source.first, source.tokens)
        copies = {"columns": copy} if for_wgrad else {"out": copy}
        label = f"{source.slot.rpartition('.')[2]}.{kind}.quantize{suffix}"
        self._quantise(label, source, copies, product=product, operand="input")
        return copy

    def before_gather(self, grad: Rows, suffix: str, product: str) -> Rows:
        """Return the gradient of a product's result as tensor-parallel ranks gather it: its copy by rows, or itself.

        With scales of blocks its two copies have as many bytes as itself, so it is quantised after the gather.
        """
        if not self.shape.gathered or fp8.by_blocks(self.recipe):
            return grad
        copy = self._own(f"{grad.slot}.fp8", grad, self.builder.features(grad.slot))
        self._quantise(f"{grad.slot}.quantize{suffix}", grad, {"out": copy}, product=product, operand="gradient")
        return copy

    def gradient(self, grad: Rows, suffix: str, features: int, product: str, *, for_wgrad: bool = False) -> Rows:
        """Return the copy of a gradient that the gradient of an input reads, or with ``for_wgrad`` that of a weight.

        ``features``: those of the product's result, which may be a part of what ``grad`` packs.
        """
        if self._is_quantised(grad.slot):
            return self.transposed(grad, suffix) if for_wgrad else grad
        key = (suffix, grad)
        if key not in self._gradients:
            copies = {"out": self._own(f"{grad.slot}.fp8", grad, features)}
            if fp8.two_copies(self.decisions):
                copies["columns"] = self._own(f"{grad.slot}.fp8.columns", grad, features)
            label = f"{grad.slot}.quantize{suffix}"
            self._quantise(label, grad, copies, product=product, operand="gradient", features=features)
            self._gradients[key] = (copies["out"], copies.get("columns", copies["out"]))
        return self._gradients[key][for_wgrad]

    def transposed(self, rows: Rows, suffix: str) -> Rows:
        """Return an FP8 copy as the gradient of a weight reads it; one that was gathered may have to be transposed."""
        if self.decisions.fp8_layouts == "any" or not self._is_gathered(rows.slot):
            return rows
        builder = self.builder
        name = f"{rows.slot}.columns"
        if not builder.has(name):
            whole = builder.all(rows.slot).tokens
            builder.own(name, BufferClass.TRANSIENT, builder.dtype(rows.slot), whole, builder.features(rows.slot))
        target = Rows(name, rows.first, rows.tokens)
        size = rows.tokens * builder.row_bytes(rows.slot)
        work = Rowwise("fp8.transpose", rows.tokens, size, size)
        label = rows.slot.partition(".")[2]
        builder.emit(
            f"{label}.transpose{suffix}", "fp8.transpose", Lane.COMPUTE, work, x=reads(rows), out=writes(target)
        )
        return target

    def _two_copies_of(self, slot: str) -> bool:
        """Return whether an input has a copy by columns beside the one by rows; a gathered one may be transposed."""
        gathered = self.shape.gathered and slot in fp8.GATHERED
        return fp8.by_blocks(self.recipe) or (fp8.two_copies(self.decisions) and not gathered)

    def _is_quantised(self, slot: str) -> bool:
        return self.builder.dtype(slot) in (fp8.ACTIVATIONS, fp8.gradients(self.recipe))

    def _is_gathered(self, slot: str) -> bool:
        return self._is_quantised(slot) and self.builder.buffer_class(slot) is BufferClass.EXCHANGE

    def _own(self, name: str, grad: Rows, features: int) -> Rows:
        """Return as many rows as a gradient's in an FP8 buffer of the template, which row blocks use in turn.

        It has room for the first block, which is the largest.
        """
        builder = self.builder
        if not builder.has(name):
            row = fp8.row_features(self.recipe, features)
            builder.own(name, BufferClass.TRANSIENT, fp8.gradients(self.recipe), grad.tokens, row)
        return Rows(name, 0, grad.tokens)

    def _quantise(
        self, name: str, source: Rows, copies: dict[str, Rows], *, product: str, operand: fp8.Scaled, features: int = 0
    ) -> None:
        """Emit the quantisation of ``source`` to its copies: by rows (``out``), by columns (``columns``), or both.

        ``product``, ``operand``: what it is, for its scale. ``features``: how many of a row are quantised; 0 for all.
        """
        builder = self.builder
        values = source.tokens * (features or builder.features(source.slot))
        written = sum(rows.tokens * builder.row_bytes(rows.slot) for rows in copies.values())
        work = quantisation(self.decisions, source.tokens, values, written)
        operands: dict[str, Access] = {role: writes(rows) for role, rows in copies.items()}
        if fp8.delayed(self.decisions):
            row = fp8.scaled_row(self.decisions, product, operand)
            operands |= {"scale": reads(Rows(SCALES, row, 1)), "amax": accumulates(Rows(AMAXES, row, 1))}
        builder.emit(name, "fp8.quantize", Lane.COMPUTE, work, x=reads(source), **operands)


def requantisation(decisions: Decisions, elements: int, *, shard: bool) -> Rowwise:
    """Return the work of quantising updated fp32 master weights to the copy by rows.

    One current scale needs a pass for the largest value first. For a ``shard`` that pass is a kernel of its own
    (``search_of_largest``).
    """
    passes = 2 if decisions.fp8 == "tensor" and not shard else 1
    return Rowwise("fp8.quantize", elements, passes * DTYPE_BYTES["fp32"] * elements, elements)


def search_of_largest(elements: int, found: int) -> Rowwise:
    """Return the work of finding the largest values of a shard of fp32 master weights; ``found``: how many are written.

    Transformer Engine does this before it reduces them (``tensor/utils.py``, cast_master_weights_to_fp8).
    """
    return Rowwise("fp8.largest", elements, DTYPE_BYTES["fp32"] * elements, DTYPE_BYTES["fp32"] * found)


def transposition(elements: int) -> Rowwise:
    """Return the work of transposing weights in FP8."""
    return Rowwise("fp8.transpose", elements, elements, elements)


def quantisation(decisions: Decisions, rows: int, values: int, written: int) -> Rowwise:
    """Return the work of quantising ``values`` of the plan's dtype; current scaling reads them once more before."""
    passes = 2 if decisions.fp8 == "tensor" else 1
    return Rowwise("fp8.quantize", rows, passes * values * DTYPE_BYTES[decisions.dtype], written)
