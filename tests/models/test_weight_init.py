"""Weights drawn block by block: any rank's part is that part of the whole."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fp8cfg.models.weight_init import BLOCK, block_seed, draw_normal


def drawn(
    rows: int,
    columns: int,
    whole: int | None = None,
    first: tuple[int, int] = (0, 0),
    seed: int = 1,
    name: str = "w",
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    out = torch.full((rows, columns), torch.nan, dtype=dtype)
    draw_normal(out, 0.5, seed, name, whole, first)
    return out


@pytest.mark.parametrize(
    ("rows", "columns"), [(300, 700), (3, BLOCK + 10), (5, 4), (BLOCK // 64 * 2, 64)]
)
def test_a_part_is_that_part_of_the_whole(rows: int, columns: int) -> None:
    whole = drawn(rows, columns)
    assert whole.isfinite().all()
    for at, stop in ((0, 1), (1, rows), (rows // 2, rows), (rows - 1, rows), (2, 2)):
        for left, right in ((0, columns), (1, columns - 1)):
            assert torch.equal(
                drawn(stop - at, right - left, columns, (at, left)), whole[at:stop, left:right]
            )
    assert torch.equal(drawn(rows, columns, dtype=torch.bfloat16), whole.bfloat16())


def test_seed_name_and_block_each_give_other_numbers() -> None:
    rows = BLOCK // 64
    whole = drawn(4 * rows, 64)
    assert whole.mean().abs() < 0.005 and whole.std().item() == pytest.approx(0.5, rel=0.01)
    assert (
        torch.corrcoef(torch.stack([b.flatten() for b in whole.split(rows)]))
        .fill_diagonal_(0)
        .abs()
        .max()
        < 0.02
    )
    for other in (drawn(4 * rows, 64, seed=2), drawn(4 * rows, 64, name="v")):
        assert not (other == whole).all(1).any()
    assert (
        len(
            {
                block_seed(seed, name, block)
                for seed in range(9)
                for name in "vw"
                for block in range(9)
            }
        )
        == 162
    )
