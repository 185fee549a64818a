"""Memory of a start from a Hugging Face checkpoint, what the job keeps and one tensor more, and of an export, two matrices."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
pytest.importorskip("transformers")

import fp8cfg
from fp8cfg.__main__ import main
from tests.support.forked import processes
from tests.support.hf_models import WORDS, saved
from tests.support.small import small

SHAPE = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
MIB = 1 << 20
LARGEST = 4 * 2 * 2304 * 768
"""Bytes of gate and up of the model that is exported, in float32."""
M_MMAP_THRESHOLD = -3


def anonymous() -> int:
    """Bytes of this process that no file holds: safetensors are mapped, and their pages are the file's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def peak(work: Callable[[], Any]) -> tuple[int, Any]:
    """The most bytes beyond those of before that were there while `work` ran, and what it returns."""
    seen, done, before = [0], threading.Event(), anonymous()

    def watch() -> None:
        while not done.wait(0.0005):
            seen[0] = max(seen[0], anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    made = work()
    done.set()
    watcher.join()
    return seen[0] - before, made


def start(folder: Path, words: list[str], found: Any) -> None:
    """Put the peak of a start, what it leaves, and the model's bytes in float32 into `found`."""
    recipe = fp8cfg.compose(["recipe=from_hf", f"model.path={folder}", *WORDS, *words])
    before = anonymous()
    most, job = peak(lambda: fp8cfg.build(recipe))
    found.put((most, anonymous() - before, sum(4 * p.numel() for p in job.model.parameters())))


@pytest.mark.parametrize(
    "words",
    [["precision=fp32"], ["precision=bf16_fp8", "fp8.params=true"]],
    ids=["fp32", "FP8 weights"],
)
def test_weights_are_not_held_twice(words: list[str], tmp_path: Path) -> None:
    saved(tmp_path, "llama", "10MB", dtype=torch.bfloat16, **SHAPE)
    most, left, model = in_a_process(start, tmp_path, words)
    assert left >= 0.95 * model  # it was in memory, in float32
    assert (
        most <= left + 14 * MIB
    )  # the largest matrix, of gate and up, has 6, and quantizing it takes a second one


def export(folder: Path, words: list[str], found: Any) -> None:
    """Put the peak of an export of folder/run and its exit code into `found`: of the second, for the first loads modules."""
    # Of less than 32 MiB, which no large model's matrices are, glibc may keep what is freed; of less than this it does: some MiB here.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MIB)
    assert main(["export", "hf", str(folder / "run"), str(folder / "first"), *words]) == 0
    gc.collect()
    found.put(
        peak(lambda: main(["export", "hf", str(folder / "run"), str(folder / "second"), *words]))
    )


@pytest.mark.parametrize(
    ("words", "options"),
    [
        (["precision=bf16_fp8_block", "fp8.params=true"], ["--fp8", "block"]),
        (["precision=bf16", "task=lora"], ["--merge"]),
        (["precision=bf16", "storage.weight=fp16_scaled"], []),
        (["precision=bf16_fp8_block", "fp8.params=true", "storage.shard=fsdp"], []),
    ],
    ids=["FP8 weights", "adapters", "fp16_scaled", "fsdp"],
)
def test_an_export_takes_two_matrices(words: list[str], options: list[str], tmp_path: Path) -> None:
    recipe = small(
        *words,
        "model.hidden_size=768",
        "model.ffn_hidden_size=2304",
        "trainer.max_steps=1",
        "optim.warmup_steps=0",
        "trainer.val_check_interval=0",
        "trainer.global_batch_size=1",
        "trainer.micro_batch_size=1",
        "trainer.accelerator=cpu",
        "trainer.compile=off",
    )
    fp8cfg.fit(fp8cfg.build(recipe), folder=tmp_path / "run")
    most, code = in_a_process(export, tmp_path, options)
    assert code == 0 and LARGEST / 2 <= most <= 2 * LARGEST + 4 * MIB, (
        f"{most / LARGEST:.2f} matrices"
    )


def in_a_process(work: Callable[..., None], *args: Any) -> Any:
    """What `work` of these arguments and of a queue puts there."""
    found = processes.SimpleQueue()
    child = processes.Process(target=work, args=(*args, found))
    child.start()
    child.join(60)
    return found.get()
