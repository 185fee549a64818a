"""FP8 statistics over time: read line by line, merged, and equal to what the run wrote."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from fp8cfg.run_folder.files import RunFiles, RunFolderError
from fp8cfg.studies import fp8_history
from fp8cfg.studies.fp8_history import STATISTICS, FP8History, read_history

REDUCTIONS = {"max": np.nanmax, "min": np.nanmin, "mean": np.nanmean}


def lines(steps: Iterable[int], layers: int = 2) -> list[dict[str, object]]:
    """Random statistics of two tensors of each layer."""
    random = np.random.default_rng(0)
    return [
        {"step": step, "layer": f"layers.{layer}.fc", "tensor": tensor, "format": "e4m3"}
        | {name: float(random.random()) for name in STATISTICS}
        for step in steps
        for layer in range(layers)
        for tensor in ("input", "weight")
    ]


def read(folder: Path, rows: list[dict[str, object]], end: str = "\n") -> FP8History | None:
    text = "\n".join(map(json.dumps, rows)) + end
    (folder / "fp8_stats.jsonl").write_text(text)
    return read_history(RunFiles.at(folder))


def test_a_short_history_is_exact(tmp_path: Path) -> None:
    rows = lines([5, 10, 15])
    found = read(tmp_path, rows)
    assert found is not None
    assert found.rows == [(f"layers.{i}.fc", t) for i in (0, 1) for t in ("input", "weight")]
    assert found.tensors == ["input", "weight"]
    assert found.steps.tolist() == [[5, 5], [10, 10], [15, 15]]
    for name in STATISTICS:
        expected = np.array([row[name] for row in rows], dtype=np.float64).reshape(3, 4).T
        np.testing.assert_array_equal(found.values[name], expected)
        layers, weights = found.of_tensor(name, "weight")
        assert layers == ["layers.0.fc", "layers.1.fc"]
        np.testing.assert_array_equal(weights, expected[1::2])


def test_a_long_history_is_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_history, "COLUMNS", 8)
    rows = lines(range(1, 101))
    found = read(tmp_path, rows)
    assert found is not None and found.num_steps == 100
    assert 8 <= len(found.steps) < 16
    assert found.steps[0, 0] == 1 and found.steps[-1, 1] == 100
    assert (found.steps[1:, 0] == found.steps[:-1, 1] + 1).all()
    merged = found.merged(5)
    assert len(merged.steps) == 5 and merged.steps[-1, 1] == 100
    for name, merge in STATISTICS.items():
        whole = np.array([row[name] for row in rows], dtype=np.float64).reshape(100, 4).T
        for i, (first, last) in enumerate(found.steps):
            expected = REDUCTIONS[merge](whole[:, first - 1 : last], axis=1)
            np.testing.assert_allclose(found.values[name][:, i], expected)
        if merge != "mean":
            total = REDUCTIONS[merge](whole, axis=1)
            np.testing.assert_array_equal(REDUCTIONS[merge](merged.values[name], axis=1), total)


def test_a_tensor_of_zeros_has_no_scale_and_infinity_is_read(tmp_path: Path) -> None:
    rows = lines([1], layers=1)
    rows[0] |= {"scale_min": None, "scale_max": None, "amax": "Infinity"}
    found = read(tmp_path, rows)
    assert found is not None
    assert np.isnan(found.values["scale_min"][0, 0])
    assert np.isinf(found.values["amax"][0, 0])


def test_a_running_run_has_an_incomplete_line(tmp_path: Path) -> None:
    found = read(tmp_path, lines([1, 2]), end='\n{"step": 3, "lay')
    assert found is not None and found.num_steps == 2
    assert read(tmp_path, [], end="") is None
    (tmp_path / "fp8_stats.jsonl").unlink()
    assert read_history(RunFiles.at(tmp_path)) is None


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    rows = lines([1])
    del rows[2]["amax"]
    with pytest.raises(RunFolderError, match=r"fp8_stats.jsonl:3: not a line .*'amax'"):
        read(tmp_path, rows)
