"""The program that exports to accelerate and DeepSpeed start: transformers' Trainer on sequences of one length."""

TRAIN = "train.py"

TRAIN_TEXT = '''"""Trains a causal language model on sequences of one length; options: TrainingArguments' and Job's."""

import os
from dataclasses import dataclass

import torch
from accelerate import ParallelismConfig
from accelerate.utils import DeepSpeedSequenceParallelConfig
from transformers import AutoConfig, AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments


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
    Trainer(model=model, args=args, train_dataset=data).train()


if __name__ == "__main__":
    main()
'''
