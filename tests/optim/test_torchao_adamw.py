"""The low-bit AdamW beside torchao's AdamWFp8, which always compiles its step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fp8cfg.numerics.codecs import Codec, get_codec
from fp8cfg.numerics.formats import E4M3
from fp8cfg.optim.low_bit.adam import LowBitAdamW
from fp8cfg.optim.low_bit.columns import Columns, named_columns

SHAPE = (64, 128)
HYPER: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def pair(columns: Columns, block: int) -> tuple[LowBitAdamW, nn.Parameter, Any, nn.Parameter]:
    optim = pytest.importorskip("torchao.optim")
    start = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)) * 0.02
    mine, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    return (
        LowBitAdamW([("w", mine)], columns=columns, **HYPER),
        mine,
        optim.AdamWFp8([theirs], block_size=block, **HYPER),
        theirs,
    )


def step(
    mine: LowBitAdamW, my: nn.Parameter, theirs: Any, their: nn.Parameter, number: int
) -> None:
    generator = torch.Generator().manual_seed(number)
    my.grad = (
        torch.randn(SHAPE, generator=generator)
        * 1e-3
        * torch.exp(torch.randn(SHAPE, generator=generator))
    )
    their.grad = my.grad.clone()
    mine.step()
    theirs.step()


@pytest.mark.parametrize("block", [128, 256])
def test_torchaos_codec_gives_torchaos_codes(block: int) -> None:
    """Both moments on a linear grid, as torchao has them: the same codes and scales, weights to a few units of float32."""
    linear = Codec(E4M3, "exact", block=block)
    mine, my, theirs, their = pair(Columns(exp_avg=linear, exp_avg_sq=linear), block)
    for number in range(10):
        step(mine, my, theirs, their, number)
        state, saved = mine.state[my], theirs.state[their]
        for moment in ("exp_avg", "exp_avg_sq"):
            codes, scale = state[moment]
            same = (
                (codes.view(torch.uint8).view(-1) == saved[moment].codes.view(torch.uint8).view(-1))
                .float()
                .mean()
            )
            assert same > 0.999, (number, moment, same)
            assert torch.allclose(scale, saved[moment].scale, rtol=1e-6, atol=0)
    assert torch.allclose(my, their, rtol=0, atol=2e-5)


def test_the_preset_takes_torchaos_first_step() -> None:
    """fp8_block's second moment is the square root, which is what differs from the second step on: a code that is 0 in torchao's
    is not 0 here."""
    mine, my, theirs, their = pair(named_columns(exp_avg="fp8_block", exp_avg_sq="fp8_block"), 128)
    step(mine, my, theirs, their, 0)
    assert torch.allclose(my, their, rtol=0, atol=1e-8)
    first, second = mine.state[my]["exp_avg"], mine.state[my]["exp_avg_sq"]
    saved = theirs.state[their]
    assert torch.equal(
        first[0].view(torch.uint8).view(-1), saved["exp_avg"].codes.view(torch.uint8).view(-1)
    )
    v, linear = (
        get_codec("fp8_block", second_moment=True).decode(second),
        saved["exp_avg_sq"].dequantize().view(SHAPE),
    )
    assert (linear == 0).float().mean() > 0.01 and not (v == 0).any()
