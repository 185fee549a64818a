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

import fp8cfg
from fp8cfg.__main__ import main
from fp8cfg.run_folder import metrics_file
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


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("door", ["command line", "python"])
def test_it_starts_anew_where_that_is_asked_for(
    door: str, fault: str, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [Path(shutil.copytree(trained, tmp_path / name)) for name in ("whole", "damaged")]
    (step,) = (runs[1] / "checkpoints").glob("step-*")
    state = load_file(step / "fp8.safetensors")
    FAULTS[fault][0](state)
    save_file(state, step / "fp8.safetensors")
    write_sums(step)
    assert main(["resume", str(runs[1])]) == 4
    assert "resume with --recalibrate-fp8" in "".join(capsys.readouterr())
    assert main(["resume", str(runs[0]), "trainer.max_steps=5"]) == 0
    capsys.readouterr()
    if door == "command line":
        assert main(["resume", str(runs[1]), "trainer.max_steps=5", "--recalibrate-fp8"]) == 0
    else:
        fp8cfg.resume(runs[1], ["trainer.max_steps=5"], recalibrate_fp8=True)
    out = capsys.readouterr()
    line = "--recalibrate-fp8: reset scales and amax histories of 4 layers"
    assert line in out.out and "histories were reset" not in out.err
    whole, anew = (metrics_file.read_metrics(run / "metrics.jsonl")[-1] for run in runs)
    # The weights are the same, and each tensor has a scale of its own first step again.
    assert anew["step"] == 5 and abs(float(anew["val_loss"]) / float(whole["val_loss"]) - 1) < 0.01


@pytest.mark.parametrize("dtype", [torch.int32, torch.float16, torch.float64])
def test_a_weight_of_another_dtype_is_not_cast(
    dtype: torch.dtype, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    (step,) = (run / "checkpoints").glob("step-*")
    state = load_file(step / "model.safetensors")
    state["embedding.weight"] = state["embedding.weight"].to(dtype)
    save_file(state, step / "model.safetensors")
    write_sums(step)
    assert main(["resume", str(run), "trainer.max_steps=5"]) == 4
    said = "".join(capsys.readouterr())
    assert f"embedding.weight is {dtype}, expected torch.bfloat16" in said


def test_an_option_without_effect_is_said(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(trained, tmp_path / "run")
    assert main(["resume", str(run), "trainer.max_steps=5", "--recalibrate-fp8"]) == 0
    assert "note: --recalibrate-fp8: has no effect" in capsys.readouterr().out


def test_a_missing_scale_of_stored_weights_cannot_be_made_anew(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    (step,) = (run / "checkpoints").glob("step-*")
    state = load_file(step / "fp8.safetensors")
    drop("fp8_weight_scale_inv")(state)
    save_file(state, step / "fp8.safetensors")
    write_sums(step)
    assert main(["resume", str(run), "trainer.max_steps=5", "--recalibrate-fp8"]) == 4
    said = "".join(capsys.readouterr())
    assert "is missing" in said and "resume with --recalibrate-fp8" not in said


def write_sums(step: Path) -> None:
    """Brings the manifest up to date, as a tool that rewrites files would."""
    manifest = json.loads((step / "MANIFEST.json").read_text())
    for name in manifest["files"]:
        data = (step / name).read_bytes()
        manifest["files"][name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (step / "MANIFEST.json").write_text(json.dumps(manifest))
