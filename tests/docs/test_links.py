"""Links and anchors of the Markdown pages lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from tests.support.doc_blocks import PAGES
from tests.support.verbs import ROOT

_LINK = re.compile(r"(?<!!)\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^()\s]+)\)")
_FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
MADE = ROOT / "docs" / "reference"


def links(page: Path) -> list[str]:
    text = re.sub(r"`[^`\n]*`", "", _FENCED.sub("", page.read_text(encoding="utf-8")))
    return _LINK.findall(text)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and Python-Markdown make them."""
    heads = re.findall(
        r"^#+ (.+)$", _FENCED.sub("", page.read_text(encoding="utf-8")), re.MULTILINE
    )
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize(
    "page",
    [*PAGES, ROOT / "CHANGELOG.md", ROOT / "conf" / "README.md"],
    ids=lambda p: str(p.relative_to(ROOT)),
)
def test_links_of_a_page(page: Path) -> None:
    for link in links(page):
        if re.match(r"https?://", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.is_relative_to(ROOT) and target.exists(), (
            f"{page.relative_to(ROOT)}: {link} is not there"
        )
        assert not anchor or anchor in anchors(target), (
            f"{page.relative_to(ROOT)}: {link} has no such heading"
        )


def test_every_page_is_linked_to() -> None:
    found = {
        (page.parent / link.partition("#")[0]).resolve()
        for page in PAGES
        for link in links(page)
        if not link.startswith("http")
    }
    assert [
        str(page.relative_to(ROOT))
        for page in PAGES[2:]
        if page.resolve() not in found and page != ROOT / "docs" / "README.md"
    ] == []


def test_links_out_are_to_projects_that_the_pages_are_about() -> None:
    known = (
        "https://github.com/NVIDIA/",
        "https://github.com/NVIDIA-NeMo/",
        "https://github.com/huggingface/",
        "https://github.com/marin-community/",
        "https://github.com/pytorch/",
        "https://pytorch.org/",
        "https://arxiv.org/abs/",
        "https://ui.perfetto.dev",
    )
    for page in PAGES:
        assert [
            link for link in links(page) if link.startswith("http") and not link.startswith(known)
        ] == [], page


def test_every_page_has_its_place_in_the_site() -> None:
    navigation = yaml.safe_load((ROOT / "docs/mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    places = []
    for tab in navigation:
        for pages in tab.values():
            for page in pages:
                places += [page] if isinstance(page, str) else page.values()
    assert sorted(places) == sorted(set(places))
    assert [place for place in places if not (ROOT / place).is_file()] == []
    wanted = {str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md")}
    assert wanted - set(places) == set()
