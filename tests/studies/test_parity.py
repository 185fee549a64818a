"""Parity of tiny runs: the gaps against the runs' own metrics, faults that it must find, reuse, resume and launchers."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import fp8cfg
from fp8cfg.__main__ import main
from fp8cfg.execution.executor import Command
from fp8cfg.numerics import linear_operands
from fp8cfg.numerics.scaling import WEIGHT
from fp8cfg.schema.errors import ConfigError
from fp8cfg.studies import parity_runs, parity_verdicts
from fp8cfg.training.loop import Interrupted
from fp8cfg.training.runs import fit
from tests.support import chromium

TINY = (
    "recipe=llama_tiny",
    "data=tiny",
    "model.num_layers=1",
    "model.hidden_size=64",
    "model.ffn_hidden_size=128",
    "model.seq_length=32",
    "trainer.global_batch_size=4",
    "trainer.micro_batch_size=4",
    "optim.warmup_steps=2",
    "trainer.limit_val_batches=1",
    "checkpoint.every_n_steps=4",
)
STEPS = 8
SEEDS = (1234, 1235)


def parity(*words: str) -> int:
    return main(["parity", *TINY, "--steps", str(STEPS), *words])


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a study with two precisions and two seeds."""
    root = tmp_path_factory.mktemp("parity")
    assert parity("precision=bf16_fp8", "--seeds", "2", f"log.dir={root}") == 0
    return root / "parity-llama_tiny-8steps"


@pytest.fixture
def copied(study: Path, tmp_path: Path) -> Path:
    """A log.dir with a copy of the study."""
    shutil.copytree(study, tmp_path / study.name)
    return tmp_path


@pytest.fixture
def no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def train(run: parity_runs.PlannedRun, _: Any) -> None:
        raise AssertionError(f"{run.title} is trained")

    monkeypatch.setattr(parity_runs, "fit_here", train)


def losses(folder: Path) -> list[float]:
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [row["loss"] for row in rows if "loss" in row]


