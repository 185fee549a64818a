"""Reports in sections: plain text for a pipe, rules and colors on a terminal, HTML in a notebook."""

from __future__ import annotations

import html
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from fp8cfg.schema.messages import colored, has_color
from fp8cfg.schema.tables import Table, output_width

RULE_WIDTH = 100
"""Columns of a heading's line on a wide terminal."""
_STYLE = """<style>
.fp8cfg { font-size: 13px; line-height: 1.4; }
.fp8cfg table { border-collapse: collapse; margin: .3em 0; font-size: inherit; }
.fp8cfg td:first-child { white-space: pre; }
.fp8cfg th, .fp8cfg td { text-align: left; padding: 1px 10px 1px 0; white-space: pre-wrap;
  border: none; background: none; color: inherit; vertical-align: top; }
.fp8cfg th { border-bottom: 1px solid; opacity: .75; font-weight: 600; }
.fp8cfg .n { text-align: right; font-variant-numeric: tabular-nums; }
.fp8cfg pre { margin: .3em 0; padding: 0; white-space: pre-wrap; background: none; color: inherit;
  font-size: 12px; }
.fp8cfg summary { cursor: pointer; font-weight: 600; }
</style>"""
# Colors are inherited from the notebook, so that light and dark themes both work.


@dataclass(frozen=True)
class Section:
    """A part of a report.

    Attributes:
        title: Heading on a terminal and in a notebook. Plain text has none.
        blocks: Texts and tables (`Table`).
    """

    title: str
    blocks: Sequence[str]

    def __str__(self) -> str:
        return "\n".join(self.blocks)


def plain_text(sections: Sequence[Section]) -> str:
    """Returns the sections as text, with empty lines between them."""
    return "\n\n".join(map(str, sections))


def print_sections(sections: Sequence[Section]) -> None:
    """Prints sections to standard output. On a terminal each has a heading."""
    if not has_color(sys.stdout):
        print(plain_text(sections), flush=True)
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(width=output_width(), highlight=False, soft_wrap=True)
    rules = Console(width=min(output_width(), RULE_WIDTH))
    for section in sections:
        rules.rule(f"[bold]{section.title}", align="left", style="dim")
        for block in section.blocks:
            if isinstance(block, Table):
                header, _, rows = block.partition("\n")
                console.print(Text(header, style="bold"), Text(f"\n{rows}"), sep="")
            else:
                print(colored(block, sys.stdout))
        console.print()


def sections_html(title: str, sections: Sequence[Section], folded: Collection[str] = ()) -> str:
    """Returns the sections as HTML for a notebook.

    Args:
        title: Heading above the sections.
        sections: The sections.
        folded: Titles of sections that are folded at first.
    """
    parts = [f"<div><b>{html.escape(title)}</b></div>"]
    for section in sections:
        body = "".join(map(_block_html, section.blocks))
        opened = "" if section.title in folded else " open"
        summary = f"<summary>{html.escape(section.title)}</summary>"
        parts.append(f"<details{opened}>{summary}{body}</details>")
    return in_notebook("".join(parts))


def in_notebook(body: str) -> str:
    """Returns HTML with the styles of all notebook output of this package."""
    return f'{_STYLE}<div class="fp8cfg">{body}</div>'


def table_html(
    header: Sequence[str], rows: Sequence[Sequence[Any]], right: Sequence[int] = ()
) -> str:
    """Returns a table as HTML.

    Args:
        header: The header of each column. Empty for a table without one.
        rows: The cells of each row. They are escaped.
        right: Indices of the right-aligned columns.
    """

    def row_html(tag: str, row: Sequence[Any]) -> str:
        cells = []
        for index, cell in enumerate(row):
            kind = ' class="n"' if index in right else ""
            cells.append(f"<{tag}{kind}>{html.escape(str(cell))}</{tag}>")
        return f"<tr>{''.join(cells)}</tr>"

    head = row_html("th", header) if header else ""
    return f"<table>{head}{''.join(row_html('td', row) for row in rows)}</table>"


def _block_html(block: str) -> str:
    if isinstance(block, Table):
        return table_html(block.header, block.rows, block.right)
    return f"<pre>{html.escape(block)}</pre>"
