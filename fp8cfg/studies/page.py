"""HTML pages with figures and tables. A page is one file without server and network.

Plotly draws the figures. Its script is part of the page, about 5 MB. Names and values may come from
users, so all of them are escaped. page.html is the template, page.css the style, and page.js draws
figures and handles switches.
"""

from __future__ import annotations

import base64
import html
import json
import math
import os
import re
import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp8cfg.schema import __version__
from fp8cfg.schema.errors import ConfigError, NotWritable

COLORS = (
    "#2f7fd0",
    "#d97a1e",
    "#159a76",
    "#8f63c9",
    "#d6453d",
    "#9a6b3f",
    "#cf5f9d",
    "#7a8594",
)
"""Colors of series. Each has a contrast of at least 3 on the light and on the dark background."""
DASHES = ("solid", "dash", "dot", "dashdot")
"""Plotly's dashes. After all colors with one dash, the next dash begins."""
FILTERED_ROWS = 15
"""A table with more rows gets a filter."""
GENERATOR = b'<meta name="generator" content="fp8cfg">'
"""Mark in the head of our pages. Only files with this mark are replaced."""
NUMBER = re.compile(r"[-+]?[\d.,]+(e[-+]?\d+)?\s?(%|x|[A-Za-z]{1,4}(/[a-z]{1,6})?)?")
"""Text of a numeric cell, with an optional unit, such as 1.2 GiB or 8,532."""
Value = str | int | float | bool | None
"""A value in a table. Floats are shown with four digits. Pass text for more digits."""


@dataclass(frozen=True)
class Badge:
    """A short word on a colored background, such as a verdict. A cell of a table.

    Attributes:
        text: The word.
        tone: "good", "warning", "bad" or "neutral".
    """

    text: str
    tone: str = "neutral"


@dataclass(frozen=True)
class Text:
    """A paragraph.

    Attributes:
        text: Plain text.
        tone: "" for text, "note" for a remark in small print, "warning" for a box.
    """

    text: str
    tone: str = ""


@dataclass(frozen=True)
class Facts:
    """A row of key figures in large print.

    Attributes:
        items: Label and value of each figure.
    """

    items: Sequence[tuple[str, Value]]


