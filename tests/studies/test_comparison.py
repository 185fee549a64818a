"""Comparisons of runs agree with NumPy, and say what cannot be compared."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fp8cfg
from fp8cfg.__main__ import main
from fp8cfg.schema.errors import ConfigError
from fp8cfg.studies.comparison import gap_between
from tests.support.short_runs import fit
from tests.support.verbs import loads, refused, said


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps in BF16 twice, in FP8, and with another seed."""
    root = tmp_path_factory.mktemp("runs")
    words = {
        "one": ["precision=bf16"],
        "again": ["precision=bf16"],
        "fp8": ["precision=bf16_fp8"],
        "seed": ["precision=bf16", "trainer.seed=7"],
    }
    for name, overrides in words.items():
        made = fit(root / "made", *overrides, "trainer.compile=off")
        shutil.move(made.path, root / name)
    return root


@pytest.fixture
def mine(root: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(root, tmp_path / "runs"))


def losses(folder: Path, name: str = "loss") -> dict[int, float]:
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row[name] for row in rows if name in row}


def write_losses(folder: Path, values: Sequence[float | str]) -> None:
    """Replaces the metrics by these losses of steps 1, 2, ..."""
    lines = [json.dumps({"step": n, "loss": loss}) + "\n" for n, loss in enumerate(values, 1)]
    (folder / "metrics.jsonl").write_text("".join(lines))


series = st.dictionaries(
    st.integers(1, 30), st.floats(-100, 100, allow_subnormal=False), min_size=1, max_size=20
)


@given(series, series)
def test_gaps_are_those_of_numpy(a: dict[int, float], b: dict[int, float]) -> None:
    common = sorted(a.keys() & b.keys())
    gap = gap_between(
        (sorted(a), [a[step] for step in sorted(a)]), (sorted(b), [b[step] for step in sorted(b)])
    )
    if not common:
        assert gap is None
        return
    assert gap is not None
    x, y = (np.array([values[step] for step in common]) for values in (a, b))
    assert gap.steps == len(common)
    assert gap.mean == pytest.approx(np.mean(y - x), abs=1e-9)
    assert gap.largest == np.max(np.abs(y - x))
    assert gap.largest_step == common[int(np.argmax(np.abs(y - x)))]
    different = np.flatnonzero(x.view(np.int64) != y.view(np.int64))
    assert gap.first_difference == (common[different[0]] if len(different) else None)
    beyond = np.flatnonzero(~np.isclose(y, x, rtol=0.01, atol=0))
    assert gap.first_beyond == (common[beyond[0]] if len(beyond) else None)


def test_losses_that_are_not_finite_are_differences() -> None:
    steps = [1, 2, 3]
    gap = gap_between((steps, [4.0, 3.0, 2.0]), (steps, [4.0, math.nan, 2.0]))
    assert gap and math.isnan(gap.largest) and gap.largest_step == gap.first_beyond == 2
    gap = gap_between((steps, [4.0, math.inf, 2.0]), (steps, [4.0, math.inf, 2.0]))
    assert gap and gap.first_difference is None and gap.largest == 0
    gap = gap_between((steps, [math.inf, 3.0, 2.0]), (steps, [-math.inf, 3.0, 2.0]))
    assert gap and gap.first_beyond == 1 and gap.largest == math.inf


def test_equal_runs_are_equal(root: Path) -> None:
    found = fp8cfg.compare_runs(root / "one", str(root / "again"))
    gap, val_gap = found.runs[1].loss_gap, found.runs[1].val_gap
    assert gap and (gap.steps, gap.largest, gap.first_difference) == (4, 0, None)
    assert val_gap and (val_gap.steps, val_gap.first_difference) == (2, None)
    assert (found.keys, found.notes) == ({}, [])
    assert "all keys are equal" in str(found) and "never" in str(found)


def test_precisions_are_compared_at_each_step(root: Path) -> None:
    found = fp8cfg.compare_runs(root / "one", root / "fp8")
    gap = found.runs[1].loss_gap
    a, b = losses(root / "one"), losses(root / "fp8")
    assert gap and gap.mean == pytest.approx(np.mean([b[step] - a[step] for step in a]))
    assert found.keys["fp8.enabled"] == [False, True]
    assert not {"log.dir", "log.folder", "name"} & found.keys.keys()
    assert found.notes == []
    recorded = json.loads((root / "fp8" / "coverage.json").read_text())
    assert found.runs[1].fp8_share == recorded["share_of_matmul_flops"] > 0.5
    assert found.runs[0].fp8_share == 0
    files = (root / "fp8" / "checkpoints" / "step-00000004").iterdir()
    assert found.runs[1].checkpoint == sum(file.stat().st_size for file in files)
    assert found.runs[0].memory and found.runs[0].memory > 50 << 20


def test_another_seed_is_not_matched(root: Path) -> None:
    (note,) = fp8cfg.compare_runs(root / "one", root / "seed").notes
    assert f"{root}/seed: its losses are not matched" in note
    assert "trainer.seed=7, not 1234" in note


