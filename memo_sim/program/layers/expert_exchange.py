"""Experts that ranks divide (expert parallelism): dispatched rows go to the rank of their expert, and come back.

A rank of ``ep`` has count / ep experts, and its own tokens. Forward, for the rows of all its tokens:

    router -> route -> sort -> places      as without expert parallelism; the order of experts is that of ranks
    seats      each slot's seat among the rows that are sent: rank of its expert x capacity + its number for that rank
    norm2 -> dispatch (ep x capacity rows) -> [all-to-all] -> arrange by expert -> up -> act, times the probability
      -> down -> arrange by rank -> [all-to-all] -> combine from the seats -> next x

    rank 0 sends   [to 0: a a b .][to 1: c d d d]      . is a seat that nothing takes: its row is a copy of another one,
    rank 0 gets    [of 0: a a b .][of 1: a b . .]      which no product reads and which gets no gradient
    by expert      a a a b b . . .

Sizes are known before the step: each rank sends ``capacity`` rows to each rank (``layout/expert_load.py``), so the host
waits for nothing. Two small all-to-alls go with the rows of forward: how many rows of each expert there are, and the
probabilities, by which the rank of the expert multiplies. A row beyond the capacity has no seat: it counts as zero
(without the bias of the second product) and its expert gets no gradient of it (the executor counts such rows).

Backward sends the gradients of the rows of the sum to the experts, and those of the rows and of the probabilities
back. It also sends the rows of the second norm again, which the gradient of the first product's weight reads: they are
neither kept nor swapped, but where rows are recomputed, recompute has received them already. What the router decided
and where rows go (``route_*``) is kept, so backward and recompute by token exchange no numbers of rows again.

Tensor parallelism divides the features inside every expert, as without expert parallelism: its ranks have all rows of
their tokens, and each sends them to the ranks with its own features. With ``expert_tp`` 1 they have whole experts and
are ranks of ``ep`` themselves: each sends the rows of its token shard once (``experts.py``).

``expert_overlap`` writes products between a row's exchange and its use that need none of the rows under way:

    forward    compute  [copy][shared_up, shared_act][arrange][up, act, down][arrange][shared_down    ][combine]
               ep             [rows                 ]                                 [rows back      ]

    backward   compute  [copy][recompute of attention][copy][shared expert, down.dgrad][arrange][up, act, act.bwd]
               ep             [gradients of the sum  ]      [second norm's rows       ]
               compute  [up.dgrad][arrange][weight gradients of both products and of the shared expert][combine]
               ep                          [gradients of the rows                                     ]

Under full recompute the router decides anew, so the gradients of the sum are sent behind the second norm's rows. The
shared expert then has sums of its own, which are added to those of the experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from memo_sim.contract.experts import Experts
from memo_sim.contract.units import DTYPE_BYTES
from memo_sim.program.ir.builder import Access, Rows, accumulates, reads, writes
from memo_sim.program.ir.instruction import COLLECTIVE_LANES, BufferClass
from memo_sim.program.ir.kinds import Phase, TemplateKind
from memo_sim.program.ir.work import Collective
from memo_sim.program.layers.experts import INDEX, NUMBER, ExpertMlp
from memo_sim.program.layout.expert_load import received_sizes
from memo_sim.program.layout.fp8 import narrow_elements
from memo_sim.program.layout.parameters import experts_block
from memo_sim.program.layout.rank_order import EP
from memo_sim.program.operators import workspaces as table
from memo_sim.program.operators.fp8_operands import EXPERT_COLUMNS, EXPERT_WEIGHTS, Fp8Weights
from memo_sim.program.operators.operators import OperatorWriter, RowBlock

PARAMS, GRADS = "expert_params", "expert_grads"
"""Slots of the block of the rank's experts."""
COUNT = DTYPE_BYTES["int32"]
BACKWARDS = (TemplateKind.BACKWARD, TemplateKind.BACKWARD_RESIDENT)


