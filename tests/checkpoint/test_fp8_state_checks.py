"""FP8 state of a checkpoint must be there and possible: a run never resumes with other scales than it had."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fp8cfg.__main__ import main
from tests.support.short_runs import fit

State = dict[str, Tensor]


def drop(ending: str) -> Callable[[State], object]:
    return lambda state: [state.pop(name) for name in list(state) if name.endswith(ending)]


def fill(ending: str, value: float) -> Callable[[State], object]:
    return lambda state: [t.fill_(value) for name, t in state.items() if name.endswith(ending)]


FAULTS = {
    "histories missing": (drop("amax_history"), "is missing"),
    "histories NaN": (fill("amax_history", float("nan")), "NaN or negative"),
    "histories negative": (fill("amax_history", -1.0), "NaN or negative"),
    "scales missing": (drop("fp8_scale"), "is missing"),
    "scales 0": (fill("fp8_scale", 0.0), "is 0 or infinite"),
    "scales infinite": (fill("fp8_scale", torch.inf), "is 0 or infinite"),
    "scales NaN": (fill("fp8_scale", float("nan")), "NaN or negative"),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    words = ("precision=bf16_fp8", "checkpoint.every_n_steps=4")
    return fit(tmp_path_factory.mktemp("runs"), *words).path


@pytest.mark.parametrize("fault", FAULTS)
def test_impossible_fp8_state_is_not_resumed(
    fault: str, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    (step,) = (run / "checkpoints").glob("step-*")
    state = load_file(step / "fp8.safetensors")
    damage, reason = FAULTS[fault]
    damage(state)
    save_file(state, step / "fp8.safetensors")
    write_sums(step)
    assert main(["resume", str(run), "trainer.max_steps=5"]) == 4
    out, err = capsys.readouterr()
    assert reason in out + err


def write_sums(step: Path) -> None:
    """Brings the manifest up to date, as a tool that rewrites files would."""
    manifest = json.loads((step / "MANIFEST.json").read_text())
    for name in manifest["files"]:
        data = (step / name).read_bytes()
        manifest["files"][name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (step / "MANIFEST.json").write_text(json.dumps(manifest))
