"""What `--help` prints, of all and of each verb."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fp8cfg.__main__ import main
from fp8cfg.cli import WORDS as VERBS
from fp8cfg.cli import help
from fp8cfg.schema import recipe_registry
from fp8cfg.schema.presets import choices

ROOT = Path(__file__).parents[2]


def test_help_names_every_verb_and_choice_in_few_narrow_lines(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert main([]) == 0, "without arguments nothing trains"
    assert capsys.readouterr().out == out
    lines = out.splitlines()
    assert len(lines) <= 80 and max(map(len, lines)) <= 80
    sections = [line for line in lines if re.fullmatch(r"[A-Z][a-z ]+:", line)]
    assert sections == [
        "Examples:",
        "Train:",
        "Look before you train:",
        "Study runs:",
        "Use a trained model:",
        "Prepare:",
        "Options:",
    ]
    for verb in set(VERBS) - {"help"}:
        assert any(line.startswith(f"  {verb} ") for line in lines), verb
    written = {
        f"{family}_{size}"
        for family, sizes in re.findall(r"(\w+)_\{([\w,]+)\}", out)
        for size in sizes.split(",")
    }
    assert {*recipe_registry.recipes(), *choices()} <= written | set(out.split())
    for word in ("stdlib", "Exit codes", "75"):
        assert word in out, word


def test_help_is_quick_to_load() -> None:
    loaded = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "fp8cfg", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    ).stderr
    assert not [
        m
        for m in ("pydantic", "hydra", "omegaconf", "torch", "fiddle", "yaml")
        if f" {m}\n" in loaded
    ]


@pytest.mark.parametrize("verb", [v for v in VERBS if v != "help"])
def test_each_verb_has_a_usage_of_its_own(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    usage = importlib.import_module(f"fp8cfg.cli.{verb}").USAGE.strip()
    assert (
        usage.startswith("fp8cfg ")
        and verb in usage.partition("\n")[0]
        and max(map(len, usage.splitlines())) <= 80
    )
    assert usage.count("\n  fp8cfg ") + usage.count("torchrun ") >= 2 or verb == "completion"
    for argv in ([verb, "--help"], ["help", verb], [verb, "fp8.margin=1", "-h"], ["--help", verb]):
        assert main(argv) == 0
        assert capsys.readouterr().out.strip() == usage


@pytest.mark.parametrize("argv", [[], ["recipe=llama_8b"], ["my.yaml"], ["fp8.margin=1", "-m"]])
def test_help_without_a_verb_is_the_general_one(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*argv, "--help"]) == 0
    assert capsys.readouterr().out.strip() == help.usage().strip()
