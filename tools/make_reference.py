"""Reference pages made from the code: keys, presets, backends by key, CLI, Python, exit codes, environment variables.

    python tools/make_reference.py            # write docs/reference/*.md and the support matrix of README.md
    python tools/make_reference.py --check    # write nothing; exit code 1 and the names of pages that are not up to date

tests/docs/test_reference.py holds that they are. The page of backends by key is made from the cells of tests/support/backend_cells.py,
each of which a test reads back from a built job; it takes some twenty seconds, the others three.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [
    str(ROOT),
    str(ROOT / "tests" / "builder"),
]  # tests.support, and the module of tests that it reads its words from

from tools.reference import backends, cli, keys, names, python, system  # noqa: E402

PAGES: dict[str, Callable[[], str]] = {
    "keys": keys.page,
    "presets": names.page,
    "backends": backends.page,
    "support": backends.support_page,
    "cli": cli.page,
    "python": python.page,
    "exit-codes": system.exit_codes,
    "environment": system.environment,
}
MADE = "<!-- Made by tools/make_reference.py from the code; edit there. -->\n\n"
MATRIX = re.compile(r"(<!-- support matrix -->\n).*?(<!-- end of support matrix -->)", re.DOTALL)


def made(page: str) -> str:
    """The text of docs/reference/`page`.md as the code has it."""
    return f"{MADE}{PAGES[page]().rstrip()}\n"


def readme(text: str) -> str:
    """README.md with the support matrix as the rules of the backends have it."""
    return MATRIX.sub(lambda found: f"{found[1]}{backends.support_table()}\n{found[2]}", text)


def wanted(pages: list[str]) -> dict[Path, str]:
    """What the files of `pages`, and README.md, are to hold."""
    found = {ROOT / "docs" / "reference" / f"{page}.md": made(page) for page in pages}
    return found | {ROOT / "README.md": readme((ROOT / "README.md").read_text(encoding="utf-8"))}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="write nothing; exit code 1 where a page is not up to date",
    )
    parser.add_argument("pages", nargs="*", help=f"of {', '.join(PAGES)}; default all")
    arguments = parser.parse_args()
    if unknown := [page for page in arguments.pages if page not in PAGES]:
        parser.error(f"{unknown[0]}: no such page; choose from {', '.join(PAGES)}")
    old = [
        (path, text)
        for path, text in wanted(arguments.pages or [*PAGES]).items()
        if not path.is_file() or path.read_text(encoding="utf-8") != text
    ]
    for path, text in old:
        print(f"{path.relative_to(ROOT)}: {'is not up to date' if arguments.check else 'written'}")
        if not arguments.check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    return int(arguments.check and bool(old))


if __name__ == "__main__":
    sys.exit(main())
