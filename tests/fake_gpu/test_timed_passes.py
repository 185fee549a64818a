"""A pass that bench_gpu.py times begins on a GPU that is still busy: what the host takes to launch its first kernels is not its own.

Runs on the fake GPU alone (tools/fake_gpu): a real one keeps no log."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA device, not even a fake one", allow_module_level=True)

from tools.fake_gpu.recorder import is_fake, record
from tools.gpu_rows.bench_measurement import timed

if not is_fake():
    pytest.skip("a real GPU keeps no log", allow_module_level=True)


def test_the_gpu_is_busy_before_a_pass_begins() -> None:
    with record() as found:
        timed(lambda: torch.ones(8, device="cuda"), "cuda")
    before, kernel, *_ = [line for line in found.lines if line[0] == "K"]
    assert "spin" in before and "FillFunctor" in kernel