def test_other_data_are_not_matched_and_a_moved_file_is(mine: Path) -> None:
    def change(old: str, new: str) -> list[str]:
        for path in ("recipe.yaml", "checkpoints/step-00000004/state.json"):
            text = (mine / "again" / path).read_text()
            (mine / "again" / path).write_text(text.replace(old, new))
        return fp8cfg.compare_runs(mine / "one", mine / "again").notes

    tiny, moved = "name: tiny\n  path: null", "name: jsonl\n  path: moved.jsonl"
    assert change(tiny, moved) == []
    state = json.loads((mine / "one" / "checkpoints/step-00000004/state.json").read_text())
    (note,) = change(state["data"]["corpus_sha256"], "0" * 64)
    assert "data.path=moved.jsonl, not null" in note
    (note,) = change(moved, tiny)
    assert "the data had other contents" in note


def test_runs_of_different_length_and_without_common_steps(mine: Path) -> None:
    write_losses(mine / "one", [4.0, 3.0, 2.0, 1.0])
    write_losses(mine / "fp8", [4.0, 3.2])
    found = fp8cfg.compare_runs(mine / "one", mine / "fp8")
    gap = found.runs[1].loss_gap
    assert gap and (gap.steps, gap.first_difference, gap.first_beyond) == (2, 2, 2)
    assert f"{mine}/fp8 has 2 steps and {mine}/one has 4" in found.notes[0]
    write_losses(mine / "fp8", [])
    found = fp8cfg.compare_runs(mine / "one", mine / "fp8")
    assert found.runs[1].loss_gap is None
    assert "no step is common" in str(found)


def test_skipped_steps_have_a_note(mine: Path) -> None:
    metrics = mine / "fp8" / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    for row in rows:
        if "stepped" in row:
            row["stepped"] = row["step"] != 2
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = fp8cfg.compare_runs(mine / "one", mine / "fp8")
    assert found.notes == [f"{mine}/fp8: the optimizer skipped 1 step, the last one is step 2"]


def test_a_run_that_goes_on_and_a_resumed_run(mine: Path) -> None:
    before = (mine / "fp8" / "recipe.yaml").read_text()
    (mine / "fp8" / "recipe-until-step-2.yaml").write_text(before.replace("lr: 0.003", "lr: 0.001"))
    with fp8cfg.RunFolder.open(mine / "again"):
        status = {"state": "running", "step": 2, "message": "", "time": 0.0}
        (mine / "again" / "status.json").write_text(json.dumps(status))
        found = fp8cfg.compare_runs(mine / "one", mine / "again", mine / "fp8")
    assert [run.state for run in found.runs] == ["done", "running", "done"]
    assert found.notes[0] == f"{mine}/again: running at step 4"
    assert found.notes[1].endswith("resumed with changes; up to step 2 it had optim.lr=0.001")


def test_the_verb_prints_80_columns_or_json(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(root)
    out = said(capsys, "compare", "one", "fp8", "seed")
    assert max(map(len, out.splitlines())) <= 80
    assert out.startswith("A  one  (reference)\nB  fp8\nC  seed\n")
    assert out == str(fp8cfg.compare_runs("one", "fp8", "seed")) + "\n"
    data = json.loads(said(capsys, "compare", "one", "fp8", "--json"))
    gap = fp8cfg.compare_runs("one", "fp8").runs[1].loss_gap
    assert gap and data["runs"][1]["loss_gap"]["mean"] == gap.mean
    assert data["keys"]["fp8.enabled"] == [False, True]
    assert main(["compare", "one", "fp8", "--json", "--output", f"{tmp_path}/new/a.json"]) == 0
    assert json.loads((tmp_path / "new" / "a.json").read_text()) == data


def test_wide_values_are_stacked(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (mine / "fp8" / "recipe.yaml").read_text()
    names = ", ".join(f"layers.{n}.mlp.linear_fc1" for n in range(9))
    (mine / "fp8" / "recipe.yaml").write_text(text.replace("exclude: []", f"exclude: [{names}]"))
    out = said(capsys, "compare", str(mine / "one"), str(mine / "fp8"))
    assert "fp8.exclude\n  A  []\n  B  [layers.0.mlp.linear_fc1, layers.1" in out


def test_mistakes(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = str(root / "one")
    wanted = "compare: needs two run folders, as in: fp8cfg compare runs/A runs/B"
    assert refused(capsys, "compare", one) == [wanted]
    assert refused(capsys, "compare", one, f"{one}/.") == [
        f"{one}/.: given twice; name each run once"
    ]
    (line,) = refused(capsys, "compare", one, str(root))
    assert line.startswith(f"{root}: not a run folder") and "it has 4 runs in it" in line
    (line,) = refused(capsys, "compare", one, "nowhere")
    assert (
        line == "nowhere: run folder not found; check the path, or list your runs with fp8cfg runs"
    )
    assert refused(capsys, "compare", one, one, "fp8.margin=1") == [
        "compare: takes run folders, remove fp8.margin=1"
    ]
    with pytest.raises(ConfigError, match="needs two or more run folders"):
        fp8cfg.compare_runs(one)


def test_it_loads_no_torch(root: Path) -> None:
    assert not {"torch", "pandas", "plotly"} & loads("compare", f"{root}/one", f"{root}/fp8")
