"""The command line as a new user meets it: what it prints, one line for each mistake, and the documented exit codes."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.support.ranks import launch
from tests.support.small import SMALL

ROOT = Path(__file__).parents[2]


def started(*argv: str, **env: str) -> subprocess.CompletedProcess[str]:
    """`python -m fp8cfg` as a shell starts it; `fp8cfg` below is a process too, forked from one that has torch imported."""
    return subprocess.run(
        [sys.executable, "-m", "fp8cfg", *argv],
        cwd=ROOT,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=300,
    )


fp8cfg = partial(launch, 1)


def test_version() -> None:
    assert started("--version").stdout.startswith("fp8cfg 0.")


NO_CUDA = (
    "No CUDA GPUs are available" if torch.version.cuda else "Torch not compiled with CUDA enabled"
)
MISTAKES = [  # what a whole process ends with; tests/schema/test_error_texts.py has the words
    (["fp8.margn=1"], "error: fp8.margn: no such key; did you mean 'fp8.margin'?"),
    (["--config-dir"], "error: --config-dir: needs a value"),
    (["--config-dir", "nowhere"], "error: --config-dir nowhere: no such folder"),
    (["nowhere.yaml"], "error: nowhere.yaml: cannot be read (No such file or directory)"),
    (
        ["precision=bf16_fp8", "fp8.exclude=['*.linear_fc9']"],
        "error: fp8.exclude=*.linear_fc9: matches no linear layer; did you mean 'layers.*.mlp.linear_fc2'?",
    ),
    (
        ["trainer.accelerator=cuda"],
        f"error: trainer.accelerator=cuda: torch has no CUDA device here ({NO_CUDA}); set cpu or auto",
    ),
]


@pytest.mark.parametrize(("argv", "line"), MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_2(argv: list[str], line: str) -> None:
    done = fp8cfg(*argv, CUDA_VISIBLE_DEVICES="")
    assert done.stderr.splitlines() == [line]
    assert done.returncode == 2


def test_a_model_that_does_not_fit_is_refused_with_what_does() -> None:
    words = ["recipe=llama_405b", "precision=bf16_fp8", "data.tokenizer=bytes"]
    done = fp8cfg(*words, "trainer.accelerator=cpu")
    assert done.returncode == 2
    assert done.stdout == ""
    *lines, line = done.stderr.splitlines()
    assert (
        len(lines) == 2
        and "tensor_model_parallel_size=8: " in lines[0]
        and "context_parallel_size=4: " in lines[1]
    )
    assert (
        "pipeline_model_parallel_size=8: needs a multiple of 8 ranks, got 1; launch 8 ranks or set it to 1"
        in line
    )
    assert line.endswith(
        f"; as a smoke run: fp8cfg {' '.join(words)} trainer.accelerator=cpu trainer.smoke=true"
    )


def test_a_layout_for_more_ranks_is_refused_with_a_line_that_trains_as_printed(
    tmp_path: Path,
) -> None:
    words = [
        *SMALL,
        "precision=bf16_fp8",
        "trainer.devices=4",
        "trainer.micro_batch_size=2",
        "trainer.strategy.context_parallel_size=2",
        f"log.dir={tmp_path}",
    ]
    refused = fp8cfg(*words)
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1 and not [*tmp_path.iterdir()]
    offers = refused.stderr.removesuffix("\n").partition("; runs here: ")[2]
    line, smoke = offers.split("; as a smoke run: ")
    verb, *offered = shlex.split(line)
    assert (
        verb == "fp8cfg"
        and set(offered) - set(words) == {"trainer.strategy.context_parallel_size=1"}
        and smoke.endswith(" trainer.smoke=true")
    )
    done = fp8cfg(*offered)
    assert done.returncode == 0 and "done: 6 steps" in done.stdout, done.stderr


def test_the_main_job_end_to_end(tmp_path: Path) -> None:
    done = started(*SMALL, "precision=bf16_fp8", "fp8.margin=1", f"log.dir={tmp_path}")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    folder = next(tmp_path.iterdir())
    lines = done.stdout.splitlines()
    assert lines[0] == f"run folder: {folder}"
    assert "planned coverage" not in done.stdout and "memory per rank" not in done.stdout
    coverage = next(line for line in lines if line.startswith("FP8: "))
    assert "8 of 9 linear layers" in coverage and coverage.endswith("as planned, emulated")
    assert lines.index(coverage) <= 15
    assert {p.name for p in folder.iterdir()} >= {
        "recipe.yaml",
        "environment.json",
        "metrics.jsonl",
        "coverage.json",
        "checkpoints",
    }
    recorded = json.loads((folder / "coverage.json").read_text())["backend"]
    assert recorded["backend"] == "native" and recorded["passed_over"] == [
        "msamp, te, torchao: native goes first where FP8 is emulated"
    ]


def test_min_coverage_ends_with_exit_code_3(tmp_path: Path) -> None:
    done = fp8cfg(*SMALL, "precision=bf16_fp8", "fp8.min_coverage=0.99", f"log.dir={tmp_path}")
    assert done.returncode == 3
    assert done.stderr.startswith("error: fp8.min_coverage=0.99: ") and done.stderr.count("\n") == 1


def test_a_recipe_file_and_a_folder_of_ones_own_train(tmp_path: Path) -> None:
    (tmp_path / "precision").mkdir()
    (tmp_path / "precision" / "mine.yaml").write_text(
        "compute: bf16\nfp8: {enabled: true, scaling: current}\n"
    )
    file = tmp_path / "mine.yaml"
    file.write_text(
        "recipe: llama_tiny\nprecision: mine\nname: mine\ntrainer: {max_steps: 2}\noptim: {warmup_steps: 1}\n"
    )
    small = [w for w in SMALL if not w.startswith(("recipe=", "trainer.max_steps", "optim.warmup"))]
    done = fp8cfg(str(file), *small, "--config-dir", str(tmp_path), f"log.dir={tmp_path / 'runs'}")
    assert done.returncode == 0, done.stderr
    assert "precision:  bf16, FP8 current" in done.stdout and next(
        (tmp_path / "runs").iterdir()
    ).name.startswith("mine-")


def test_run_folders_that_cannot_be_had(tmp_path: Path) -> None:
    assert fp8cfg(*SMALL, "trainer.max_steps=2", f"log.dir={tmp_path / 'runs'}").returncode == 0
    folder = next((tmp_path / "runs").iterdir())
    from fp8cfg.run_folder.run_folder import RunFolder

    with RunFolder.open(folder):
        second = fp8cfg("resume", str(folder))
    assert (
        second.returncode == 6
        and str(os.getpid()) in second.stderr
        and second.stderr.count("\n") == 1
    )
    (tmp_path / "file").write_text("")
    blocked = fp8cfg(*SMALL, f"log.dir={tmp_path / 'file'}")
    assert (
        blocked.returncode == 5
        and blocked.stderr.startswith("error: ")
        and blocked.stderr.count("\n") == 1
    )


def test_megatrons_token_files_train(tmp_path: Path) -> None:
    import numpy as np

    from fp8cfg.data.indexed import write_indexed

    documents = [np.random.default_rng(i).integers(0, 200, 300) for i in range(20)]
    prefix = write_indexed(tmp_path / "tokens", documents, vocab_size=208)
    words = [w for w in SMALL if not w.startswith("data=")]
    done = fp8cfg(
        *words,
        "data=tokens",
        f"data.path={prefix}",
        "model.vocab_size=208",
        "precision=bf16_fp8",
        f"log.dir={tmp_path / 'runs'}",
    )
    assert done.returncode == 0, done.stderr
    small = fp8cfg(
        *words,
        "data=tokens",
        f"data.path={prefix}",
        "model.vocab_size=96",
        f"log.dir={tmp_path / 'runs'}",
    )
    assert (
        small.returncode == 2 and "vocab_size" in small.stderr and small.stderr.count("\n") == 1
    ), small.stderr


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("plan | head -1", 0),
        ("list | true", 0),
        ("export --full | head -1", 0),
        ("check fp8.margn=1 | true", 2),
        ("list >&-", 0),
        ("check fp8.margn=1 >&-", 2),
        ("plan precision=bf16_fp8 --gpu a100-40 >&-", 2),
        ("check <&-", 0),
        ("list >/dev/full", 5),
    ],
)
def test_streams_that_are_closed_or_full(command: str, code: int) -> None:
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m fp8cfg {command}; exit ${{PIPESTATUS[0]}}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == code
    assert all(line.startswith("error: ") for line in done.stderr.splitlines())


def test_what_the_terminal_has_no_character_for_is_escaped() -> None:
    done = started("explain", "data.path", "data=text", "data.path='/é'", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, "data.path = /\\xe9")