@dataclass(frozen=True)
class Table:
    """A table. Numeric columns are aligned to the right.

    Attributes:
        columns: Titles of the columns.
        rows: Cells of each row.
        caption: Title of the table.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[Value | Badge]]
    caption: str = ""


@dataclass(frozen=True)
class Figure:
    """A Plotly figure.

    Colors of text, axes and background follow the theme of the page. Set the color of each series
    with `line_style`. Encode arrays with `packed` and names with `plotly_text`.

    Attributes:
        title: Title above the figure.
        data: Plotly traces. The legend of the page switches traces by their `legendgroup`.
        layout: Plotly layout, such as titles of axes.
        note: Remark under the figure.
        height: Height in pixels.
        wide: Whether the figure takes the whole width. Otherwise two fit next to each other.
        log_switch: Whether to offer a logarithmic y axis.
        log_colors: Whether colors of a heat map are logarithmic. `z` of the trace must be packed
            and float32. Use `%{customdata}` in its hovertemplate for the original values. Zeros get
            the lowest color.
        x_choices: x values of each trace, by the names of the page's switch, such as
            {"steps": [...], "tokens": [...]}. The first choice is shown at the start.
    """

    title: str
    data: Sequence[Mapping[str, Any]]
    layout: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""
    height: int = 280
    wide: bool = False
    log_switch: bool = False
    log_colors: bool = False
    x_choices: Mapping[str, Sequence[Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Tabs:
    """Panels of blocks. One panel is visible at a time.

    Attributes:
        label: Title of the choice, such as "Tensor".
        panels: Blocks by the name of the tab.
    """

    label: str
    panels: Mapping[str, Sequence[Block]]


@dataclass(frozen=True)
class Fold:
    """Blocks behind a line. The reader opens them with a click.

    Attributes:
        title: The visible line.
        blocks: The hidden blocks.
    """

    title: str
    blocks: Sequence[Block]


Block = Text | Facts | Table | Figure | Tabs | Fold


@dataclass(frozen=True)
class Section:
    """A section of a page. The table of contents has an entry for it.

    Attributes:
        title: Heading.
        blocks: Contents.
    """

    title: str
    blocks: Sequence[Block]


def line_style(index: int) -> dict[str, str]:
    """Returns color and dash of a series, for `line` of a Plotly trace.

    Args:
        index: Number of the series. 32 series differ in color or dash, then styles repeat.
    """
    dash = DASHES[index // len(COLORS) % len(DASHES)]
    return {"color": COLORS[index % len(COLORS)], "dash": dash}


def plotly_text(text: str) -> str:
    """Escapes text for names and labels of a figure. Plotly interprets tags such as <b>."""
    return html.escape(text, quote=False)


def packed(values: Sequence[float] | NDArray[Any]) -> dict[str, str]:
    """Encodes numbers for a Plotly trace in binary form, smaller and faster than JSON.

    Args:
        values: Numbers of shape [N] or [rows, columns]. NaN is a gap.

    Returns:
        Plotly's specification of a typed array, in base64. int32 for integers below 2^31, float32
        for other numbers, float64 beyond both ranges.
    """
    array = np.asarray(values)
    kind = "f4"
    if array.dtype.kind in "iu":
        # In float64, because abs() of the smallest int64 overflows. Plotly has no int64.
        fits = array.size == 0 or np.abs(array.astype(np.float64)).max() < 2**31
        kind = "i4" if fits else "f8"
    elif np.abs(array[np.isfinite(array)]).max(initial=0.0) > np.finfo(np.float32).max:
        kind = "f8"
    # Plotly expects little-endian data in row order, whatever the machine.
    data = base64.b64encode(np.ascontiguousarray(array, dtype=f"<{kind}").tobytes())
    spec = {"dtype": kind, "bdata": data.decode("ascii")}
    if array.ndim == 2:
        spec["shape"] = f"{array.shape[0]}, {array.shape[1]}"
    return spec


def write_page(
    path: str | Path,
    title: str,
    sections: Sequence[Section],
    *,
    subtitle: str = "",
    legend: Sequence[str] = (),
) -> None:
    """Writes a page. An older page of fp8cfg at the path is replaced.

    Args:
        path: The HTML file. Missing folders are created.
        title: Title of the page.
        sections: Contents.
        subtitle: A line under the title.
        legend: Names of the series. Each name has a switch at the top, in the color of its
            `line_style`.

    Raises:
        ConfigError: Plotly is not installed, or the path has another file.
        NotWritable: The file cannot be written.
    """
    text = page_html(title, sections, subtitle=subtitle, legend=legend)
    replace_page(Path(path), text)


def page_html(
    title: str,
    sections: Sequence[Section],
    *,
    subtitle: str = "",
    legend: Sequence[str] = (),
) -> str:
    """Returns the text of a page. See `write_page`. Raises ConfigError if Plotly is missing."""
    script = plotly_script()
    writer = _Writer()
    parts = []
    for number, section in enumerate(sections):
        parts.append(
            f'<section id="section-{number}" aria-labelledby="heading-{number}">'
            f'<h2 id="heading-{number}">{_escape(section.title)}</h2>'
            f'<div class="blocks">{writer.blocks(section.blocks)}</div></section>'
        )
    contents = "".join(
        f'<li><a href="#section-{number}">{_escape(section.title)}</a></li>'
        for number, section in enumerate(sections)
    )
    folder = Path(__file__).parent
    values = {
        "title": _escape(title),
        "subtitle": f'<p class="subtitle">{_escape(subtitle)}</p>' if subtitle else "",
        "version": _escape(__version__),
        "style": (folder / "page.css").read_text(encoding="utf-8"),
        "contents": contents,
        "tools": _x_switch(writer.x_names) + _legend(legend),
        "sections": "".join(parts),
        "plotly": script,
        "script": (folder / "page.js").read_text(encoding="utf-8"),
    }
    template = (folder / "page.html").read_text(encoding="utf-8")
    # One pass over the template: a placeholder within a user's text stays text.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: values[match[1]], template)


def plotly_script() -> str:
    """Returns Plotly's script. Raises ConfigError if Plotly is not installed."""
    # Plotly is an optional dependency, the extra `report`.
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise ConfigError("plotly is not installed: pip install 'fp8cfg[report]'") from None
    return str(get_plotlyjs())


