"""log.profile and log.memory_snapshot."""

from __future__ import annotations

import gzip
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import fp8cfg
from fp8cfg.run_folder.metrics_file import read_metrics
from fp8cfg.run_folder.run_folder import RunFolder
from fp8cfg.schema.errors import ConfigError
from fp8cfg.training import loop
from fp8cfg.training.profiling import MemorySnapshots
from tests.support.small import small


def fit(folder: Path, *words: str) -> list[str]:
    """Trains the small recipe. Returns what it prints."""
    said: list[str] = []
    fp8cfg.fit(fp8cfg.build(small("model.num_layers=1", *words)), folder, say=said.append)
    return said


def losses(folder: Path) -> list[Any]:
    return [row["loss"] for row in read_metrics(folder / "metrics.jsonl") if "loss" in row]


def trace(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Events of the Chrome trace by name, as a viewer groups them."""
    (file,) = (folder / "profile").iterdir()
    assert file.name.endswith(".pt.trace.json.gz")
    events: dict[str, list[dict[str, Any]]] = {}
    for event in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]:
        events.setdefault(event["name"], []).append(event)
    return events


def test_a_profile_has_the_chosen_steps(tmp_path: Path) -> None:
    said = fit(tmp_path / "a", "trainer.max_steps=4", "log.profile=2:3")
    events = trace(tmp_path / "a")
    assert [name for name in sorted(events) if name.startswith("step ")] == ["step 2", "step 3"]
    steps = [events["step 2"][0], events["step 3"][0]]
    products = events["aten::mm"]
    for step in steps:
        inside = [e for e in products if 0 <= e["ts"] - step["ts"] <= step["dur"]]
        # One layer of four linear layers and the output layer, each with three products.
        assert len(inside) == 15
    assert any(line.startswith("profile: ") for line in said)
    # It changes no loss.
    fit(tmp_path / "b", "trainer.max_steps=4")
    assert losses(tmp_path / "a") == losses(tmp_path / "b")


def test_a_run_that_ends_early_leaves_its_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_step = loop.train_step

    def stop_at_three(job: Any, batches: Any, step: int, *more: Any, **named: Any) -> Any:
        if step == 2:
            raise RuntimeError("crash")
        return train_step(job, batches, step, *more, **named)

    monkeypatch.setattr(loop, "train_step", stop_at_three)
    with pytest.raises(RuntimeError, match="crash"):
        fit(tmp_path / "a", "log.profile=2:5")
    assert "step 2" in trace(tmp_path / "a")


def test_a_snapshot_needs_a_gpu(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("the GPU is used")
    with pytest.raises(ConfigError, match="records GPU memory, but this run is on a CPU"):
        fit(tmp_path / "a", "log.memory_snapshot=true")
    assert not (tmp_path / "a").exists()
    with pytest.raises(ConfigError, match=r"has no effect with trainer.accelerator=cpu"):
        small("log.memory_snapshot=true", "trainer.accelerator=cpu")


def test_snapshots_are_written_after_three_steps_and_without_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    memory = torch.cuda.memory
    monkeypatch.setattr(memory, "_record_memory_history", lambda **given: calls.append(given))
    monkeypatch.setattr(memory, "_dump_snapshot", lambda path: calls.append(Path(path).name))
    recipe = small("log.memory_snapshot=true")
    (tmp_path / "run").mkdir()
    run = RunFolder.reading(tmp_path / "run")
    snapshots = MemorySnapshots(recipe, run, print)
    with pytest.raises(torch.OutOfMemoryError), snapshots:
        for step in (5, 6, 7, 8):
            snapshots.finish(step)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    begin, *written, end = calls
    assert begin["stacks"] == "python" and end == {"enabled": None}
    assert written == ["memory-step-7.pickle", "memory-at-error.pickle"]


@pytest.mark.gpu
def test_torch_reads_a_snapshot(tmp_path: Path) -> None:
    fit(tmp_path / "a", "trainer.max_steps=4", "log.memory_snapshot=true")
    snapshot = pickle.loads((tmp_path / "a/profile/memory-step-3.pickle").read_bytes())
    assert snapshot["segments"] and any(trace for trace in snapshot["device_traces"])
