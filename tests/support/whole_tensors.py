"""Jobs of several ranks whose tensors are whole, without FSDP2: gradients are summed after the backward pass, as around a model of one's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from fp8cfg.building import model

WHOLE = "whole"
"""storage.shard=none of such a job."""


@contextmanager
def without_fsdp2(on: bool = True) -> Iterator[None]:
    """Let jobs that are built inside be such ones."""
    with pytest.MonkeyPatch.context() as patch:
        if on:
            patch.setattr(model, "by_fsdp2", lambda *_: False)
        yield


def shard_word(shard: str) -> str:
    """What is written for storage.shard."""
    return f"storage.shard={'none' if shard == WHOLE else shard}"
