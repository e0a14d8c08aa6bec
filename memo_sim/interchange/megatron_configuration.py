"""A configuration of Megatron as its files have it: values by name, what was read of them, and why others are not."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from memo_sim.contract.errors import BadInput
from memo_sim.contract.interchange import IgnoredOption, ReadOption
from memo_sim.contract.model import Model
from memo_sim.interchange.shell_script import is_unresolved, shown, unresolved_in

TRUE, FALSE = ("true", "yes", "1", "on"), ("false", "no", "0", "off", "none", "null", "")

_LEARNED = (
    r"^(lr|min_lr|max_lr|lr_.*|weight_decay.*|.*weight_decay|adam_.*|beta\d|sgd.*|optimizer|clip_grad|init_method.*"
    r"|train_iters|train_samples|loss_scale.*|initial_loss.*|min_loss.*|seed|decoupled.*|hysteresis|muon.*"
    r"|calculate_per_token_loss|scheduler.*|warmup.*|start_weight.*|end_weight.*|override_opt.*|use_checkpoint_opt.*"
    r"|finetune|reset_.*|eod_mask_loss|.*ratio|apply_layernorm_1p|layernorm_zero_centered_gamma|train_.*|max_steps"
    r"|apply_residual.*|apply_query.*|epsilon|adam_eps|cross_entropy_fusion_impl)$"
)
_RUNNING = (
    r"log|tensorboard|wandb|save|load|eval|exit|ckpt|checkpoint|timing|profil|interval|timeout|distributed_backend"
    r"|manual_gc|straggler|check_for|empty_unused|world|rank|master|nnodes|nproc|local|results|attach|print|record"
    r"|rerun|trace|spec$|spec_|dir$|path$|one_logger|experiment|name$|tags"
)
_NEEDED = re.compile(
    r"(tensor|pipeline|context)_model_parallel_size|context_parallel_size|num_(layers|attention_heads|query_groups)|"
    r"(hidden|ffn_hidden|vocab|padded_vocab|micro_batch|global_batch)_size|seq_length|recompute_num_layers|kv_channels|"
    r"max_position_embeddings"
)
"""Names whose values have to be known."""
_WHY: tuple[tuple[str, str], ...] = (
    (r"^[A-Z][A-Z0-9_]*$", "the environment of the run"),
    (r"fp4|nvfp", "memo has no products of four bits: they are faster than predicted"),
    (r"fp8|mxfp", "a choice of FP8 beside its recipe, which changes no time or memory that memo predicts"),
    (r"(hidden|attention)_dropout|embedding_dropout", "dropout is not priced"),
    (r"mtp_", "predicting several tokens is not priced: the step is longer than predicted"),
    (r"cpu_offloading|offload_modules|fine_grained|activation_offload", "offloading of activations is not priced"),
    (
        r"shared_expert_overlap|overlap_moe",
        "exchanges of rows are priced without products beside them: the step may be shorter than predicted",
    ),
    (r"moe_|expert_|num_shared|shared_expert", "a choice of experts that changes nothing that memo prices"),
    (r"window_|attention_softmax|softmax_type|sink", "attention is priced as causal over the whole sequence"),
    (r"batch_size_schedule|rampup", "the batch grows to its full size, which is priced"),
    (
        r"grad_reduce_in_bf16|accumulate_allreduce|main_grads|main_params|grad_reduce_in_fp32",
        "memo sums gradients in fp32",
    ),
    (
        r"fusion|fused|persist_layer_norm|use_mcore|use_flash_attn|transformer_impl|^te_|gemm|jit|masked_softmax",
        "a choice of kernels, beside those that memo knows",
    ),
    (
        r"overlap|bucket|nccl|ddp|gloo|sharp|comm|ub_|p2p|deallocate|gradient_reduce|average_in",
        "how the framework communicates: the prediction has its own default",
    ),
    (_LEARNED, "what is learned, not how long a step takes"),
    (
        r"data|split|tokenizer|vocab_file|merge_file|mock|num_workers|dataset|blend|eod|mmap|mask_in|tiktoken|fim_",
        "data and tokenizer",
    ),
    (_RUNNING, "logging, evaluation, checkpoints and start"),
)
"""Why a name is ignored, by the first expression that finds it."""

_UNKNOWN = "memo does not know it"


def why_ignored(name: str) -> str:
    """Return why memo does not use an option."""
    return next((why for pattern, why in _WHY if re.search(pattern, name)), _UNKNOWN)


@dataclass
class Configuration:
    """The values of a file by Megatron's names; what is used is noted, so that the rest can be listed.

    ``spelled``: how the file writes a name. ``where``: the file.
    """

    values: Mapping[str, Any]
    spelled: Mapping[str, str]
    where: str
    read: list[ReadOption] = field(default_factory=list)
    ignored: list[IgnoredOption] = field(default_factory=list)
    assumed: list[str] = field(default_factory=list)
    undecided: list[str] = field(default_factory=list)
    """Names in conditions of a script that could not be decided."""
    taken: set[str] = field(default_factory=set)
    model: Model | None = None
    """The model, where the file names one in place of a shape."""

    def has(self, name: str) -> bool:
        """Return whether the file gives a value."""
        value = self.values.get(name)
        return value is not None and str(value).lower() not in ("none", "null")

    def raw(self, name: str) -> Any:
        """Return a value, and note that it was used."""
        self.taken.add(name)
        value = self.values.get(name)
        return value[0] if isinstance(value, list | tuple) and len(value) == 1 else value

    def key(self, name: str) -> str:
        """Return a name as the file writes it."""
        return self.spelled.get(name, name)

    def bad(self, name: str, wanted: str) -> BadInput:
        """Return the error about a value."""
        text = str(self.values.get(name))
        hint = None
        if is_unresolved(text):
            names = " ".join(f"--set {open_}=..." for open_ in self.open_names())
            hint = f"give what the script leaves open: {names} (or --set {name}=...)"
        return BadInput(
            "a value that cannot be read",
            where=f"{self.where}: {self.key(name)}",
            got=shown(text)[:80],
            wanted=wanted,
            hint=hint,
        )

    def whole(self, name: str, default: int | None = None, *, least: int = 1) -> int | None:
        """Return a whole number, or ``default`` where the file has none.

        Raises:
            BadInput: when it is something else.
        """
        if not self.has(name):
            self.taken.add(name)
            return default
        text = str(self.raw(name)).replace("_", "")
        if not re.fullmatch(r"\d{1,18}", text, re.ASCII) or int(text) < least:
            raise self.bad(name, f"a whole number from {least}")
        return int(text)

    def open_names(self) -> list[str]:
        """Return the names that the script leaves open and that memo may need, in their order."""
        texts = [str(value) for name, value in self.values.items() if _NEEDED.fullmatch(name)]
        found = [*self.undecided, *(name for text in texts for name in unresolved_in(text))]
        return list(dict.fromkeys(name for name in found if re.fullmatch(r"\w+", name, re.ASCII)))

    def needed(self, name: str) -> int:
        """Return a whole number that the file has to give.

        Raises:
            BadInput: when it does not.
        """
        found = self.whole(name)
        if found is None:
            raise BadInput(
                "the job does not say what memo needs",
                where=self.where,
                got=f"no {self.key(name)}",
                hint=f"give it: --set {name}=...",
            )
        return found

    def number(self, name: str, default: float) -> float:
        """Return a finite number.

        Raises:
            BadInput: when it is something else.
        """
        if not self.has(name):
            self.taken.add(name)
            return default
        try:
            value = float(str(self.raw(name)))
        except ValueError:
            value = -1.0
        if not 0 <= value < 1e30:
            raise self.bad(name, "a number")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        """Return whether a switch is on.

        Raises:
            BadInput: when it is neither on nor off.
        """
        if not self.has(name):
            self.taken.add(name)
            return default if name not in self.values else False
        raw = self.raw(name)
        words = raw if isinstance(raw, list | tuple) else [raw]
        if self.key(name).startswith("--") and all(is_unresolved(str(word)) for word in words):
            return True  # a switch, and variables behind it that nothing sets
        text = str(raw).lower()
        if text not in (*TRUE, *FALSE):
            raise self.bad(name, "true or false")
        return text in TRUE

    def text(self, name: str, default: str = "") -> str:
        """Return a text.

        Raises:
            BadInput: when it is not resolved.
        """
        if not self.has(name):
            self.taken.add(name)
            return default
        value = str(self.raw(name))
        if is_unresolved(value):
            raise self.bad(name, "a value")
        return value

    def texts(self, name: str) -> list[str]:
        """Return a list of texts, which the file may join by commas."""
        self.taken.add(name)
        value = self.values.get(name)
        parts = value if isinstance(value, list | tuple) else re.split(r"[,\s]+", str(value or "").strip("[]()"))
        return [str(part).strip("'\" ") for part in parts if str(part).strip("'\" ")]

    def say(self, names: tuple[str, ...], says: str) -> None:
        """Note what the values of ``names`` say in memo's words; names that the file does not give are left out."""
        for name in names:
            if name in self.values:
                self.read.append(ReadOption(key=self.key(name), value=self._shown(name), says=says))

    def ignore_rest(self) -> None:
        """List every name that was not used."""
        for name, value in self.values.items():
            if name not in self.taken:
                why = why_ignored(name)
                self.ignored.append(IgnoredOption(key=self.key(name), value=shown_value(value), why=why))

    def _shown(self, name: str) -> str:
        """Return the value as the file has it; a switch by its name has none."""
        value = self.values[name]
        return "" if isinstance(value, bool) and self.key(name).startswith("--") else shown_value(value)


def shown_value(value: Any) -> str:
    """Return a value as a page shows it, without a script's variables, and cut where it is long."""
    text = " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return shown(text)[:200]
