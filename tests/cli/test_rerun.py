"""`rerun`: the same run again, what has changed, and whether the losses are the same."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from fp8cfg.__main__ import main
from fp8cfg.cli.rerun import compare_losses
from fp8cfg.run_folder.environment import collect_environment, compare_environments
from fp8cfg.run_folder.run_folder import RunFolder
from fp8cfg.schema.errors import ConfigError
from tests.support.small import SMALL


def test_differences_between_environments() -> None:
    now = collect_environment()
    assert [
        line for line in compare_environments(now, now) if not line.startswith("code: uncommitted")
    ] == []
    then = {
        **now,
        "packages": {**now["packages"], "torch": "2.0", "apex": "1"},
        "command": ["other"],
        "host": "other",
        "gpus": ["H200", "H200"],
        "threads": None,
        "variables": {"NVTE_X": "1", "TORCHELASTIC_RUN_ID": "x", "TORCHINDUCTOR_CACHE_DIR": "/x"},
        "code": {"commit": "a", "dirty": True},
    }
    lines = compare_environments(
        then,
        {**now, "code": {"commit": "b", "dirty": True}, "variables": {}, "gpus": [], "threads": 1},
    )
    assert lines == [
        f"packages.torch: 2.0 -> {now['packages']['torch']}",
        "gpus: H200, H200 -> none",
        "threads: none -> 1",
        "code.commit: a -> b",
        "packages.apex: 1 -> none",
        "variables.NVTE_X: 1 -> none",
        "code: uncommitted changes then and now; whether they are the same ones is not recorded",
    ]


def test_what_a_stranger_wrote_does_not_reach_the_terminal_raw() -> None:
    (line,) = compare_environments({"os\x1b[31m": "a\nb" + "x" * 500, "os": "same"}, {"os": "same"})
    assert line.isprintable() and len(line) < 250 and "a?bxx" in line


@pytest.mark.parametrize(
    ("then", "now", "lines"),
    [
        (
            {1: 3.0, 2: 0.1 + 0.2},
            {1: 3.0, 2: 0.1 + 0.2},
            ["training loss: equal bit for bit in all 2 values, the last 0.30000000000000004"],
        ),
        (
            {1: 3.0, 2: 0.3},
            {1: 3.0, 2: 0.1 + 0.2},
            ["training loss: 0.3, was 0.3 at step 2: 5.55e-17 apart, from step 2"],
        ),
        (
            {1: 3.0},
            {1: 4.0, 2: 2.0},
            [
                "compared up to step 1; the first run has 1 steps, this one 2",
                "training loss: 4, was 3 at step 1: 1 apart, from step 1",
            ],
        ),
        (
            {1: float("nan")},
            {1: float("nan")},
            ["training loss: equal bit for bit in its one value, nan"],
        ),
        (
            {},
            {1: 4.0},
            [
                "compared up to step 0; the first run has 0 steps, this one 1",
                "training loss: the two runs have none in common",
            ],
        ),
    ],
)
def test_losses_are_compare_losses(
    then: dict[int, float], now: dict[int, float], lines: list[str]
) -> None:
    none: dict[int, float] = {}
    assert (
        compare_losses(
            {"training loss": then, "validation loss": none},
            {"training loss": now, "validation loss": none},
        )[:-1]
        == lines
    )


@pytest.mark.slow
def test_a_run_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main([*SMALL, "precision=bf16_fp8", f"log.dir={tmp_path / 'first'}"]) == 0
    (first,) = (tmp_path / "first").iterdir()
    capsys.readouterr()
    assert main(["rerun", str(first)]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == f"rerun of {first}" and not [
        line for line in out if line.startswith("changed: ") and "uncommitted" not in line
    ]
    assert out[-2].startswith("training loss: equal bit for bit in all 6 values, the last ")
    assert out[-1].startswith("validation loss: equal bit for bit in all 2 values, the last ")
    (second,) = (p for p in (tmp_path / "first").iterdir() if p != first)
    assert (second / "recipe.yaml").read_text() == (first / "recipe.yaml").read_text()

    monkeypatch.setenv("NVTE_DEBUG_LEVEL", "1")
    from fp8cfg.data import corpus

    monkeypatch.setattr(
        corpus, "fingerprint", lambda tokens: "other"
    )  # what a changed text would have
    monkeypatch.setattr("fp8cfg.data.samples.fingerprint", lambda tokens: "other")
    assert (
        main(
            [
                "rerun",
                str(first),
                "optim.lr=1e-3",
                f"log.dir={tmp_path / 'third'}",
                "trainer.max_steps=4",
            ]
        )
        == 0
    )
    out = capsys.readouterr().out.splitlines()
    for line in (
        "changed: optim.lr: 0.003 -> 0.001",
        "changed: trainer.max_steps: 6 -> 4",
        "changed: variables.NVTE_DEBUG_LEVEL: none -> 1",
        "changed: data: the text or tokens to train on differ from the first run's",
        "compared up to step 4; the first run has 6 steps, this one 4",
    ):
        assert line in out
    assert "apart, from step 2" in out[-2] and max(map(len, out[-3:])) <= 80


DAMAGED = [
    ("environment.json", "[1]", "versions: environment.json: not a JSON object"),
    ("environment.json", "{", "versions: environment.json: cannot be read ("),
    ("environment.json", "[" * 100_000, "versions: environment.json: cannot be read ("),
    ("environment.json", None, "versions: environment.json: is not there"),
    ("environment.json", " " * (2 << 20), "versions: environment.json: larger than 1024 KB"),
    ("environment.json", "FIFO", "versions: environment.json: is no file"),
    ("metrics.jsonl", "nonsense\n", "losses: metrics.jsonl:1: not a line of metrics"),
    ("metrics.jsonl", None, "losses: metrics.jsonl: is not there"),
    ("metrics.jsonl", "FIFO", "losses: metrics.jsonl: is no file"),
    ("checkpoints", None, "data: the first run has no checkpoint"),
    (
        "checkpoints/step-00000001/state.json",
        "5",
        "data: checkpoints/step-00000001/state.json: not a JSON object",
    ),
    (
        "checkpoints/step-00000001/state.json",
        "{}",
        "data: checkpoints/step-00000001/state.json: does not have data.corpus_sha256",
    ),
]


@pytest.mark.parametrize(
    ("file", "text", "line"), DAMAGED, ids=[f"{file} {str(text)[:9]}" for file, text, _ in DAMAGED]
)
def test_what_is_missing_or_damaged_is_named_and_the_recipe_runs(
    file: str,
    text: str | None,
    line: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "fp8cfg.cli.launch_run.launch", lambda recipe, *_: print("runs", recipe.name) or 0
    )
    monkeypatch.setattr(
        "fp8cfg.training.data.run_data", lambda recipe: (SimpleNamespace(sha256="one"),)
    )
    state = json.dumps({"data": {"corpus_sha256": "one"}})
    files = {
        "recipe.yaml": "recipe: llama_tiny\n",
        "environment.json": json.dumps(collect_environment()),
        "metrics.jsonl": "",
        "checkpoints/step-00000001/state.json": state,
    }
    for name, content in (files | {file: text}).items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        if content == "FIFO":
            os.mkfifo(name)
        elif content is not None and not (text is None and name.startswith(file)):
            Path(name).write_text(content)
    assert main(["rerun", "."]) == 0
    out = [
        said
        for said in capsys.readouterr().out.replace("\n  ", " ").splitlines()
        if said and "uncommitted" not in said
    ]
    assert (
        out[0] == "rerun of ."
        and out[1].startswith(f"cannot compare {line}")
        and out[2:] == ["runs llama_tiny"]
    )


def test_presets_that_no_word_chooses_are_said_to_change_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fp8cfg.cli.launch_run.launch", lambda *_: 0)
    for name, text in {
        "recipe.yaml": "recipe: llama_tiny\n",
        "conf/precision/mine.yaml": "compute: fp32\n",
        "conf/optim/slow.yaml": "lr: 1e-4\n",
    }.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)
    for words, said in (("precision=bf16", 1), ("precision=mine", 0), ("optim=slow", 0)):
        assert main(["rerun", ".", "--config-dir", "conf", words]) == 0
        assert (
            capsys.readouterr().err.count(
                "note: --config-dir conf: no effect, no override chooses one of its presets"
            )
            == said
        )


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (
            "hydra: {run: {dir: x}}",
            "recipe.yaml: hydra: Hydra's own settings are not part of a recipe",
        ),
        ("x" * (1 << 20), "recipe.yaml: larger than 256 KB"),
        (None, "recipe.yaml is missing; check"),
    ],
)
def test_a_recipe_that_cannot_be_read_is_refused(
    text: str | None, part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if text:
        (tmp_path / "recipe.yaml").write_text(text)
    assert main(["rerun", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert part in err and err.count("\n") == 1


def test_a_run_without_a_checkpoint_has_no_digest_of_its_data(tmp_path: Path) -> None:
    from fp8cfg.cli.rerun import _data_digest
    from fp8cfg.run_folder.run_folder import RunFolder

    (tmp_path / "checkpoints" / "step-00000002.tmp-1").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-00000002.tmp-1" / "state.json").write_text("{}")
    with pytest.raises(ConfigError, match="the first run has no checkpoint"):
        _data_digest(RunFolder.reading(tmp_path))
    for step, digest in ((1, "one"), (10, "ten")):
        folder = tmp_path / "checkpoints" / f"step-{step:08d}"
        folder.mkdir()
        (folder / "state.json").write_text(json.dumps({"data": {"corpus_sha256": digest}}))
    assert _data_digest(RunFolder.reading(tmp_path)) == "ten"


def test_a_run_whose_recipe_a_resume_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["model.num_layers=1", "trainer.max_steps=4", f"log.folder={tmp_path / 'run'}"]
    first = tmp_path / "run"
    assert main([*SMALL, *words]) == 0
    assert main(["resume", str(first), "trainer.max_steps=6", "checkpoint.keep=5"]) == 0
    assert [step for step, _ in RunFolder.reading(first).past_recipes()] == [4]
    capsys.readouterr()
    assert main(["rerun", str(first), "log.dir=" + str(tmp_path / "again")]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "nothing that is recorded has changed" not in out
    assert (
        "not repeated: up to step 4 the first run had trainer.max_steps=4; this run has the last"
        " recipe from its first step, and losses can differ" in out
    )
    # A resume from before the change forgets it.
    for step in ("00000004", "00000006"):
        shutil.rmtree(first / "checkpoints" / f"step-{step}")
    assert main(["resume", str(first)]) == 0
    assert RunFolder.reading(first).past_recipes() == []
