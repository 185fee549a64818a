"""docs/reference is what tools/make_reference.py makes from the code."""

from __future__ import annotations

import pytest

from tests.support.verbs import ROOT
from tools import make_reference
from tools.reference.keys import described, unit

CELLS = ("backends",)
"""Pages that are made from the cells of the backend table, which builds hundreds of graphs."""


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.slow] if page in CELLS else [])
        for page in make_reference.PAGES
    ],
)
def test_a_page_is_up_to_date(page: str) -> None:
    text = (ROOT / "docs" / "reference" / f"{page}.md").read_text(encoding="utf-8")
    assert text == make_reference.made(page), f"run: python tools/make_reference.py {page}"


def test_the_support_matrix_of_the_readme_is_up_to_date() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text == make_reference.readme(text) and "| native | CPU |" in text, (
        "run: python tools/make_reference.py support"
    )


def test_there_is_no_other_page() -> None:
    assert {path.stem for path in (ROOT / "docs" / "reference").iterdir()} == {
        *make_reference.PAGES
    }


def test_meaning_source_and_unit_of_a_key() -> None:
    assert described("Optimizer steps. Default 3 (TE).") == ("Optimizer steps.", "TE")
    assert (
        described("One of two. Default null: true under block (128x128) and nvfp4 (TE).")[1] == "TE"
    )
    assert described("Names the folder. Default runs.") == ("Names the folder.", "fp8cfg")
    assert unit({"type": "integer"}, "Optimizer steps between two moves.") == "optimizer steps"
    assert unit({"type": "string"}, "Optimizer steps between two moves.") == ""
