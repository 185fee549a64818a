"""Ranks on the fake GPU, one each: torch's own NCCL code runs what every layout asks of it, in one order on all ranks, and losses are
those of as many ranks on CPUs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA device, not even a fake one", allow_module_level=True)

from fp8cfg.run_folder import metrics_file
from tests.support.ranks import LIMIT, ROOT, ranks_environment
from tests.support.small import small_words
from tools.fake_gpu.recorder import is_fake

if not is_fake():
    pytest.skip("this GPU has values and ranks of its own", allow_module_level=True)

COMMAND = ROOT / "tools" / "fake_gpu" / "command.py"
STEPS = (
    "trainer.max_steps=4",
    "trainer.micro_batch_size=2",
    "trainer.val_check_interval=2",
    "log.every_n_steps=1",
    "trainer.compile=off",
)
WIDE = ("model.hidden_size=256", "model.ffn_hidden_size=512")
TENSOR, SEQUENCE = (
    "trainer.strategy.tensor_model_parallel_size=2",
    "trainer.strategy.sequence_parallel=true",
)
PIPELINE, CONTEXT = (
    "trainer.strategy.pipeline_model_parallel_size=2",
    "trainer.strategy.context_parallel_size=2",
)
INTERLEAVED = (
    "model.num_layers=4",
    PIPELINE,
    "trainer.strategy.virtual_pipeline_model_parallel_size=2",
)
FSDP = "storage.shard=fsdp"
LAYOUTS = [
    (2, "bf16_fp8", "checkpoint.async_save=true"),
    (2, "bf16_fp8_current", FSDP),
    (2, "bf16_fp8_block", "fp8.format=e4m3", FSDP, *WIDE),
    (2, "bf16_fp8", TENSOR, SEQUENCE),
    (2, "bf16_fp8_current", *INTERLEAVED),
    (2, "bf16_fp8", CONTEXT),
    (2, "bf16_fp8", "opt_level=O2"),
    (2, "fp16_fp8", "storage.shard=zero2", "precision.initial_loss_scale=256"),
    (2, "bf16_fp8", "storage.comm=fp8"),
    (2, "bf16_fp8_current", "storage.shard=none", "lora.enabled=true"),
    (4, "bf16_fp8", TENSOR, PIPELINE),
    (4, "bf16_fp8_current", "trainer.strategy.data_parallel_replicate_size=2", FSDP),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: " ".join(map(str, layout)))
def test_losses_are_those_of_ranks_on_cpus(layout: tuple[Any, ...], tmp_path: Path) -> None:
    """To within what attention, norms and sums on a GPU round otherwise, and FP8 makes of it."""
    (cpu, norms), (gpu, gpu_norms) = (ran(device, layout, tmp_path) for device in ("cpu", "cuda"))
    assert gpu == pytest.approx(cpu, abs=2e-3)
    assert gpu_norms == pytest.approx(norms, rel=2e-2)


def ran(device: str, layout: tuple[Any, ...], folder: Path) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of a run on `device`, which it has proved, and saved. Its ranks are not forked: CUDA is here."""
    ranks, preset, *words = layout
    run, command = folder / device, [str(COMMAND)] if device == "cuda" else ["-m", "fp8cfg"]
    given = small_words(
        f"precision={preset}", *STEPS, *words, f"trainer.accelerator={device}", f"log.folder={run}"
    )
    environ = {
        **ranks_environment(ranks),
        "FAKE_GPUS": str(ranks if device == "cuda" else 0),
        "FAKE_NCCL_SECONDS": "120",
    }
    started = [
        subprocess.Popen(
            [sys.executable, *command, *given],
            env={**environ, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        said = "".join(process.communicate(timeout=LIMIT)[0] for process in started)
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0] * ranks, said
    assert "UserWarning" not in said  # of torch
    steps = [row for row in metrics_file.read_metrics(run / "metrics.jsonl") if "loss" in row]
    assert len(steps) == 4
    return [row["loss"] for row in steps], [row["grad_norm"] for row in steps]
