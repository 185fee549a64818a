"""What shells complete: the words, and each script in its shell."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from fp8cfg.__main__ import main
from fp8cfg.cli import WORDS as VERBS
from fp8cfg.cli.completion import SCRIPTS, completions, keys
from fp8cfg.interop.projects import PROJECTS
from fp8cfg.schema.keys import short
from fp8cfg.schema.node import Node
from fp8cfg.schema.recipe import fields
from fp8cfg.schema.value_errors import options as literal_options

ROOT = Path(__file__).parents[2]
SCALINGS = ["block", "current", "delayed", "mxfp8", "nvfp4"]


def test_the_keys_and_their_values_are_those_of_the_schema() -> None:
    schema = {
        short(k): i.annotation
        for k, i in fields().items()
        if not (isinstance(i.annotation, type) and issubclass(i.annotation, Node))
    }
    assert keys().keys() == schema.keys()
    for key, annotation in schema.items():
        want = set(literal_options(annotation)) | (
            {"true", "false"} if bool in (annotation, *get_args(annotation)) else set()
        )
        assert set(keys()[key]) - {"null"} == want, key
        assert ("null" in keys()[key]) == (type(None) in get_args(annotation)), key


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["fp8.ma"], ["fp8.margin="]),
        (["mod"], ["model."]),
        (["model.rope_scaling.f"], ["model.rope_scaling.factor="]),
        (["fp8.scaling="], [f"fp8.scaling={s}" for s in SCALINGS]),
        (["fp8.scaling=cu"], ["fp8.scaling=current"]),
        (["fp8.enabled="], ["fp8.enabled=false", "fp8.enabled=true"]),
        (["opt_level="], [f"opt_level={o}" for o in ("O1", "O2", "O3", "null")]),
        (["fp8.margin="], []),
        (["recipe=llama_4"], ["recipe=llama_405b"]),
        (["recipe=llama_8b", "preci"], ["precision.", "precision="]),
        (["precision=fp16_fp8_"], ["precision=fp16_fp8_block", "precision=fp16_fp8_current"]),
        (["data=t"], ["data=text", "data=tiny", "data=tokens"]),
        (["-m", "precision=bf16,fp16_m"], ["precision=bf16,fp16_mxfp8"]),
        (["compl"], ["completion"]),
        (["explain", "backe"], ["backend"]),
        (["--cfg", ""], ["all", "hydra", "job"]),
        (["-c", "j"], ["job"]),
        (["--multi"], ["--multirun"]),
        (["resume", "runs/x", "--al"], ["--allow"]),
        (["resume", ""], []),
        (["rerun", "ru"], []),
        (["--config-dir", ""], []),
        (["completion", ""], ["bash", "fish", "zsh"]),
        (["list", "d"], ["data"]),
        (["resume", "x", "--allow", "fp8.mar"], ["fp8.margin"]),
        (["help", "re"], ["report", "rerun", "resume"]),
        (["compare", "runs/a", "ru"], []),  # the shell completes run folders
        (["runs", "--wh"], ["--where"]),
        (["init", "mine", "precision=bf16_m"], ["precision=bf16_mxfp8"]),
        (["nonsense"], []),
        (["x="], []),
    ],
)
def test_words(words: list[str], found: list[str]) -> None:
    assert completions(words) == found


def test_the_first_word_may_be_a_verb() -> None:
    assert set(VERBS) < set(completions([""])) and not set(VERBS) & set(completions(["train", ""]))


def test_words_that_ask_for_help_are_words_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "--words", "--help", "--version", "fp8.ma"]) == 0
    assert capsys.readouterr().out == "fp8.margin=\n"


def test_presets_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "llama_mine.yaml").write_text("")
    assert completions(["--config-dir", str(tmp_path), "recipe=llama_m"]) == ["recipe=llama_mine"]


def test_completing_loads_neither_torch_nor_hydra() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-X",
            "importtime",
            "-m",
            "fp8cfg",
            "completion",
            "--words",
            "fp8.scaling=c",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.stdout == "fp8.scaling=current\n"
    assert not [m for m in ("hydra", "omegaconf", "torch", "fiddle") if f" {m}\n" in done.stderr]


@pytest.fixture
def command(tmp_path: Path) -> dict[str, str]:
    """An environment in which `fp8cfg` is this checkout's."""
    script = tmp_path / "fp8cfg"
    script.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m fp8cfg "$@"\n')
    script.chmod(0o755)
    return {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": str(tmp_path)}


@pytest.mark.parametrize(
    ("line", "reply"),
    [
        ("fp8cfg fp8.ma", ["fp8.margin="]),
        (
            "fp8cfg fp8.scaling=cu",
            ["current"],
        ),  # bash has split the word at '=': what stands before it is there already
        ("fp8cfg -m precision=bf16,fp16_m", ["bf16,fp16_mxfp8"]),
        ("fp8cfg 'fp8.first_step=", []),
        ("fp8cfg fp8.first_step=", ["auto", "in_time", "te"]),
        ("fp8cfg recipe=llama_8b fp8.scaling=del", ["delayed"]),
        ("fp8cfg rerun ", []),
        ("fp8cfg --cfg ", ["all", "hydra", "job"]),
        ("~/fp8cfg compl", ["completion"]),
    ],
)
def test_bash(line: str, reply: list[str], command: dict[str, str]) -> None:
    code = f"{SCRIPTS['bash']}compopt() {{ :; }}\nCOMP_LINE={shell(line + ' and more')} COMP_POINT={len(line)}\n_fp8cfg\nprintf '%s\\n' \"${{COMPREPLY[@]}}\""
    done = subprocess.run(
        ["bash", "--norc", "-c", code], env=command, capture_output=True, text=True
    )
    assert done.stderr == "" and done.stdout.split() == reply
    without = code.replace("\n_fp8cfg\n", "\nCOMP_WORDBREAKS=${COMP_WORDBREAKS//[=:]}\n_fp8cfg\n")
    if "=" in line and reply:
        whole = subprocess.run(
            ["bash", "--norc", "-c", without], env=command, capture_output=True, text=True
        ).stdout.split()
        assert whole == completions(line.split()[1:])


def shell(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def test_bash_knows_the_command(command: dict[str, str]) -> None:
    done = subprocess.run(
        ["bash", "--norc", "-c", "source <(fp8cfg completion bash); complete -p fp8cfg"],
        env=command,
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == ["complete", "-o", "default", "-F", "_fp8cfg", "fp8cfg"]


@pytest.mark.parametrize("name", ["zsh", "fish"])
def test_the_script_of_another_shell_is_its_language(name: str, tmp_path: Path) -> None:
    if not shutil.which(name):
        pytest.skip(f"{name} is not installed")
    (tmp_path / "script").write_text(SCRIPTS[name])
    done = subprocess.run([name, "-n", str(tmp_path / "script")], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_fish_completes(command: dict[str, str]) -> None:
    if not shutil.which("fish"):
        pytest.skip("fish is not installed")
    code = "fp8cfg completion fish | source; complete -C 'fp8cfg fp8.scaling=cu'; complete -C 'fp8cfg fp8.ma'"
    done = subprocess.run(["fish", "-N", "-c", code], env=command, capture_output=True, text=True)
    assert done.stdout.split() == ["fp8.scaling=current", "fp8.margin="], done.stderr


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_begins_with_how_to_install_it(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", name]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("# fp8cfg: add to ~/.") and f"fp8cfg completion {name}" in first


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["import", "m"], ["megatron"]),
        (["import", ""], [*sorted(PROJECTS)]),
        (["export", "s"], ["slurm", "storage."]),
        (["export", "h"], ["hf"]),
        (["import", "nemo", "run"], []),
        (["export", "hf", ""], []),
        (["export", "hf", "a", "b", "--dtype", "f"], ["fp16", "fp32"]),
        (["export", "hf", "a", "b", "--fp8", ""], ["block", "tensor"]),
        (["export", "--output", "m"], []),
        (["evaluate", "a", "--precision", "bf16_mx"], ["bf16_mxfp8"]),
        (["log.progress=p"], ["log.progress=plain"]),
        (["train", "--verb"], ["--verbose"]),
    ],
)
def test_projects_and_values_of_options(words: list[str], found: list[str]) -> None:
    assert completions(words) == found
