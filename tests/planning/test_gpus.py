"""The table of GPUs."""

from __future__ import annotations

import pytest

import fp8cfg
from fp8cfg.backends.choice import FP8_CAPABILITY
from fp8cfg.planning.hardware import GPU, GPUS, find_gpu


@pytest.mark.parametrize("gpu", GPUS.values(), ids=lambda g: g.name)
def test_figures_agree_with_one_another(gpu: GPU) -> None:
    assert (gpu.fp8 is not None) == (gpu.capability >= FP8_CAPABILITY)
    assert gpu.fp8 is None or gpu.fp8 == pytest.approx(2 * gpu.bf16, rel=0.02)
    assert 16 << 30 < gpu.memory < 300 << 30 and gpu.source


def test_names() -> None:
    assert find_gpu("H100_PCIe") is GPUS["h100-pcie"]
    with pytest.raises(
        fp8cfg.ConfigError, match="--gpu h1000: no such GPU in the table; did you mean 'h100'"
    ):
        find_gpu("h1000")
