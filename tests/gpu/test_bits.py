"""On a GPU: the Triton kernels write the bytes of plain torch code on the CPU, and Transformer Engine's quantizers those of the kernels."""

from __future__ import annotations

import warnings

import pytest

import fp8cfg
from fp8cfg.backends.choice import backend_violations
from fp8cfg.planning.hardware import find_hardware
from tools.gpu_rows import kernel_bits, te_bits

pytestmark = pytest.mark.gpu
PRESETS = {
    "delayed": "bf16_fp8",
    "current": "bf16_fp8_current",
    "block": "bf16_fp8_block",
    "mxfp8": "bf16_mxfp8",
    "nvfp4": "bf16_nvfp4",
}


@pytest.mark.parametrize("scaling", kernel_bits.SCALINGS)
def test_kernels_write_the_bytes_of_plain_code(scaling: str) -> None:
    if why := kernel_bits.refused("cuda"):
        pytest.skip(why)
    kernel_bits.kernel_bits(scaling).verdict()


@pytest.mark.parametrize("scaling", te_bits.SCALINGS)
def test_transformer_engine_writes_the_same_bytes(scaling: str) -> None:
    precision = fp8cfg.compose([f"precision={PRESETS[scaling]}", "backend=te"]).precision
    if why := "; ".join(
        str(found) for found in backend_violations("te", precision, find_hardware("cuda"))
    ):
        pytest.skip(why)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        te_bits.te_bits(scaling).verdict()
