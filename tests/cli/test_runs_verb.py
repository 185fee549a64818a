"""`fp8cfg runs`: one row per run, whatever state it is in, as wide as its reader."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import fp8cfg
from fp8cfg.__main__ import main
from fp8cfg.cli import runs
from fp8cfg.studies.runs import RunSummary, list_runs
from tests.support.short_runs import fit
from tests.support.verbs import loads, refused, said


def summarize(folder: Path) -> RunSummary:
    [run] = list_runs(folder)
    return run


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs: one in BF16, and two in FP8 of which one has another margin and is in a sweep."""
    root = tmp_path_factory.mktemp("runs")
    words = {
        "bf16": ["precision=bf16"],
        "fp8": ["precision=bf16_fp8"],
        "sweep/0": ["precision=bf16_fp8", "fp8.margin=1", "optim.lr=1e-3"],
    }
    for number, (name, overrides) in enumerate(words.items()):
        made = fit(root / "made", *overrides, "trainer.compile=off")
        shutil.move(made.path, root / name)
        for file in (root / name).iterdir():
            os.utime(file, (1e9 + number, 1e9 + number))
    return root


@pytest.fixture
def mine(root: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(root, tmp_path / "runs"))


def names(root: Path, *where: str) -> list[str]:
    return [str(run.folder.relative_to(root)) for run in list_runs(root, where)]


def test_a_summary_has_the_values_of_the_files(root: Path) -> None:
    run = summarize(root / "sweep" / "0")
    recipe = fp8cfg.RunFolder.open(run.folder, lock=False).read_recipe()
    rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert (run.recipe, run.data, run.ranks) == (recipe.name, recipe.data.name, 1)
    assert (run.steps, run.max_steps, run.state) == (4, recipe.trainer.max_steps, "done")
    assert (run.loss, run.best_loss) == (losses[-1], min(losses))
    assert run.val_loss == rows[-1]["val_loss"]
    speeds = sorted(row["tokens_per_second"] for row in rows if "loss" in row and row["step"] > 1)
    assert run.tokens_per_second == speeds[1]
    du = subprocess.run(["du", "-ab", run.folder], capture_output=True, text=True, check=True)
    files = [line.split("\t") for line in du.stdout.splitlines()]
    assert run.size == sum(int(size) for size, path in files if Path(path).is_file())
    assert (run.precision, run.backend) == ("bf16_fp8+", "native")
    assert summarize(root / "fp8").precision == "bf16_fp8"


def test_the_newest_is_first(root: Path) -> None:
    assert names(root) == ["sweep/0", "fp8", "bf16"]


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        (["precision=bf16_fp8"], ["sweep/0", "fp8"]),
        (["precision=BF16-FP8", "fp8.margin=0"], ["fp8"]),
        (["fp8.margin=1"], ["sweep/0"]),
        (["trainer.plugins.fp8.margin=1"], ["sweep/0"]),
        (["fp8={margin: 1, enabled: true}"], ["sweep/0"]),
        (["optim.lr=0.001"], ["sweep/0"]),
        (["optim.betas=[0.9,0.95]", "precision=bf16"], ["bf16"]),
        (["precision=bf16", "precision=bf16_fp8"], ["sweep/0", "fp8", "bf16"]),
        (["backend=native", "precision=bf16_fp8"], ["sweep/0", "fp8"]),
        (["backend=auto", "data=tiny", "recipe=llama_tiny", "task=pretrain"], 3),
        (["data.path=null", "state=done"], 3),
        (["state=running"], []),
        (["recipe=llama_8b"], []),
        (["task=lora"], []),
    ],
)
def test_conditions(where: list[str], expected: list[str] | int, root: Path) -> None:
    found = names(root, *where)
    assert found == expected or len(found) == expected