def check_page_path(path: Path) -> None:
    """Raises ConfigError if `path` is a folder, or a file other than a page of fp8cfg."""
    # Guards against a typo such as --output recipe.yaml.
    if path.is_dir():
        raise ConfigError(f"{path}: is a folder; name a file, as in {path / 'report.html'}")
    if not path.exists():
        return
    with path.open("rb") as file:
        beginning = file.read(1000)
    if GENERATOR not in beginning:
        raise ConfigError(f"{path}: exists and is no page of fp8cfg; remove it or name another")


def replace_page(path: Path, text: str) -> None:
    """Replaces a page atomically: a browser loads the old page or the new one. See `write_page`."""
    # In the same folder, because a rename is only atomic within a file system.
    new = path.with_name(f".fp8cfg-{uuid.uuid4().hex}")
    try:
        check_page_path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        new.write_text(text, encoding="utf-8")
        new.replace(path)
    except OSError as error:
        raise NotWritable(f"{path}: cannot be written ({error.strerror})") from None
    finally:
        # Left over only after an error.
        with suppress(OSError):
            os.unlink(new)


class _Writer:
    """Converts blocks to HTML. Figures and tabs get consecutive numbers for their ids."""

    def __init__(self) -> None:
        self.x_names: list[str] = []
        """Names for the switch of the x axis, collected from all figures."""
        self._number = 0

    def blocks(self, blocks: Iterable[Block]) -> str:
        """Returns the HTML of several blocks."""
        return "".join(self.block(block) for block in blocks)

    def block(self, block: Block) -> str:
        """Returns the HTML of a block."""
        match block:
            case Text():
                tone = f' class="{_escape(block.tone)}"' if block.tone else ""
                return f"<p{tone}>{_escape(block.text)}</p>"
            case Facts():
                items = "".join(
                    f"<div><dt>{_escape(label)}</dt><dd>{_escape(_shown(value))}</dd></div>"
                    for label, value in block.items
                )
                return f'<dl class="facts">{items}</dl>'
            case Table():
                return self.table(block)
            case Figure():
                return self.figure(block)
            case Tabs():
                return self.tabs(block)
            case Fold():
                return (
                    f"<details><summary>{_escape(block.title)}</summary>"
                    f'<div class="blocks">{self.blocks(block.blocks)}</div></details>'
                )

    def table(self, table: Table) -> str:
        """Returns the HTML of a table, with a filter if it is long."""
        # A column is numeric if all of its cells are. One empty column is not.
        numeric = [
            all(_is_number(row[column]) for row in table.rows)
            and any(row[column] is not None for row in table.rows)
            for column in range(len(table.columns))
        ]

        def cell(tag: str, column: int, text: str) -> str:
            """Returns a th or td element of a column."""
            kind = ' class="number"' if numeric[column] else ""
            scope = ' scope="col"' if tag == "th" else ""
            return f"<{tag}{scope}{kind}>{text}</{tag}>"

        titles = "".join(cell("th", i, _escape(name)) for i, name in enumerate(table.columns))
        rows = [
            "<tr>" + "".join(cell("td", i, _cell(value)) for i, value in enumerate(row)) + "</tr>"
            for row in table.rows
        ]
        name = table.caption or "table"
        caption = f"<caption>{_escape(table.caption)}</caption>" if table.caption else ""
        search = ""
        if len(rows) > FILTERED_ROWS:
            label = _escape(f"Filter: {name}")
            search = (
                f'<input type="search" class="filter" placeholder="Filter {len(rows)} rows"'
                f' aria-label="{label}">'
            )
        # Focusable, because keyboards must be able to scroll it.
        return (
            f'<div class="table">{search}<div class="scroll" tabindex="0" role="region"'
            f' aria-label="{_escape(name)}"><table>{caption}<thead><tr>{titles}</tr></thead>'
            f"<tbody>{''.join(rows)}</tbody></table></div></div>"
        )

    def figure(self, figure: Figure) -> str:
        """Returns the HTML of a figure, with its data as JSON for page.js."""
        number = self._next()
        for name in figure.x_choices:
            if name not in self.x_names:
                self.x_names.append(name)
        spec: dict[str, Any] = {"data": figure.data, "layout": figure.layout, "x": figure.x_choices}
        if figure.log_colors:
            spec["logColors"] = True
        log = '<button type="button" class="log" aria-pressed="false">Log scale</button>'
        note = f'<p class="note">{_escape(figure.note)}</p>' if figure.note else ""
        return (
            f'<figure class="{"wide" if figure.wide else "half"}" aria-labelledby="title-{number}">'
            f'<figcaption><h3 id="title-{number}">{_escape(figure.title)}</h3>'
            f"{log if figure.log_switch else ''}</figcaption>"
            f'<div class="plot" style="height:{int(figure.height)}px"></div>{note}'
            f'<script type="application/json">{_json(spec)}</script></figure>'
        )

    def tabs(self, tabs: Tabs) -> str:
        """Returns the HTML of tabs: radio buttons, so that arrow keys work without a script."""
        number = self._next()
        radios, panels = [], []
        for i, (name, blocks) in enumerate(tabs.panels.items()):
            radios.append(
                f'<label><input type="radio" name="tabs-{number}" value="{i}"'
                f"{' checked' if i == 0 else ''}><span>{_escape(name)}</span></label>"
            )
            panels.append(
                f'<div class="panel"{" hidden" if i else ""}><div class="blocks">'
                f"{self.blocks(blocks)}</div></div>"
            )
        return (
            f'<div class="tabs"><fieldset class="choice"><legend>{_escape(tabs.label)}</legend>'
            f"{''.join(radios)}</fieldset>{''.join(panels)}</div>"
        )

    def _next(self) -> int:
        """Returns the next number for an id."""
        self._number += 1
        return self._number


