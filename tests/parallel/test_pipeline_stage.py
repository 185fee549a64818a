"""Stages of a pipeline until torch 2.15: memory for what they receive, and sends that go as their receives do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.pipelining import schedules

from fp8cfg.parallel.pipeline_schedule import TORCH_FREES_BUFFERS, _InterleavedStage, _Stage

pytestmark = pytest.mark.skipif(TORCH_FREES_BUFFERS, reason="torch itself does so from 2.15 on")


def test_sends_go_as_torch_receives(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL has one communicator for calls that are batched and another for a pair's that are not: a send in one never meets its
    receive in the other. torch 2.11 batches receives, 2.13 does not, by the same function."""
    sent: list[Any] = []
    monkeypatch.setattr(
        schedules,
        "_batch_p2p",
        lambda ops: sent.append(ops) or [SimpleNamespace(wait=lambda: None)],
    )
    stage: Any = object.__new__(_InterleavedStage)
    stage.__dict__.update(_pending_sends=[], group="stages")
    assert stage._send(["a send"]) == stage._send([]) == []
    assert sent == [["a send"]] and len(stage._pending_sends) == 1


@pytest.mark.parametrize(
    "root",
    [SimpleNamespace(meta=None), SimpleNamespace(source=None, buffer=None)],
    ids=["torch 2.11", "torch 2.13"],
)
def test_inputs_of_the_whole_model_are_not_received(root: Any) -> None:
    received = SimpleNamespace(source=0, buffer=torch.empty(2, 3, requires_grad=True))
    stage: Any = object.__new__(_Stage)
    stage.__dict__.update(
        args_recv_info={0: (root, received)}, grad_recv_info={}, device="cpu", has_backward=True
    )
    stage._allocate_buffers(stage.args_recv_info, 1)
    assert received.buffer.is_meta, "kept for microbatches that are under way alone"
    stage._allocate_buffers(stage.args_recv_info, 0)
    assert received.buffer.shape == (2, 3) and not received.buffer.is_meta
