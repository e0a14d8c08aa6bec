"""``tokenwise``: wraps the decoder layers of a transformers model in place, and takes them off again."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from memo_exec.decoder_layers.attention_calls import listen
from memo_exec.decoder_layers.bytes_report import LayerBytes, TokenwiseReport
from memo_exec.decoder_layers.layer_forward import LayerForward
from memo_exec.decoder_layers.layer_swap import CountedSwap, LayerBlocks, LayerSwap
from memo_exec.decoder_layers.meta_copy import consecutive_positions, meta_copy
from memo_exec.decoder_layers.plan_policy import policy_of_plan
from memo_exec.decoder_layers.policy import Fate, Policy
from memo_exec.decoder_layers.row_independence import TOKENS, check_rows, refuse_dropout
from memo_sim.contract.errors import CannotRun, UsageError
from memo_sim.contract.plan import Plan

ATTRIBUTE = "memo_tokenwise"
"""The attribute of a wrapped model that holds its ``Tokenwise``."""

ModelT = TypeVar("ModelT", bound=nn.Module)


def tokenwise(
    model: ModelT,
    alpha: float | None = None,
    *,
    plan: str | os.PathLike[str] | Plan | None = None,
    whole: Literal["swap", "keep"] = "swap",
    resident_layers: int | None = None,
    check: bool = True,
    pin_memory: bool = True,
    debug: bool = False,
) -> ModelT:
    """Train a transformers model with MEMO's token-wise swapping and recomputation (MEMO 4.1); return the model.

    The decoder layers are wrapped in place; modules, parameters and their names stay. In a forward pass with gradients,
    the tensors that a layer saves for the first ``alpha`` of each sequence's tokens go to host memory and come back one
    layer ahead of backward; those of the other tokens are made again in backward. Attention is never made again: the
    layer's input, and what attention saves besides q, k and v, are swapped for all tokens. Passes without gradients are
    as before, and so are evaluations that fill a cache.

    ``model.memo_tokenwise`` has the bytes of the last step (``report()``), those of other lengths (``predict(tokens)``)
    and the way back (``undo()``).

    Args:
        model: a causal language model of transformers (or a PEFT model around one), not yet compiled. Attention must be
            called through transformers' ``AttentionInterface``, once in each layer.
        alpha: share of the tokens that is swapped, between 0 and 1. Default 0.5.
        plan: a plan of memo, or its file, whose alpha is used. It must be of this model, and hold no decisions that
            this wrapper cannot follow.
        whole: "keep" leaves the layer's input and what attention saves on the device.
        resident_layers: last layers that keep everything. Default 2: their backward begins before their memory is
            needed again (MEMO 4.1).
        check: run each kind of layer on eight tokens first, and refuse it unless its rows are independent.
        pin_memory: pin the host memory (CUDA only).
        debug: compare checksums of swapped tensors, and poison memory before it is reused.

    Raises:
        UsageError: when an argument is wrong, or the model is wrapped already.
        CannotRun: when row blocks cannot play the model's layers; the message names the layer and the reason.
        BadInput: when the plan's file cannot be read.
    """
    if (found := getattr(model, ATTRIBUTE, None)) is not None:
        raise UsageError("the model is wrapped already", got=str(found), hint=f"call model.{ATTRIBUTE}.undo() first")
    policy = _policy(model, alpha, plan, whole, resident_layers)
    wrapped = Tokenwise(model, policy, pin_memory=pin_memory, debug=debug)
    wrapped.wrap(check=check)
    return model


def _policy(
    model: nn.Module,
    alpha: float | None,
    plan: str | os.PathLike[str] | Plan | None,
    whole: str,
    resident_layers: int | None,
) -> Policy:
    if whole not in ("swap", "keep"):
        raise UsageError("not a value of whole", got=repr(whole), wanted="'swap' or 'keep'")
    if plan is not None:
        given = {"alpha": alpha, "resident_layers": resident_layers, "whole": None if whole == "swap" else whole}
        for name, value in given.items():
            if value is not None:
                raise UsageError(f"the plan decides {name}", got=f"{name}={value!r} and a plan", hint=f"drop {name}")
        return policy_of_plan(plan, getattr(model, "config", None))
    alpha = 0.5 if alpha is None else alpha
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not 0 <= alpha <= 1:
        raise UsageError("not a value of alpha", got=repr(alpha), wanted="a number between 0 and 1")
    chosen = Policy(alpha, whole=Fate.SWAP if whole == "swap" else Fate.KEEP)
    if resident_layers is None:
        return chosen
    if not isinstance(resident_layers, int) or isinstance(resident_layers, bool) or resident_layers < 0:
        raise UsageError("not a value of resident_layers", got=repr(resident_layers), wanted="a whole number from 0")
    return Policy(alpha, whole=chosen.whole, resident_layers=resident_layers)


class Tokenwise:
    """A wrapped model: its layers, their bytes, and the way back."""

    def __init__(self, model: nn.Module, policy: Policy, *, pin_memory: bool, debug: bool) -> None:
        self.policy = policy
        self._model = model
        self._decoder = decoder_of(model)
        self._layers: list[WrappedForward] = []
        self._pin_memory = pin_memory
        self._debug = debug
        self._swap: LayerSwap | CountedSwap | None = None

    def wrap(self, *, check: bool) -> None:
        """Wrap every decoder layer; on an error, leave the model as it was.

        Raises:
            CannotRun: when row blocks cannot play a layer.
        """
        listen()
        layers = list(self._decoder.layers)  # type: ignore[arg-type]
        for index, layer in enumerate(layers):
            where = f"layers.{index} ({type(layer).__name__})"
            _refuse_layer(layer, where)
            self._layers.append(WrappedForward(layer, self, index, len(layers), where))
        for each in self._layers:
            each.layer.forward = each
        setattr(self._model, ATTRIBUTE, self)
        try:
            if check:
                self._check()
        except BaseException:
            self.undo()
            raise

    def undo(self) -> None:
        """Take the wrappers off; graphs that are alive can still run backward."""
        for each in self._layers:
            each.take_off()
        self._layers.clear()
        if hasattr(self._model, ATTRIBUTE):
            delattr(self._model, ATTRIBUTE)

    @property
    def host_bytes(self) -> int:
        """Size of the host memory that swapped tensors use, from the second step on."""
        return self._swap.host_memory.bytes if isinstance(self._swap, LayerSwap) else 0

    def report(self) -> TokenwiseReport:
        """Return the bytes of each layer in the last forward pass, with what backward has brought back so far."""
        return TokenwiseReport(tuple(each.bytes() for each in self._layers))

    def predict(self, tokens: int, batch: int = 1) -> TokenwiseReport:
        """Return the bytes of a step of ``batch`` sequences of ``tokens``, on this rank, without running it.

        The layers' shapes are played on the meta device, with the model's own modules. It has to be called before
        weights are sharded.

        Raises:
            UsageError: when a number is not positive.
            CannotRun: when shapes do not decide the bytes, as with experts that run one by one.
        """
        for name, value in (("tokens", tokens), ("batch", batch)):
            if not isinstance(value, int) or value < 1:
                raise UsageError(f"not a number of {name}", got=repr(value), wanted="a whole number from 1")
        counted = Tokenwise.__new__(Tokenwise)
        counted.policy = self.policy
        counted._model = meta_copy(self._model, {id(self): counted})
        counted._decoder = decoder_of(counted._model)
        counted._layers = [layer.forward for layer in counted._decoder.layers]  # type: ignore[union-attr]
        counted._swap = CountedSwap()
        with torch.enable_grad(), consecutive_positions():
            try:
                counted._decoder(inputs_embeds=counted._inputs(batch, tokens, "meta"), use_cache=False)
            # torch has no exception of its own for what a shape-only kernel lacks: it raises this one, or
            # NotImplementedError, which is a subclass. The text says what is missing, and is shown.
            except RuntimeError as error:
                raise CannotRun(
                    "the bytes of this model cannot be predicted from shapes alone",
                    got=f"{type(error).__name__}: {error}",
                    hint="run one step and read report()",
                ) from error
        counted_bytes = counted.report()
        for each in counted_bytes.layers:
            each.restored_bytes = each.swapped_bytes
        return counted_bytes

    def synchronize(self) -> None:
        """Block until every copy to the host has run, and free the originals."""
        if isinstance(self._swap, LayerSwap):
            self._swap.synchronize()

    def swap_of(self, device: torch.device) -> LayerSwap | CountedSwap:
        """Return where a layer's tensors are swapped; the first forward says on which device they are."""
        if self._swap is None:
            pinned = self._pin_memory and device.type == "cuda"
            self._swap = LayerSwap(pinned=pinned, streams=True, debug=self._debug)
        return self._swap

    def _check(self) -> None:
        device = next(self._decoder.parameters()).device
        if device.type == "meta":
            return
        with torch.no_grad(), self._checking():
            self._model(inputs_embeds=self._inputs(1, TOKENS, device), use_cache=False)

    @contextmanager
    def _checking(self) -> Iterator[None]:
        checked: set[tuple[tuple[str, type], ...]] = set()
        for each in self._layers:
            each.checked_kinds = checked
        try:
            yield
        finally:
            for each in self._layers:
                each.checked_kinds = None

    def _inputs(self, batch: int, tokens: int, device: torch.device | str) -> Tensor:
        """Return zeros in place of embeddings, which require gradients where embeddings do."""
        embedding = self._model.get_input_embeddings().weight  # type: ignore[operator]
        trained = embedding.requires_grad or hasattr(self._model, "_require_grads_hook")
        dtype = next(p.dtype for p in self._decoder.layers[0].parameters() if p.is_floating_point())  # type: ignore[index, union-attr]
        return torch.zeros(batch, tokens, embedding.shape[-1], dtype=dtype, device=device).requires_grad_(trained)

    def __str__(self) -> str:
        return f"token-wise alpha {self.policy.alpha:g} on {len(self._layers)} layers of {type(self._model).__name__}"


