"""The pictures of the pages are as the tool draws them, and each page has its own."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from tests.support.doc_blocks import PAGES
from tools import make_pictures


@pytest.mark.parametrize("name", make_pictures.FIXED)
def test_a_picture_is_up_to_date(name: str) -> None:
    drawn = (make_pictures.FOLDER / f"{name}.svg").read_text(encoding="utf-8")
    assert drawn == make_pictures.PICTURES[name](), f"run: python tools/make_pictures.py {name}"


def test_pages_show_every_picture_with_a_text() -> None:
    shown = set()
    for page in PAGES:
        for text, link in re.findall(r"!\[([^]]*)\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
            assert text and (page.parent / link).is_file(), f"{page}: {link}"
            shown.add((page.parent / link).stem)
    assert set(make_pictures.PICTURES) <= shown


@pytest.mark.parametrize("name", make_pictures.PICTURES)
def test_a_picture_asks_no_other_host(name: str) -> None:
    drawn = (make_pictures.FOLDER / f"{name}.svg").read_text(encoding="utf-8")
    ElementTree.fromstring(drawn)
    assert set(re.findall(r"https?://[^/\"]+", drawn)) <= {"http://www.w3.org"}
