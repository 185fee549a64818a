"""Batches reach the fake GPU from pinned memory on a stream of their own: the host waits for none, the stream of the step for each.

Runs on the fake GPU alone (tools/fake_gpu): a real one keeps no log."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA device, not even a fake one", allow_module_level=True)

from fp8cfg.training.microbatches import copy_batch_to_device
from tools.fake_gpu import cases
from tools.fake_gpu.recorder import is_fake, record
from tools.gpu_rows.proof import without_proof

if not is_fake():
    pytest.skip("a real GPU keeps no log", allow_module_level=True)


def test_a_batch_is_copied_aside() -> None:
    batch = torch.arange(64).view(8, 8), torch.zeros(8, dtype=torch.int32)
    copy_batch_to_device(batch, torch.device("cuda"))  # makes the stream
    with record() as found:
        copied = copy_batch_to_device(batch, torch.device("cuda"))
    assert [line for line in found.lines if line[0] in "CS"] == [
        "C P2D 512 on another stream",
        "C P2D 32 on another stream",
    ]
    assert found.lines[-1] == "E cudaStreamWaitEvent", (
        "work that is launched from here on comes after the copies"
    )
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert all(
        t.is_cuda and torch.equal(t.cpu(), kept) for t, kept in zip(copied, batch, strict=True)
    ), "small copies are real here"


def test_a_step_copies_its_batch_aside_and_does_not_wait() -> None:
    without_proof()
    take = cases.step("precision=bf16")["step"]
    for _ in range(2):
        take()
    with record() as found:
        take()
    assert found.copies("P2D") > 0 and found.waits == 0 and found.copies("H2D") == 0
    copies = [line.split() for line in found.lines if line.startswith("C P2D")]
    assert sum("another" in words for words in copies) == 2, "tokens and targets"
    assert all("another" in words or int(words[2]) < 1024 for words in copies), (
        "torch 2.15 sends lists of addresses from there, too"
    )
