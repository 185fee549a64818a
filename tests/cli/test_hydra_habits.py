"""Habits of Hydra's users: the run folder, sweepers and launchers that are installed, and the documented list of what does not work."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fp8cfg
from fp8cfg.__main__ import main

PAGE = Path(__file__).parents[2] / "docs/guides/hydra.md"
ROWS = re.findall(
    r"^\| `(.+?)` \| (.+?) \| .+? \|$",
    PAGE.read_text(encoding="utf-8").partition("## What does not work")[2],
    re.MULTILINE,
)
TINY = [
    "recipe=llama_tiny",
    "precision=bf16_fp8",
    "trainer.max_steps=2",
    "trainer.val_check_interval=0",
    "trainer.global_batch_size=2",
    "trainer.micro_batch_size=2",
    "model.num_layers=1",
    "model.hidden_size=32",
    "model.ffn_hidden_size=32",
    "model.num_attention_heads=2",
    "model.num_query_groups=1",
    "model.seq_length=32",
    "data=tiny",
    "checkpoint.every_n_steps=0",
]


@pytest.mark.parametrize(("said", "answer"), ROWS, ids=[said for said, _ in ROWS])
def test_what_does_not_work_is_answered_as_documented(
    said: str,
    answer: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    if said.startswith("fp8cfg "):
        assert main(shlex.split(said)[1:]) == 2
        (line,) = capsys.readouterr().err.splitlines()
    else:
        with pytest.raises(fp8cfg.ConfigError) as e:
            fp8cfg.from_yaml(f"{said}\n")
        (line,) = e.value.problems
    assert answer in line
    assert not list(tmp_path.iterdir())


def test_the_list_is_read() -> None:
    assert (
        len(ROWS)
        == PAGE.read_text(encoding="utf-8").partition("## What does not work")[2].count("\n| ") - 2
        > 12
    )


@pytest.fixture
def folders(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The run folders that `train` makes, without training."""
    made: list[Path] = []

    def launched(recipe: fp8cfg.Recipe, folder: Callable[[], Any], *_: Any) -> int:
        with folder() as run:
            made.append(run.path)
        return 0

    monkeypatch.setattr("fp8cfg.cli.launch_run.launch", launched)
    return made


@pytest.mark.parametrize("value", ["", "''", '" "', "null"])
def test_a_folder_of_hydras_needs_a_name(
    value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for argv, key in (([], "hydra.run.dir"), (["sweep", "optim.lr=0.1,0.2"], "hydra.sweep.dir")):
        assert main([*argv, f"{key}={value}"]) == 2
        assert capsys.readouterr().err == f"error: {key}={value}: needs a name\n" and not list(
            tmp_path.iterdir()
        )


def test_hydra_run_dir_is_the_run_folder(
    folders: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["hydra.run.dir=here/it/is", "fp8.margin=1", "precision=bf16_fp8"]) == 0
    assert (
        main(["hydra.run.dir=runs/${name}-${trainer.max_steps}-${now:%Y}", "trainer.max_steps=7"])
        == 0
    )
    assert folders[0] == Path("here/it/is") and re.fullmatch(r"llama_tiny-7-\d{4}", folders[1].name)
    assert fp8cfg.RunFolder.open(folders[0], lock=False).read_recipe().fp8.margin == 1
    capsys.readouterr()
    assert main(["hydra.run.dir=a", "log.dir=b"]) == 0
    assert (
        capsys.readouterr().err == "note: log.dir=b: no effect, hydra.run.dir=a is the run folder\n"
    )
    assert main(["hydra.run.dir=${log.dir}/c/d", "log.dir=b"]) == 0 and not capsys.readouterr().err
    assert main(["hydra.run.dir=rü é"]) == 0 and folders[-1] == Path("rü é")
    assert main(["hydra.run.dir=here/it/is"]) == 2
    assert "already contains a run" in capsys.readouterr().err
    assert main(["hydra.run.dir=x", "hydra.verbose=true"]) == 2
    assert (
        capsys.readouterr().err
        == "error: hydra.verbose=true: does nothing in a single run; use it with -m, --cfg or --info\n"
    )


PLUGINS = {
    "joblib_launcher": ["fp8.margin=0,1", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2"],
    "submitit_launcher": ["fp8.margin=0,1", "hydra/launcher=submitit_local"],
    "optuna_sweeper": [
        "optim.lr=interval(1e-4,1e-2)",
        "hydra/sweeper=optuna",
        "hydra.sweeper.n_trials=2",
        "hydra.sweeper.n_jobs=1",
    ],
}


def _installed(plugin: str) -> bool:
    return bool(importlib.util.find_spec("hydra_plugins")) and bool(
        importlib.util.find_spec(f"hydra_plugins.hydra_{plugin}")
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "plugin",
    [
        pytest.param(
            name,
            marks=pytest.mark.skipif(
                not _installed(name), reason=f"hydra-{name.replace('_', '-')} is not installed"
            ),
        )
        for name in PLUGINS
    ],
)
def test_a_sweep_through_a_plugin(plugin: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fp8cfg", "-m", *TINY, f"log.dir={tmp_path}", *PLUGINS[plugin]]
    done = subprocess.run(
        command, cwd=PAGE.parents[2], capture_output=True, text=True, timeout=300
    )  # joblib starts a Python of its own
    assert done.returncode == 0, done.stderr
    (sweep,) = tmp_path.iterdir()
    jobs = json.loads((sweep / "results.json").read_text())
    assert [j["exit_code"] for j in jobs] == [0, 0] and all(
        j["fp8_share"] > 0.3 and 5 < j["training_loss"] < 6 for j in jobs
    )
    assert [(sweep / str(n) / "recipe.yaml").exists() for n in (0, 1)] == [True, True]
    assert f"sweep folder: {sweep}" in done.stdout
