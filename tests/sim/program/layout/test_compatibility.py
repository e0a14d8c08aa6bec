"""Every compatibility rule has decisions that break it and no other, and a message with all its fields."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from memo_sim.contract.documents import Documents
from memo_sim.contract.errors import Infeasible
from memo_sim.contract.experts import Experts
from memo_sim.contract.layer_shape import LayerShape
from memo_sim.contract.plan import Decisions, Kernels, Layout
from memo_sim.program.layout.compatibility import ARENA_RULES, RULES, check_compatible
from memo_sim.program.layout.rules.rule import Rule
from memo_sim.program.lower import lower
from tests.sim.small_programs import GPT, LATENT, LLAMA

UNEVEN = GPT.of_layers([LayerShape(ffn_hidden=width) for width in (128, 256, 128, 256)])
EXPERTS = msgspec.structs.replace(LLAMA, experts=Experts(count=4, per_token=2, hidden=64))
SEVERAL_EXPERTS = LLAMA.of_layers(
    [LayerShape(ffn_hidden=640, experts=Experts(count=count, per_token=2, hidden=64)) for count in (4, 8)]
)
WINDOW = msgspec.structs.replace(LLAMA, window=256)
SINKS = msgspec.structs.replace(LLAMA, sinks=True)
POST_NORMS = msgspec.structs.replace(LLAMA, post_norms=True)
GEGLU = msgspec.structs.replace(LLAMA, activation="gelu_tanh")
LORA = "r=8,alpha=8,targets=qkv+proj+ffn"
BIDIRECTIONAL = msgspec.structs.replace(GPT, bidirectional=True)
WIDE_HEADS = msgspec.structs.replace(GPT, heads=1, kv_heads=1, head_dim=256)
PLAIN = Kernels(attention="plain")
SAVED = {"model": LLAMA, "modules": "huggingface", "memory_policy": "eager"}
METRICS = {"loss_metrics": 2, "loss": "blocks", "memory_policy": "eager"}
CHUNKS = {"recompute": "full", "attention_chunk_tokens": 512}
EVERY_SECOND = {"recompute": "full", "recompute_layers": "every-2"}


def multiplexed(**changes: Any) -> Layout:
    return Layout(**({"pp": 5, "subsequences": 8, "multiplexed": True} | changes))


def chunked(**changes: Any) -> Layout:
    return Layout(**({"tp": 2, "sequence_parallel": True, "tp_overlap": "chunked"} | changes))


PACKED = {"documents": Documents(lengths=((512, 1),))}
SELECTING = msgspec.structs.replace(
    EXPERTS, experts=Experts(count=8, per_token=2, hidden=192, selection_bias=True, selection_rate=0.001)
)
IN_FP8_ALONE: dict[str, Any] = {"fp8": "tensor", "fp8_params": True}
IN_FP8_SWAPPED: dict[str, Any] = {"swap_dtype": "fp8", "swapped_tokens": 1024}
BREAKS: dict[str, tuple[Layout, dict[str, Any], str]] = {
    "packed documents: metp": (Layout(metp=2), PACKED, "2 with documents"),
    "packed documents: cp_exchange": (Layout(cp_exchange="rsa"), PACKED, "rsa with documents"),
    "packed documents: micro_batch": (
        Layout(cp=2, cp_exchange="all_gather"),
        {**PACKED, "micro_batch": 2},
        "2 with documents",
    ),
    "packed documents: subsequences": (Layout(subsequences=2), PACKED, "2 with documents"),
    "packed documents: attention_chunk_tokens": (Layout(), CHUNKS | PACKED, "512 with documents"),
    "packed documents: attention": (
        Layout(),
        {**PACKED, "kernels": Kernels(attention="triton-flash")},
        "triton-flash",
    ),
    "packed documents: cuda_graphs": (
        Layout(),
        {**PACKED, "cuda_graphs": True, "memory_policy": "eager"},
        "true with documents",
    ),
    "packed documents: bidirectional": (Layout(), {**PACKED, "model": BIDIRECTIONAL}, "true with documents"),
    "packed documents: windows": (
        Layout(cp=2),
        {**PACKED, "model": WINDOW},
        "cp 2 with documents and a window of 256 tokens",
    ),
    "packed documents: most": (
        Layout(),
        {"documents": Documents(lengths=((512, 1),), most=2**20)},
        "1048576 of 2048 tokens",
    ),
    "cuts of documents: documents": (Layout(cp=2), {"document_cuts": "documents"}, "documents, but none are given"),
    "experts: tp_overlap": (chunked(), {"model": EXPERTS}, "chunked with a model with experts"),
    "experts: metp": (Layout(metp=2), {"model": EXPERTS}, "2 with a model with experts"),
    "experts: multiplexed": (
        Layout(pp=2, subsequences=2, multiplexed=True),
        {"model": EXPERTS, "global_batch": 1},
        "true with a model with experts",
    ),
    "experts: recompute": (
        Layout(),
        {"model": EXPERTS, "recompute": "operators"},
        "operators with a model with experts",
    ),
    "experts: mlp_chunk_tokens": (
        Layout(),
        {"model": EXPERTS, "recompute": "full", "mlp_chunk_tokens": 512},
        "512 with a model with experts",
    ),
    "experts: schedule": (
        Layout(pp=2, schedule="zero-bubble"),
        {"model": EXPERTS},
        "zero-bubble with a model with experts",
    ),
    "experts: memory_policy": (
        Layout(),
        {"model": EXPERTS, "memory_policy": "eager"},
        "eager with a model with experts",
    ),
    "experts: rowwise": (
        Layout(),
        {"model": EXPERTS, "kernels": Kernels(rowwise="compiled")},
        "compiled with a model with experts",
    ),
    "experts of modules: recompute": (
        Layout(),
        {
            "model": EXPERTS,
            "memory_policy": "eager",
            "modules": "huggingface",
            "kernels": Kernels(rowwise="eager"),
        },
        "none with a model with experts",
    ),
    "experts of modules: kind": (
        Layout(),
        {
            "model": msgspec.structs.replace(LLAMA, experts=Experts(count=4, per_token=2, hidden=64, shared=64)),
            "memory_policy": "eager",
            "modules": "huggingface",
            "kernels": Kernels(rowwise="eager"),
            "recompute": "full",
        },
        "experts with a shared one, with biases, or with a clamped activation",
    ),
    "experts of modules: ep": (
        Layout(dp=2, ep=2),
        {
            "model": EXPERTS,
            "memory_policy": "eager",
            "modules": "huggingface",
            "kernels": Kernels(rowwise="eager"),
            "recompute": "full",
            "global_batch": 2,
        },
        "2 with a model with experts",
    ),
    "experts of modules: tp": (
        Layout(tp=2),
        {
            "model": EXPERTS,
            "memory_policy": "eager",
            "modules": "huggingface",
            "kernels": Kernels(rowwise="eager"),
            "recompute": "full",
        },
        "2 with a model with experts",
    ),
    "experts: layer_pattern": (Layout(), {"model": SEVERAL_EXPERTS}, "experts of several kinds"),
    "latent attention: adapters": (
        Layout(),
        {"model": LATENT, "adapters": "r=4,alpha=8,targets=ffn"},
        "r=4,alpha=8,targets=ffn with a model with latent attention",
    ),
    "latent attention: metp": (Layout(metp=2), {"model": LATENT}, "2 with a model with latent attention"),
    "latent attention: tp_overlap": (chunked(), {"model": LATENT}, "chunked with a model with latent attention"),
    "latent attention: cp_exchange": (
        Layout(cp=2, cp_exchange="rsa"),
        {"model": LATENT},
        "rsa with a model with latent attention",
    ),
    "latent attention: uneven_heads": (
        Layout(ulysses=2, uneven_heads=True),
        {"model": LATENT},
        "true with a model with latent attention",
    ),
    "latent attention: attention_chunk_tokens": (
        Layout(),
        {"model": LATENT, "recompute": "full", "attention_chunk_tokens": 512},
        "512 with a model with latent attention",
    ),
    "latent attention: bidirectional": (
        Layout(),
        {"model": msgspec.structs.replace(LATENT, bidirectional=True)},
        "true with a model with latent attention",
    ),
    "latent attention: recompute": (
        Layout(),
        {"model": LATENT, "recompute": "operators"},
        "operators with a model with latent attention",
    ),
    "latent attention: schedule": (
        Layout(pp=2, schedule="zero-bubble"),
        {"model": LATENT},
        "zero-bubble with a model with latent attention",
    ),
    "latent attention: memory_policy": (
        Layout(),
        {"model": LATENT, "memory_policy": "eager"},
        "eager with a model with latent attention",
    ),
    "latent attention: rowwise": (
        Layout(),
        {"model": LATENT, "kernels": Kernels(rowwise="compiled")},
        "compiled with a model with latent attention",
    ),
    "latent attention: attention": (
        Layout(),
        {"model": LATENT, "kernels": Kernels(attention="flash3")},
        "flash3 with heads of 48 and values of 32",
    ),
    "rebuild_qkv: subsequences": (
        Layout(subsequences=2),
        {"model": LATENT, "rebuild_qkv": True},
        "true with 2 subsequences",
    ),
    "rebuild_qkv: model": (Layout(), {"rebuild_qkv": True}, "true with a model without latent attention"),
    "rebuild_qkv: recompute": (
        Layout(),
        {"model": LATENT, "recompute": "full", "rebuild_qkv": True},
        "true with recompute full",
    ),
    "windows: attention": (
        Layout(),
        {"model": WINDOW, "kernels": Kernels(attention="torch-cudnn")},
        "torch-cudnn with a window of 256 tokens",
    ),
    "windows: modules": (
        Layout(),
        SAVED | {"model": WINDOW, "kernels": Kernels(attention="torch-flash")},
        "torch-flash with a window of 256 tokens",
    ),
    "windows: cp_exchange": (
        Layout(cp=2, cp_exchange="rsa"),
        {"model": WINDOW},
        "rsa with a window of 256 tokens",
    ),
    "windows: metp": (Layout(metp=2), {"model": WINDOW}, "2 with a window of 256 tokens"),
    "windows: attention_chunk_tokens": (Layout(), {"model": WINDOW} | CHUNKS, "512 with a window of 256 tokens"),
    "windows: multiplexed": (
        multiplexed(pp=4),
        {"model": WINDOW, "seq_tokens": 4096},
        "true with a window of 256 tokens",
    ),
    "windows: cp": (Layout(cp=8), {"model": WINDOW}, "cp 8, chunks of 128 tokens, a window of 256"),
    "sinks: cp_exchange": (Layout(cp=2, cp_exchange="rsa"), {"model": SINKS}, "rsa with a model with sinks"),
    "sinks: metp": (Layout(metp=2), {"model": SINKS}, "2 with a model with sinks"),
    "sinks: attention_chunk_tokens": (Layout(), {"model": SINKS} | CHUNKS, "512 with a model with sinks"),
    "sinks: multiplexed": (
        multiplexed(pp=4),
        {"model": SINKS, "seq_tokens": 4096},
        "true with a model with sinks",
    ),
    "sinks: modules": (
        Layout(),
        SAVED | {"model": SINKS},
        "huggingface with a model with sinks",
    ),
    "sinks: recompute": (Layout(), {"model": SINKS, "recompute": "selective"}, "selective with a model with sinks"),
    "sinks: attention": (Layout(), {"model": SINKS, "kernels": PLAIN}, "plain with a model with sinks"),
    "norms behind attention and MLP: metp": (Layout(metp=2), {"model": POST_NORMS}, "2 with a model with such norms"),
    "norms behind attention and MLP: mlp_chunk_tokens": (
        Layout(),
        {"model": POST_NORMS, "recompute": "full", "mlp_chunk_tokens": 512},
        "512 with a model with such norms",
    ),
    "norms behind attention and MLP: attention_chunk_tokens": (
        Layout(),
        {"model": POST_NORMS} | CHUNKS,
        "512 with a model with such norms",
    ),
    "norms behind attention and MLP: recompute": (
        Layout(),
        {"model": POST_NORMS, "recompute": "operators"},
        "operators with a model with such norms",
    ),
    "norms behind attention and MLP: modules": (
        Layout(),
        SAVED | {"model": POST_NORMS},
        "huggingface with a model with such norms",
    ),
    "norms behind attention and MLP: schedule": (
        Layout(pp=2, schedule="zero-bubble"),
        {"model": POST_NORMS},
        "zero-bubble with a model with such norms",
    ),
    "norms behind attention and MLP: multiplexed": (
        multiplexed(pp=4),
        {"model": POST_NORMS, "seq_tokens": 4096},
        "true with a model with such norms",
    ),
    "Gemma's operators: cp_exchange": (
        Layout(cp=2, cp_exchange="rsa"),
        {"model": GEGLU},
        "rsa with a model with them",
    ),
    "Gemma's operators: modules": (
        Layout(),
        SAVED | {"model": GEGLU},
        "huggingface with a model with them",
    ),
    "load of experts: model": (Layout(), {"expert_load": "zipf-1"}, "zipf-1"),
    "FP8: dtype": (Layout(), {"fp8": "tensor", "dtype": "fp32"}, "fp32 with fp8 tensor"),
    "FP8: metp": (Layout(metp=2), {"fp8": "block"}, "2 with fp8 block"),
    "FP8: tp_overlap": (chunked(), {"fp8": "mx"}, "chunked with fp8 mx"),
    "FP8: multiplexed": (multiplexed(), {"fp8": "tensor"}, "true with fp8 tensor"),
    "FP8: schedule": (Layout(pp=2, schedule="zero-bubble"), {"fp8": "delayed"}, "zero-bubble with fp8 delayed"),
    "FP8: mlp_rebuild": (
        Layout(),
        {"fp8": "tensor", "recompute": "full", "mlp_chunk_tokens": 512, "mlp_rebuild": "layer"},
        "layer with fp8 tensor",
    ),
    "FP8: recompute": (Layout(), {"fp8": "tensor", "recompute": "norms"}, "norms with fp8 tensor"),
    "FP8: modules": (Layout(), SAVED | {"fp8": "tensor", "recompute": "full"}, "huggingface with fp8 tensor"),
    "FP8: adapters": (Layout(), {"fp8": "tensor", "adapters": LORA}, f"{LORA} with fp8 tensor"),
    "FP8: grad_sums": (
        Layout(),
        {"fp8": "tensor", "grad_sums": "autocast", "memory_policy": "eager"},
        "autocast with fp8 tensor",
    ),
    "FP8: rebuild_qkv": (
        Layout(),
        {"model": LATENT, "fp8": "block", "rebuild_qkv": True, "kernels": Kernels(attention="torch-cudnn")},
        "true with fp8 block",
    ),
    "swaps in FP8: metp": (Layout(metp=2), IN_FP8_SWAPPED, "2 with swap_dtype fp8"),
    "swaps in FP8: multiplexed": (
        multiplexed(),
        IN_FP8_SWAPPED | {"swapped_tokens": 2048},
        "true with swap_dtype fp8",
    ),
    "swaps in FP8: fp8": (Layout(), IN_FP8_SWAPPED | {"fp8": "tensor"}, "tensor with swap_dtype fp8"),
    "swaps in FP8: attention_chunk_tokens": (
        Layout(),
        CHUNKS | {"swap_dtype": "fp8", "swapped_tokens": 2048},
        "512 with swap_dtype fp8",
    ),
    "swaps in FP8: deterministic": (Layout(), IN_FP8_SWAPPED | {"deterministic": True}, "true with swap_dtype fp8"),
    "swaps in FP8: memory_policy": (
        Layout(),
        IN_FP8_SWAPPED | {"memory_policy": "eager"},
        "eager with swap_dtype fp8",
    ),
    "experts in FP8: products": (Layout(), {"model": EXPERTS, "fp8_experts": True}, "none with fp8_experts"),
    "experts in FP8: model": (Layout(), {"fp8": "block", "fp8_experts": True}, "true"),
    "parameters in FP8: products": (Layout(), {"fp8_params": True}, "none with fp8_params"),
    "parameters in FP8: fp8": (Layout(), {"fp8": "mx", "fp8_params": True}, "mx with fp8_params"),
    "parameters in FP8: states": (Layout(), IN_FP8_ALONE | {"states": "host"}, "host with fp8_params"),
    "parameters in FP8: zero_params": (
        Layout(dp=2, zero=3),
        IN_FP8_ALONE | {"zero_params": "cast", "memory_policy": "eager", "global_batch": 2},
        "cast with fp8_params",
    ),
    "parameters in FP8: sharding": (
        Layout(dp=2, zero=3),
        IN_FP8_ALONE | {"sharding": "fsdp2", "memory_policy": "eager", "global_batch": 2},
        "fsdp2 with fp8_params",
    ),
    "expert parallelism: model": (Layout(dp=2, ep=2), {}, "2"),
    "expert parallelism: replicas": (Layout(dp=3, ep=2), {"model": EXPERTS, "global_batch": 3}, "2 of 3 ranks"),
    "expert parallelism: zero_ranks": (
        Layout(dp=4, ep=4, zero=1, zero_ranks=2),
        {"model": EXPERTS, "global_batch": 4},
        "2 with ep 4",
    ),
    "expert_tp: degree": (
        Layout(tp=4, dp=2, ep=2, sequence_parallel=True, expert_tp=2),
        {"model": EXPERTS, "global_batch": 2},
        "2 with tp 4",
    ),
    "expert_tp: ep": (
        Layout(tp=2, sequence_parallel=True, expert_tp=1),
        {"model": EXPERTS},
        "1 with tp 2 and ep 1",
    ),
    "expert_tp: sequence_parallel": (
        Layout(tp=2, ep=2, expert_tp=1),
        {"model": EXPERTS},
        "expert_tp 1 without sequence parallelism",
    ),
    "overlap of experts: ep": (
        Layout(),
        {"model": EXPERTS, "expert_overlap": True},
        "expert_overlap with ep 1",
    ),
    "capacity of experts: ep": (
        Layout(),
        {"model": EXPERTS, "expert_capacity": 1.5},
        "capacity 1.5, overflow drop with ep 1",
    ),
    "load of experts: number": (Layout(), {"model": EXPERTS, "expert_load": "measured-1500-500"}, "2 experts"),
    "selection bias: gradients": (
        Layout(),
        {"model": SELECTING, "states": "pure-bf16"},
        "states pure-bf16, gradients in bf16",
    ),
    "adapters: model": (
        Layout(),
        {"adapters": "r=8,alpha=8,targets=gate"},
        "r=8,alpha=8,targets=gate with a model without a gate",
    ),
    "adapters: experts": (Layout(), {"model": EXPERTS, "adapters": LORA}, f"{LORA} with a model with experts"),
    "adapters: metp": (Layout(metp=2), {"adapters": LORA}, f"2 with adapters {LORA}"),
    "adapters: tp_overlap": (chunked(), {"adapters": LORA}, f"chunked with adapters {LORA}"),
    "adapters: schedule": (
        Layout(pp=5, schedule="zero-bubble"),
        {"adapters": LORA},
        f"zero-bubble with adapters {LORA}",
    ),
    "adapters: multiplexed": (multiplexed(), {"adapters": LORA}, f"true with adapters {LORA}"),
    "adapters: recompute": (
        Layout(),
        {"recompute": "operators", "adapters": LORA},
        f"operators with adapters {LORA}",
    ),
    "adapters: memory_policy": (Layout(), {"memory_policy": "eager", "adapters": LORA}, f"eager with adapters {LORA}"),
    "adapters: rowwise": (
        Layout(),
        {"kernels": Kernels(rowwise="compiled"), "adapters": LORA},
        f"compiled with adapters {LORA}",
    ),
    "adapters: attention": (Layout(), {"kernels": PLAIN, "adapters": LORA}, f"plain with adapters {LORA}"),
    "adapters: cp_exchange": (Layout(cp=2, cp_exchange="rsa"), {"adapters": LORA}, f"rsa with adapters {LORA}"),
    "adapters: loss": (Layout(), {"loss": "checkpointed", "adapters": LORA}, f"checkpointed with adapters {LORA}"),
    "layers that differ: metp": (Layout(metp=2), {"model": UNEVEN}, "2 with layers of 2 kinds"),
    "layers that differ: multiplexed": (
        Layout(pp=2, subsequences=2, multiplexed=True, partition="length"),
        {"model": UNEVEN, "global_batch": 1},
        "true with layers of 2 kinds",
    ),
    "layers that differ: partition": (Layout(subsequences=2), {"model": UNEVEN}, "flops with layers of 2 kinds"),
    "layers that differ: modules": (
        Layout(),
        {"model": UNEVEN, "modules": "huggingface", "memory_policy": "eager", "recompute": "full"},
        "huggingface with layers of 2 kinds",
    ),
    "multiplexing: pp": (multiplexed(pp=1), {}, "1"),
    "multiplexing: subsequences": (multiplexed(subsequences=4), {}, "4 with 5 stages"),
    "multiplexing: global_batch": (multiplexed(), {"global_batch": 2}, "2 micro-batches"),
    "multiplexing: schedule": (multiplexed(schedule="zero-bubble"), {}, "zero-bubble"),
    "multiplexing: zero": (multiplexed(dp=2, zero=2), {"global_batch": 2}, "2 with multiplexing"),
    "multiplexing: pp_layers": (multiplexed(pp=2), {}, "3, 2"),
    "multiplexing: rounding_buffers": (
        multiplexed(),
        {"recompute": "full", "rounding_buffers": True},
        "true with multiplexing",
    ),
    "multiplexing: memory_policy": (multiplexed(), {"memory_policy": "eager"}, "eager"),
    "virtual stages: schedule": (
        Layout(pp=2, virtual_stages=2),
        {},
        "2 with the schedule 1f1b, pp 2",
    ),
    "virtual stages: overlap_p2p": (
        Layout(pp=2, virtual_stages=2, schedule="interleaved", overlap_p2p=False),
        {},
        "false",
    ),
    "pipeline stages: zero": (
        Layout(pp=2, dp=2, zero=2, schedule="zero-bubble"),
        {},
        "2 with the schedule zero-bubble",
    ),
    "pipeline stages: zero of a framework": (
        Layout(pp=2, dp=2, zero=3),
        {"memory_policy": "eager"},
        "3 with pp 2 in an eager framework",
    ),
    "tensor parallelism in chunks: metp": (Layout(metp=2, tp_overlap="chunked"), {}, "2 with tp_overlap chunked"),
    "tensor parallelism in chunks: tp": (Layout(tp_overlap="chunked"), {}, "1 with tp_overlap chunked"),
    "tensor parallelism in chunks: sequence_parallel": (
        Layout(tp=2, tp_overlap="chunked"),
        {},
        "false with tp_overlap chunked",
    ),
    "tensor parallelism in chunks: subsequences": (chunked(subsequences=2), {}, "2 with tp_overlap chunked"),
    "tensor parallelism in chunks: attention_chunk_tokens": (chunked(), CHUNKS, "512 with tp_overlap chunked"),
    "ranks of ZeRO: zero": (Layout(dp=4, zero_ranks=2), {"global_batch": 4}, "2 with zero 0"),
    "ranks of ZeRO: replicas": (Layout(dp=6, zero=1, zero_ranks=4), {"global_batch": 6}, "4 of 6 ranks"),
    "MLP in row blocks: schedule": (
        Layout(pp=2, schedule="zero-bubble"),
        {"recompute": "full", "mlp_chunk_tokens": 512},
        "512 with the schedule zero-bubble",
    ),
    "MLP rebuilt by frameworks: row blocks": (
        Layout(),
        {"recompute": "full", "mlp_rebuild": "twice"},
        "twice without row blocks",
    ),
    "MLP rebuilt by frameworks: tp": (
        Layout(tp=2),
        {"recompute": "full", "mlp_chunk_tokens": 512, "mlp_rebuild": "layer"},
        "layer with tp 2",
    ),
    "METP: states": (Layout(metp=2), {"states": "pure-bf16"}, "pure-bf16 with metp 2"),
    "pure bf16 states: dtype": (Layout(), {"states": "pure-bf16", "dtype": "fp32"}, "fp32 with states pure-bf16"),
    "pure bf16 with fp32 moments: memory_policy": (
        Layout(),
        {"states": "pure-bf16-fp32-moments", "memory_policy": "eager"},
        "pure-bf16-fp32-moments with memory policy eager",
    ),
    "grad_sums fp32: memory_policy": (
        Layout(),
        {"states": "pure-bf16", "grad_sums": "fp32", "memory_policy": "eager"},
        "fp32 with states pure-bf16 and memory policy eager",
    ),
    "grad_sums params: dtype": (Layout(), {"grad_sums": "params", "dtype": "fp32"}, "params with dtype fp32"),
    "grad_sums params: states": (Layout(), {"grad_sums": "params", "states": "host"}, "params with states host"),
    "METP: grad_sums": (Layout(metp=2), {"grad_sums": "params"}, "params with metp 2"),
    "METP: early_stop": (Layout(metp=2), {"recompute": "full", "early_stop": True}, "true with metp 2"),
    "early stop: recompute": (Layout(), {"early_stop": True}, "true with recompute none"),
    "cast parameters: memory_policy": (
        Layout(dp=2, zero=3),
        {"global_batch": 2, "zero_params": "cast"},
        "caching with zero_params cast",
    ),
    "cast parameters: zero": (
        Layout(dp=2, zero=2),
        {"global_batch": 2, "zero_params": "cast", "memory_policy": "eager"},
        "2 with zero_params cast",
    ),
    "cast parameters: states": (
        Layout(dp=2, zero=3),
        {"global_batch": 2, "zero_params": "cast", "memory_policy": "eager", "states": "host"},
        "host with zero_params cast",
    ),
    "cast parameters: dtype": (
        Layout(dp=2, zero=3),
        {"global_batch": 2, "zero_params": "cast", "memory_policy": "eager", "dtype": "fp32"},
        "fp32 with zero_params cast",
    ),
    "metrics from logits: memory_policy": (
        Layout(),
        {"loss_metrics": 2, "loss": "blocks"},
        "caching with loss_metrics 2",
    ),
    "metrics from logits: tp": (Layout(tp=2), METRICS, "2 with loss_metrics 2"),
    "metrics from logits: pp": (Layout(pp=5), METRICS, "5 with loss_metrics 2"),
    "metrics from logits: subsequences": (Layout(subsequences=2), METRICS, "2 with loss_metrics 2"),
    "metrics from logits: loss": (Layout(), METRICS | {"loss": "fused"}, "fused with loss_metrics 2"),
    "metrics from logits: loss_chunk_tokens": (
        Layout(),
        METRICS | {"loss_chunk_tokens": 512},
        "512 with loss_metrics 2",
    ),
    "eager-fp32 loss: tp": (Layout(tp=2), {"loss": "eager-fp32"}, "eager-fp32 with tp 2"),
    "keep_norms: metp": (Layout(tp=2), {"keep_norms": True}, "true with metp 1"),
    "METP: tp": (Layout(metp=2, tp=2), {}, "2 with metp 2"),
    "METP: cp": (Layout(metp=2, cp=2), {}, "2 with metp 2"),
    "METP: zero_ranks": (Layout(metp=2, dp=2, zero=1, zero_ranks=2), {"global_batch": 2}, "2 with metp 2"),
    "METP: ulysses": (Layout(metp=2, ulysses=2), {}, "2 with metp 2"),
    "METP: subsequences": (Layout(metp=2, subsequences=2), {}, "2 with metp 2"),
    "METP: schedule": (Layout(metp=2, pp=5, schedule="zero-bubble"), {}, "zero-bubble with metp 2"),
    "METP: recompute": (Layout(metp=2), {"recompute": "selective"}, "selective with metp 2"),
    "METP: mlp_rebuild": (
        Layout(metp=2),
        {"recompute": "full", "mlp_chunk_tokens": 512, "mlp_rebuild": "layer"},
        "layer with metp 2",
    ),
    "METP: memory_policy": (Layout(metp=2), {"memory_policy": "eager"}, "eager with metp 2"),
    "METP: keep_norms": (Layout(metp=2), {"recompute": "full", "keep_norms": True}, "true with recompute full"),
    "METP: attention": (Layout(metp=2), {"kernels": PLAIN}, "plain with metp 2"),
    "ring self-attention: metp": (Layout(metp=2, cp_exchange="rsa"), {}, "2 with cp_exchange rsa"),
    "ring self-attention: ulysses": (Layout(cp=2, ulysses=2, cp_exchange="rsa"), {}, "2 with cp_exchange rsa"),
    "ring self-attention: subsequences": (Layout(subsequences=2, cp_exchange="rsa"), {}, "2 with cp_exchange rsa"),
    "ring self-attention: recompute": (
        Layout(cp=2, cp_exchange="rsa"),
        {"recompute": "tokenwise"},
        "tokenwise with cp_exchange rsa",
    ),
    "ring self-attention: swapped_tokens": (
        Layout(cp=2, cp_exchange="rsa"),
        {"swapped_tokens": 128},
        "128 with cp_exchange rsa",
    ),
    "ring self-attention: attention": (Layout(cp_exchange="rsa"), {"kernels": PLAIN}, "plain with cp_exchange rsa"),
    "loss with the classifier's product inside: memory_policy": (
        Layout(),
        {"loss": "linear", "memory_policy": "eager"},
        "eager with loss linear",
    ),
    "loss with the classifier's product inside: rowwise": (
        Layout(),
        {"loss": "linear-triton", "kernels": Kernels(rowwise="compiled")},
        "compiled with loss linear-triton",
    ),
    "attention in chunks: bidirectional": (
        Layout(),
        {"model": BIDIRECTIONAL, **CHUNKS},
        "true with chunks of 512 tokens",
    ),
    "attention in chunks: attention": (Layout(), {"kernels": PLAIN, **CHUNKS}, "plain with chunks of 512 tokens"),
    "attention in chunks: row blocks of row-wise recompute": (
        Layout(ulysses=2),
        CHUNKS | {"recompute": "rowwise", "mlp_chunk_tokens": 128},
        "128 with chunks of 256 rows on a rank",
    ),
    "attention in chunks: recompute": (
        Layout(),
        {"attention_chunk_tokens": 512},
        "recompute none with chunks of 512 tokens",
    ),
    "attention in chunks: subsequences": (Layout(subsequences=2), CHUNKS, "2 with chunks of 512 tokens"),
    "attention in chunks: schedule": (
        Layout(pp=2, schedule="zero-bubble"),
        CHUNKS,
        "zero-bubble with chunks of 512 tokens",
    ),
    "attention in chunks: cp_exchange": (Layout(cp_exchange="rsa"), CHUNKS, "rsa with chunks of 512 tokens"),
    "attention in chunks: memory_policy": (
        Layout(cp=2),
        {"memory_policy": "eager", **CHUNKS},
        "eager with chunks of 512 tokens",
    ),
    "bidirectional model: cp_exchange": (
        Layout(cp=2, cp_exchange="all_gather"),
        {"model": BIDIRECTIONAL},
        "all_gather with a bidirectional model",
    ),
    "bidirectional model: subsequences": (
        Layout(subsequences=2),
        {"model": BIDIRECTIONAL},
        "2 with a bidirectional model",
    ),
    "bidirectional model: attention": (
        Layout(),
        {"model": BIDIRECTIONAL, "kernels": PLAIN},
        "plain with a bidirectional model",
    ),
    "offload window: subsequences": (
        Layout(),
        {"offload_window": 1, "swapped_tokens": 128},
        "1 with 1 subsequences, 128 tokens swapped",
    ),
    "rounding buffers: recompute": (Layout(), {"rounding_buffers": True}, "true with recompute none"),
    "rounding buffers: offload_window": (
        Layout(subsequences=2),
        {"rounding_buffers": True, "recompute": "full", "swapped_tokens": 2048, "offload_window": 1},
        "1 with rounding buffers",
    ),
    "subsequences with cp: multiplexed": (multiplexed(cp=2), {}, "true with 8 subsequences and cp 2"),
    "subsequences with cp: memory_policy": (
        Layout(subsequences=2, cp=2),
        {"memory_policy": "eager"},
        "eager with 2 subsequences and cp 2",
    ),
    "subsequences: attention": (Layout(subsequences=2), {"kernels": PLAIN}, "plain with 2 subsequences"),
    "selective recompute: swapped_tokens": (
        Layout(),
        {"recompute": "selective", "swapped_tokens": 1024},
        "alpha 0.5 (1024 tokens) with recompute selective",
    ),
    "layers of full recompute: recompute": (Layout(), {"recompute_layers": "first-2"}, "first-2 with recompute none"),
    "layers of full recompute: swapped_tokens": (
        Layout(),
        {"swapped_tokens": 128, **EVERY_SECOND},
        "128 with recompute_layers every-2",
    ),
    "layers of full recompute: mlp_chunk_tokens": (
        Layout(),
        {"mlp_chunk_tokens": 512, **EVERY_SECOND},
        "512 with recompute_layers every-2",
    ),
    "layers of full recompute: attention_chunk_tokens": (
        Layout(),
        {**CHUNKS, **EVERY_SECOND},
        "512 with recompute_layers every-2",
    ),
    "layers of full recompute: rounding_buffers": (
        Layout(),
        {"rounding_buffers": True, **EVERY_SECOND},
        "true with recompute_layers every-2",
    ),
    "layers of full recompute: early_stop": (
        Layout(),
        {"early_stop": True, "recompute": "full", "recompute_layers": "groups-2"},
        "true with recompute_layers groups-2",
    ),
    "layers of full recompute: metp": (Layout(metp=2), EVERY_SECOND, "2 with recompute_layers every-2"),
    "layers of full recompute: subsequences": (
        Layout(subsequences=2),
        EVERY_SECOND,
        "2 with recompute_layers every-2",
    ),
    "layers of full recompute: zero": (
        Layout(dp=2, zero=3),
        {"global_batch": 2, "recompute": "full", "recompute_layers": "groups-2"},
        "3 with recompute_layers groups-2",
    ),
    "row-wise recompute: metp": (Layout(metp=2), {"recompute": "rowwise"}, "rowwise with METP"),
    "row-wise recompute: multiplexed": (
        multiplexed(pp=5),
        {"recompute": "rowwise", "seq_tokens": 4096},
        "true with recompute rowwise",
    ),
    "row-wise recompute: schedule": (
        Layout(pp=2, schedule="zero-bubble"),
        {"recompute": "rowwise"},
        "zero-bubble with recompute rowwise",
    ),
    "row-wise recompute: mlp_rebuild": (
        Layout(),
        {"recompute": "rowwise", "mlp_chunk_tokens": 512, "mlp_rebuild": "twice"},
        "twice with recompute rowwise",
    ),
    "row-wise recompute: attention": (
        Layout(),
        {"recompute": "rowwise", "kernels": PLAIN},
        "plain with recompute rowwise",
    ),
    "MLP in row blocks: recompute": (Layout(), {"mlp_chunk_tokens": 512}, "512 with recompute none"),
    "FlashAttention 1: head_dim": (
        Layout(),
        {"model": WIDE_HEADS, "kernels": Kernels(attention="flash1")},
        "flash1 with heads of 256",
    ),
    "plain attention: cp": (Layout(cp=2), {"kernels": PLAIN}, "2 with plain attention"),
    "plain attention: swapped_tokens": (
        Layout(),
        {"kernels": PLAIN, "swapped_tokens": 128},
        "128 with recompute none",
    ),
    "plain attention: recompute": (
        Layout(),
        {"kernels": PLAIN, "recompute": "operators"},
        "operators with plain attention",
    ),
    "replay_allocator: memory_policy": (
        Layout(),
        {"replay_allocator": True, "memory_policy": "caching"},
        "--replay-allocator with memory policy caching",
    ),
    "modules: memory_policy": (
        Layout(),
        {"modules": "huggingface", "recompute": "full", "memory_policy": "caching"},
        "huggingface with memory policy caching",
    ),
    "modules: recompute": (
        Layout(),
        {"modules": "huggingface", "memory_policy": "eager", "recompute": "operators"},
        "huggingface with recompute operators",
    ),
    "saved tensors of modules: family": (
        Layout(),
        SAVED | {"model": GPT},
        "gpt with modules huggingface, recompute none",
    ),
    "saved tensors of modules: tp": (Layout(tp=2), SAVED, "2 with modules huggingface, recompute none"),
    "saved tensors of modules: ulysses": (Layout(ulysses=2), SAVED, "2 with modules huggingface, recompute none"),
    "saved tensors of modules: pp": (Layout(pp=2), SAVED, "2 with modules huggingface, recompute none"),
    "saved tensors of modules: subsequences": (
        Layout(subsequences=2),
        SAVED,
        "2 with modules huggingface, recompute none",
    ),
    "saved tensors of modules: cp_exchange": (
        Layout(cp=2, cp_exchange="rsa"),
        SAVED,
        "rsa with modules huggingface, recompute none",
    ),
    "saved tensors of modules: attention": (
        Layout(),
        SAVED | {"kernels": PLAIN},
        "plain with modules huggingface, recompute none",
    ),
    "saved tensors of modules: micro_batch": (
        Layout(),
        SAVED | {"recompute": "tokenwise", "micro_batch": 2, "global_batch": 2},
        "2 with modules huggingface, recompute tokenwise",
    ),
    "saved tensors of modules: swapped_tokens": (
        Layout(),
        SAVED | {"swapped_tokens": 1024},
        "1024 of 2048 tokens with recompute none",
    ),
    "streams: memory_policy": (
        Layout(),
        {"streams": "events", "memory_policy": "caching"},
        "events with memory policy caching",
    ),
    "grad_sums: memory_policy": (
        Layout(),
        {"grad_sums": "autocast", "memory_policy": "caching"},
        "autocast with memory policy caching",
    ),
    "autocast: zero": (
        Layout(dp=2, zero=3),
        {"grad_sums": "autocast", "memory_policy": "eager"},
        "autocast with ZeRO 3",
    ),
    "autocast: states": (
        Layout(),
        {"grad_sums": "autocast", "memory_policy": "eager", "states": "pure-bf16"},
        "autocast with states pure-bf16 of bf16",
    ),
    "sharding: memory_policy": (
        Layout(dp=2, zero=3),
        {"sharding": "fsdp2", "memory_policy": "caching"},
        "fsdp2 with memory policy caching",
    ),
    "reduce_dtype: sharding": (
        Layout(dp=2, zero=3),
        {"reduce_dtype": "bf16", "memory_policy": "eager"},
        "bf16 with sharding memo",
    ),
    "allocator_limit_gib: memory_policy": (
        Layout(),
        {"allocator_limit_gib": 40, "memory_policy": "planned"},
        "40 GiB with memory policy planned",
    ),
    "cuda_graphs: memory_policy": (
        Layout(),
        {"cuda_graphs": True, "memory_policy": "planned"},
        "--cuda-graphs with memory policy planned",
    ),
    "plain attention: memory_policy": (
        Layout(),
        {"kernels": PLAIN, "memory_policy": "planned"},
        "planned with plain attention",
    ),
}
"""Of each rule: a layout and other decisions that break it and no other rule, and what the message says was got."""


def decided(rule: Rule) -> Decisions:
    layout, changes, _ = BREAKS[rule.name]
    # Nothing but the arena's own rule is about planned memory.
    return Decisions(**({"model": GPT, "layout": layout, "seq_tokens": 2048, "memory_policy": "caching"} | changes))


def test_every_rule_has_a_name_of_its_own_and_a_case() -> None:
    names = [rule.name for rule in (*RULES, *ARENA_RULES)]
    assert sorted(names) == sorted(BREAKS)


@pytest.mark.parametrize("rule", [*RULES, *ARENA_RULES], ids=lambda rule: rule.name)
def test_decisions_break_one_rule_and_are_told_so(rule: Rule) -> None:
    decisions = decided(rule)
    assert [each.name for each in (*RULES, *ARENA_RULES) if each.breaks(decisions)] == [rule.name]
    error = rule.refusal(decisions)
    assert (error.where, error.got, error.wanted, error.hint) == (
        rule.where,
        BREAKS[rule.name][2],
        rule.wanted,
        rule.hint,
    )
    assert all((error.what, error.where, error.wanted, error.hint))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_no_program_is_written_for_them(rule: Rule) -> None:
    with pytest.raises(Infeasible) as refused:
        lower(decided(rule))
    assert refused.value.message() == rule.refusal(decided(rule)).message()


def test_the_first_broken_rule_is_told() -> None:
    both = Decisions(model=GPT, layout=Layout(metp=2, tp=2, cp=2), seq_tokens=2048)
    with pytest.raises(Infeasible) as refused:
        check_compatible(both)
    assert refused.value.where == "layout.tp"


@pytest.mark.parametrize(
    "layout",
    [
        Layout(),
        Layout(tp=2, cp=2, sequence_parallel=True, cp_exchange="all_gather"),
        Layout(metp=2, pp=5, schedule="interleaved", virtual_stages=2),
        Layout(pp=2, schedule="zero-bubble", zero=1, dp=2),
        multiplexed(),
        chunked(cp=2, pp=2, schedule="zero-bubble"),
        Layout(ulysses=2, zero=3),
    ],
)
def test_layouts_that_go_together_are_not_refused(layout: Layout) -> None:
    check_compatible(Decisions(model=GPT, layout=layout, seq_tokens=2048, global_batch=layout.dp))
