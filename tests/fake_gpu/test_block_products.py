"""Products with 1x128 weights of few outputs on Hopper: strides of their scales that torch 2.11 takes as well; values are those of
emulation.

Runs where torch has a CUDA device of compute capability 9.x, also a fake one (tools/fake_gpu), where compiled code has no
values."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip(
        "no CUDA device of compute capability 9.x, not even a fake one", allow_module_level=True
    )

from fp8cfg.numerics import E4M3, Scaling
from tests.support.layer_passes import check_passes


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("fp8_params", [False, True])
@pytest.mark.parametrize("tokens", [256, 100])
@pytest.mark.parametrize("outputs", [128, 64, 16])
def test_few_outputs(outputs: int, tokens: int, fp8_params: bool, compiled: bool) -> None:
    check_passes(
        Scaling("block", backward=E4M3, power_2_scales=True),
        tokens,
        256,
        outputs,
        torch.bfloat16,
        fp8_params,
        compiled,
    )
