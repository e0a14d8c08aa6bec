"""Every knob of a plan, declared once: its kind, default, help, label, place in a plan file, and what it needs.

A knob is a decision that a question may pin. Its declaration is a field of ``Pins`` (None leaves it to the search) or
of ``Chosen`` (never searched). These follow from the declarations:

- the options of ``memo-sim what-if`` and ``longest``, and which of them ``--plan`` excludes (``question_options.py``)
- the keyword arguments of ``memo_sim.what_if`` and their types (``contract/named_knobs.py``)
- the pins of a question (``planning/question.py``), and the refusal of a pin that would have no effect
- the labels of layouts (``views/plan_table.py``), the words that a case file may use, and ``docs/knobs.md``

How to add a knob:

1. Declare it here, as a field of ``Pins`` or ``Chosen``.
2. Give ``Layout`` or ``Decisions`` (``contract/plan.py``) a field of the same name. A test compares the two.
3. Copy the pin into the plan: ``planning/layouts.py`` fills a ``Layout``, ``planning/space.py`` fills ``Decisions``.
4. Use the decision where programs are written (``program``).
5. If it excludes other knobs, add a rule to a module of ``program/layout/rules``.
6. If a system searches it, name it in ``System.searched`` (``planning/presets.py``).
7. Write ``docs/knobs.md`` and ``contract/named_knobs.py`` again; the tests that compare them print the commands.

This module imports neither msgspec nor click: ``memo-sim --help`` reads it at every start.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Literal, TypeVar, get_args

from memo_sim.contract.attention_kernels import AttentionName, Libraries

if TYPE_CHECKING:
    from memo_sim.contract.documents import Documents

DtypeName = Literal["fp32", "bf16", "fp16"]
"""Dtype of parameters, activations and products."""
Fp8Recipe = Literal["none", "delayed", "tensor", "block", "mx"]
"""Scales of the layers' products in FP8 (``program/layout/fp8.py``), as in Transformer Engine's recipes.

- none: products in the plan's dtype.
- delayed: one scale a tensor, from the largest values of earlier steps.
- tensor: one scale a tensor, from the tensor itself (current scaling), which is read once more for its largest value.
- block: one scale for 128 values of a row of activations and gradients, and for 128 x 128 values of a weight.
- mx: MXFP8, one scale of 8 bits for 32 values."""
Fp8Layouts = Literal["tn", "any"]
"""Layouts that a device's FP8 products take.

- tn: both operands must be contiguous along the dimension that is summed (Hopper), so backward needs transposed copies.
- any: every layout (Blackwell)."""
SwapDtype = Literal["same", "fp8"]
"""Dtype of swapped skeletal tensors on the host: their own, or E4M3 with a scale for each row."""
ProductDtype = Literal["fp32", "bf16", "fp16", "fp8-tensor", "fp8-block", "fp8-mx"]
"""Kind of a product in a profile: the dtype of its operands, for FP8 with the granularity of its scales."""
Recompute = Literal["none", "full", "selective", "norms", "mlp", "operators", "tokenwise", "rowwise"]
"""What backward recomputes.

