"""The README's examples are run: the Python block, and each command with the error lines shown under it."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import fp8cfg
from fp8cfg import recipes
from tests.support.small import SMALL, small

ROOT = Path(__file__).parents[1]
SMALL_COMPOSE = fp8cfg.compose
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_python_example_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    block, = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    monkeypatch.setattr(recipes, "llama_tiny", lambda: small())
    monkeypatch.setattr(fp8cfg, "compose", lambda words: SMALL_COMPOSE([*SMALL, *words[1:]]), raising=False)
    tokens = torch.randint(0, 256, (2, 32))
    scope = {"tokens": tokens, "targets": tokens, "step": 0}
    exec(block, scope)
    assert scope["loss"].dtype == torch.float32 and "coverage, observed" in capsys.readouterr().out


def test_the_examples_with_a_model_of_ones_own_run() -> None:
    (job, own), = re.findall(r"^A model of your own:\n\n(.*?)\n\nor .*?:\n\n(.*?)\n\n", TEXT, re.DOTALL | re.MULTILINE)
    for block in (job, own):
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 1, bias=False), torch.nn.Flatten(0))
        scope = {"fp8cfg": fp8cfg, "recipe": small("precision=bf16_fp8"), "model": model, "batch": torch.randn(1, 64), "optimizer": torch.optim.AdamW(model.parameters())}
        exec(textwrap.dedent(block), scope)
        assert fp8cfg.has_fp8_layers(model)


EXAMPLES = re.findall(r"    \$ fp8cfg (.*)\n((?:    (?:error: .*|\.\.\.)\n)+)", TEXT)


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 3


@pytest.mark.parametrize(("words", "shown"), EXAMPLES)
def test_each_mistake_is_answered_as_shown(words: str, shown: str) -> None:
    done = subprocess.run([sys.executable, "-m", "fp8cfg", *shlex.split(words), "trainer.accelerator=cpu"], cwd=ROOT, capture_output=True, text=True)
    want = [line.strip() for line in shown.splitlines() if line.strip().startswith("error:")]
    machine = re.compile(r"[\d.]+ GiB free")
    assert [machine.sub("", line) for line in done.stderr.splitlines()] == [machine.sub("", line) for line in want]
    assert done.returncode == 2


def test_every_tool_has_help() -> None:
    for tool in (ROOT / "tools").glob("*.py"):
        done = subprocess.run([sys.executable, str(tool), "--help"], capture_output=True, text=True, cwd=ROOT, env={**__import__("os").environ, "PYTHONPATH": str(ROOT)})
        assert done.returncode == 0 and "usage:" in done.stdout, tool
        assert tool.name in TEXT, f"the README does not name {tool.name}"
