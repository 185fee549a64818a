"""The prose check finds phrases and long paragraphs, outside of code only."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import check_prose

PAGE = """# Title

The weights beside the masters are fine.

```text
beside
```

- A list item with `beside` in code.
- {}

| a | b |
| --- | --- |
| what gives way | x |
""".format("word " * 81)


def test_problems_have_their_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    assert check_prose.main([str(page)]) == 1
    printed = capsys.readouterr().out.splitlines()
    assert [line.removeprefix(f"{page}:") for line in printed] == [
        "3: 'beside': next to, with",
        "10: a paragraph of 82 words, at most 80",
        "14: 'gives way': is changed to fit",
    ]


def test_the_pages_have_no_problem() -> None:
    assert check_prose.main([]) == 0