def tree(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


@pytest.mark.usefixtures("no_training")
def test_the_same_command_again_reads_finished_runs_and_writes_none(
    study: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sorted(path.name for path in study.iterdir()) == [
        f"{precision}-seed{seed}" for precision in ("bf16", "bf16_fp8") for seed in SEEDS
    ]
    before = tree(study)
    command = ["precision=bf16,bf16_fp8", "--seeds", "2", f"log.dir={study.parent}"]
    assert parity(*command, "--json") == 0
    out, err = capsys.readouterr()
    assert tree(study) == before
    assert err.count(": reused") == 4
    data = json.loads(out)
    assert data["seeds"] == list(SEEDS) and data["steps"] == STEPS and data["window"] == 2

    gaps = {}
    for seed in SEEDS:
        pairs = zip(
            losses(study / f"bf16_fp8-seed{seed}"), losses(study / f"bf16-seed{seed}"), strict=True
        )
        gaps[str(seed)] = statistics.fmean([a - b for a, b in pairs][-2:])
    [verdict] = data["precisions"]
    assert verdict["gap_by_seed"] == pytest.approx(gaps)
    assert verdict["gap"] == pytest.approx(statistics.fmean(gaps.values()))
    spread = statistics.stdev(gaps.values())
    assert verdict["noise"] == pytest.approx(6.314 * spread / math.sqrt(2))
    assert verdict["failed"] is False and data["exit_code"] == 0
    # Same weights, same data: the first losses differ by the rounding alone.
    first = [losses(study / f"{name}-seed1234")[0] for name in ("bf16", "bf16_fp8")]
    assert first[0] != first[1] and abs(first[0] - first[1]) < 0.01


@pytest.mark.usefixtures("no_training")
def test_the_table_states_the_verdict_and_what_it_cannot_tell(
    study: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["precision=bf16,bf16_fp8", f"log.dir={study.parent}"]
    assert parity(*command, "--seeds", "2") == 0
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if len(line) > 80 and str(study) not in line] == []
    assert (
        "within " in out
        and "parity of llama_tiny: 8 steps, seeds 1234, 1235" in out
        and "baseline bf16: loss " in out
    )
    for limit in ("Short runs: 1.02K tokens", "Small model", "FP8 is emulated (bf16_fp8)"):
        assert limit in out

    assert parity(*command, "--seeds", "1", "--tolerance", "10") == 0
    out = capsys.readouterr().out
    assert "within tolerance" in out and "One seed: the noise is unknown" in out

    code = parity(*command, "--seeds", "1", "--tolerance", "0", "--json")
    [verdict] = json.loads(capsys.readouterr().out)["precisions"]
    assert verdict["gap"] != 0 and code == (3 if verdict["gap"] > 0 else 0)


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Multiplies the scale that dequantizes each FP8 weight, so that it does not fit the values."""
    operand = linear_operands.LinearCall._fp8_operand

    def plant(factor: float) -> None:
        def with_wrong_scale(self: Any, source: Any, role: int, *rest: Any) -> Any:
            found = operand(self, source, role, *rest)
            return found._replace(scale_inv=found.scale_inv * factor) if role == WEIGHT else found

        monkeypatch.setattr(linear_operands.LinearCall, "_fp8_operand", with_wrong_scale)

    return plant


def test_a_weight_scale_that_is_too_small_fails_against_an_existing_baseline(
    study: Path,
    tmp_path: Path,
    planted: Callable[[float], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    planted(2.0**-6)
    against = [word for seed in SEEDS for word in ("--against", str(study / f"bf16-seed{seed}"))]
    output = tmp_path / "new" / "parity.html"
    code = parity(
        "precision=bf16_fp8", *against, f"log.dir={tmp_path}", "--json", "--output", str(output)
    )
    assert code == 3
    data = json.loads(capsys.readouterr().out)
    [verdict] = data["precisions"]
    assert verdict["verdict"] == "worse" and verdict["from_step"] < STEPS
    assert verdict["gap"] > max(verdict["noise"], 0.1)
    assert not (tmp_path / "parity-llama_tiny-8steps" / "bf16-seed1234").exists()
    page = output.read_text(encoding="utf-8")
    assert f"worse from step {verdict['from_step']} on" in page
    assert "What this study cannot tell" in page and "http://" not in page.split("<script")[0]


@pytest.mark.skipif(chromium.PATH is None, reason="chromium is not installed")
@pytest.mark.usefixtures("no_training")
def test_the_page_draws_the_gaps_of_the_table(
    study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "parity.html"
    command = ["precision=bf16,bf16_fp8", "--seeds", "2", f"log.dir={study.parent}", "--json"]
    assert parity(*command, "--output", str(page)) == 0
    [verdict] = json.loads(capsys.readouterr().out)["precisions"]
    with chromium.chromium(tmp_path / "profile") as browser:
        browser.open(page)
        browser.screenshot(tmp_path / "page.png", full=True)
        assert browser.problems == []
        assert browser.run("figures.every(f => f.dataset.drawn === 'light')")
        traces = browser.run(
            "figures.map(f => f.querySelector('.plot').data.map(t => [t.name ?? '', [...t.y]]))"
        )
    gap, by_seed, loss = [dict(figure) for figure in traces]
    assert len(gap["bf16_fp8"]) == STEPS
    assert gap["bf16_fp8"][-1] == pytest.approx(verdict["gap"])
    assert gap["tolerance"] == [0.01, 0.01] and "noise band of other seeds" in gap
    assert by_seed["bf16_fp8, one seed"] == pytest.approx(list(verdict["gap_by_seed"].values()))
    means = [losses(study / f"bf16-seed{seed}") for seed in SEEDS]
    assert loss["bf16"] == pytest.approx(
        [statistics.fmean(pair) for pair in zip(*means, strict=True)]
    )


def test_a_precision_that_diverges_fails_and_is_not_trained_again(
    study: Path,
    copied: Path,
    planted: Callable[[float], None],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for seed in SEEDS:
        shutil.rmtree(copied / study.name / f"bf16_fp8-seed{seed}")
    planted(math.inf)
    command = ["precision=bf16,bf16_fp8", "--seeds", "2", f"log.dir={copied}", "--json"]
    assert parity(*command) == 3
    [verdict] = json.loads(capsys.readouterr().out)["precisions"]
    assert verdict["verdict"] == "diverged" and verdict["from_step"] == 1
    assert "2 of 2 runs diverged" in verdict["message"] and verdict["gap"] is None

    monkeypatch.setattr(parity_runs, "fit_here", None)
    assert parity(*command) == 3
    capsys.readouterr()
    assert parity(*command[:-1]) == 3
    assert "diverged at step 1" in capsys.readouterr().out


def test_a_baseline_that_diverges_ends_the_study(
    study: Path,
    tmp_path: Path,
    planted: Callable[[float], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    planted(math.inf)
    words = ["precision=bf16_fp8,bf16", "--seeds", "1", f"log.dir={tmp_path}"]
    assert parity(*words) == 7
    assert "the baseline diverged, bf16_fp8, seed 1234" in capsys.readouterr().err
    assert not (tmp_path / study.name / "bf16-seed1234").exists()
    assert parity(*words) == 7  # also if the folder of the baseline exists
    capsys.readouterr()


def test_a_stopped_run_is_resumed_to_the_same_losses(
    study: Path, copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copied / study.name / "bf16_fp8-seed1235"
    recipe = fp8cfg.RunFolder.open(study / folder.name, lock=False).read_recipe()
    shutil.rmtree(folder)

    class Stop(fp8cfg.Callback):
        def step(self, step: int, values: Any) -> None:
            if step == 5:
                os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted):
        fit(fp8cfg.build(recipe), folder, say=lambda _: None, callbacks=[Stop()])
    assert len(losses(folder)) == 5
    assert parity("precision=bf16,bf16_fp8", "--seeds", "2", f"log.dir={copied}") == 0
    out = capsys.readouterr().out
    assert out.count("reused") == 3 and "resuming" in out
    assert losses(folder) == losses(study / folder.name)


def test_a_run_that_still_trains_is_compared_as_far_as_it_is(
    study: Path, copied: Path, no_training: None
) -> None:
    metrics = copied / study.name / "bf16_fp8-seed1235" / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(lines[:5]))
    recipe = fp8cfg.compose([*TINY, f"trainer.max_steps={STEPS}", f"log.dir={copied}"])
    recipes = {
        name: fp8cfg.compose([f"precision={name}"], base=recipe) for name in ("bf16", "bf16_fp8")
    }
    planned = parity_runs.make_study(recipes, 2, 0.01)
    report = parity_verdicts.judge(planned)
    assert list(report.steps) == [1, 2, 3, 4, 5] and report.window == 1

    metrics.unlink()
    with pytest.raises(ConfigError, match=r"bf16_fp8-seed1235: has no step yet"):
        parity_verdicts.judge(planned)


def test_a_baseline_on_other_data_is_reported(
    study: Path, copied: Path, no_training: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its folder has the name of the precision: the two are told apart."""
    baseline = copied / "bf16_fp8"
    (copied / study.name / "bf16-seed1234").rename(baseline)
    command = ["precision=bf16_fp8", "--against", str(baseline), f"log.dir={copied}"]
    assert parity(*command) == 0
    out = capsys.readouterr().out
    assert "baseline run bf16_fp8: loss" in out and "same data" not in out

    state = max(baseline.glob("checkpoints/step-*")) / "state.json"
    data = json.loads(state.read_text())
    data["data"]["corpus_sha256"] = "0" * 64
    state.write_text(json.dumps(data))
    environment = json.loads((baseline / "environment.json").read_text())
    environment["packages"]["torch"] = "1.0"
    (baseline / "environment.json").write_text(json.dumps(environment))
    assert parity(*command) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "The runs were not trained on the same data" in out
    assert "not trained in the same environment: packages.torch: 1.0 -> " in out


def test_in_python_with_overrides_of_a_precision_and_an_executor(
    study: Path, copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = fp8cfg.compose([*TINY, f"log.dir={copied}"])
    commands = []

    class InThisProcess:
        def execute(self, command: Command) -> int:
            commands.append(command.folder.name)
            return main(command.words())

    report = fp8cfg.parity(
        recipe,
        ["bf16", "bf16_fp8", "bf16_fp8 fp8.margin=6"],
        seeds=2,
        steps=STEPS,
        executor=InThisProcess(),
        say=lambda _: None,
    )
    assert commands == [f"bf16_fp8_fp8.margin_6-seed{seed}" for seed in SEEDS]
    assert [verdict.precision for verdict in report.verdicts] == [
        "bf16_fp8",
        "bf16_fp8 fp8.margin=6",
    ]
    # E4M3 has 17 binades: scales that are 2^-6 too small, with fitting inverses, lose nothing here.
    assert not report.failed and "bf16_fp8 fp8.margin=6" in str(report)
    assert repr(report) == str(report) and "bf16_fp8 fp8.margin=6" in report._repr_html_()
    recipe_of_run = fp8cfg.RunFolder.open(
        copied / study.name / commands[0], lock=False
    ).read_recipe()
    assert recipe_of_run.fp8.margin == 6 and recipe_of_run.trainer.seed == SEEDS[0]


def test_a_launcher_of_hydra_trains_what_is_missing(
    study: Path, copied: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = copied / study.name / "bf16-seed1235"
    shutil.rmtree(folder)
    words = ["precision=bf16,bf16_fp8", "--seeds", "2", f"log.dir={copied}", "--json"]
    assert parity(*words, "hydra/launcher=basic") == 0
    out, err = capfd.readouterr()
    assert "3 of them reused" in err and json.loads(out)["steps"] == STEPS
    assert losses(folder) == losses(study / folder.name)


def test_fp8_overrides_hold_only_for_precisions_with_fp8(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[parity_runs.Study] = []

    def stop(study: parity_runs.Study) -> None:
        made.append(study)
        raise ConfigError("enough")

    monkeypatch.setattr(parity_runs, "check_runs", stop)
    precisions = "precision=bf16,bf16_fp8,bf16_fp8 fp8.exclude=['*.linear_fc1','*.linear_fc2']"
    words = [precisions, "fp8.margin=3", "optim.lr=0.001", "trainer.seed=5"]
    assert parity(*words, f"log.dir={tmp_path}") == 2
    margins = {run.precision: run.recipe.fp8.margin for run in made[0].runs}
    *names, excluding = margins
    assert names == ["bf16", "bf16_fp8"] and list(margins.values()) == [0, 3, 3]
    assert made[0].runs[-1].recipe.fp8.exclude == ("*.linear_fc1", "*.linear_fc2")
    assert excluding in made[0].runs[-1].title
    assert {run.recipe.optim.lr for run in made[0].runs} == {0.001}
    assert sorted({run.recipe.trainer.seed for run in made[0].runs}) == [5, 6, 7]
    assert "fp8.margin=3: not for bf16, which has no FP8" in capsys.readouterr().err


def test_a_recipe_file_is_compared_with_bf16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[parity_runs.Study] = []

    def stop(study: parity_runs.Study) -> None:
        made.append(study)
        raise ConfigError("enough")

    monkeypatch.setattr(parity_runs, "check_runs", stop)
    file = tmp_path / "advised.yaml"
    file.write_text("recipe: llama_tiny\nprecision: bf16_fp8\nfp8: {exclude: ['*.linear_fc2']}\n")
    assert main(["parity", str(file), "--steps", "3", "--seeds", "1"]) == 2
    assert (
        main(["parity", str(file), "--steps", "3", "--seeds", "1", "precision=bf16_fp8,own"]) == 2
    )
    exclude = [{run.precision: run.recipe.fp8.exclude for run in study.runs} for study in made]
    assert exclude == [
        {"bf16": (), "own": ("*.linear_fc2",)},
        {"bf16_fp8": (), "own": ("*.linear_fc2",)},
    ]
    capsys.readouterr()


@pytest.fixture
def errors(capsys: pytest.CaptureFixture[str]) -> Iterator[SimpleNamespace]:
    """Runs a command that must end with exit code 2, and returns the lines of its errors."""

    def of(*words: str) -> list[str]:
        assert parity(*words) == 2
        err = capsys.readouterr().err
        return [line for line in err.splitlines() if not line.startswith("note:")]

    yield SimpleNamespace(of=of)


@pytest.mark.usefixtures("no_training")
def test_wrong_arguments_get_one_line_each(
    study: Path, tmp_path: Path, errors: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = f"log.dir={tmp_path}"
    both = "precision=bf16,bf16_fp8"
    run = str(study / "bf16-seed1234")
    for words, part in (
        ([new], "needs precisions to compare, as in precision=bf16,bf16_fp8"),
        (["precision=bf16", new], "precision=bf16: is the baseline; add a precision"),
        (["precision=bf16,bf16", new], "bf16 is given twice"),
        (["precision=bf16,bf16_fp8,own", new], "precision=bf16,own: are the same precision"),
        (["precision=bf16", "precision=bf16_fp8", new], "given twice; write one list"),
        (["precision=bf16,bf16_fp9", new], "bf16_fp9"),
        ([both, new, "--tolerance", "much"], "--tolerance much: needs a number"),
        ([both, new, "--tolerance", "-1"], "--tolerance -1: needs a number of at least 0"),
        ([both, new, "--seeds", "0"], "--seeds 0: must be at least 1"),
        ([both, new, "trainer.max_steps=9"], "trainer.max_steps is set too; drop one"),
        (
            [both, new, "trainer.num_nodes=2", "trainer.global_batch_size=8"],
            "trainer.num_nodes=2: parity starts runs on one",
        ),
        ([both, new, "log.folder=x"], "log.folder=x: parity trains several runs"),
        ([both, new, "trainer.smoke=true"], "trainer.smoke=true"),
        ([both, new, "hydra.run.dir=x"], "hydra.run.dir=x: parity takes hydra/launcher=NAME"),
        (["precision=bf16,bf16_mxfp8", new, "fp8.margin=1"], "precision=bf16_mxfp8: fp8.margin=1"),
        (["precision=bf16_fp8", "--against", run, "--seeds", "2"], "drop --seeds"),
        (["precision=bf16_fp8", "--against", run, "--against", run], "trainer.seed=1234"),
        (["precision=bf16_fp8", "--against", str(tmp_path)], "not a run folder"),
        (["precision=bf16_fp8", "--against", run, "optim.lr=1"], "write optim.lr=0.003"),
        ([both, f"log.dir={study.parent}", "optim.lr=0.01"], "has a run with optim.lr=0.003"),
        ([both, new, "--output", str(tmp_path)], f"--output {tmp_path}: is a folder"),
    ):
        lines = errors.of(*words)
        assert len(lines) == 1 and part in lines[0], (words, lines)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    assert "start it without torchrun" in errors.of(both, new)[0]
    assert list(tmp_path.iterdir()) == []
