"""docs/extending/preset.md, followed: one file, whose Python names stand in it."""

from __future__ import annotations

import re
import shutil
import textwrap
from pathlib import Path

import pytest

from fp8cfg.schema import presets
from fp8cfg.schema.errors import ConfigError
from fp8cfg.schema.safe_files import CONF

PAGE = Path(__file__).parents[2] / "docs/extending/preset.md"


def test_a_preset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (text,) = re.findall(r"```yaml\n(.*?) *```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    shutil.copytree(CONF, tmp_path / "conf")
    folder = tmp_path / "conf" / "precision"
    assert textwrap.dedent(text) == "".join(
        (folder / "bf16_fp8.yaml").read_text(encoding="utf-8")
    ), "the page shows the file as it is"
    mine = (
        textwrap.dedent(text)
        .replace(
            "bf16_with_fp8_mixed, bf16_with_fp8_delayed_scaling_mixed", "mine_mixed, ours_mixed"
        )
        .replace("margin: 0", "margin: 3")
    )
    (folder / "mine.yaml").write_text(mine, encoding="utf-8")

    functions = presets.functions(folder)
    assert {name: stem for name, stem in functions.items() if name not in presets.FUNCTIONS} == {
        "mine_mixed": "mine",
        "ours_mixed": "mine",
    }
    monkeypatch.setattr(presets, "CONF", tmp_path / "conf")
    monkeypatch.setattr(presets, "FUNCTIONS", functions)
    assert "mine" in presets.choices()
    for name in ("mine", "mine_mixed", "ours-mixed"):
        assert presets.precision_preset(name).fp8.margin == 3


def test_a_name_is_of_one_file(tmp_path: Path) -> None:
    for stem in ("a", "b"):
        (tmp_path / f"{stem}.yaml").write_text(
            "# What it is.\ncompute: bf16\n# Python: one_mixed\n", encoding="utf-8"
        )
    with pytest.raises(ConfigError, match=r"b\.yaml: one_mixed is already the name of a\.yaml"):
        presets.functions(tmp_path)