class ExchangedExperts(ExpertMlp):
    """Writes experts that the ranks of ``ep`` share."""

    def __init__(self, writer: OperatorWriter, experts: Experts, *, first: int = 0) -> None:
        super().__init__(writer, experts, first=first)
        shape = self.shape
        self._suffix = writer.suffix
        """End of the names of instructions of backward."""
        divided = writer.decisions.layout.expert_divided
        block = experts_block(writer.model, divided, shape.ep, experts, writer.decisions.lora)
        assert block is not None  # this class is for ep above 1
        self._block = block
        self._narrow = narrow_elements(writer.decisions, block)
        """Elements at the block's beginning that are not in slot ``PARAMS``, because they are in FP8 alone."""
        if self.weights:
            self.weights = Fp8Weights(writer.decisions, block, (EXPERT_WEIGHTS, EXPERT_COLUMNS))
        self._received = False
        """Whether this template has received the rows of the second norm."""
        self._sent_gradient: tuple[Rows, Rows, Rows, Rows] | None = None
        """Once they are sent: the gradients of routed tokens, those of all tokens, what is sent, and what arrives."""
        self._activation_gradient: Rows | None = None
        """The gradient of the activation, once its product is written."""
        self._shared_gradient: Rows | None = None
        """The gradient of the shared expert's input, once its products are written."""

    def _route(self, source: Rows) -> None:
        """Write what the router decides, and the seats and arrivals of rows that follow from it."""
        super()._route(source)
        tokens, sent, slots = self.shape.routed_tokens, self._sent, self.shape.dispatched
        own, ranks = self.shape.own_experts, self.shape.ep
        ends = self._own("route_sent_ends", "int32", self.experts.count, 1)
        self._emit(
            "seats",
            "experts.seats",
            self.rows,
            2 * INDEX * slots + INDEX * self.rows,
            INDEX * (slots + self.rows),
            table.send_order_workspace_bytes(self.rows, slots, ranks),
            experts=reads(self._tokens("route_experts")),
            places=reads(self._places),
            order=reads(self._order),
            ends=reads(self._all_ends),
            seats=writes(self._seats),
            sent=writes(sent),
            sent_ends=writes(ends),
        )
        arrived_ends = self._exchange("route_arrived_ends", "ends", ends, COUNT)
        gates = self._own("gates.sent", "fp32", self.rows, 1)
        self._emit(
            "gates",
            "experts.gates",
            self.rows,
            (NUMBER + INDEX) * self.rows,
            NUMBER * self.rows,
            0,
            probs=reads(Rows("route_probs", 0, tokens)),
            order=reads(sent),
            out=writes(gates),
        )
        arrived_gates = self._exchange("gates.arrived", "gates", gates, NUMBER)
        self._emit(
            "arrivals",
            "experts.arrivals",
            self.rows,
            INDEX * self.rows,
            2 * INDEX * self.rows,
            table.receive_order_workspace_bytes(self.rows, ranks, own),
            arrived_ends=reads(arrived_ends),
            order=writes(self._arrived(self._all)),
            ends=writes(self._ends),
        )
        self._arrange("gates.arrange", arrived_gates, Rows("route_gates", *self._all), NUMBER)

    def _dispatched(self, rows: RowBlock) -> Rows:
        """Return a range of the experts' input rows; recompute and backward have them in one buffer."""
        return Rows(self.writer.own("dispatched", self.rows, self.shape.hidden), *rows)

    def _dispatch(self, name: str, source: Rows, out: Rows) -> None:
        """Emit the way of tokens' rows to the experts' rows ``out``, for all of them at the first row block."""
        if name != "dispatch.grad":
            if self._received:
                return
            self._received, out = True, Rows(out.slot, *self._all)
        copies, arrived = self._send(name, source)
        if self.overlapped:
            self._while_rows_are_sent()
        self._arrange(f"{name}.arrange", arrived, out, self._row_bytes, kept=self._kept(copies))

    def _combine(self, name: str, source: str, out: Rows, **kept: Access) -> None:
        """Emit the way of the experts' rows back to their tokens, and the sum of each token's rows."""
        sent, returned = self._send_back(name, source)
        if self.overlapped:
            self._shared_sum = super()._shared_output()
            kept = {"kept": reads(sent)}
        super()._combine(name, returned.slot, out, **kept)

    def _shared_output(self) -> Rows | None:
        return self._shared_sum if self.overlapped else super()._shared_output()

    def _kept(self, rows: Rows) -> Access | None:
        """Return rows that are sent as an operand of what follows their exchange, if products stand between the two.

        Without it their memory would be free at once, and a product that used it would wait for the exchange.
        """
        return reads(rows) if self.overlapped else None

    def _while_rows_are_sent(self) -> None:
        """Write what needs no rows that are under way: the shared expert, and what backward can begin with."""
        beside, blocks = self._shared_input
        suffix = self.writer.suffix
        for rows in self._named(blocks):
            self.shared.first_half(beside, rows)
        self.writer.suffix = suffix
        if self.builder.kind in BACKWARDS:
            begun = self._sent_gradient is not None
            self._send_gradient()
            if begun:
                self._second_input_gradient()

    def before_recompute(self) -> None:
        """Write the exchange of the gradients of the sum, if exchanges overlap: what was routed is there."""
        if self.overlapped:
            self._send_gradient()

    def again(self) -> None:
        """Write the experts once more from the kept output of the norm; routing is kept."""
        self.before_recompute()
        super().again()

    def _send_gradient(self) -> None:
        """Write the exchange of the gradients of the sum, once."""
        if self._sent_gradient is None:
            with self._of_backward():
                upstream, beside = self._gathered_gradient("grad_out")
                self._sent_gradient = upstream, beside, *self._send("dispatch.grad", upstream)

    def _second_input_gradient(self) -> Rows:
        """Write the shared expert's backward, and the gradient of the second product's input, once; return the latter.

        The shared expert's comes first, because it needs no rows of other ranks.
        """
        if self._activation_gradient is None:
            assert self._sent_gradient is not None  # sent before
            _, beside, copies, arrived = self._sent_gradient
            with self._of_backward():
                self.shared.backward(beside)
                d_down = self._second_gradient
                self._arrange("dispatch.grad.arrange", arrived, d_down, self._row_bytes, kept=self._kept(copies))
                t = Rows(self.writer.own("d_act", self.rows, self.shape.expert_width), *self._all)
                self._dgrad("experts_down", d_down, t)
                self._activation_gradient = t
        return self._activation_gradient

    @contextmanager
    def _of_backward(self) -> Iterator[None]:
        """Name instructions as those of backward, among those of recompute."""
        builder, writer = self.builder, self.writer
        phase, suffix = builder.phase, writer.suffix
        builder.phase, writer.suffix = Phase.BACKWARD, self._suffix
        yield
        builder.phase, writer.suffix = phase, suffix

    def _second_product_backward(self, grad_out: str) -> tuple[Rows, Rows, Rows]:
        if not self.overlapped:
            return super()._second_product_backward(grad_out)
        self._send_gradient()
        t = self._second_input_gradient()
        assert self._sent_gradient is not None  # sent above
        upstream, beside, *_ = self._sent_gradient
        return upstream, beside, t

    def _shared_input_gradient(self, source: Rows) -> Rows | None:
        return self._shared_gradient if self.overlapped else super()._shared_input_gradient(source)

    def _first_product_backward(self, d_up: Rows) -> tuple[Rows, Rows]:
        """Write the gradients of the first product beside the exchanges that they do not need.

        compute  [gradient of the rows        ]              [gradient of the weight        ][combine]
        ep       [second norm's rows again    ]              [gradients of the rows back    ]

        What is sent stays until after the product beside it: if its memory were free before, the product could take it
        for its result, and would wait for the exchange.
        """
        writer, tokens = self.writer, (0, self.shape.routed_tokens)
        source, again = self._send_norm_again()
        d_rows = Rows(writer.own("d_dispatched", self.rows, self.shape.hidden), *self._all)
        self._dgrad("experts_up", d_up, d_rows)
        sent, returned = self._send_back("dispatch.bwd", d_rows.slot)
        dispatched = None if self.frozen else self._dispatched(self._all)
        if again is not None and dispatched is not None:
            copies, arrived = again
            self._arrange("dispatch.again.arrange", arrived, dispatched, self._row_bytes, kept=reads(copies))
        if self.overlapped and dispatched is not None:
            self._wgrad("experts_down", self._second_gradient, Rows("act", *self._all))
        if self.overlapped:
            self._shared_gradient = super()._shared_input_gradient(source)
        if dispatched is not None:
            self._wgrad("experts_up", d_up, dispatched)
        d_norm = Rows(writer.own("d_norm2", self.shape.routed_tokens, self.shape.hidden), *tokens)
        super()._combine("dispatch.bwd", returned.slot, d_norm, kept=reads(sent))
        return source, d_norm

    def _send_norm_again(self) -> tuple[Rows, tuple[Rows, Rows] | None]:
        """Write the exchange of the second norm's rows for backward, if it has not received them.

        Returns these rows as the router reads them, and what is sent and what arrives. Of frozen weights no gradient
        reads them.
        """
        source = self.writer.shard_rows("norm2", (0, self.shape.tokens))
        if self.frozen:
            return source, None
        if not self.whole:
            source = self.writer.gather_again("norm2", source, "norm2_full", 0)
        return source, None if self._received else self._send("dispatch.again", source)

    def _send(self, name: str, source: Rows) -> tuple[Rows, Rows]:
        """Emit the copy of tokens' rows to the rows that are sent, and their exchange; return these and what comes."""
        sent, arrived = self._row_buffer(f"{name}.sent"), self._row_buffer(f"{name}.arrived")
        super()._dispatch(name, source, sent)
        self._all_to_all(name, sent, arrived, self._row_bytes)
        return sent, arrived

    def _send_back(self, name: str, source: str) -> tuple[Rows, Rows]:
        """Emit the copy of experts' rows to their order of arrival, and their exchange; return these and what comes."""
        sent, returned = self._row_buffer(f"{name}.sent"), self._row_buffer(f"{name}.returned")
        self._arrange(f"{name}.back", Rows(source, *self._all), sent, self._row_bytes, back=True)
        self._all_to_all(name, sent, returned, self._row_bytes)
        return sent, returned

    @property
    def _row_bytes(self) -> int:
        return self.shape.hidden * self.writer.size

    def _activation_backward(self, grad: Rows, d_up: Rows, d_probs: Rows) -> None:
        """Write the gradients of the first product, and of the probabilities, which go back to their tokens."""
        d_gates = self._own("d_gates", "fp32", self.rows, 1)
        super()._activation_backward(grad, d_up, d_gates)
        sent = self._own("d_gates.sent", "fp32", self.rows, 1)
        self._arrange("d_gates.back", d_gates, sent, NUMBER, back=True)
        returned = self._exchange("d_gates.returned", "d_gates", sent, NUMBER)
        self._emit(
            "gates.bwd",
            "experts.gates.bwd",
            self.shape.routed_tokens,
            (NUMBER + INDEX) * self.shape.dispatched,
            NUMBER * self.shape.dispatched,
            table.gates_backward_workspace_bytes(self.shape.dispatched),
            x=reads(returned),
            seats=reads(self._seats),
            out=writes(d_probs),
        )

    def _weights_of(self, rows: RowBlock) -> dict[str, Access]:
        """Return the probability of each received row."""
        return {"gates": reads(Rows("route_gates", *rows))}

    def _read_for_seats(self) -> dict[str, Access]:
        """Return each slot's seat, and the rows that are sent: their number is the seat of a slot without one."""
        return {"seats": reads(self._seats), "sent": reads(self._sent)}

    def _seats_scratch(self) -> int:
        return table.missing_seats_workspace_bytes(self.shape.routed_tokens, self.experts.per_token)

    def _weight(self, name: str) -> Access | None:
        found = self._block.find(name)
        return reads(Rows(PARAMS, found.first - self._narrow, found.elements)) if found else None

    def _weight_grad(self, name: str) -> Access | None:
        found = self._block.find(name)
        return accumulates(Rows(GRADS, found.first, found.elements)) if found else None

    def _sizes(self, rows: Rows) -> tuple[tuple[int, int], ...]:
        shape, load = self.shape, self.writer.decisions.expert_load
        sizes = (self.experts, shape.dispatched, load, shape.ep, shape.pair_rows)
        return received_sizes(*sizes, rows.first, rows.tokens)

    def _arrange(
        self, name: str, source: Rows, out: Rows, row: int, *, back: bool = False, kept: Access | None = None
    ) -> None:
        """Emit the copy of rows from their order of arrival to that of experts, or back.

        ``row``: bytes of one row. ``kept``: an operand whose memory nothing may take before it.
        """
        self._emit(
            name,
            "experts.arrange.back" if back else "experts.arrange",
            out.tokens,
            (row + INDEX) * out.tokens,
            row * out.tokens,
            0,
            x=reads(source),
            order=reads(self._arrived((0, self.rows) if back else (out.first, out.tokens))),
            out=writes(out),
            kept=kept,
        )

    def _exchange(self, name: str, what: str, sent: Rows, row: int) -> Rows:
        """Emit the all-to-all of one number a row; return the rows that arrive."""
        arrived = self._own(name, self.builder.dtype(sent.slot), sent.tokens, 1)
        self._all_to_all(what, sent, arrived, row)
        return arrived

    def _all_to_all(self, name: str, sent: Rows, arrived: Rows, row: int) -> None:
        """Emit the exchange of equally many rows with every rank; ``row``: bytes of one."""
        work = Collective("all_to_all", row * sent.tokens, self.shape.ep, EP)
        operands = {"send": reads(sent), "recv": writes(arrived)}
        name = f"{name}.exchange{self.writer.suffix}"
        self.builder.emit(name, "experts.all_to_all", COLLECTIVE_LANES[EP], work, **operands)

    def _row_buffer(self, name: str) -> Rows:
        """Return a buffer of rows that are exchanged."""
        name = f"{self.builder.phase}.{name}"
        self.writer.own(name, self.rows, self.shape.hidden, BufferClass.EXCHANGE)
        return Rows(name, *self._all)

    def _arrived(self, rows: RowBlock) -> Rows:
        """Return where the row of each place in the order of experts has arrived."""
        return Rows("route_arrived", *rows)

    @property
    def _sent(self) -> Rows:
        """The slot of each row that is sent."""
        return Rows("route_sent", *self._all)

    def _slots(self, rows: Rows) -> Rows:
        return Rows("route_sent", rows.first, rows.tokens)

    @property
    def _seats(self) -> Rows:
        return self._tokens("route_seats")

    @property
    def _ends(self) -> Rows:
        return Rows("route_own_ends", 0, self.shape.own_experts)

    @property
    def _order(self) -> Rows:
        return self._own("route_order", "int64", self.shape.dispatched, 1)

    @property
    def _places(self) -> Rows:
        return self._own("route_places", "int64", self.shape.routed_tokens, self.experts.per_token)
