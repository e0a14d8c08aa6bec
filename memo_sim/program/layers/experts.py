"""Experts in place of a layer's MLP: each token's row goes to few of many narrow MLPs, and their rows are summed.

Forward. T tokens have C = T x per_token dispatched rows, sorted by expert, so every size is known before the step:

    norm2 -> router (T, experts) -> route: probabilities and experts of every token -> sort -> places
    norm2 -> dispatch (C, hidden) -> up -> act, times the probability -> down (C, hidden) -> combine (T, hidden)
      -> next x = resid + combined

Products are grouped: one call multiplies the rows of every expert with that expert's weights. The probability is
multiplied in before the second product. So backward finds its gradient from the activation, and the second product's
result is not kept:

    d_down = dispatch(d_out)       t = d_down W_down       d_probability = sum over a row of t x silu(gate) x up
    d_up = probability x t x silu'                         d_dispatched = d_up W_up      d_norm2 = combine + d_logits W

What backward needs, and what becomes of it under token-wise recompute (alpha):

- ``up`` and ``act`` have dispatched rows. With alpha of the tokens, as large a part of these rows is swapped, the first
  ones; the others are recomputed from the second norm's output of all tokens.
- What the router decided is kept whole (``route_*``), so recompute never routes again.
- The dispatched copies of norm2 are neither kept nor swapped: backward copies the rows again.

Full recompute routes again, from the same bits.

Tensor parallelism divides the features inside every expert. Each rank routes all tokens, from the gathered norm, and so
has the same dispatched rows. Sums over ranks are needed where features were divided:

    combine -> [reduce-scatter] -> next x          d_norm2 = combine + d_logits W -> [reduce-scatter]
    d_probability -> d_logits (of this rank's features) -> [all-reduce] -> gradient of the router's weight

Biases (GPT-OSS). Those of the first product are added to its rows. Those of the second are added to the sum over each
token's experts, as a product: probabilities of all experts (mostly 0) x biases, of which each tensor-parallel rank adds
an equal part. With expert parallelism those of the first lie with a rank's experts, and those of the second, which are
few numbers, whole on every rank: they are added to its own tokens, so no rank needs another's.

Selection bias (DeepSeek-V3). Its place in the gradients gets the rows of each expert, once for each micro-batch, in
backward. So they are summed over micro-batches and ranks with the gradients, and the optimizer's step moves the bias:
the host waits for nothing. The gradient norm leaves them out.

In FP8 (``fp8_experts``) the activation is kept quantised, as in a dense MLP. The dispatched rows are quantised where a
product reads them: by rows in forward and recompute, by columns after backward has copied them again. Routing, copies,
sums and exchanges between ranks stay in the plan's dtype. Rows that frameworks add to fill an expert's last block of
scales are not counted in buffers.

Subsequences are routed one after the other, each by itself. A loss of balance, which is of all tokens, reads the rows
that experts got of every subsequence (``expert_ends.py``).

A shared expert (``shared_expert.py``) adds its rows to the sum before it is reduced over ranks.

Whole experts on tensor-parallel ranks (``Layout.whole_experts``): each rank routes and dispatches the rows of its own
token shard, so nothing is gathered for experts, nothing is summed over these ranks, and no row is sent twice. A shared
expert keeps its divided features: the second norm is gathered for it, and its sum is reduce-scattered by itself.

    norm2 shard -> router -> dispatch -> experts -> combine                                     -> + -> next x
    norm2 shard -> [all-gather] -> shared_up -> shared_act -> shared_down -> [reduce-scatter]  -> +
"""

from __future__ import annotations

from collections.abc import Iterator

from memo_sim.contract.experts import Experts
from memo_sim.contract.hardware import GemmPass
from memo_sim.contract.units import DTYPE_BYTES
from memo_sim.program.ir.builder import Access, Rows, accumulates, reads, writes
from memo_sim.program.ir.instruction import BufferClass, Lane
from memo_sim.program.ir.kinds import Phase, TemplateKind
from memo_sim.program.ir.work import Collective, Fp8GroupedGemm, Gemm, GroupedGemm, Rowwise
from memo_sim.program.layers import expert_ends
from memo_sim.program.layers.shared_expert import SharedExpert, in_fp32
from memo_sim.program.layout.expert_load import sizes_of
from memo_sim.program.layout.fp8 import PRODUCTS
from memo_sim.program.layout.parameters import SELECTION_BIAS, gradient_dtype
from memo_sim.program.layout.rowwise_blocks import is_rowwise
from memo_sim.program.operators import norms
from memo_sim.program.operators import workspaces as table
from memo_sim.program.operators.operators import OperatorWriter, RowBlock

