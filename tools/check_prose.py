"""Checks the English of the pages: phrases to avoid and the length of paragraphs.

    python tools/check_prose.py             check README.md, CONTRIBUTING.md and the pages in docs/
    python tools/check_prose.py FILE ...    check these files

The exit code is 1 if a page has a problem. `make check` runs it. The pages in docs/reference are made from the code and are not read.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LONGEST = 80
"""Words of the longest paragraph or list item."""
INSTEAD = {
    r"where there (is|are)": "if there is; or name the case",
    r"(is|are) (that|those) of": "repeat the noun",
    r"\bthose (of|that)\b": "repeat the noun",
    r"\bthat of the\b": "repeat the noun",
    r"\bbeside\b": "next to, with",
    r"\balone\b": "only",
    r"\bsays? (that|what|so|which|why)\b": "reports, prints, sets",
    r"\bgives? way\b": "is changed to fit",
    r"\bgo(es)? on\b": "continue, resume",
    r"\bof (one's|your|its|their|our) own\b": "your own X, custom",
    r"\bof (yours|ours|theirs)\b": "your X",
    r"\bin fewer bits\b": "low-precision, 8-bit",
    r"\bso many\b": "the number of",
    r"\bwhoever\b|\bwhatever\b": "name it",
    r"\bstands? (for|in|there|at|beside|as)\b": "is, means",
    r"\btill\b": "until",
    r"\bat hand\b": "available",
    r"\bthere is none\b": "name it",
    r"\bby itself\b": "automatically",
    r"\banew\b": "again",
    r"\bis held\b|\bare held\b": "is stored",
    r"\brefused\b": "rejected, raises an error",
}
"""Phrases of a translated text, and a plainer form."""


def pages() -> list[Path]:
    """Returns the pages that people write."""
    written = [page for page in (ROOT / "docs").rglob("*.md") if page.parent.name != "reference"]
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(written)]


def problems(text: str) -> Iterator[tuple[int, str]]:
    """Yields line numbers and problems of a page in Markdown."""
    for number, paragraph in paragraphs(text):
        words = len(paragraph.split())
        if words > LONGEST and not paragraph.startswith("|"):
            yield number, f"a paragraph of {words} words, at most {LONGEST}"
        for phrase, instead in INSTEAD.items():
            match = re.search(phrase, paragraph, re.IGNORECASE)
            if match:
                yield number, f"'{match[0]}': {instead}"


def paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Yields the first line numbers and the texts of paragraphs, list items and rows of tables."""
    start = 0
    lines: list[str] = []
    in_code = False
    for number, line in enumerate([*text.splitlines(), ""], start=1):
        is_fence = line.startswith("```")
        starts_anew = re.match(r"\s*([-*|#]|\d+\.) ?", line) is not None
        if lines and (is_fence or starts_anew or not line.strip()):
            yield start, " ".join(" ".join(lines).split())
            lines = []
        if is_fence:
            in_code = not in_code
        elif not in_code and line.strip():
            if not lines:
                start = number
            # Code may have any word.
            lines.append(re.sub(r"`[^`]*`", "X", line))


def main(arguments: list[str] | None = None) -> int:
    """Prints the problems of the pages and returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE")
    files = parser.parse_args(arguments).files or pages()
    count = 0
    for page in files:
        for line, problem in problems(page.read_text(encoding="utf-8")):
            path = page.resolve()
            name = path.relative_to(ROOT) if path.is_relative_to(ROOT) else page
            print(f"{name}:{line}: {problem}")
            count += 1
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
