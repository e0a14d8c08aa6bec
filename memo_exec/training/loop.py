"""The training loop: plays optimizer steps over the global batch, reports their figures, and saves checkpoints.

    step n: batch(seed, n) -> micro-batches -> the program, once -> loss, gradient norm -> one line, maybe a checkpoint

The loss is the sum over counted targets divided by their number in the whole global batch. A step depends only on its
number and the states, so a run that was killed and resumed has the same losses.

Every rank draws the whole global batch and takes its own part: its data-parallel share of the sequences, and of these
the tokens of its rows. After each step the ranks exchange their times, so a step ends for all with the slowest rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path

import torch

from memo_exec.distributed.world import World
from memo_exec.interpreter.interpreter import Interpreter
from memo_exec.interpreter.record import StepRecord
from memo_exec.kernels import StepScalars
from memo_exec.kernels.call import Ends
from memo_exec.kernels.documents import check_room, squares
from memo_exec.training import checkpoint, run_folder
from memo_exec.training.conversations import Conversations
from memo_exec.training.dataset import IGNORED_LABEL, Batch, Dataset
from memo_exec.training.expert_overflow import Overflow
from memo_exec.training.hyperparameters import Hyperparameters
from memo_exec.training.rollouts import MadeUp
from memo_sim.contract.errors import UsageError
from memo_sim.contract.plan import Plan
from memo_sim.contract.units import GIB, format_percent, format_seconds
from memo_sim.program.ir.instruction import Lane
from memo_sim.program.layout.token_order import Run, token_runs

MOST_RECORDS = 32
"""How many records are kept for the comparison: those of the last steps."""


@dataclass(frozen=True)
class StepFigure:
    """The figures of one step that a run prints in one line."""

    step: int
    loss: float
    grad_norm: float
    tokens_per_s: float
    mfu: float | None
    device_bytes: int
    stalls_s: float

    def line(self) -> str:
        """Return the line that a run prints for this step."""
        mfu = "-" if self.mfu is None else format_percent(self.mfu)
        return (
            f"step {self.step:>5}  loss {self.loss:.4f}  grad norm {self.grad_norm:.3f}  "
            f"{self.tokens_per_s:,.0f} tokens/s  MFU {mfu}  device {self.device_bytes / GIB:.3f} GiB  "
            f"stalls {format_seconds(self.stalls_s)}"
        )


@dataclass
class Training:
    """A training run: its plan, its progress, and the losses and records so far."""

    plan: Plan
    interpreter: Interpreter
    dataset: Dataset | Conversations | MadeUp
    hyperparameters: Hyperparameters
    seed: int
    step: int = 0
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    records: deque[StepRecord] = field(default_factory=lambda: deque(maxlen=MOST_RECORDS))
    sequences: int = 0
    """Packed sequences that this process has drawn."""
    pieces: int = 0
    """Documents in all of them."""
    attended: int = 0
    """Sum of the squares of their tokens."""
    asked: int = 0
    """The number of the signal that this process received; 0 for none."""
    stopped_by: int = 0
    """The number of the signal that any rank received; it ends the loop after the current step. 0 for none."""
    world: World = field(default_factory=World)
    """The ranks of this run."""
    run_id: str = field(default_factory=run_folder.new_run)
    """The identifier that the checkpoints of this run and of its resumed runs share."""
    base: str = ""
    """Fingerprint of the frozen weights (``checkpoint.base_of``)."""
    last_saved: Path | None = None
    """The newest good checkpoint: written by this run, or resumed from."""
    overflow: Overflow | None = None
    """Dispatched rows beyond the capacity of experts, since the run began or was resumed."""
    times_s: deque[list[float]] = field(default_factory=lambda: deque(maxlen=MOST_RECORDS))
    """For every record: the step's time on each rank in seconds."""

    def __post_init__(self) -> None:
        names = self.interpreter.program.walk()
        self._computes = frozenset(name for name, instruction in names if instruction.lane is Lane.COMPUTE)

    def run(
        self,
        steps: int,
        *,
        save: Path | None = None,
        save_every: int = 10,
        tell: Callable[[StepFigure], None] = lambda figure: None,
    ) -> None:
        """Play steps until ``steps`` have ended in total, including those before a resume.

        Raises:
            UsageError: when the loss, the gradient norm or a state becomes NaN or infinite.
            Infeasible: when a step has more rows for a rank's experts than the plan has places for, and the plan
                refuses such steps.
        """
        saved = self.step
        self.stopped_by = int(max(asked for (asked,) in self.world.numbers(self.asked)))
        while self.step < steps and not self.stopped_by:
            tell(self.play_step())
            if save is not None and self.step - saved >= save_every:
                self.save(save)
                saved = self.step
        if save is not None and self.step > saved:
            self.save(save)

    def play_step(self) -> StepFigure:
        """Play the next step and return its figures."""
        decisions = self.plan.decisions
        number = self.step + 1
        batch = self.dataset.batch(self.seed, number, decisions.global_batch, decisions.seq_tokens)
        check_room(decisions, batch.documents, self.dataset.path)
        self.sequences += len(batch.documents)
        self.pieces += sum(map(len, batch.documents))
        self.attended += squares(batch.documents)
        scalars, documents = self._scalars(number, batch), self._documents(batch)
        record = self.interpreter.run_step(self._micro_batches(batch, documents), scalars, documents)
        overflow = self.interpreter.context.overflow.tolist() if decisions.layout.ep > 1 else ()
        by_rank = self.world.numbers(self.asked, record.step_s, record.peak_device_bytes, *overflow)
        self.overflow = Overflow.of([counts for _, _, _, *counts in by_rank], decisions)
        if decisions.expert_overflow == "refuse" and self.overflow is not None and self.overflow.dropped:
            raise self.overflow.refusal(number, self._after_refusal())
        if not (isfinite(record.loss) and isfinite(record.grad_norm)):
            raise UsageError(
                "the loss or the gradient norm is not a number any more",
                where=f"step {number}",
                got=f"loss {record.loss}, grad norm {record.grad_norm}",
                hint=self._after_bad_step(),
            )
        self.step = number
        self.losses.append(record.loss)
        self.grad_norms.append(record.grad_norm)
        self.records.append(record)
        self.stopped_by = int(max(asked for asked, *_ in by_rank))
        self.times_s.append([seconds for _, seconds, *_ in by_rank])
        return self._figure(record, max(self.times_s[-1]), int(max(peak for _, _, peak, *_ in by_rank)))

    def _after_refusal(self) -> str:
        """Say where a run can go on whose last step was not applied."""
        saved = f"; the last good checkpoint is {self.last_saved}" if self.last_saved is not None else ""
        return f"--expert-overflow drop counts rows beyond the capacity as zero{saved}"

    def _after_bad_step(self) -> str:
        saved = f"the last good checkpoint is {self.last_saved}; " if self.last_saved is not None else ""
        return f"{saved}use a lower --lr, or more --warmup-steps"

    def _micro_batches(self, batch: Batch, documents: Sequence[Ends]) -> list[tuple[torch.Tensor, ...]]:
        """Return this rank's micro-batches: its sequences of the global batch, in order, and of these its tokens."""
        decisions, context = self.plan.decisions, self.interpreter.context
        shares, share, size = decisions.layout.dp, context.mesh.at("dp"), decisions.micro_batch
        every = documents or [()] * decisions.micro_batches
        tokens = [tokens_of(token_runs(decisions, context.rank, ends)) for ends in every]
        parts = []
        for whole in (batch.ids, batch.labels, *(() if batch.rollout is None else (batch.rollout,))):
            own = torch.split(torch.chunk(torch.from_numpy(whole), shares)[share], size)
            parts.append([sequences.flatten(0, 1)[mine] for sequences, mine in zip(own, tokens, strict=True)])
        return list(zip(*parts, strict=True))

    def _documents(self, batch: Batch) -> list[Ends]:
        """Return where the documents of this rank's micro-batches end; all ranks of a sequence have the same."""
        size, count = self.plan.decisions.micro_batch, self.plan.decisions.micro_batches
        first = self.interpreter.context.mesh.at("dp") * count
        numbers = range(first, first + count) if batch.documents else ()
        return [batch.documents[n * size : (n + 1) * size] for n in numbers]

    def _scalars(self, step: int, batch: Batch) -> StepScalars:
        chosen = self.hyperparameters
        targets = int((batch.labels != IGNORED_LABEL).sum())
        return StepScalars(
            lr=chosen.learning_rate_at(step),
            step=step,
            loss_scale=1.0 / targets,
            beta1=chosen.beta1,
            beta2=chosen.beta2,
            eps=chosen.epsilon,
            weight_decay=chosen.weight_decay,
            clip=chosen.clip or None,
            clip_ratio=chosen.clip_ratio,
            clip_ratio_high=chosen.clip_ratio if chosen.clip_ratio_high is None else chosen.clip_ratio_high,
            kl_weight=chosen.kl_weight,
        )

    def _figure(self, record: StepRecord, step_s: float, device_bytes: int) -> StepFigure:
        decisions = self.plan.decisions
        tokens = decisions.global_batch * decisions.seq_tokens
        peak = peak_flops(self.plan)
        flops = decisions.step_flops
        return StepFigure(
            step=self.step,
            loss=record.loss,
            grad_norm=record.grad_norm,
            tokens_per_s=tokens / step_s,
            mfu=flops / (step_s * peak * decisions.layout.devices) if peak else None,
            device_bytes=device_bytes,
            stalls_s=sum(wait.seconds for wait in record.waits if wait.instruction in self._computes),
        )

    def median_record(self, warm_ups: int) -> tuple[StepRecord, list[float], int]:
        """Return the median step after the warm-ups: its record, its time on each rank, and the number of steps.

        Steps are ordered by the slowest rank's time, so every rank returns the same step.
        """
        chosen = list(zip(self.records, self.times_s, strict=True))
        if len(chosen) < MOST_RECORDS:  # otherwise the first records are no longer kept
            chosen = chosen[min(warm_ups, (len(chosen) - 1) // 2) :]
        ordered = sorted(chosen, key=lambda played: max(played[1]))
        record, times_s = ordered[(len(ordered) - 1) // 2]
        return record, times_s, len(ordered)

    def save(self, directory: Path) -> Path:
        """Write a checkpoint into ``directory`` and return its path.

        Raises:
            UsageError: when it cannot be written there, or the state has a NaN or an infinity.
            CannotRun: when another rank has stopped.
        """
        try:
            self.last_saved = checkpoint.save(directory, self._state(), self.interpreter, self.world)
        except checkpoint.NotFinite as error:
            raise UsageError(error.what, where=error.where, got=error.got, hint=self._after_bad_step()) from None
        return self.last_saved

    def _state(self) -> checkpoint.RunState:
        decisions = self.plan.decisions
        return checkpoint.RunState(
            step=self.step,
            model=decisions.model,
            dtype=decisions.dtype,
            states=decisions.states,
            seq_tokens=decisions.seq_tokens,
            global_batch=decisions.global_batch,
            hyperparameters=self.hyperparameters,
            data=checkpoint.DataPosition(file=str(self.dataset.path), sha256=self.dataset.sha256, seed=self.seed),
            losses=self.losses,
            grad_norms=self.grad_norms,
            program_sha256=self.plan.program_sha256,
            run=self.run_id,
            adapters=decisions.adapters,
            base=self.base,
        )

    def restore(self, saved: Path, run: checkpoint.RunState) -> None:
        """Continue from a checkpoint that ``checkpoint.check`` has accepted.

        Raises:
            BadInput: when its tensors cannot be read, or are not those of the plan.
        """
        checkpoint.check_files(saved, run, self.world)
        checkpoint.load_state(saved, self.interpreter, self.world)
        self.last_saved, self.step = saved, run.step
        self.run_id = run.run or self.run_id
        self.losses, self.grad_norms = list(run.losses), list(run.grad_norms)


def tokens_of(runs: Iterable[Run]) -> torch.Tensor:
    """Return the tokens of a micro-batch that lie in runs of rows, in the order of rows."""
    return torch.cat([torch.arange(run.token, run.token + run.tokens) for run in runs])


def peak_flops(plan: Plan) -> float | None:
    """Return the peak FLOP/s of one device (from the profile) that the predicted MFU refers to.

    None when the plan has no prediction.
    """
    predicted, decisions = plan.prediction, plan.decisions
    if predicted is None or not predicted.mfu or not predicted.step_s:
        return None
    flops = decisions.step_flops
    return flops / (predicted.mfu * predicted.step_s * decisions.layout.devices)
