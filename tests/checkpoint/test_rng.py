"""What is drawn after restore() is what was drawn after capture(), also through a checkpoint."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from fp8cfg.checkpoint import job_state
from tests.support.whole_checkpoints import load, save


def draw() -> list[float]:
    """An odd number of gaussians, so that the spare one that python and numpy keep matters."""
    words = [random.random(), random.gauss(0, 1), float(np.random.randn()), float(np.random.rand())]
    return (
        words
        + torch.randn(5).tolist()
        + torch.rand(700).tolist()
        + [random.getrandbits(700) % 2.0**50]
    )


def test_bitwise_through_a_checkpoint(tmp_path: Path) -> None:
    random.seed(0)
    np.random.seed(0)
    draw()
    tensors, state = job_state.capture_rng()
    assert state["python"]["gauss"] is not None and state["numpy"]["has_gauss"] == 1
    assert all(t.dtype == torch.uint8 for t in tensors.values())
    expected = [draw() for _ in range(3)]
    back, said = load(save(tmp_path, 1, {"rng": tensors}, {"rng": state}, keep=1))
    draw()
    job_state.restore_rng(back["rng"], said["rng"])
    assert [draw() for _ in range(3)] == expected


def test_capture_is_a_copy() -> None:
    tensors, state = job_state.capture_rng()
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    draw()
    assert all(torch.equal(tensors[name], before[name]) for name in before)
    job_state.restore_rng(tensors, state)
    again, same = job_state.capture_rng()
    assert same == state and all(torch.equal(again[name], before[name]) for name in before)


def test_parts_that_do_not_belong_together() -> None:
    tensors, state = job_state.capture_rng()
    with pytest.raises(KeyError):
        job_state.restore_rng({}, state)
    with pytest.raises((ValueError, TypeError, RuntimeError)):
        job_state.restore_rng(tensors | {"python": tensors["python"][:-4]}, state)


def test_devices_that_are_not_here_are_left_out() -> None:
    tensors, state = job_state.capture_rng()
    expected = draw()
    tensors["cuda.99"] = torch.zeros(16, dtype=torch.uint8)
    job_state.restore_rng(tensors, state)
    assert draw() == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_cuda() -> None:
    torch.randn(3, device="cuda")
    tensors, state = job_state.capture_rng()
    expected = torch.randn(1000, device="cuda")
    job_state.restore_rng(tensors, state)
    assert torch.equal(torch.randn(1000, device="cuda"), expected)