class WrappedForward:
    """The ``forward`` of a wrapped layer."""

    def __init__(self, layer: nn.Module, owner: Tokenwise, index: int, layers: int, where: str) -> None:
        self.layer = layer
        self.checked_kinds: set[tuple[tuple[str, type], ...]] | None = None
        """While layers are checked: the kinds that are done."""
        self._owner = owner
        self._index = index
        self._where = where
        self._own = layer.__dict__.get("forward")
        self._forward = layer.forward
        self._names = list(inspect.signature(layer.forward).parameters)
        self._policy = owner.policy.of_layer(index, layers)
        self._last: tuple[LayerBytes, LayerBlocks] | None = None

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Play the layer in row blocks, or as before where there are no gradients."""
        named |= dict(zip(self._names, args, strict=False))
        x: Tensor = named.pop(self._names[0])
        if self.checked_kinds is not None:
            self._check(x, named)
            return x
        if not torch.is_grad_enabled() or (not self.layer.training and named.get("past_key_values") is not None):
            return self._forward(x, **named)
        self._refuse(x, named)
        if named.get("past_key_values") is not None:
            named["past_key_values"] = None
        call = LayerForward(
            self.layer,
            self._forward,
            self._policy,
            self._owner.swap_of(x.device),
            first=self._index == 0,
            where=self._where,
        )
        found = call.run(x, named)
        self._last = (call.saved.bytes, call.blocks)
        return found

    def bytes(self) -> LayerBytes:
        """Return the bytes of the last forward pass."""
        if self._last is None:
            return LayerBytes(layer=self._index)
        found, blocks = self._last
        return LayerBytes(
            layer=self._index,
            swapped_bytes=found.swapped_bytes,
            restored_bytes=blocks.restored_bytes,
            recomputed_bytes=found.recomputed_bytes,
            kept_bytes=found.kept_bytes,
        )

    def take_off(self) -> None:
        """Give the layer its forward back."""
        if self._own is None:
            self.layer.__dict__.pop("forward", None)
        else:
            self.layer.forward = self._own

    def _check(self, x: Tensor, named: dict[str, Any]) -> None:
        kind = tuple((name, type(module)) for name, module in self.layer.named_modules())
        assert self.checked_kinds is not None
        if kind not in self.checked_kinds:
            check_rows(self.layer, self._forward, x, named, self._where)
            self.checked_kinds.add(kind)

    def _refuse(self, x: Tensor, named: dict[str, Any]) -> None:
        """Refuse what a pass asks for and row blocks cannot give."""
        if self.layer.training and getattr(self.layer, "gradient_checkpointing", False):
            raise UsageError(
                "gradient checkpointing is on: it would recompute attention, and everything else twice",
                where=self._where,
                hint="set gradient_checkpointing to False (model.gradient_checkpointing_disable())",
            )
        if torch.compiler.is_compiling():
            raise CannotRun("a compiled layer cannot pause for attention", where=self._where)
        _refuse_units(self.layer, self._where)
        cache = named.get("past_key_values")
        if cache is not None and cache.get_seq_length():
            raise CannotRun("training on a cache with keys is not supported", where=self._where, hint="use_cache=False")
        if named.get("output_attentions"):
            raise CannotRun("attention weights are not returned", where=self._where, got="output_attentions=True")
        if named.get("output_router_logits") and x.shape[0] > 1:
            raise CannotRun(
                "the router's logits would be in another order: those of each row block",
                where=self._where,
                got=f"output_router_logits=True with {x.shape[0]} sequences",
                wanted="one sequence in a batch",
            )


def decoder_of(model: nn.Module) -> nn.Module:
    """Return the module that holds the decoder layers.

    Raises:
        CannotRun: when the model has none.
    """
    base: Any = model
    if hasattr(base, "get_base_model"):  # PEFT
        base = base.get_base_model()
    decoder: Any = base.get_decoder() if hasattr(base, "get_decoder") else None
    if decoder is not None and not hasattr(decoder, "layers"):
        decoder = getattr(decoder, "model", None)  # some classes are taken for their own decoder (Llama 4)
    if not isinstance(getattr(decoder, "layers", None), nn.ModuleList) or not len(decoder.layers):
        raise CannotRun(
            "the model has no decoder layers that can be found",
            got=type(model).__name__,
            wanted="a causal language model of transformers, whose decoder has `layers`",
        )
    found: nn.Module = decoder
    return found


def _refuse_layer(layer: nn.Module, where: str) -> None:
    if layer._compiled_call_impl is not None or hasattr(layer, "_orig_mod"):
        raise CannotRun("a compiled layer cannot pause for attention", where=where, hint="do not compile it")
    _refuse_units(layer, where)
    refuse_dropout(layer, where)


def _refuse_units(layer: nn.Module, where: str) -> None:
    for name, module in layer.named_modules():
        if name and isinstance(module, FSDPModule):
            raise CannotRun(
                "a part of the layer is an FSDP unit of its own, whose parameters would be gathered for each row block",
                where=f"{where}.{name}",
                hint="call fully_shard on whole layers",
            )
