"""docs/extending/model_size.md, followed: one line of a family's table."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_size(tmp_path: Path) -> None:
    """recipe=NAME, fp8cfg.recipes.NAME, list, help, completion and type checkers have it."""
    page = (ROOT / "docs/extending/model_size.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^ +(llama32_2b = .+)$", page, re.MULTILINE)
    shutil.copytree(
        ROOT / "fp8cfg", tmp_path / "fp8cfg", ignore=shutil.ignore_patterns("__pycache__")
    )
    family = tmp_path / "fp8cfg" / "recipes" / "llama.py"
    source = family.read_text(encoding="utf-8")
    after = "\n\n\ndef _renamed("
    assert source.count(after) == 1
    family.write_text(source.replace(after, f"\n{line}{after}"), encoding="utf-8")

    code = (
        "from fp8cfg.__main__ import main; from fp8cfg.recipes import llama32_2b; import fp8cfg, fp8cfg.recipes;"
        "r = llama32_2b(); print(r.name, r.model.num_layers, r.model.hidden_size, r.model.share_embeddings_and_output_weights);"
        "assert r == fp8cfg.compose(['recipe=llama32_2b']) and 'llama32_2b' in fp8cfg.recipes.__all__;"
        "main(['list', 'recipe']); main(['--help']); main(['completion', '--words', 'recipe=llama32_2']);"
        "main(['explain', 'model.num_layers', 'recipe=llama32_2b'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("llama32_2b 20 2560 True\n")
    assert "llama32_2b        Llama 3.2 2B, one node, tied embeddings.\n" in done.stdout
    assert (
        " llama32_{1b,2b,3b}" in done.stdout.partition("recipe     ")[2].partition("precision  ")[0]
    )
    assert "recipe=llama32_2b\n" in done.stdout and "recipe function llama32_2b, by" in done.stdout
