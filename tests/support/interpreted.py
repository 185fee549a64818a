"""Triton's interpreter, which computes kernels on a CPU. It is chosen when Triton is imported: tests under it run in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether this is such a process."""
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in a process of its own")
not_interpreted = pytest.mark.skipif(INTERPRETED, reason="this is that process")


def under_the_interpreter(file: str) -> None:
    """The tests of `file` under the interpreter pass."""
    environ = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", file],
        env=environ,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:]


def quantize_by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of a CPU are quantized by the kernels as those of a GPU are."""
    from fp8cfg.numerics.kernels import launch, store

    for module, names in (
        (launch, ("can_fuse_tensor",)),
        (store, ("can_fuse_store", "can_fuse_tensor")),
    ):
        for name in names:
            monkeypatch.setattr(module, name, lambda *of: True)
        monkeypatch.setattr(
            module,
            "can_fuse_tiles",
            lambda t, tile, scaling, carrier: scaling.layout.scale != "e4m3",
        )
