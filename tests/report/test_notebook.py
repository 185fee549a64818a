"""HTML of a plan, coverage, differences, an explanation and a run folder, and the history of a result."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import fp8cfg
from tests.support.small import small

VOID = {"meta", "br", "hr"}


class Page(HTMLParser):
    """Cells of all tables, and all text. Fails on tags that are not closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.cells: list[str] = []
        self.text = ""
        self.tags: set[str] = set()
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.open.append(tag)
        self.tags.add(tag)
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.text += data + " "
        if self.open[-1:] in (["td"], ["th"]):
            self.cells[-1] += data


def page(value: Any) -> Page:
    html = value._repr_html_()
    # Colors come from the notebook, so that dark themes work. Nothing is loaded.
    assert "http" not in html and "color: #" not in html and "background: #" not in html
    return Page(html)


def test_a_plan_has_all_of_its_text() -> None:
    plan = fp8cfg.plan(fp8cfg.compose(["recipe=llama_8b", "precision=bf16_fp8"]), "h100", 16)
    shown = page(plan)
    assert {"layers.*.mlp.linear_fc1", "masters", "accumulation", "O3"} <= set(shown.cells)
    assert "Plan of llama_8b on 16 ranks, h100" in shown.text
    words = set(str(plan).split())
    assert words - set(shown.text.split()) == set()


def test_coverage_of_a_model() -> None:
    coverage = fp8cfg.plan(small("precision=bf16_fp8")).coverage
    shown = page(coverage)
    assert "layers.*.mlp.linear_fc1" in shown.cells and coverage.summary in shown.text


def test_differences_have_a_row_a_key_and_markup_is_text() -> None:
    first = fp8cfg.compose(["log.dir='<script>alert(1)</script>'"])
    second = fp8cfg.compose(["precision=bf16_fp8"])
    shown = page(first.diff(second))
    assert shown.cells[:3] == ["key", "first", "second"]
    rows = {shown.cells[at]: shown.cells[at + 1 : at + 3] for at in range(3, len(shown.cells), 3)}
    assert rows["fp8.enabled"] == ["false", "true"]
    assert rows["log.dir"][0] == "<script>alert(1)</script>" and "script" not in shown.tags
    assert page(first.diff(first)).text.strip() == "no difference"


@pytest.mark.parametrize("key", ["fp8.margin", "fp8", "log.dir"])
def test_an_explanation(key: str) -> None:
    words = ["precision=bf16_fp8", "fp8.margin=1", "log.dir='<b>&amp;'"]
    explanation = fp8cfg.explain(words, key)
    shown = page(explanation)
    assert explanation.description in shown.text
    if key == "fp8":
        assert shown.cells[shown.cells.index("fp8.margin") + 1] == "1"
    else:
        assert "command line: " in shown.cells[-1] and explanation.effect in shown.cells
    if key == "log.dir":
        assert "<b>&amp;" in shown.cells


def test_a_run_folder_and_the_history_of_a_result(tmp_path: Path) -> None:
    words = "precision=bf16_fp8", "trainer.max_steps=4", "trainer.val_check_interval=2"
    recipe = small(*words, f"log.folder={tmp_path / 'run'}")
    result = fp8cfg.fit(fp8cfg.build(recipe), say=lambda _: None)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    history = result.history
    assert [row["step"] for row in history] == [1, 2, 3, 4]
    for line in map(json.loads, lines):
        assert history[line["step"] - 1].items() >= line.items()
    assert [row.get("val_loss") is not None for row in history] == [False, True, False, True]
    assert history[-1]["loss"] == result.loss and history[-1]["val_loss"] == result.val_loss
    run = fp8cfg.RunFolder.open(tmp_path / "run", lock=False)
    cells = page(run).cells
    assert cells[cells.index("training loss") + 1] == f"{result.loss:.4f}"
    assert cells[cells.index("state") + 1] == "done" and "metrics.jsonl" in cells[-1]
    (tmp_path / "run" / "metrics.jsonl").write_text("<b>\n")
    assert "not a line of metrics: '<b>'" in page(run).text
