"""Memory of a start from a Hugging Face checkpoint: what the job keeps, and one tensor more."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
pytest.importorskip("transformers")

import fp8cfg
from tests.models.test_hf_checkpoint import WORDS, saved
from tests.support.forked import processes

SHAPE = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
MIB = 1 << 20


def anonymous() -> int:
    """Bytes of this process that no file holds: safetensors are mapped, and their pages are the file's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def start(folder: Path, words: list[str], found: Any) -> None:
    """Put the peak of a start, what it leaves, and the model's bytes in float32 into `found`."""
    recipe = fp8cfg.compose(["recipe=from_hf", f"model.path={folder}", *WORDS, *words])
    seen, done, before = [0], threading.Event(), anonymous()

    def watch() -> None:
        while not done.wait(0.0005):
            seen[0] = max(seen[0], anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    job = fp8cfg.build(recipe)
    done.set()
    watcher.join()
    found.put((seen[0] - before, anonymous() - before, sum(4 * p.numel() for p in job.model.parameters())))


@pytest.mark.parametrize("words", [["precision=fp32"], ["precision=bf16_fp8", "fp8.params=true"]], ids=["fp32", "FP8 weights"])
def test_weights_are_not_held_twice(words: list[str], tmp_path: Path) -> None:
    saved(tmp_path, "llama", "10MB", dtype=torch.bfloat16, **SHAPE)
    found = processes.SimpleQueue()
    child = processes.Process(target=start, args=(tmp_path, words, found))
    child.start()
    child.join(60)
    peak, left, model = found.get()
    assert left >= 0.95 * model  # it was in memory, in float32
    assert peak <= left + 14 * MIB  # the largest matrix, of gate and up, has 6, and quantizing it takes a second one
