"""What users' tools read of an installed wheel: mypy --strict finds mistakes and nothing else, jedi lists fields with their text."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import jedi
import pytest

import fp8cfg
from fp8cfg.schema import recipe_registry
from tests.support.installs import ROOT, Environment

FILES = Path(__file__).parent / "user_files"
OPTIONS = "[mypy]\nstrict = true\n[mypy-torch.*]\nfollow_imports = skip\n"
"""A user's, but for torch, which is not what is tested and takes two thirds of the time."""


def test_mypy_finds_the_mistakes_of_a_users_file_and_no_others(
    installed: Environment, tmp_path: Path
) -> None:
    (tmp_path / "mypy.ini").write_text(OPTIONS)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "mypy",
            "--config-file",
            tmp_path / "mypy.ini",
            "--python-executable",
            installed.python,
            "--cache-dir",
            ROOT / ".mypy_cache" / "user_files",
            "--no-color-output",
            "--no-error-summary",
            *sorted(FILES.glob("*.py")),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    found = re.findall(r"(\w+\.py):(\d+): error: .*\[([\w-]+)\]$", done.stdout, re.MULTILINE)
    lines = (FILES / "wrong.py").read_text(encoding="utf-8").splitlines()
    wanted = [
        ("wrong.py", str(i), code)
        for i, line in enumerate(lines, 1)
        for code in re.findall(r"# error: (.+)", line)
    ]
    assert len(wanted) == 3 and (found, done.stderr, done.stdout.count(" error: ")) == (
        wanted,
        "",
        3,
    ), done.stdout + done.stderr


def test_what_mypy_passes_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        recipe_registry, "_RECIPES", dict(recipe_registry._RECIPES)
    )  # it registers one
    runpy.run_path(str(FILES / "right_recipe.py"))


@pytest.mark.parametrize(
    ("code", "node"),
    [
        ("from fp8cfg.recipes import llama_8b\nrecipe = llama_8b()\nrecipe.fp8.", fp8cfg.FP8),
        ("import fp8cfg\nfp8cfg.compose(['recipe=llama_8b']).storage.", fp8cfg.Storage),
        ("import fp8cfg\nfp8cfg.bf16_with_fp8_mixed().", fp8cfg.Precision),
    ],
    ids=["of a recipe", "of what is composed", "of a preset"],
)
def test_an_editor_lists_the_fields_of_a_node_with_their_text(
    code: str,
    node: type[fp8cfg.FP8],
    installed: Environment,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        jedi.settings, "cache_directory", str(tmp_path / "cache")
    )  # another process may be writing to the shared one
    project = jedi.Project(
        tmp_path,
        sys_path=[str(installed.site), *(p for p in sys.path if p and Path(p).resolve() != ROOT)],
    )
    listed = {
        c.name: c for c in jedi.Script(code, path=tmp_path / "mine.py", project=project).complete()
    }
    assert set(node.model_fields) <= set(listed)
    for name, field in node.model_fields.items():
        assert Path(str(listed[name].module_path)).is_relative_to(installed.site)
        assert (
            " ".join(listed[name].docstring().split())
            == " ".join(str(field.description).split())
            != ""
        )