- none: nothing.
- full: the whole forward of each layer.
- selective: only attention, from kept Q, K and V (as in Megatron-LM).
- norms: only the norms (Megatron-LM's recompute module layernorm).
- mlp: only the MLP, from its kept input (its module mlp).
- operators: every second product, norms and activations; attention is never recomputed (as in torchtitan).
- tokenwise: the tokens that are not swapped; attention is never recomputed (MEMO).
- rowwise: all but attention, block by block of rows, from the layer's input, attention's output and its log-sum-exp."""
MemoryPolicy = Literal["planned", "caching", "eager"]
"""How device memory is allocated.

- planned: one arena with planned addresses.
- caching: PyTorch's caching allocator serves the same requests.
- eager: that allocator under an eager framework, which requests more (an fp32 loss) and frees later
  (``record_stream``)."""
States = Literal["fp32", "bf16", "host", "pure-bf16", "pure-bf16-fp32-moments"]
"""Dtype and place of gradients and optimizer states; bytes per parameter of a bf16 model, whole on one rank.

- fp32: gradients, master weights and moments in fp32 (2 + 4 + 4 + 8 = 18; 16 where ``ZeroParams`` is cast).
- bf16: moments in bf16, the rest as fp32 (14).
- host: as fp32, with master weights and moments in host memory (6 on the device).
- pure-bf16: no master weights; gradients and moments in bf16 as the parameters (2 + 2 + 4 = 8). That is AdamW on a
  model that was loaded in bf16, without autocast. Every step rounds parameters to the nearest bf16 number.
- pure-bf16-fp32-moments: the same with moments in fp32 (2 + 2 + 8 = 12)."""
Sharding = Literal["memo", "fsdp1", "fsdp2"]
"""Whose implementation of ZeRO 2 and 3, with its own passes over parameters and gradients
(``program/data_parallel/sharding.py``).

- memo: gathers and reduces in place, as memo-exec does.
- fsdp1: torch's flat parameters. Autograd copies the gradients of a unit into one flat tensor.
- fsdp2: torch's ``fully_shard``. Each gather is copied out to the parameters, and gradients are copied into the tensor
  that is reduced."""
ReduceDtype = Literal["auto", "fp32", "bf16"]
"""Dtype in which FSDP sums gradients over ranks.

- auto: that of the sums over micro-batches (``GradSums``): fp32, or bf16 without master weights.
- fp32, bf16: torchtitan's ``mixed_precision_reduce``, composer's ``PURE``. A rank's own sums stay in theirs."""
AdamwKernels = Literal["foreach", "fused"]
"""AdamW of a framework (row-wise kernels eager or compiled): torch's default, ten passes over lists of tensors, or one
kernel."""
Streams = Literal["auto", "recorded", "events"]
"""When an eager framework gets memory back that a stream beside compute has used.

- recorded: when the device has passed that work (``record_stream``): DeepSpeed, FSDP1, c10d before PyTorch 2.8.
- events: when the tensor dies, because the streams wait for each other's events: FSDP2, c10d since.
- auto: by the year of the libraries and the level of ZeRO (``memory/eager_framework.py``)."""
ZeroParams = Literal["auto", "stored", "cast"]
"""What ZeRO 3 gathers parameters from, where there is an fp32 master copy.

- stored: a rank keeps its shard in the parameters' dtype beside the fp32 shard, and gathers that (DeepSpeed).
- cast: a rank keeps only the fp32 shard, and casts it before every gather (torch FSDP's ``MixedPrecision``).
- auto: the system's own, cast with Hugging Face's modules (``Modules``), else stored."""
GradSums = Literal["auto", "params", "fp32", "autocast"]
"""Dtype in which gradients are summed, over micro-batches and over ranks.

- auto: fp32 (without master weights: bf16), which a product adds to as it writes. Under an eager framework, fp16 where
  parameters are fp16, as Megatron-LM has it: a product writes a tensor of its own, and another kernel adds it.
- params: in the parameters' dtype. Under an eager framework as in the fp16 case: ``.grad`` of modules in bf16
  (InternEvo). In memo-exec a product adds to the sum as it writes.
- fp32: in fp32 also without master weights, and of fp16 parameters (Megatron-LM's
  ``--accumulate-allreduce-grads-in-fp32``).
- autocast: in fp32, because parameters are fp32, whole on every rank: torch.autocast casts a layer's weights in every
  forward, and a product's gradient is a narrow tensor that is cast and added (flash-attention's training code)."""
Loss = Literal[
    "auto",
    "blocks",
    "fused",
    "eager-fp32",
    "vocab-parallel",
    "checkpointed",
    "checkpointed-fp32",
    "linear",
    "linear-triton",
]
"""How the loss and the gradient of the logits are computed (``program/layers/loss.py``).

- auto: as the memory policy does. Planned and caching: blocks. Eager: as its libraries do (``Hardware.eager_libraries``
  and ``memory/eager_framework.py``): an fp32 copy and its softmax, or the gradient over the logits.
- blocks: row blocks in a small fp32 workspace; the gradient has a buffer of its own.
- fused: one kernel, which writes the gradient over the logits (Liger, Megatron-LM's fused loss).
- eager-fp32: ``F.cross_entropy(logits.float())`` under autograd.
- vocab-parallel: Megatron-LM's unfused loss, whose fp32 copy becomes the softmax and then the gradient in place.
- checkpointed: each chunk under torch.utils.checkpoint, so its product and its log-softmax of an fp32 copy run twice,
  with accuracy and entropy (TRL's chunked_nll since 1.13).
- checkpointed-fp32: the same with an fp32 product of fp32 copies of weight and input (TRL before 1.13).
- linear: classifier and loss together, a tile of the vocabulary at a time, so the logits of all tokens and all columns
  never exist; backward computes each tile's product again (``program/layers/linear_loss.py``). In torch's operators.
- linear-triton: the same with memo-exec's Triton kernels, which keep the logits of forward in registers.

With tp above 1 the logits stay sharded over the vocabulary in all of them but eager-fp32 and the checkpointed ones,
which have no such form.
``loss_chunk_tokens`` applies to each."""
LINEAR_LOSSES: tuple[Loss, ...] = ("linear", "linear-triton")
"""Forms whose product with the classifier is a part of them."""
Objective = Literal["next-token", "grpo"]
"""What the loss is of the targets' log-probabilities.

- next-token: their negative sum (pre-training, and fine-tuning, whose data say which tokens are targets).
- grpo: the clipped policy gradient of PPO and GRPO, and a KL term against a reference model. A step has three numbers
  in fp32 for every token besides: its advantage, and its log-probabilities when it was drawn and by the reference."""
Modules = Literal["auto", "operators", "huggingface"]
"""Whose modules an eager framework trains, which decides what autograd saves of a layer.

- operators: each operator keeps what its own backward reads, as in memo-exec.
- huggingface: Hugging Face's modules in accelerate's FSDP2: fp32 copies of norms' inputs, every result inside the MLP
  (``memory/huggingface.py``; ``program/layers/huggingface.py`` without full recompute). ``ZeroParams`` is cast unless
  given.
- auto: the system's own, else operators."""
MlpRebuild = Literal["block", "layer", "twice"]
"""What full recompute repeats of an MLP in row blocks (``program/layers/mlp.py``).

- block: backward rebuilds each block, without its second product, right before the block's backward.
- layer: the layer's recompute rebuilds all blocks, and autograd keeps what they save: model code that loops over
  ``split`` inside a checkpointed layer.
- twice: the layer's recompute runs the blocks without keeping them, and backward rebuilds each one again: DeepSpeed's
  TiledMLP inside a checkpointed layer, three forwards in all."""
CpExchange = Literal["ring", "all_gather", "rsa"]
"""How context-parallel ranks exchange keys and values.

- ring: ranks pass them on hop by hop and merge partial attention results.
- all_gather: ranks gather them all at once.
- rsa: ring self-attention. Ranks pass on the keys, then the values, and torch's products write whole rows of scores to
  memory instead of the attention kernel. With one rank, the scores are written to memory too."""
Overlap = Literal["none", "gradients", "both"]
"""Which communication of ZeRO 0 and 1 overlaps with compute.

- none: gradients are reduced over replicas, and parameters gathered, after the step's last gradient.
- gradients: each block's gradients are reduced after its last backward.
- both: in addition, ZeRO 1 gathers parameters at the start of the next step, block by block, ahead of its forward."""
ExpertOverflow = Literal["drop", "refuse"]
"""What happens to rows beyond the capacity of expert parallelism.

- drop: they count as zero, and the run reports their number.
- refuse: the step's update is not applied, and the run ends with the capacity to plan for."""
TpOverlap = Literal["none", "chunked"]
"""Whether a layer's products overlap with the all-gathers before them and the reduce-scatters behind them.

- none: a product waits for the whole all-gather, and a reduce-scatter for the whole product.
- chunked: both are cut into one chunk for each tensor-parallel rank. The product of a chunk starts when the chunk has
  arrived, and its result is sent while the next one is computed (torch's asynchronous tensor parallelism; Transformer
  Engine's ring exchange on userbuffers, Megatron-Core's ``tp_comm_overlap``)."""
RowwiseKernel = Literal["torch", "triton", "eager", "compiled", "fused", "jit", "internevo", "flash-attn"]
"""Whose kernels play norms, activations, rotary embeddings, residuals, the loss and the optimizer.

- torch, triton: memo-exec's own, single torch operators or fused Triton kernels; each instruction is one kernel.
- eager: torch modules as model code writes them; every tensor operator and cast is a kernel with its own passes over
  memory.
- compiled: the same modules under torch.compile.
- fused: Megatron-LM's and Transformer Engine's fused kernels.
- jit: Megatron-LM's under PyTorch 1.10 to 2.0: TorchScript under nvFuser, with dropout; apex's FastLayerNorm.
- internevo: InternEvo's mixture of 2023: apex's norms of an fp32 copy, flash-attn's rotary, torch's operators.
- flash-attn: flash-attention's training code: dropout, an fp32 residual and the norm in one kernel, GeLU in products.

memo-exec cannot play the last six (``operators/framework_kernels.py``)."""
FrameworkLibrary = Literal["eager", "compiled", "fused", "jit", "internevo", "flash-attn"]
"""The kernels of training frameworks among them."""
Schedule = Literal["gpipe", "1f1b", "interleaved", "zero-bubble"]
"""The order in which a pipeline stage plays micro-batches (``program/layout/schedule.py``)."""
Partition = Literal["length", "flops"]
"""How a sequence is divided into subsequences: by equal length, or by equal forward FLOPs (SPPO 4)."""

DocumentCuts = Literal["sequence", "documents"]
"""Where context-parallel ranks cut packed sequences (``program/layout/documents.py``).

- sequence: into 2 x cp chunks of each sequence, wherever documents end (Megatron-LM's data loader).
- documents: into 2 x cp chunks of each document, so that all ranks attend equally much (Transformer Engine's THD)."""

MOST_SEQUENCES = 2**16
MOST_SUBSEQUENCES = 2**16
MOST_WINDOW = 64
MOST_LIMIT_GIB = 2**20
MOST_CAPACITY = 1_000.0
MOST_METRICS = 16
"""More is a typo."""
MOST_ZERO = 3
"""ZeRO 3 divides parameters, gradients and optimizer states."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Degree:
    """Ranks that work is divided over; the degrees of a layout multiply to its devices."""

    def __str__(self) -> str:
        return "ranks, from 1"


@dataclass(frozen=True, slots=True)
class Whole:
    """A whole number in a range; ``most`` None: without an upper bound."""

    least: int
    most: int | None = None

    def __str__(self) -> str:
        return f"from {self.least}" if self.most is None else f"{self.least} to {self.most}"


@dataclass(frozen=True, slots=True)
class Fraction:
    """A number from 0 to 1."""

    def __str__(self) -> str:
        return "0 to 1"


@dataclass(frozen=True, slots=True)
class OneOf:
    """One of a few words."""

    words: tuple[str, ...]

    def __str__(self) -> str:
        return ", ".join(self.words)


@dataclass(frozen=True, slots=True)
class Switch:
    """On, off, or not given: ``--name`` and ``--no-name``."""

    def __str__(self) -> str:
        return "on, off"


@dataclass(frozen=True, slots=True)
class Flag:
    """Off unless given."""

    def __str__(self) -> str:
        return "on"


@dataclass(frozen=True, slots=True)
class Length:
    """A number of tokens such as ``64k``; 0 stands for all of them."""

    def __str__(self) -> str:
        return "tokens, as 4096 or 64k"


@dataclass(frozen=True, slots=True)
class CountOrAuto:
    """A whole number from 1, or ``auto``: the search chooses."""

    most: int

    def __str__(self) -> str:
        return f"1 to {self.most}, or auto"


@dataclass(frozen=True, slots=True)
class Numbers:
    """Whole numbers from 1, joined by commas."""

    def __str__(self) -> str:
        return "numbers, as 7,8,8,7"


@dataclass(frozen=True, slots=True)
class LayerChoice:
    """Which layers of a stage a decision is about (``contract/units.py``, ``parse_layer_choice``)."""

    def __str__(self) -> str:
        return "all, every-N, first-K or groups-N"


@dataclass(frozen=True, slots=True)
class LowRank:
    """Low-rank adapters (``contract/adapters.py``, ``parse_adapters``)."""

    def __str__(self) -> str:
        return "none, or as r=16,alpha=32,targets=qkv+proj+ffn"


@dataclass(frozen=True, slots=True)
class Load:
    """How rows spread over experts (``contract/units.py``, ``parse_expert_load``)."""

    def __str__(self) -> str:
        return "balanced, zipf-S (as zipf-0.5), or a file of memo-exec run --expert-load"


@dataclass(frozen=True, slots=True)
class DocumentLengths:
    """Lengths of the documents of packed sequences (``contract/documents.py``, ``parse_documents``)."""

    def __str__(self) -> str:
        return "mean=TOKENS,max=TOKENS or a file of lengths"


@dataclass(frozen=True, slots=True)
class Factor:
    """A number above 0 that something is multiplied by."""

    most: float

    def __str__(self) -> str:
        return f"above 0, up to {self.most:g}"


Kind = (
    Degree
    | Whole
    | Fraction
    | OneOf
    | Switch
    | Flag
    | Length
    | CountOrAuto
    | Numbers
    | LayerChoice
    | Load
    | LowRank
    | DocumentLengths
    | LowRank
    | Factor
)
"""What values a knob has; ``str()`` says it in a table."""


@dataclass(frozen=True, slots=True)
class Part:
    """A knob's own part of a layout's label, such as ``tp4``; shown where the knob is more than ``above``."""

    text: str
    above: int = 1


@dataclass(frozen=True, slots=True)
class Mark:
    """A mark behind the part of another knob, such as ``+sp`` in ``tp4+sp``.

    It is shown where this knob is ``value`` and the other knob ``of`` is ``least`` or more.
    """

    of: str
    text: str
    value: object = True
    least: int = 1


@dataclass(frozen=True, slots=True)
class Listed:
    """This knob's numbers behind the part of another knob, such as ``pp4(7,8,8,7)``."""

    of: str


Label = Part | Mark | Listed
"""How a knob shows in a layout's label."""


@dataclass(frozen=True, slots=True)
class Knob:
    """One declaration; ``name`` is that of the field in ``Pins`` or ``Chosen`` and in the plan."""

    kind: Kind
    help: str
    at: str
    """The part of a plan file that holds the knob: ``layout``, ``decisions``, ``decisions.kernels``."""
    labels: tuple[Label, ...] = ()
    needs: str = ""
    """The knob that has to be above its default for this one to have an effect; a question that pins it without is
    refused."""
    on_command_line: bool = True
    unless_given: str = ""
    """Where the command line chooses a value that is not given: how. The default is then that of Python alone."""
    called: str = ""
    """Its option and argument, where these are not named for the field: ``lora`` of ``adapters``."""
    name: str = ""
    default: object = None
    """Of the pin; None: left to the search, or to the system."""

    @property
    def path(self) -> str:
        """Where it stands in a plan, as refusals say it: ``layout.tp``."""
        return f"{self.at}.{self.name}"

    @property
    def option(self) -> str:
        """The option of the command line: ``--loss-chunk`` of ``loss_chunk_tokens``."""
        return f"--{self.argument.replace('_', '-')}"

    @property
    def argument(self) -> str:
        """The keyword argument of the Python functions, named as the option: ``loss_chunk``."""
        return self.called or self.name.removesuffix("_tokens")


_DECLARED = "knob"


def _knob(
    default: T,
    kind: Kind,
    help: str,
    *,
    at: str = "decisions",
    labels: tuple[Label, ...] = (),
    needs: str = "",
    on_command_line: bool = True,
    unless_given: str = "",
    called: str = "",
) -> T:
    """Return a dataclass field that carries the declaration of the knob it is named for."""
    declared = Knob(kind, help, at, labels, needs, on_command_line, unless_given, called)
    return field(default=default, metadata={_DECLARED: declared})


def _one_of(words: object) -> OneOf:
    """Return the kind whose words are those of a ``Literal``."""
    return OneOf(get_args(words))


@dataclass(frozen=True, slots=True, kw_only=True)
class Pins:
    """Knobs with a fixed value; None leaves a knob to the search, or to the system where it is not searched."""

    tp: int | None = _knob(
        None,
        Degree(),
        "Tensor parallelism (with sequence parallelism when above 1).",
        at="layout",
        labels=(Part("tp", above=0),),
    )
    sequence_parallel: bool | None = _knob(
        None,
        Switch(),
        "Sequence parallelism: tensor-parallel ranks hold token shards outside of their products.",
        at="layout",
        labels=(Mark("tp", "+sp"),),
        on_command_line=False,
    )
    tp_overlap: TpOverlap = _knob(
        "none",
        _one_of(TpOverlap),
        "Cut the all-gathers and reduce-scatters of a layer's tensor parallelism into chunks, which overlap with the"
        " products beside them (asynchronous tensor parallelism, tp_comm_overlap).",
        at="layout",
        labels=(Mark("tp", "+chunked", "chunked", least=2),),
        needs="tp",
    )
    """Not searched: no framework has it on unless asked for."""
    cp: int | None = _knob(None, Degree(), "Context parallelism (zigzag).", at="layout", labels=(Part("cp", above=0),))
    cp_exchange: CpExchange | None = _knob(
        None,
        _one_of(CpExchange),
        "How cp ranks exchange keys and values: hop by hop, all at once, or hop by hop with all scores in memory (ring"
        " self-attention). The system's own unless given.",
        at="layout",
        labels=(Mark("cp", "+ag", "all_gather", least=2), Mark("cp", "+rsa", "rsa")),
    )
    """Not searched: ring and all_gather differ little, and rsa never wins."""
    ulysses: int | None = _knob(
        None,
        Degree(),
        "Ulysses: an all-to-all before and after attention divides the heads.",
        at="layout",
        labels=(Part("ulysses"),),
    )
    uneven_heads: bool = _knob(
        False,
        Flag(),
        "Ulysses' degree need not divide the key/value heads: its first ranks have one more of them, with its query"
        " heads (as in DeepSpeed).",
        at="layout",
        labels=(Mark("ulysses", "+uneven", least=2),),
        needs="ulysses",
    )
    """Not searched."""
    ep: int | None = _knob(
        None,
        Whole(1),
        "Expert parallelism: this many consecutive ranks of cp x ulysses x dp divide the experts, and exchange rows by"
        " all-to-all. It needs no devices of its own.",
        at="layout",
        labels=(Part("ep"),),
    )
    expert_tp: int | None = _knob(
        None,
        Whole(1),
        "Ranks of tp that divide the features of each expert: all of them unless given, or 1 (Megatron-LM's"
        " --expert-tensor-parallel-size). With 1, --ep divides the experts over consecutive ranks of tp x cp x ulysses"
        " x dp, and each sends the rows of its own token shard.",
        at="layout",
        labels=(Part("etp", above=0),),
        needs="ep",
    )
    metp: int | None = _knob(
        None,
        Degree(),
        "Memory-efficient tensor parallelism: weights pass round a ring.",
        at="layout",
        labels=(Part("metp"),),
    )
    overlap_exchanges: bool | None = _knob(
        None,
        Switch(),
        "METP computes during its exchanges (double buffers), or waits for them. It computes unless given.",
        at="layout",
        needs="metp",
    )
    """Not searched: to compute during exchanges never loses."""
    keep_norms: bool = _knob(
        False,
        Flag(),
        "METP's layers keep the outputs of their norms, as its authors do, instead of computing them again.",
        needs="metp",
    )
    """Not searched: it saves 1 % of a short step and takes two thirds more memory."""
    rebuild_qkv: bool = _knob(
        False,
        Flag(),
        "A model with latent attention: backward computes Q, K and V of the heads again from the latents, by two"
        " products, in place of keeping or swapping them (Megatron-LM's recompute module mla_up_proj).",
    )
    """Not searched: it trades time for memory beside every recompute mode, as the user likes."""
    pp: int | None = _knob(None, Degree(), "Pipeline stages.", at="layout", labels=(Part("pp"),))
    """None: what the system searches, else one stage."""
    pp_layers: tuple[int, ...] | None = _knob(
        None,
        Numbers(),
        "Layers of each stage (with virtual stages: of each chunk, in the model's order). Unless given stages have"
        " nearly equal numbers of layers: the first and the last get one more last. Where --pp is not given, or layers"
        " differ, splits of more equal work are tried too.",
        at="layout",
        labels=(Listed("pp"),),
        needs="pp",
    )
    """Splits that are tried: ``planning/stage_splits.py``. Empty: nearly equal numbers."""
    schedule: Schedule | None = _knob(
        None,
        _one_of(Schedule),
        "Order in which a stage plays micro-batches. With --pp 1f1b unless given, else the system's are tried.",
        at="layout",
        needs="pp",
    )
    virtual_stages: int | None = _knob(
        None, Whole(1), "Chunks of layers of each stage, for the interleaved schedule.", at="layout", needs="pp"
    )
    overlap_p2p: bool | None = _knob(
        None,
        Switch(),
        "Stages compute while they send and receive. The system's own unless given.",
        at="layout",
        on_command_line=False,
    )
    """Not searched."""
    dp: int | None = _knob(None, Degree(), "Data parallelism.", at="layout", labels=(Part("dp", above=0),))
    zero: int | None = _knob(
        None,
        Whole(0, MOST_ZERO),
        "Over cp x ulysses x dp: 1 divides optimizer states, 2 gradients too, 3 parameters too (FSDP).",
        at="layout",
        labels=(Part("zero", above=0),),
    )
    zero_ranks: int | None = _knob(
        None,
        Whole(1),
        "ZeRO divides over groups of this many consecutive replicas (cp x ulysses x dp), and the groups replicate, as"
        " in torch's HSDP. All replicas unless given.",
        at="layout",
        labels=(Part("over", above=0),),
        needs="zero",
    )
    """Not searched: it would double the candidates of every layout with replicas on several nodes."""
    subsequences: int | Literal["auto"] | None = _knob(
        None,
        CountOrAuto(MOST_SUBSEQUENCES),
        "Number of subsequences that a sequence is cut into; auto: searched, which takes many minutes for pipelines and"
        " a million tokens. Unless given the system decides, and most take one.",
        at="layout",
        labels=(Part("n"),),
    )
    partition: Partition | None = _knob(
        None,
        _one_of(Partition),
        "Subsequences of equal length, or of equal forward work. Unless given, of equal work, and of equal length where"
        " layers differ.",
        at="layout",
        labels=(Mark("subsequences", "+length", "length"),),
        needs="subsequences",
    )
    multiplexed: bool | None = _knob(
        None,
        Switch(),
        "Idle stages play rows of other stages' subsequences while the pipeline fills and drains.",
        at="layout",
        labels=(Mark("subsequences", "+mx"),),
    )
    """Idle stages as in SPPO 6.2. None: tried where the system does so, or where ``subsequences`` is ``auto``, and all
    stages lie in one node: the rows travel in every step, and over a network more subsequences do better."""
    offload_window: int | None = _knob(
        None,
        Whole(0, MOST_WINDOW),
        "Passes during which the swapped rows of a subsequence are copied out, from buffers of their own; 0: from the"
        " two rounding buffers. Unless given the system's own are tried, with --subsequences auto 1 and 4 besides; then"
        " wider ones for the best plan.",
    )
    alpha: float | None = _knob(
        None, Fraction(), "Fraction of tokens swapped (full and row-wise recompute: of what they keep)."
    )
    recompute: Recompute | None = _knob(None, _one_of(Recompute), "What is rebuilt of the tokens that are not swapped.")
    recompute_layers: str | None = _knob(
        None,
        LayerChoice(),
        "Full recompute: which layers of a stage run forward again, while the others keep everything. every-2: every"
        " second one (torchtitan's selective option 2). first-8: the first 8 of each chunk (Megatron-LM's recompute"
        " method block). groups-2: all of them, with one input kept for 2 layers (its method uniform). All unless"
        " given.",
    )
    """Not searched, but groups of layers under systems that name them (``System.last_resorts``)."""
    offload_inputs: bool | None = _knob(
        None,
        Switch(),
        "Full recompute: layer inputs wait in host memory for backward (alpha 1), or on the device (alpha 0). The"
        " system's own unless given.",
    )
    """Goes with every system and memory policy, as ``--alpha`` does only where a system leaves alpha open."""
    rounding_buffers: bool | None = _knob(
        None,
        Switch(),
        "Full recompute: every layer is played in the two rounding buffers, which exist all step (as in MEMO's"
        " executor), or has buffers of its own. The system's own unless given.",
    )
    """Not searched: buffers of a layer's own never take more memory."""
    early_stop: bool | None = _knob(
        None,
        Switch(),
        "Full recompute ends where backward has all of a layer's tensors, without the MLP's second product, or repeats"
        " the whole layer. The system's own unless given.",
    )
    """PyTorch 2.1 and later, ``use_reentrant=False``: ``torch.utils.checkpoint.set_checkpoint_early_stop``, on by
    default. Not searched: it never loses, and whether a framework has it is for the user to say."""
    overlap: Overlap | None = _knob(
        None,
        _one_of(Overlap),
        "ZeRO 0 and 1: reduce gradients beside backward, gather parameters beside the next forward. The system's own"
        " unless given.",
    )
    """Not searched."""
    memory_policy: MemoryPolicy | None = _knob(
        None,
        _one_of(MemoryPolicy),
        "One planned arena; PyTorch's caching allocator; that allocator under an eager framework. The system's own"
        " unless given.",
    )
    """Not searched: it is the user's choice whether memory is planned, and what it costs not to."""
    allocator_limit_gib: int | None = _knob(
        None,
        Whole(0, MOST_LIMIT_GIB),
        "PyTorch's allocator leaves the device's memory above so many GiB unused"
        " (torch.cuda.set_per_process_memory_fraction); 0: uses all. Lower limits are tried unless given.",
    )
    replay_allocator: bool = _knob(
        False, Flag(), "CUDA: memo-exec's allocator serves libraries from the arena (with memory policy planned)."
    )
    cuda_graphs: bool = _knob(
        False,
        Flag(),
        "An eager framework replays its kernels from CUDA graphs: its host launches none (with memory policy eager).",
    )
    """Not searched: it is a choice of the framework's configuration."""
    sharding: Sharding | None = _knob(
        None,
        _one_of(Sharding),
        "Whose ZeRO 2 and 3: memo-exec's, which copies nothing, or torch's FSDP, which copies whole units: fsdp1 their"
        " gradients, fsdp2 their parameters too (with memory policy eager). The system's own unless given.",
    )
    """Not searched: it is a choice of the framework."""
    reduce_dtype: ReduceDtype = _knob(
        "auto",
        _one_of(ReduceDtype),
        "Dtype in which FSDP reduces gradients over ranks. auto: as it sums them over micro-batches.",
    )
    """Not searched: it changes what is learned."""
    loss_chunk_tokens: int | None = _knob(
        None, Length(), "Tokens whose logits exist at once; 0 = all. Chosen when not given."
    )
    mlp_chunk_tokens: int | None = _knob(
        None,
        Length(),
        "Full recompute: tokens whose MLP exists at once, row-wise recompute: rows of a block; 0 = all. Chosen when not"
        " given.",
    )
    mlp_rebuild: MlpRebuild | None = _knob(
        None,
        _one_of(MlpRebuild),
        "An MLP in row blocks under full recompute. block: backward rebuilds each block. layer: the layer's recompute"
        " rebuilds all blocks and keeps them. twice: the layer's recompute runs them, and backward rebuilds each one"
        " again (DeepSpeed's TiledMLP). The system's own unless given.",
    )
    """Not searched: block needs the least time and memory; the others say what frameworks do."""
    attention_chunk_tokens: int | None = _knob(
        None,
        Length(),
        "Full or row-wise recompute: tokens of the sequence whose attention exists at once, while the keys and values"
        " of the others wait on the host; 0 = all. Chosen when not given.",
    )
    attention: AttentionName | None = _knob(
        None,
        _one_of(AttentionName),
        "Attention: plain, a generation of flash attention (flash: the newest that GPU and --libraries have), cuDNN, or"
        " a kernel by its name. The fastest that the profile has for those libraries unless given.",
        at="decisions.kernels",
    )
    """Not searched: a faster kernel never loses, and whether it is installed is for the user to say."""
    libraries: Libraries | None = _knob(
        None,
        _one_of(Libraries),
        "Year of PyTorch, flash-attn and Transformer Engine: decides which attention kernels there are, and the memory"
        " of eager frameworks. The profile's unless given.",
    )
    rowwise: RowwiseKernel | None = _knob(
        None,
        _one_of(RowwiseKernel),
        "Kernels of norms, activations, rotary, residuals, loss and optimizer: memo-exec's (torch, triton), or those of"
        " frameworks (eager, compiled, fused, jit, internevo, flash-attn), which memo-exec cannot play. The system's"
        " own unless given.",
        at="decisions.kernels",
    )
    """The search chooses between torch and triton where a system has memo-exec's kernels."""
    adamw: AdamwKernels | None = _knob(
        None,
        _one_of(AdamwKernels),
        "AdamW of a framework whose row-wise kernels are eager or compiled (refused with others): foreach (torch's"
        " default, ten passes) or fused (one). The system's own unless given.",
        at="decisions.kernels",
    )
    """Not searched: it is a choice of the framework's configuration."""
    dtype: DtypeName | None = _knob(
        None,
        _one_of(DtypeName),
        "Dtype of parameters and activations. bf16 where a GPU has it unless given, else fp32. A profile has to"
        " have rates of it.",
    )
    """Not searched: it changes what is learned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """Knobs that are the user's choice and never searched."""

    states: States = _knob(
        "fp32",
        _one_of(States),
        "fp32: master weights and moments in fp32. bf16: moments in bf16. host: optimizer states and their update on"
        " the host. pure-bf16: no master weights; gradients and moments in bf16. pure-bf16-fp32-moments: the same with"
        " moments in fp32.",
    )
    zero_params: ZeroParams = _knob(
        "auto",
        _one_of(ZeroParams),
        "Memory policy eager with ZeRO 3: a rank stores a shard of parameters in their dtype beside the fp32 shard"
        " (DeepSpeed), or casts the fp32 shard before every gather (FSDP). auto: the system's own, cast with --modules"
        " huggingface, else stored.",
    )
    grad_sums: GradSums = _knob(
        "auto",
        _one_of(GradSums),
        "Dtype in which gradients are summed, over micro-batches and ranks. params: that of the parameters; with memory"
        " policy eager a kernel of its own adds what a product wrote (autograd's .grad; InternEvo). fp32: also without"
        " master weights. autocast: memory policy eager, fp32, as are whole parameters, which every forward casts."
        " auto: fp32, without master weights bf16, with memory policy eager for fp16 parameters fp16.",
    )
    """Not searched: it changes what is learned."""
    objective: Objective = _knob(
        "next-token",
        _one_of(Objective),
        "What the loss is of the targets' log-probabilities. next-token: pre-training and supervised fine-tuning. grpo:"
        " the clipped policy gradient of GRPO and PPO, with a KL term, from advantages and log-probabilities that a"
        " step is given; forwards of the reference model and generation are not part of it.",
    )
    """Not searched: it changes what is learned."""
    fp8: Fp8Recipe = _knob(
        "none",
        _one_of(Fp8Recipe),
        "Linear products of layers in FP8, by Transformer Engine's recipes; attention, routers, the embedding, the"
        " classifier and, without --fp8-experts, experts stay in bf16. tensor: one scale a tensor, from its values"
        " (current scaling). delayed: from earlier steps. block: scales of 1x128 and 128x128 values. mx: MXFP8, 1x32."
        " memo-exec runs tensor, delayed and block on Hopper, and mx on Blackwell.",
    )
    """Not searched: it changes what is learned."""
    fp8_params: bool = _knob(
        False,
        Flag(),
        "With --fp8: the weights of its products are kept in FP8 alone, without a bf16 copy; the optimizer writes them"
        " from fp32 master weights, and ranks gather them in FP8 (Megatron-LM's --fp8-param-gather). memo-exec runs it"
        " with tensor and block.",
    )
    """Not searched: it changes what is learned."""
    fp8_experts: bool = _knob(
        False,
        Flag(),
        "With --fp8 and a model with experts: the grouped products of experts, and those of a shared expert, in FP8 too"
        " (Megatron-LM's TEGroupedLinear, DeepSeek-V3's recipe with block). Rows are exchanged in bf16. memo-exec runs"
        " it with tensor and block.",
    )
    """Not searched: it changes what is learned."""
    swap_dtype: SwapDtype = _knob(
        "same",
        _one_of(SwapDtype),
        "In what activations are swapped. fp8: E4M3 with a scale for each row, about half the bytes of bf16 in copies"
        " and in host memory. Backward reads rounded values, so gradients are not those of a step that keeps them.",
    )
    """Not searched: it changes what is learned."""
    loss: Loss = _knob(
        "auto",
        _one_of(Loss),
        "How the loss is computed. blocks: in row blocks, the gradient in its own buffer. fused: one kernel, the"
        " gradient over the logits. eager-fp32: torch's cross_entropy of an fp32 copy under autograd. vocab-parallel:"
        " Megatron-LM's, in place in an fp32 copy. checkpointed: TRL's chunked_nll, each chunk under checkpoint, with"
        " accuracy and entropy. checkpointed-fp32: the same with an fp32 product, as before TRL 1.13. linear: the"
        " classifier's product inside the loss, a tile of the vocabulary at a time, in torch's operators; backward"
        " computes it again. linear-triton: the same in Triton kernels. auto: blocks, or with memory policy eager what"
        " its libraries do.",
    )
    loss_metrics: int = _knob(
        0,
        Whole(0, MOST_METRICS),
        "Memory policy eager: times that the trainer computes torch's cross entropy again, as metrics, from a"
        " micro-batch's logits, which it keeps until its backward has ended.",
    )
    """MosaicML's Composer with llm-foundry's defaults has two: cross entropy and perplexity, each from the logits."""
    streams: Streams = _knob(
        "auto",
        _one_of(Streams),
        "Memory policy eager: when memory that other streams use comes back. recorded: when the device has passed their"
        " work (DeepSpeed, FSDP1). events: when a tensor dies (FSDP2). auto: the system's own, else by its libraries.",
    )
    modules: Modules = _knob(
        "auto",
        _one_of(Modules),
        "Memory policy eager: whose modules autograd runs. operators: each keeps what its own backward"
        " reads. huggingface: those of transformers in accelerate's FSDP2, with fp32 copies of norms' inputs and every"
        " result inside the MLP. auto: the system's own, else operators.",
    )
    expert_load: str = _knob(
        "balanced",
        Load(),
        "A model with experts: how its tokens spread over them. balanced: evenly. zipf-S: the n-th fullest expert gets"
        " rows in proportion to n**-S, at most one of every token. A file: as in the run that wrote it. It changes"
        " how long products take.",
    )
    expert_capacity: float = _knob(
        0.0,
        Factor(MOST_CAPACITY),
        "With --ep: rows that a rank can send to each of its ranks, over the mean. It sizes buffers and all-to-alls.",
        unless_given="1.25 x what the fullest rank gets under --expert-load",
    )
    expert_overflow: ExpertOverflow = _knob(
        "drop",
        _one_of(ExpertOverflow),
        "With --ep: rows beyond the capacity count as zero (drop), or the step is not applied and the run ends with the"
        " capacity to plan for (refuse).",
    )
    expert_overlap: bool = _knob(
        False,
        Flag(),
        "With --ep: all-to-alls overlap with products that do not need them, of the shared expert and of recompute. It"
        " takes more memory (Megatron-LM's --moe-shared-expert-overlap does a part of it).",
    )
    """Not searched."""
    documents: Documents | None = _knob(
        None,
        DocumentLengths(),
        "Sequences are packed from several documents, and a token attends to its own document alone."
        " mean=2k,max=64k: exponential lengths, cut at max. Or a file with one length, or length,count, a line. A"
        " sequence is one document unless given.",
    )
    document_cuts: DocumentCuts = _knob(
        "sequence",
        _one_of(DocumentCuts),
        "Packed documents under context parallelism. sequence: ranks cut each sequence, wherever documents end."
        " documents: they cut each document, so that all have equal work (Transformer Engine's THD).",
    )
    """Not searched: it is a choice of the framework's data loader."""
    adapters: str = _knob(
        "none",
        LowRank(),
        "Low-rank adapters of rank r, which alone are trained: all weights of the model are frozen, and there is no"
        " dropout. alpha: r unless given; the scale is alpha/r, with rslora alpha/sqrt(r). targets: qkv+proj+ffn unless"
        " given, or some of q, k, v, proj, gate, up, down.",
        called="lora",
    )
    """Not searched: it changes what is learned."""
    micro_batch: int = _knob(
        1,
        Whole(1, MOST_SEQUENCES),
        "Sequences that a rank plays at once.",
        unless_given="1; what-if and gpus: for short sequences also 2, 4 and 8 on the fastest layouts",
    )
    global_batch: int = _knob(
        1,
        Whole(1, MOST_SEQUENCES),
        "Sequences of a step.",
        unless_given="what-if: as few as keep every device busy (docs/questions.md); longest: 1 for each replica",
    )


def _declared(holder: type[Pins | Chosen]) -> tuple[Knob, ...]:
    return tuple(replace(f.metadata[_DECLARED], name=f.name, default=f.default) for f in fields(holder))


PINNED, CHOSEN = _declared(Pins), _declared(Chosen)
KNOBS = {knob.name: knob for knob in (*PINNED, *CHOSEN)}
"""Every knob by name, in the order of the options and of the parts of a label."""
ARGUMENTS = {knob.argument: knob for knob in KNOBS.values() if knob.on_command_line}
"""The knobs that a question may name, by the names of the keyword arguments."""
DEGREES = tuple(knob.name for knob in PINNED if isinstance(knob.kind, Degree))

OF_A_MACHINE = ("cluster", "from_datasheet", "device_memory_gib", "host_memory_gib", "safety_gib", "power_w")
"""What a question says of the machine, as options and arguments name it."""
OF_A_QUESTION = ("model", "seq_len", "system", *OF_A_MACHINE)
"""What a question says beside its knobs."""
MEMORY_GIB = (0.001, 100_000)
"""Least and most GiB that a question may name; anything else is a typo."""
POWER_W = (1, 10_000)
"""Least and most watts that a question may name; a profile knows fewer."""
FAILURE_VALUES: dict[str, tuple[float, float]] = {
    "mtbf_hours": (1e-3, 1e9),
    "checkpoint_s": (1e-3, 1e6),
    "checkpoint_gb_s": (1e-3, 1e6),
    "checkpoint_interval_s": (1e-3, 1e8),
    "restart_s": (0, 1e6),
}
"""Least and most of what a question may say of failures, by the name of the option and argument."""
STRAGGLER_SPREAD = (0, 0.5)
"""Least and most standard deviation of the time that devices take for the same product."""
OF_A_LONG_RUN: dict[str, tuple[float, float]] = {**FAILURE_VALUES, "straggler_spread": STRAGGLER_SPREAD}
"""Least and most of what a question may say about many devices over a long time; all of it is off unless given."""