NUMBER, INDEX = DTYPE_BYTES["fp32"], DTYPE_BYTES["int64"]


class ExpertMlp:
    """Writes experts into a layer's templates, with the calls of ``Mlp``."""

    blocked = False
    """Whether the MLP runs in row blocks."""
    apart = False
    """Whether the norm is computed for all rows, outside of the row blocks."""

    def __init__(self, writer: OperatorWriter, experts: Experts, *, first: int = 0) -> None:
        """``first``: the rank's row at which the tokens of ``writer.shape`` begin, where they are one row block."""
        self.writer, self.shape, self.experts = writer, writer.shape, experts
        self.block = first, writer.shape.tokens
        """These tokens in the layer's output and in the gradients of its output and of the residual."""
        self.builder = writer.builder
        self.ends_first = 0
        """The row of slot ``route_ends`` at which those of these tokens begin."""
        self.all_ends = self._ends_of_all()
        """For a loss of balance: where experts' rows end among those of all tokens, of which these are a part."""
        self.rows = self.shape.expert_rows
        """Number of dispatched rows; with expert parallelism, of rows that the rank can receive."""
        self.whole = self.shape.whole_experts
        """Whether tensor-parallel ranks have whole experts, so each routes its own token shard."""
        self.overlapped = writer.decisions.expert_overlap
        """Whether exchanges of rows overlap with products that do not need them (``expert_exchange.py``)."""
        self.beside = self.whole or self.overlapped
        """Whether the shared expert has sums of its own, which are added to those of the experts."""
        self.shared = SharedExpert(writer)
        self.frozen = writer.decisions.lora is not None
        """Whether none of the weights are trained."""
        self.clamped = experts.activation == "clamped"
        self.activation = "experts.clamped" if self.clamped else "experts.swiglu"
        self.weights = writer.fp8.weights if writer.fp8 is not None and writer.decisions.fp8_experts else None
        """The weights' copies in FP8; None where the experts' products run in the plan's dtype."""

    def _ends_of_all(self) -> Rows | None:
        """Return the ends of all row blocks and subsequences; None where these tokens are all, or nothing reads it."""
        decisions, shape = self.writer.decisions, self.shape
        in_parts = is_rowwise(decisions) or shape.kv_cache_tokens > 0
        return expert_ends.all_ends(decisions, shape) if in_parts and expert_ends.balanced(shape) else None

    @property
    def _all(self) -> RowBlock:
        return 0, self.rows

    def first_product(self, rows: RowBlock) -> None:
        """Write the norm of a row block; products follow when all tokens are there (``inner``)."""
        norms.norm(self.writer, "norm2", "resid", rows, rows)

    def rebuild_output(self, rows: RowBlock) -> None:
        """Write what a norm behind the MLP needs: nothing, as models with experts have no such norm."""

    def inner(self, blocks: list[RowBlock], *, routed: bool) -> None:
        """Write what lies between the norm of all tokens and the second product, for the dispatched rows of ``blocks``.

        ``blocks`` are of tokens; as large a part of the dispatched rows belongs to each. ``routed``: whether the
        router's decisions are there.
        """
        shard = self.writer.shard_rows("norm2", (0, self.shape.tokens))
        source = beside = shard
        if not self.whole or self.shared.width:
            beside = self.writer.gather("norm2", shard, "norm2_full", 0)
        if not self.whole:
            source = beside
        if not routed:
            self._route(source)
            self.shared.gate(beside)
            if self.all_ends and self.builder.kind is TemplateKind.FORWARD and not is_rowwise(self.writer.decisions):
                expert_ends.keep(self.builder, self.writer.decisions, self.shape)
        self._shared_input = beside, blocks
        for first, tokens in self._named(blocks):
            ends = [at * self.rows // self.shape.tokens for at in (first, first + tokens)]
            self._first_half(source, (ends[0], ends[1] - ends[0]))
            if not self.overlapped:
                self.shared.first_half(beside, (first, tokens))

    def _named(self, blocks: list[RowBlock]) -> Iterator[RowBlock]:
        """Yield each row block; meanwhile its number ends the names of instructions, where forward has several."""
        for i, rows in enumerate(blocks):
            if self.builder.kind is TemplateKind.FORWARD and len(blocks) > 1:
                self.writer.suffix = f".r{i}"
            yield rows
        if self.builder.kind is TemplateKind.FORWARD and len(blocks) > 1:
            self.writer.suffix = ""

    def before_recompute(self) -> None:
        """Write what backward begins with while a layer is recomputed: nothing, where a rank has all experts."""

    def forward(self, out: str) -> None:
        """Write the second product, the sum over each token's experts, and the residual sum into ``out``."""
        summed, at = self._second_half(), (0, self.shape.tokens)
        self.writer.residual("out_add", "resid", summed, out=out, rows=self.block, bias="", at=at)

    def _second_half(self) -> Rows:
        """Write the second product and the sum over each token's experts; return the sum."""
        writer, tokens = self.writer, self.shape.routed_tokens
        down = writer.own("expert_out", self.rows, self.shape.hidden)
        self._product("experts_down", Rows(writer.read_by_product("act"), *self._all), Rows(down, *self._all))
        combined = Rows(writer.own("moe_out", tokens, self.shape.hidden), 0, tokens)
        self._combine("combine", down, combined)
        if self.experts.bias:
            self._out_bias(combined)
        if self.beside:
            combined = self._with_shared("shared_add", combined, self._shared_output())
        else:
            self.shared.second_half(combined)
        return combined if self.whole else writer.scatter("experts_down", combined)

    def _shared_output(self) -> Rows | None:
        """Write the shared expert's second product into a sum of its own."""
        return self.shared.whole_output(scattered=self.whole)

    def _with_shared(self, name: str, rows: Rows, shared: Rows | None) -> Rows:
        """Write the sum of rows and of the shared expert's, which ``shared`` has; return it, or ``rows`` without."""
        if shared is None:
            return rows
        writer, hidden = self.writer, self.shape.hidden
        summed = Rows(writer.own(f"{name}.sum", rows.tokens, hidden), 0, rows.tokens)
        writer.memory_bound(
            name,
            "residual_add",
            rows.tokens,
            2 * hidden,
            hidden,
            features=hidden,
            x=reads(rows),
            y=reads(shared),
            out=writes(summed),
        )
        return summed

    def again(self) -> None:
        """Write the experts once more from the kept output of the norm (``module_recompute.py``); routing is kept."""
        phase, self.builder.phase = self.builder.phase, Phase.RECOMPUTE
        self.inner([(0, self.shape.tokens)], routed=True)
        self._second_half()
        self.builder.phase = phase

    def rebuild_operators(self) -> None:
        """Never called: ``layout/compatibility.py`` refuses experts with recompute by operator.

        Raises:
            AssertionError: always.
        """
        raise AssertionError("experts with recompute by operator are refused before they are lowered")

    def backward(self, grad_out: str) -> None:
        """Write the backward from ``grad_out`` to ``d_resid``."""
        writer, shape, experts = self.writer, self.shape, self.experts
        whole, tokens = self._all, (0, shape.tokens)
        upstream, beside, t = self._second_product_backward(grad_out)
        d_up = Rows(writer.own("d_up", self.rows, 2 * shape.expert_width), *whole)
        d_probs = self._own("d_probs", "fp32", shape.routed_tokens, experts.per_token)
        self._activation_backward(t, d_up, d_probs)
        if experts.bias:
            self._biases_backward(upstream, d_up, d_probs)
        if not self.overlapped:
            self.shared.backward(beside)
        d_logits = self._own("d_logits", "fp32", shape.routed_tokens, experts.count)
        self._route_backward(d_probs, d_logits)
        source, d_norm = self._first_product_backward(d_up)
        if self.beside:
            d_norm = self._with_shared("d_shared.add", d_norm, self._shared_input_gradient(source))
        else:
            self.shared.input_gradient(source, d_norm)
        self._router_backward(d_logits, source, d_norm)
        summed = d_norm if self.whole else writer.scatter("d_norm2", d_norm)
        writer.own("d_resid", shape.shard_tokens, shape.hidden)
        norms.norm_backward(
            writer,
            "norm2",
            grad=summed,
            norm_input="resid",
            residual_grad=grad_out,
            out="d_resid",
            rows=self.block,
            at=tokens,
            input_at=tokens,
        )

    def _second_product_backward(self, grad_out: str) -> tuple[Rows, Rows, Rows]:
        """Write the gradients of the second product's weight and of its input.

        Returns the gradients of the tokens that the rank routes, of all tokens of the tensor-parallel ranks (for the
        shared expert), and of the activation.
        """
        upstream, beside = self._gathered_gradient(grad_out)
        d_down = self._second_gradient
        self._dispatch("dispatch.grad", upstream, d_down)
        t = Rows(self.writer.own("d_act", self.rows, self.shape.expert_width), *self._all)
        self._dgrad("experts_down", d_down, t)
        if not self.frozen:
            self._wgrad("experts_down", d_down, Rows("act", *self._all))
        return upstream, beside, t

    @property
    def _second_gradient(self) -> Rows:
        """The gradient of the second product's result; its buffer is added at its first use."""
        return Rows(self.writer.own("d_expert_out", self.rows, self.shape.hidden), *self._all)

    def _gathered_gradient(self, grad_out: str) -> tuple[Rows, Rows]:
        """Return the gradients of the tokens that the rank routes, and those of all tokens where they are read."""
        upstream = beside = self.writer.shard_rows(grad_out, self.block)
        if not self.whole or self.shared.width:
            beside = self.writer.gather("experts.grad", upstream, "d_moe_full", 0)
        return (upstream if self.whole else beside), beside

    def _shared_input_gradient(self, source: Rows) -> Rows | None:
        """Write the gradients of the shared expert's first product; return that of its input, in a sum of its own.

        ``source``: the second norm's rows that the router reads.
        """
        return self.shared.whole_input_gradient(None if self.whole else source, scattered=self.whole)

    def _first_product_backward(self, d_up: Rows) -> tuple[Rows, Rows]:
        """Write the gradients of the first product's weight and of its input; return the norm and its gradient."""
        writer, shape, tokens = self.writer, self.shape, (0, self.shape.tokens)
        d_rows = Rows(writer.own("d_dispatched", self.rows, shape.hidden), *self._all)
        self._dgrad("experts_up", d_up, d_rows)
        source = writer.shard_rows("norm2", tokens)
        if not self.frozen:
            source = writer.gather_again("norm2", source, "norm2_full", 0)
            self._wgrad("experts_up", d_up, self._dispatched_again(source))
        d_norm = Rows(writer.own("d_norm2", shape.tokens, shape.hidden), *tokens)
        self._combine("dispatch.bwd", d_rows.slot, d_norm)
        return source, d_norm

    def _dispatched_again(self, source: Rows) -> Rows:
        """Write the copy of ``source`` to dispatched rows once more, for the gradient of the first product's weight."""
        dispatched = self._dispatched(self._all)
        self._dispatch("dispatch.again", source, dispatched)
        return dispatched

    def _first_half(self, source: Rows, rows: RowBlock) -> None:
        """Write dispatch of ``source``, first product and activation of a range of dispatched rows."""
        writer = self.writer
        dispatched = self._dispatched(rows)
        self._dispatch("dispatch", source, dispatched)
        up, width = Rows("up", *rows), self.shape.expert_width
        self._product("experts_up", dispatched, up)
        size = writer.size * width * rows[1]
        if self.experts.bias:
            self._emit(
                "experts_up.add",
                "experts.bias",
                rows[1],
                2 * size + NUMBER * self.shape.own_experts,
                2 * size,
                table.expert_bias_workspace_bytes(rows[1], 2 * width, writer.dtype),
                x=accumulates(up),
                bias=self._weight("experts_up.bias"),
                ends=reads(self._ends),
            )
        activated = Rows("act", *rows)
        made = writer.made(activated, width)
        self._emit(
            "act",
            self.activation,
            rows[1],
            2 * size + (NUMBER + INDEX) * rows[1],
            size,
            table.expert_activation_workspace_bytes(rows[1], width, writer.dtype, clamped=self.clamped),
            features=width,
            x=reads(up),
            **self._weights_of(rows),
            out=writes(made),
        )
        writer.quantise(made, activated)

    def _dispatched(self, rows: RowBlock) -> Rows:
        """Return a range of the experts' input rows; add the buffer at its first use."""
        return Rows(self.writer.own(f"{self.builder.phase}.dispatched", self.rows, self.shape.hidden), *rows)

    def _weights_of(self, rows: RowBlock) -> dict[str, Access]:
        """Return the operands that tell the activation by which probability each row is multiplied."""
        return {"probs": reads(self._tokens("route_probs")), "order": reads(Rows("route_order", *rows))}

    def _route(self, source: Rows) -> None:
        """Write the router's product of ``source``, and what it decides: experts, probabilities, order and places."""
        writer, shape, experts = self.writer, self.shape, self.experts
        tokens, hidden, count, chosen = shape.routed_tokens, shape.hidden, experts.count, experts.per_token
        scores = self._tokens("route_scores")
        self._router_product(
            "router",
            self._in_fp32(tokens, count, hidden, "fprop"),
            table.router_workspace_bytes(tokens, hidden, count, writer.dtype, bias=experts.router_bias),
            x=reads(source),
            weight=writer.param("router.weight"),
            bias=writer.param("router.bias"),
            out=writes(scores),
        )
        table_bytes, chosen_bytes = NUMBER * tokens * count, (NUMBER + INDEX) * tokens * chosen
        self._emit(
            "route",
            "experts.route",
            tokens,
            5 * table_bytes,
            3 * table_bytes + chosen_bytes,
            table.route_workspace_bytes(tokens, experts),
            scores=accumulates(scores),
            bias=writer.param(SELECTION_BIAS),
            lse=writes(self._tokens("route_lse")) if experts.z_loss else None,
            probs=writes(self._tokens("route_probs")),
            experts=writes(self._tokens("route_experts")),
        )
        slots = shape.dispatched
        by_expert = self._own("by_expert", "int64", slots, 1)
        order, kernel = self._order, writer.decisions.kernels.attention
        index_bytes = INDEX * slots
        self._emit(
            "sort",
            "experts.sort",
            slots,
            4 * index_bytes,
            4 * index_bytes,
            table.sort_workspace_bytes(slots, kernel),
            experts=reads(self._tokens("route_experts")),
            sorted=writes(by_expert),
            order=writes(order),
        )
        self._emit(
            "places",
            "experts.places",
            slots,
            2 * index_bytes,
            2 * index_bytes,
            table.places_workspace_bytes(slots, count),
            order=reads(order),
            sorted=reads(by_expert),
            places=writes(self._places),
            ends=writes(self._all_ends),
        )

    def _router_backward(self, d_logits: Rows, source: Rows, d_norm: Rows) -> None:
        """Write the gradients of the router's input ``source``, added to ``d_norm``, and of its weight.

        ``d_norm`` gets this rank's part of the logits' gradient, because it is summed over the tensor-parallel ranks
        with the rest. The weight's gradient needs the whole.
        """
        writer, tokens, hidden, count = self.writer, self.shape.routed_tokens, self.shape.hidden, self.experts.count
        self._router_product(
            "router.dgrad",
            self._in_fp32(tokens, hidden, count, "dgrad"),
            table.router_workspace_bytes(tokens, hidden, count, writer.dtype),
            grad=reads(d_logits),
            weight=writer.param("router.weight"),
            out=accumulates(d_norm),
        )
        if self.frozen:
            return
        if self.shape.tp > 1 and not self.whole:
            work = Collective("all_reduce", NUMBER * tokens * count, self.shape.tp, "tp")
            name = f"router.reduce{writer.suffix}"
            self.builder.emit(name, "all_reduce", Lane.TP, work, tensor=accumulates(d_logits))
        into = gradient_dtype(writer.decisions)
        self._router_product(
            "router.wgrad",
            self._in_fp32(count, hidden, tokens, "wgrad"),
            table.router_wgrad_workspace_bytes(
                tokens, hidden, count, writer.dtype, into=into, bias=self.experts.router_bias
            ),
            grad=reads(d_logits),
            x=reads(source),
            out=writer.grad("router.weight"),
            grad_bias=writer.grad("router.bias"),
        )

    def _router_product(self, name: str, work: Gemm, scratch: int, *, op: str = "", **operands: Access | None) -> None:
        """Emit a product of the router or of biases; ``op``: its op, unless that is the name."""
        workspace = self.builder.scratch(f"{self.builder.phase}.{name}{self.writer.suffix}.scratch", scratch)
        self.builder.emit(name + self.writer.suffix, op or name, Lane.COMPUTE, work, **operands, workspace=workspace)

    def _in_fp32(self, m: int, n: int, k: int, gemm_pass: GemmPass) -> Gemm:
        """Return a product of the router, which is in fp32."""
        return in_fp32(self.writer, m, n, k, gemm_pass)

    def _route_backward(self, d_probs: Rows, d_logits: Rows) -> None:
        tokens, count, chosen = self.shape.routed_tokens, self.experts.count, self.experts.per_token
        balance, loads = self.experts.balance > 0, self.experts.selection_bias
        self._emit(
            "route.bwd",
            "experts.route.bwd",
            tokens,
            3 * NUMBER * tokens * count + (3 * NUMBER + INDEX) * tokens * chosen,
            3 * NUMBER * tokens * count,
            table.route_backward_workspace_bytes(tokens, count, chosen, balance=balance, loads=loads),
            grad=reads(d_probs),
            probs=reads(self._tokens("route_probs")),
            scores=reads(self._tokens("route_scores")),
            experts=reads(self._tokens("route_experts")),
            ends=reads(self._all_ends),
            all_ends=reads(self.all_ends) if self.all_ends else None,
            lse=reads(self._tokens("route_lse")) if self.experts.z_loss else None,
            out=writes(d_logits),
            loads=self.writer.grad(SELECTION_BIAS),
        )

    def _activation_backward(self, grad: Rows, d_up: Rows, d_probs: Rows) -> None:
        """Write the gradients of the first product, and of the probabilities of all tokens."""
        size = self.writer.size * self.shape.expert_width * self.rows
        self._emit(
            "act.bwd",
            f"{self.activation}.bwd",
            self.rows,
            3 * size + (NUMBER + INDEX) * self.rows,
            2 * size + NUMBER * self.rows,
            table.expert_activation_backward_workspace_bytes(self.rows, self.shape.expert_width, clamped=self.clamped),
            features=self.shape.expert_width,
            grad=reads(grad),
            x=reads(Rows("up", *self._all)),
            **self._weights_of(self._all),
            grad_x=writes(d_up),
            grad_probs=writes(d_probs),
        )

    def _out_bias(self, combined: Rows) -> None:
        """Emit the biases of the second product, times probabilities: a product of all experts' probabilities."""
        writer, tokens, hidden, count = self.writer, self.shape.routed_tokens, self.shape.hidden, self.experts.count
        self._router_product(
            "experts_down.add",
            self._in_fp32(tokens, hidden, count, "dgrad"),
            table.expert_out_bias_workspace_bytes(tokens, hidden, count, writer.dtype) + self._seats_scratch(),
            op="experts.out_bias",
            probs=reads(self._tokens("route_probs")),
            experts=reads(self._tokens("route_experts")),
            bias=writer.param("experts_down.bias"),
            out=accumulates(combined),
            **self._read_for_seats(),
        )

    def _read_for_seats(self) -> dict[str, Access]:
        """Return the operands that tell which slots' rows no expert got: none, where a rank has all experts."""
        return {}

    def _seats_scratch(self) -> int:
        """Return the scratch of leaving such slots out, in bytes."""
        return 0

    def _biases_backward(self, upstream: Rows, d_up: Rows, d_probs: Rows) -> None:
        """Emit the gradients of both products' biases, and what the second's add to the probabilities' gradients."""
        writer, shape, of = self.writer, self.shape, self.experts
        tokens, hidden, count, into = shape.routed_tokens, shape.hidden, of.count, gradient_dtype(writer.decisions)
        decided = {"probs": reads(self._tokens("route_probs")), "experts": reads(self._tokens("route_experts"))}
        self._router_product(
            "experts_down.add.dgrad",
            self._in_fp32(tokens, count, hidden, "fprop"),
            table.expert_out_bias_dgrad_workspace_bytes(tokens, hidden, count, of.per_token, writer.dtype)
            + self._seats_scratch(),
            op="experts.out_bias.dgrad",
            grad=reads(upstream),
            experts=decided["experts"],
            bias=writer.param("experts_down.bias"),
            out=accumulates(d_probs),
            **self._read_for_seats(),
        )
        if self.frozen:
            return
        self._router_product(
            "experts_down.bgrad",
            self._in_fp32(count, hidden, tokens, "wgrad"),
            table.expert_out_bias_wgrad_workspace_bytes(tokens, hidden, count, writer.dtype, into=into)
            + self._seats_scratch(),
            op="experts.out_bias.wgrad",
            grad=reads(upstream),
            **decided,
            **self._read_for_seats(),
            out=writer.grad("experts_down.bias"),
        )
        kernel, width, own = writer.decisions.kernels.attention, 2 * shape.expert_width, shape.own_experts
        self._router_product(
            "experts_up.bgrad",
            Gemm(own, width, self.rows, "wgrad", writer.dtype),
            table.expert_bias_backward_workspace_bytes(
                self.rows, width, own, writer.dtype, kernel, into=into, seats=shape.ep > 1
            ),
            op="experts.bias.bwd",
            grad=reads(d_up),
            ends=reads(self._ends),
            out=self._weight_grad("experts_up.bias"),
        )

    def _dispatch(self, name: str, source: Rows, out: Rows) -> None:
        """Emit the copy of all tokens' rows to dispatched rows."""
        size = out.tokens * self.shape.hidden * self.writer.size
        self._emit(
            name,
            "experts.dispatch",
            out.tokens,
            size + INDEX * out.tokens,
            size,
            self._dispatch_scratch(name, out),
            features=self.shape.hidden,
            x=reads(source),
            order=reads(self._slots(out)),
            out=writes(out),
            **self._read_besides(name),
        )

    def _read_besides(self, name: str) -> dict[str, Access]:
        """Return what the module reads in the copy ``name`` besides: nothing, where its own operators play it."""
        del name
        return {}

    def _dispatch_scratch(self, name: str, out: Rows) -> int:
        """Return the scratch of the copy ``name``, in bytes."""
        del name
        return table.dispatch_workspace_bytes(out.tokens)

    def _combine_scratch(self, name: str, out: Rows) -> int:
        """Return the scratch of the sum ``name``, in bytes."""
        del name
        return table.combine_workspace_bytes(out.tokens, self.shape.hidden, self.writer.dtype, seats=self.shape.ep > 1)

    def _combine(self, name: str, source: str, out: Rows, **kept: Access) -> None:
        """Emit the sum of each token's dispatched rows; ``kept``: operands whose memory nothing may take before it."""
        row = self.shape.hidden * self.writer.size
        self._emit(
            name,
            "experts.combine",
            out.tokens,
            self.rows * (row + INDEX),
            out.tokens * row,
            self._combine_scratch(name, out),
            features=self.experts.per_token * self.shape.hidden,
            x=reads(Rows(source, *self._all)),
            places=reads(self._seats),
            out=writes(out),
            **kept,
        )

    def _weight(self, name: str) -> Access | None:
        """Return the weights of the rank's experts as a read operand."""
        return self.writer.param(name)

    def _weight_grad(self, name: str) -> Access | None:
        """Return their gradients as an accumulated operand."""
        return self.writer.grad(name)

    def _read_weight(self, name: str, *, for_dgrad: bool = False) -> Access | None:
        """Return the weights of a product as it, or the gradient of its input, reads them."""
        return reads(self.weights.of(name, for_dgrad=for_dgrad)) if self.weights else self._weight(f"{name}.weight")

    def _product(self, name: str, x: Rows, out: Rows) -> None:
        """Emit the product of dispatched rows with their experts' weights."""
        n, k = self.builder.features(out.slot), self._inputs_of(name)
        if self.weights:
            assert self.writer.fp8 is not None  # whose copies they are
            x = self.writer.fp8.input(x, self.writer.suffix, name)
        operands = {"x": reads(x), "weight": self._read_weight(name), "ends": reads(self._ends)}
        self._grouped(name, "experts.linear", out, n, k, **operands, out=writes(out))

    def _inputs_of(self, name: str) -> int:
        """Return the number of input features of a product."""
        return self.shape.hidden if name == "experts_up" else self.shape.expert_width

    def _dgrad(self, name: str, grad: Rows, out: Rows) -> None:
        """Emit the gradient of a product's input."""
        n, k = self.builder.features(out.slot), self.builder.features(grad.slot)
        if self.weights:
            assert self.writer.fp8 is not None
            grad = self.writer.fp8.gradient(grad, self.writer.suffix, k, name)
        weight = self._read_weight(name, for_dgrad=True)
        operands = {"grad": reads(grad), "weight": weight, "ends": reads(self._ends)}
        self._grouped(f"{name}.dgrad", "experts.linear.dgrad", out, n, k, **operands, out=writes(out))

    def _grouped(self, name: str, op: str, rows: Rows, n: int, k: int, **operands: Access | None) -> None:
        writer = self.writer
        result = self._result_bytes(rows.tokens * n)
        scratch = self.builder.scratch(f"{self.builder.phase}.{name}{writer.suffix}.result", result)
        copied = 2 * writer.size * rows.tokens * n if self.copies_results else 0
        work = self._work(rows, n, k, "dgrad" if op.endswith("dgrad") else "fprop", copied)
        self.builder.emit(name + writer.suffix, op, Lane.COMPUTE, work, **operands, workspace=scratch)

    def _work(self, rows: Rows, n: int, k: int, gemm_pass: GemmPass, copied: int) -> GroupedGemm:
        """Return the work of a grouped product, in the plan's dtype or in FP8."""
        sizes, decisions = self._sizes(rows), self.writer.decisions
        if self.weights:
            return Fp8GroupedGemm(sizes, n, k, gemm_pass, self.writer.dtype, operands=PRODUCTS[decisions.fp8])
        return GroupedGemm(sizes, n, k, gemm_pass, self.writer.dtype, copied)

    @property
    def copies_results(self) -> bool:
        """Whether the result of a grouped product is a new tensor that is copied to where the plan has it."""
        return not table.on_cpu(self.writer.decisions.kernels.attention)

    def _result_bytes(self, elements: int) -> int:
        """Return the scratch of a grouped product with a result of so many elements."""
        if self.weights:  # kernels in FP8 write where the plan has it
            return 0
        kernel = self.writer.decisions.kernels.attention
        return table.grouped_workspace_bytes(elements, self.writer.dtype, self.shape.own_experts, kernel)

    def _wgrad(self, name: str, grad: Rows, x: Rows) -> None:
        """Emit the gradients of all experts' weights, ``m`` output features by ``n`` input features each."""
        m, n = self.builder.features(grad.slot), self._inputs_of(name)
        writer, into = self.writer, gradient_dtype(self.writer.decisions)
        kernel, builder, count = writer.decisions.kernels.attention, self.builder, self.shape.own_experts
        wide = table.wgrad_workspace_bytes(m, n, grad.tokens, writer.dtype, kernel, into=into)
        if self.weights:
            assert writer.fp8 is not None
            grad = writer.fp8.gradient(grad, writer.suffix, m, name, for_wgrad=True)
            x, wide = writer.fp8.input(x, writer.suffix, name, for_wgrad=True), 0
        result = self._result_bytes(count * m * n)
        added = (writer.size + 2 * DTYPE_BYTES[into]) * count * m * n
        builder.emit(
            f"{name}.wgrad{writer.suffix}",
            "experts.linear.wgrad",
            Lane.COMPUTE,
            self._work(grad, m, n, "wgrad", added if self.copies_results else 0),
            grad=reads(grad),
            x=reads(x),
            ends=reads(self._ends),
            out=self._weight_grad(f"{name}.weight"),
            wide=builder.scratch(f"{name}.wgrad.wide{writer.suffix}", wide),
            workspace=builder.scratch(f"{name}.wgrad.result{writer.suffix}", result),
        )

    def _sizes(self, rows: Rows) -> tuple[tuple[int, int], ...]:
        load = self.writer.decisions.expert_load
        return sizes_of(self.experts, self.rows, load, rows.first, rows.tokens)

    def _emit(  # noqa: PLR0917 - the sizes of a row-wise kernel
        self,
        name: str,
        op: str,
        rows: int,
        read: int,
        written: int,
        scratch: int,
        *,
        features: int = 0,
        **operands: Access | None,
    ) -> None:
        """Emit a memory-bound operator that reads ``read`` and writes ``written`` bytes.

        ``features``: those of a row, where a framework's kernels make passes of their own over rows."""
        writer, builder = self.writer, self.builder
        workspace = builder.scratch(f"{builder.phase}.{name}{writer.suffix}.scratch", scratch)
        work = Rowwise(self._kind(name, op), rows, read, written, 0, rows * features, writer.size)
        builder.emit(name + writer.suffix, op, Lane.COMPUTE, work, **operands, workspace=workspace)

    def _kind(self, name: str, op: str) -> str:
        """Return the kind of row-wise work of the operator ``op``, called ``name``."""
        del name
        return op

    def _tokens(self, slot: str) -> Rows:
        """Return the rows of all tokens that are routed here."""
        return Rows(slot, 0, self.shape.routed_tokens)

    @property
    def _all_ends(self) -> Rows:
        """Where the rows of each expert end, of all that the rank dispatches."""
        return Rows("route_ends", self.ends_first, self.experts.count)

    @property
    def _ends(self) -> Rows:
        """Where the rows of each of the rank's experts end."""
        return self._all_ends

    @property
    def _order(self) -> Rows:
        """The slot of each dispatched row, in the order of experts."""
        return Rows("route_order", *self._all)

    def _slots(self, rows: Rows) -> Rows:
        """The slot that each of these rows is a copy of."""
        return Rows("route_order", rows.first, rows.tokens)

    @property
    def _seats(self) -> Rows:
        """The row of each slot among those that come back from the experts."""
        return self._places

    @property
    def _places(self) -> Rows:
        """The dispatched row of each slot."""
        return self._tokens("route_places")

    def _own(self, name: str, dtype: str, tokens: int, features: int) -> Rows:
        """Return all rows of a buffer of the template; add the buffer at its first use."""
        if not self.builder.has(name):
            self.builder.own(name, BufferClass.TRANSIENT, dtype, tokens, features)
        return Rows(name, 0, tokens)
