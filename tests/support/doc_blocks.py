"""Code blocks of Markdown pages, and their execution: Python, YAML recipes, and commands with their output."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import fp8cfg
from fp8cfg import recipes
from fp8cfg.__main__ import main
from fp8cfg.cli import VERBS
from fp8cfg.schema import recipe_registry
from tests.support.verbs import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
OWN_TESTS = {
    "docs/extending/scaling.md": "tests/numerics/test_extending_scaling.py",
    "docs/extending/backend.md": "tests/extending/test_backend.py",
    "docs/extending/model_size.md": "tests/extending/test_model_size.py",
    "docs/extending/cli_verb.md": "tests/extending/test_cli_verb.py",
    "docs/extending/preset.md": "tests/extending/test_preset.py",
}
"""Checklists, whose blocks a test of their own puts into a package."""
INFOS = ("python", "console", "yaml", "text")
RUN = "runs/llama_tiny-20260102-030405"
"""The run folder that pages name; where one does, it is there."""
TRAINS = ("train", "sweep", "resume", "rerun", "parity", "advise")
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block: its info string, its text, and the line of the page on which the text begins."""

    page: Path
    line: int
    info: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


@dataclass(frozen=True)
class Command:
    """A line after `$ `, and the text that is shown under it, empty where nothing is."""

    words: list[str]
    shown: str


def blocks(page: Path) -> list[Block]:
    """The blocks of `page`, in its order."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(page, text.count("\n", 0, found.start(2)) + 1, found[1], found[2])
        for found in _FENCE.finditer(text)
    ]


def commands(block: Block) -> list[Command]:
    """The commands of a console block. Raises AssertionError where it does not begin with one."""
    parts = re.split(r"^\$ ", block.text, flags=re.MULTILINE)
    assert not parts[0].strip(), f"{block}: text before the first command"
    return [
        Command(shlex.split(line), shown)
        for line, _, shown in (part.partition("\n") for part in parts[1:])
    ]


def matches(shown: str, printed: str) -> bool:
    """Whether the output of a command matches the expected text, in which `...` stands for anything, on a line of its own for any
    number of lines.
    """

    def lines(text: str) -> str:
        return "".join(f"{line.rstrip()}\n" for line in text.splitlines())

    pattern = (
        re.escape(lines(shown))
        .replace(re.escape("...\n"), r"(?:.*\n)?")
        .replace(re.escape("..."), ".*")
    )
    return re.fullmatch(pattern, lines(printed), re.DOTALL) is not None


TINY = {"hidden_size": 64, "ffn_hidden_size": 128, "seq_length": 32}
"""A shape for what only has to run; a table with shares of FLOPs needs the recipe's own."""


@contextmanager
def short_runs(shape: dict[str, int] | None = None) -> Iterator[None]:
    """llama_tiny by that name trains a step or two of one sample on the CPU, uncompiled, with `shape`, by default TINY; recipes that are
    registered meanwhile are forgotten."""
    whole = recipes.llama_tiny

    def llama_tiny(**given: Any) -> fp8cfg.Recipe:
        recipe = whole(**given)
        recipe.model = recipe.model.merged(TINY if shape is None else shape)
        recipe.trainer = recipe.trainer.merged(
            {
                "global_batch_size": 1,
                "micro_batch_size": 1,
                "max_steps": 2 if shape is None else 1,
                "limit_val_batches": 1,
                "compile": "off",
                "accelerator": "cpu",
            }
        )
        recipe.data.name, recipe.optim.warmup_steps, recipe.checkpoint.every_n_steps = "tiny", 0, 0
        return recipe

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            recipe_registry, "_RECIPES", {**recipe_registry.recipes(), "llama_tiny": llama_tiny}
        )
        patch.setattr(recipes, "llama_tiny", llama_tiny)
        yield


def short(words: list[str]) -> list[str]:
    """`words` of a command that trains, with no more than three steps."""
    steps = [re.sub(r"^(trainer\.max_steps)=\d+$", r"\1=3", word) for word in words]
    if "--steps" in steps:
        steps[steps.index("--steps") + 1] = "3"
    return steps


def run(words: list[str], capsys: pytest.CaptureFixture[str], shown: str = "") -> tuple[int, str]:
    """Run `fp8cfg words` in this process; returns the exit code and the output, errors last. `shown` is the text that the output
    will be compared with.
    """
    capsys.readouterr()
    if words[0] in TRAINS or words[0] not in VERBS:
        with short_runs({} if "FLOPs  fprop" in shown else None):
            code = main(short(words))
    else:
        code = main(words)
    out = capsys.readouterr()
    return code, out.out + out.err
