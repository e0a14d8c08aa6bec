"""The program that exports to accelerate and DeepSpeed start: transformers' Trainer on sequences of one length."""

TRAIN = "train.py"

TRAIN_TEXT = '''"""Trains a causal language model on sequences of one length; options: TrainingArguments' and Job's."""

import os
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from accelerate import ParallelismConfig
from accelerate.utils import DeepSpeedSequenceParallelConfig
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments
from transformers.modeling_outputs import CausalLMOutput


@dataclass
class Job:
    model_name_or_path: str
    max_length: int
    dtype: str = "float32"
    attn_implementation: str = "sdpa"
    tokens_file: str | None = None  # a file of torch.save with one long row of token ids; random ones unless given
    from_config: bool = False  # random weights of the shape in model_name_or_path/config.json
    sequence_parallel_size: int = 1  # DeepSpeed's Ulysses, as in ds_config.json
    tp_size: int = 1  # tensor parallelism of transformers, as in accelerate.yaml
    loss_tokens: int = 0  # tokens of a tile of the loss, whose logits alone exist; 0: the logits of all tokens
    mlp_tokens: int = 0  # tokens of a tile of DeepSpeed's TiledMLP; 0: the MLP of all tokens at once


class Tokens(torch.utils.data.Dataset):
    """Rows of ``length`` tokens."""

    def __init__(self, path, length, vocab):
        self.tokens = torch.load(path) if path else None
        self.length, self.vocab = length, vocab

    def __len__(self):
        return 1_000_000 if self.tokens is None else len(self.tokens) // self.length

    def __getitem__(self, row):
        if self.tokens is None:
            ids = torch.randint(self.vocab, (self.length,), generator=torch.Generator().manual_seed(row))
        else:
            ids = self.tokens[row * self.length : (row + 1) * self.length]
        return {"input_ids": ids, "labels": ids, "position_ids": torch.arange(self.length)}


def tile_mlps(model, tokens):
    """Let every MLP run in DeepSpeed's tiles of at most ``tokens`` tokens."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP

    for kind in {type(module) for module in model.modules() if type(module).__name__.endswith("MLP")}:

        def tiled(self, x, whole=kind.forward):
            rows = x.reshape(-1, x.shape[-1])
            return TiledMLP.apply(whole, self, rows, -(-len(rows) // tokens), list(self.parameters())).view(x.shape)

        kind.forward = tiled


def tile_loss(model, tokens, share=None):
    """Compute the loss in tiles of at most ``tokens`` tokens.

    ``share``: the part that the loss of one token has in the step's, for DeepSpeed's tiles, which compute gradients at
    once. Without it, each tile's logits are computed again in backward.
    """

    def tile(self, x, y):
        return F.cross_entropy(self.lm_head(x).float(), y, reduction="sum") * (share or 1.0)

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, labels=None, shift_labels=None,
                num_items_in_batch=None, **rest):
        hidden = self.base_model(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids
        ).last_hidden_state
        if shift_labels is None:
            shift_labels = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
        tiles = -(-shift_labels.numel() // tokens)
        if share is not None:
            from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss

            head = list(self.lm_head.parameters())
            total = TiledFusedLogitsLoss.apply(tile, self, hidden, shift_labels, None, tiles, head, "sum")
            return CausalLMOutput(loss=total)
        pairs = zip(hidden.flatten(0, 1).chunk(tiles), shift_labels.flatten().chunk(tiles))
        total = sum(checkpoint(tile, self, x, y, use_reentrant=False) for x, y in pairs)
        if num_items_in_batch is None:
            num_items_in_batch = (shift_labels != -100).sum()
        return CausalLMOutput(loss=total / num_items_in_batch)

    type(model).forward = forward


class Scaled(Trainer):
    """Takes a loss that is scaled already: DeepSpeed's tiles have computed gradients with it."""

    loss_is_scaled_for_ga = True

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


def main():
    job, args = HfArgumentParser((Job, TrainingArguments)).parse_args_into_dataclasses()
    options = {"dtype": getattr(torch, job.dtype), "attn_implementation": job.attn_implementation}
    if job.sequence_parallel_size > 1:
        args.parallelism_config = ParallelismConfig(
            sp_backend="deepspeed",
            sp_size=job.sequence_parallel_size,
            dp_shard_size=int(os.environ["WORLD_SIZE"]) // job.sequence_parallel_size,
            sp_handler=DeepSpeedSequenceParallelConfig(
                sp_seq_length=job.max_length,
                sp_seq_length_is_variable=False,
                sp_attn_implementation=job.attn_implementation,
            ),
        )
    if job.tp_size > 1:
        from transformers.distributed import DistributedConfig

        options["distributed_config"] = DistributedConfig(tp_size=job.tp_size)
    if job.from_config:
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(job.model_name_or_path), **options)
    else:
        model = AutoModelForCausalLM.from_pretrained(job.model_name_or_path, **options)
    model.config.use_cache = False
    data = Tokens(job.tokens_file, job.max_length, model.config.vocab_size)
    if job.mlp_tokens:
        tile_mlps(model, job.mlp_tokens)
    trainer = Trainer
    if job.loss_tokens and args.deepspeed:
        # DeepSpeed averages over all ranks, so a token has the same part in the loss of each.
        rows = args.per_device_train_batch_size * (job.max_length - 1) / job.sequence_parallel_size
        tile_loss(model, job.loss_tokens, 1 / (rows * args.gradient_accumulation_steps))
        trainer = Scaled
    elif job.loss_tokens:
        tile_loss(model, job.loss_tokens)
    trainer(model=model, args=args, train_dataset=data).train()


if __name__ == "__main__":
    main()
'''
