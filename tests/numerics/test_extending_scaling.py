"""docs/extending/scaling.md, done to a copy of the package: block scaling under another name."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import get_args

import pytest

from fp8cfg.schema.fp8 import FP8
from fp8cfg.schema.scalings import GENERATIONS, SCALINGS, ScalingName

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "extending" / "scaling.md").read_text(encoding="utf-8")
NAME, ROW, TRAINING = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
CONSOLE = re.findall(r"^\$ fp8cfg (.*)\nerror: (.*)$", PAGE, re.MULTILINE)
LAYOUT = """
import fp8cfg
from fp8cfg.interop.projects import PROJECTS, to_text

def planned(scaling, gpu, *words):
    recipe = fp8cfg.compose(["recipe=llama_8b", "precision=bf16_fp8_block", "fp8.format=e4m3", f"fp8.scaling={scaling}", *words])
    data = fp8cfg.plan(recipe, gpu=gpu, gpus=8).data()
    assert data["runs"]["backend"] == "native", data["runs"]
    return {key: data[key] for key in ("coverage", "chart", "ranks", "recompute", "too_small")}

for gpu in (None, "h100"):
    for words in ((), ("fp8.params=true",), ("fp8.enable_2d_quantization=false",), ("fp8.use_power_2_scales=false",)):
        block, copy = (planned(name, gpu, "backend=native", *words) for name in ("block", "block_copy"))
        assert copy == block
        assert copy["coverage"]["share_of_matmul_flops"] > 0.5, copy["coverage"]
words = ["recipe=llama_tiny", "precision=bf16_fp8_block", "fp8.scaling=block_copy"]
recipe = fp8cfg.compose(words)
assert fp8cfg.from_yaml(fp8cfg.to_yaml(recipe)) == recipe
for project, door in PROJECTS.items():
    if door.write_text is None:  # torchtitan
        continue
    try:
        to_text(project, recipe)
    except fp8cfg.ConfigError as error:
        assert len(error.problems) == 1 and "block_copy" in error.problems[0], error.problems
    else:
        assert project == "deepspeed", project  # whose file says nothing of FP8
try:
    fp8cfg.compose([*words[:2], "fp8.scaling=blok_copy"])
    raise SystemExit("fp8.scaling=blok_copy was taken")
except fp8cfg.ConfigError as error:
    assert "did you mean 'block_copy'?" in str(error), error
"""


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package with the added scaling: the blocks of the page put where it says."""
    root = tmp_path_factory.mktemp("checkout")
    shutil.copytree(ROOT / "fp8cfg", root / "fp8cfg", ignore=shutil.ignore_patterns("__pycache__"))
    table = root / "fp8cfg" / "schema" / "scalings.py"
    text, names = re.subn(
        r"^ScalingName = .*\n",
        lambda _: NAME,
        table.read_text(encoding="utf-8"),
        flags=re.MULTILINE,
    )
    text, rows = re.subn(
        r"(?<=^SCALINGS)(.*?\n)(?=\}$)",
        lambda found: found[0] + ROW,
        text,
        flags=re.MULTILINE | re.DOTALL,
    )
    assert (names, rows) == (1, 1)
    table.write_text(text, encoding="utf-8")
    return root


def run(checkout: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    return subprocess.run(
        [sys.executable, *arguments], cwd=checkout, env=environment, capture_output=True, text=True
    )


@pytest.mark.parametrize("script", [LAYOUT, TRAINING], ids=["checked-and-planned", "trained"])
def test_the_added_scaling_is_the_one_it_copies(copied: Path, script: str) -> None:
    where = f"import fp8cfg; assert fp8cfg.__file__.startswith({str(copied)!r}), fp8cfg.__file__\n"
    done = run(copied, "-c", where + script)
    assert done.returncode == 0 and not done.stderr, done.stderr


@pytest.mark.parametrize(
    ("words", "line"), CONSOLE, ids=[words.split()[0] + words.split()[-1] for words, _ in CONSOLE]
)
def test_what_the_added_scaling_is_refused_with(copied: Path, words: str, line: str) -> None:
    done = run(copied, "-m", "fp8cfg", *words.split())
    assert (done.returncode, done.stderr) == (2, f"error: {line}\n")


OF_THEIR_OWN = {
    "interop/accelerate_backends.py": 1,
    "interop/megatron_core.py": 2,
    "models/hf_export.py": 3,
    "cli/export.py": 1,
}
"""Comparisons with a scaling's name: the switches that Accelerate and Megatron have for MXFP8 and NVFP4 alone, and the two layouts of
scales (block, tensor) that a Hugging Face checkpoint can have, which are no scalings of a recipe."""


def _literals(node: ast.expr) -> set[object]:
    """What a comparison's right side says outright: a constant, or those of a tuple, list or set."""
    return {c.value for c in getattr(node, "elts", [node]) if isinstance(c, ast.Constant)}


def test_no_file_compares_names_of_scalings() -> None:
    found = Counter[str]()
    for path in (ROOT / "fp8cfg").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Compare)
                and set().union(*map(_literals, [node.left, *node.comparators])) & SCALINGS.keys()
            ):
                found[path.relative_to(ROOT / "fp8cfg").as_posix()] += 1
    assert found == OF_THEIR_OWN


def test_every_name_has_a_row_and_every_key_is_one_of_fp8() -> None:
    assert tuple(SCALINGS) == get_args(ScalingName)
    for name, scaling in SCALINGS.items():
        assert {*scaling.keys, *scaling.attention} <= FP8.model_fields.keys(), name
        assert scaling.least is None or scaling.least in GENERATIONS, name
