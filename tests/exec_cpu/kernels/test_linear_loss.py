"""The loss with the classifier's product inside has autograd's loss and gradients, in torch's operators."""

from __future__ import annotations

import pytest
import torch

from memo_exec.kernels import linear, linear_loss
from memo_sim.program.operators import workspaces as table
from tests.exec_cpu.kernels.linear_loss_comparison import Trial

TILES = [(97, 1), (64, 2), (97, 4), (5, 4), (3, 8)]
"""Vocabulary and ranks of tp; of the last two, some ranks have columns beyond the vocabulary alone."""


@pytest.fixture(autouse=True)
def _tiles_of_16_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "LOSS_COLUMNS", 20)
    monkeypatch.setattr(table, "LOSS_COLUMNS_GRANULE", 8)
    monkeypatch.setattr(linear, "NORM_ROWS", 40)
    for module in (table, linear_loss):
        monkeypatch.setattr(module, "LOSS_ROWS", 24)
        monkeypatch.setattr(module, "NORM_ROWS", 40)


@pytest.mark.parametrize("size", [1.0, 100.0])
@pytest.mark.parametrize(("vocab", "tp"), TILES)
def test_fp32_is_autograds(vocab: int, tp: int, size: float) -> None:
    """With logits in the hundreds, exponentials overflow unless the largest logit is subtracted.

    Their own rounding is then 1e-5.
    """
    assert max(Trial("torch", vocab, tp, torch.float32, size).errors().values()) < 1e-5 * size**0.5


@pytest.mark.parametrize(("vocab", "tp"), TILES)
def test_bf16_is_off_by_its_rounding(vocab: int, tp: int) -> None:
    """Logits, their gradient and the products of a CPU are rounded to bf16; sums over tiles are in fp32."""
    found = Trial("torch", vocab, tp, torch.bfloat16).errors()
    assert max(found.values()) < 2**-6, found


def test_tiles_cover_the_vocabulary() -> None:
    for vocab in (1, 8, 20, 21, 97, 160):
        tiles = table.loss_tiles(vocab)
        assert [first for first, _ in tiles] == [n * tiles[0][1] for n in range(len(tiles))]
        assert sum(columns for _, columns in tiles) == vocab
        assert tiles[0][1] <= 24