def _x_switch(names: Sequence[str]) -> str:
    """Returns the switch of the x axis, or "" without a choice."""
    if len(names) < 2:
        return ""
    radios = "".join(
        f'<label><input type="radio" name="x-axis" value="{_escape(name)}"'
        f"{' checked' if i == 0 else ''}><span>{_escape(name)}</span></label>"
        for i, name in enumerate(names)
    )
    return f'<fieldset class="choice" id="x-axis"><legend>by</legend>{radios}</fieldset>'


def _legend(names: Sequence[str]) -> str:
    """Returns the switches of the series, or "" without names."""
    if not names:
        return ""
    # CSS has no border with dashes and dots.
    borders = {"solid": "solid", "dash": "dashed", "dot": "dotted", "dashdot": "double"}
    items = []
    for i, name in enumerate(names):
        style = line_style(i)
        items.append(
            f'<label><input type="checkbox" value="{_escape(name)}" checked><i style="border-top:'
            f'3px {borders[style["dash"]]} {style["color"]}"></i><span>{_escape(name)}</span></label>'
        )
    return (
        f'<fieldset id="legend"><legend class="hidden">Series</legend>{"".join(items)}</fieldset>'
    )


def _is_number(value: Value | Badge) -> bool:
    """Whether a cell may be in a numeric column. An empty cell may."""
    if value is None or value in ("", "-"):
        return True
    if isinstance(value, str):
        return NUMBER.fullmatch(value) is not None
    # bool is a subclass of int.
    return isinstance(value, int | float) and not isinstance(value, bool)


def _cell(value: Value | Badge) -> str:
    """Returns the HTML of a cell."""
    if isinstance(value, Badge):
        return f'<span class="badge {_escape(value.tone)}">{_escape(value.text)}</span>'
    return _escape(_shown(value))


def _shown(value: Value) -> str:
    """Returns a value as text."""
    if value is None:
        return ""
    # As in YAML: true, not True.
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}"
    return value


def _escape(text: str) -> str:
    """Escapes text for HTML, also within attributes."""
    return html.escape(text)


def _json(value: Any) -> str:
    """Returns JSON for a script element. NaN and infinity become null."""
    text = json.dumps(_finite(value), separators=(",", ":"), allow_nan=False)
    # Otherwise a name with </script> would end the element.
    return text.replace("<", "\\u003c")


def _finite(value: Any) -> Any:
    """Converts a value for JSON: arrays to lists, NaN and infinity to None."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
