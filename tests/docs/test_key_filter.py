"""The search field of the keys page, in headless Chromium."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.chromium import PATH, chromium

SCRIPT = Path(__file__).parents[2] / "docs" / "assets" / "key-filter.js"
# The site's `document$` calls the function after each page load.
PAGE = """<!doctype html><article><h1>Keys</h1>
<h2>fp8</h2><p>FP8</p><table><tbody><tr><td>fp8.margin<tr><td>fp8.amax_history_len</table>
<h2>log</h2><p>Logs</p><table><tbody><tr><td>log.dir</table></article>
<script>const document$ = {subscribe: f => f()}</script><script>%s</script>"""
VISIBLE = """[...document.querySelectorAll('h2, p, td')]
    .filter(e => e.offsetParent).map(e => e.textContent.trim())"""
TYPE = """field => {
    const input = document.querySelector('.key-filter');
    input.value = field;
    input.dispatchEvent(new Event('input'));
}"""


@pytest.mark.skipif(PATH is None, reason="needs Chromium")
def test_rows_and_sections_without_the_words_are_hidden(tmp_path: Path) -> None:
    page = tmp_path / "reference" / "keys.html"
    page.parent.mkdir()
    page.write_text(PAGE % SCRIPT.read_text(encoding="utf-8"), encoding="utf-8")
    with chromium(tmp_path / "profile") as browser:
        browser.open(page)
        browser.run(f"({TYPE})('Amax fp8')")
        assert browser.run(VISIBLE) == ["fp8", "FP8", "fp8.amax_history_len"]
        browser.run(f"({TYPE})('dir')")
        assert browser.run(VISIBLE) == ["log", "Logs", "log.dir"]
        browser.run(f"({TYPE})('')")
        assert len(browser.run(VISIBLE)) == 7
        assert not browser.problems