def test_all_wrong_conditions_are_reported(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = ["fp8.margn=1", "state=finished", "trainer.max_steps=many", "precision=bf16_fp9"]
    lines = refused(capsys, "runs", str(root), "--where", *wrong)
    assert lines[0] == "fp8.margn: no such key; did you mean 'fp8.margin'?"
    assert lines[1].startswith("state=finished: no such state")
    assert lines[2].startswith("trainer.max_steps=many: expected an integer")
    assert "did you mean 'bf16_fp8'?" in lines[3]


def test_a_pipe_gets_all_columns_and_no_colors(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = said(capsys, "runs", str(root)).splitlines()
    assert lines[0].split("  ") and all(column.title in lines[0] for column in runs.COLUMNS)
    assert [line.split()[0] for line in lines[1:4]] == [
        str(root / name) for name in ("sweep/0", "fp8", "bf16")
    ]
    assert lines[-1] == "3 runs: 3 done"
    assert "\x1b" not in "".join(lines)


def on_terminal(root: Path, width: int) -> list[str]:
    """The lines of the verb on a terminal of this width, without colors."""
    environment = {**os.environ, "FORCE_COLOR": "1", "NO_COLOR": "1", "COLUMNS": str(width)}
    environment["TTY_COMPATIBLE"] = "1"
    command = [sys.executable, "-m", "fp8cfg", "runs", "."]
    done = subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.replace("\x1b[1m", "").replace("\x1b[0m", "").splitlines()


def test_a_narrow_terminal_leaves_out_columns_and_cuts_nothing(root: Path) -> None:
    wide, narrow = on_terminal(root, 180), on_terminal(root, 80)
    assert max(map(len, narrow)) <= 80 < max(map(len, wide))
    titles = narrow[0].split()
    assert {"run", "state", "step", "loss", "precision"} <= {*titles}
    assert not {"size", "ranks", "best"} & {*titles}
    assert "sweep/0" in narrow[1] and "bf16_fp8+" in narrow[1] and "done" in narrow[1]
    assert "…" not in "".join(narrow + wide)


def test_json_has_every_field(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = json.loads(said(capsys, "runs", str(root), "--json", "--where", "precision=bf16"))
    assert [run["folder"] for run in data] == [str(root / "bf16")]
    assert data[0]["state"] == "done" and data[0]["message"] == ""
    assert data[0]["loss"] == summarize(root / "bf16").loss


def test_damaged_folders_are_rows(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (mine / "fp8" / "metrics.jsonl").write_text("nonsense\n")
    (mine / "bf16" / "recipe.yaml").write_text("a: [\n")
    out = said(capsys, "runs", str(mine))
    assert "3 runs: " in out and "1 done" in out and "2 damaged" in out
    assert f"{mine}/fp8/metrics.jsonl:1: not a line of metrics" in out
    assert f"{mine}/bf16/recipe.yaml: line 2: not valid YAML" in out
    assert {*names(mine, "state=damaged")} == {"fp8", "bf16"}
    assert {*names(mine, "data=tiny")} == {"fp8", "sweep/0"}, "its recipe is valid"
    assert {*names(mine, "precision=bf16_fp8")} == {"fp8", "sweep/0"}


def test_losses_that_json_has_no_number_for(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = json.loads((mine / "bf16" / "metrics.jsonl").read_text().splitlines()[0])
    (mine / "bf16" / "metrics.jsonl").write_text(
        json.dumps(row) + "\n" + json.dumps(row | {"step": 2, "loss": "NaN"}) + "\n"
    )
    (data,) = json.loads(said(capsys, "runs", str(mine / "bf16"), "--json"))
    assert data["loss"] == "NaN" and data["best_loss"] == row["loss"]
    assert " nan " in said(capsys, "runs", str(mine / "bf16"))


def test_folders_of_other_versions(mine: Path) -> None:
    """An older one has no status and lacks keys; a user may have put short YAML in."""
    recipe = mine / "fp8" / "recipe.yaml"
    values = yaml.safe_load(recipe.read_text())
    del values["trainer"]["plugins"]["fp8"]["emulate"], values["lora"]
    recipe.write_text(yaml.safe_dump(values))
    (mine / "fp8" / "status.json").unlink()
    assert summarize(mine / "fp8").state == "done"
    recipe.write_text("recipe: llama_tiny\nprecision: bf16_fp8\ntrainer: {max_steps: 4}\n")
    run = summarize(mine / "fp8")
    assert (run.state, run.precision, run.max_steps) == ("done", "bf16_fp8", 4)


def test_files_with_other_types_are_rows_too(
    mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (mine / "fp8" / "environment.json").write_text('{"ranks": "two"}')
    (mine / "fp8" / "coverage.json").write_text('{"backend": 5}')
    (mine / "bf16" / "metrics.jsonl").write_text('{"step": 1, "loss": "high"}\n')
    recipe = mine / "sweep" / "0" / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("max_steps: 4", "max_steps: many"))
    out = said(capsys, "runs", str(mine))
    assert "1 done" in out and "2 damaged" in out
    assert f"{recipe}: trainer.max_steps=many: expected an integer" in out
    assert f"{mine}/bf16: cannot be read" in out
    assert summarize(mine / "fp8").ranks is None


def test_no_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "train one with: fp8cfg recipe=llama_tiny" in said(capsys, "runs", str(tmp_path))
    assert said(capsys, "runs", str(tmp_path), "--json") == "[]\n"
    line = f"{tmp_path}/x: no such folder"
    assert refused(capsys, "runs", f"{tmp_path}/x") == [line]
    assert refused(capsys, "runs", "a", "b") == ["runs: takes one folder, got a, b"]


def test_without_arguments_it_lists_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert refused(capsys, "runs") == [
        "runs: no such folder; name the folder of your runs: fp8cfg runs FOLDER"
    ]
    (tmp_path / "runs").mkdir()
    assert main(["runs"]) == 0


def test_it_loads_no_torch(root: Path) -> None:
    assert not {"torch", "pandas", "plotly"} & loads("runs", str(root), "--where", "state=done")


@pytest.mark.parametrize("column", ["loss", "best", "val_loss", "tokens/s", "size", "age"])
def test_runs_are_sorted_by_a_column(
    root: Path, column: str, capsys: pytest.CaptureFixture[str]
) -> None:
    listed = json.loads(said(capsys, "runs", str(root), "--sort", column, "--json"))
    field = {"best": "best_loss", "tokens/s": "tokens_per_second", "age": "updated"}
    values = [run[field.get(column, column)] for run in listed]
    highest_first = column in ("tokens/s", "size", "age")
    assert values == sorted(values, reverse=highest_first) and len(values) == 3


def test_a_run_without_a_value_comes_last(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (mine / "bf16" / "metrics.jsonl").write_text("")
    listed = json.loads(said(capsys, "runs", str(mine), "--sort", "loss", "--json"))
    assert listed[-1]["folder"].endswith("bf16") and listed[-1]["loss"] is None
    assert refused(capsys, "runs", str(mine), "--sort", "los") == [
        "--sort los: no such column; did you mean 'loss'?"
    ]
