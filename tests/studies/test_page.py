"""HTML pages: escaping, numbers, tables, and the rules of writing a file."""

from __future__ import annotations

import base64
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("plotly")
from plotly import graph_objects

from fp8cfg.schema.errors import ConfigError, NotWritable
from fp8cfg.studies.page import (
    Badge,
    Block,
    Facts,
    Figure,
    Fold,
    Section,
    Table,
    Tabs,
    Text,
    line_style,
    packed,
    page_html,
    write_page,
)

EVIL = '<img src=x onerror="alert(1)">&"</script><!--{{title}}'


class Tags(HTMLParser):
    """Collects tags and text of a page, as a browser would find them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


def body(*blocks: Block, legend: tuple[str, ...] = ()) -> str:
    """The page without scripts and style."""
    text = page_html("title", [Section("section", blocks)], legend=legend)
    return re.sub(r"<(script|style)>.*?</\1>", "", text, flags=re.DOTALL)


def test_values_of_users_are_escaped() -> None:
    figure = Figure(
        EVIL,
        [{"type": "scatter", "x": [1], "y": [2], "name": EVIL}],
        {"title": {"text": EVIL}},
        note=EVIL,
        x_choices={EVIL: [[1]], "tokens": [[2]]},
    )
    table = Table([EVIL], [[EVIL], [Badge(EVIL, EVIL)]] * 10, EVIL)
    blocks = [
        Text(EVIL, EVIL),
        Facts([(EVIL, EVIL)]),
        Tabs(EVIL, {EVIL: [Fold(EVIL, [figure, table])]}),
    ]
    text = page_html(EVIL, [Section(EVIL, blocks)], subtitle=EVIL, legend=[EVIL])
    page = Tags(text)
    assert "img" not in page.tags
    # the shell's two scripts and the figure's
    assert page.tags.count("script") == 3
    assert page.text.count("onerror") > 20


def test_a_figure_is_valid_for_plotly() -> None:
    figure = Figure(
        "loss",
        [
            {
                "type": "scatter",
                "x": packed([1, 2]),
                "y": packed([0.5, np.nan]),
                "line": line_style(9),
            },
            {"type": "heatmap", "z": packed(np.zeros((2, 3)))},
        ],
    )
    made = graph_objects.Figure(data=list(figure.data))
    assert made.data[0].line.dash == "dash"


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([1, -(2**31) + 1], "i4"),
        ([1, 2**31], "f8"),
        ([], "f4"),
        ([0.1, float("nan")], "f4"),
        ([0.1, float("inf")], "f4"),
        ([1e300], "f8"),
        (np.arange(6).reshape(2, 3), "i4"),
    ],
)
def test_packed_numbers_are_read_back_by_plotly(values: list[float], kind: str) -> None:
    spec = packed(values)
    assert spec["dtype"] == kind
    array = np.frombuffer(base64.b64decode(spec["bdata"]), f"<{kind}")
    if "shape" in spec:
        array = array.reshape([int(n) for n in spec["shape"].split(",")])
    np.testing.assert_allclose(array, np.asarray(values), rtol=1e-7)


def test_numbers_are_aligned_and_text_is_not() -> None:
    rows = [["a", 1234567, 1.5e-9, "1.2 GiB", None], ["2b", None, 2.0, "-", "x"]]
    text = body(Table(["run", "tokens", "loss", "memory", "note"], rows))
    numeric = re.findall(r'<th scope="col"( class="number")?>', text)
    assert numeric == ["", *[' class="number"'] * 3, ""]
    assert "1,234,567" in text
    assert "1.5e-09" in text


def test_long_tables_get_a_filter() -> None:
    assert "filter" not in body(Table(["key"], [["a"]] * 15))
    assert "Filter 16 rows" in body(Table(["key"], [["a"]] * 16))


def test_nan_is_no_invalid_json() -> None:
    text = body(Figure("loss", [{"type": "scatter", "y": [1.0, float("nan"), np.float32(2)]}]))
    assert '"y":[1.0,null,2.0]' in text


def test_a_page_names_no_other_host() -> None:
    text = body(Text("text"), legend=("one",))
    assert "http:" not in text and "https:" not in text
    assert "default-src 'none'" in text


def test_an_old_page_is_replaced_and_another_file_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "new" / "page.html"
    write_page(path, "one", [])
    write_page(path, "two", [])
    assert "<title>two</title>" in path.read_text()
    assert [p.name for p in path.parent.iterdir()] == ["page.html"]
    other = tmp_path / "notes.html"
    other.write_text("mine")
    with pytest.raises(ConfigError, match=r"notes.html: exists and is no page of fp8cfg"):
        write_page(other, "one", [])
    assert other.read_text() == "mine"
    with pytest.raises(ConfigError, match="is a folder; name a file"):
        write_page(tmp_path, "one", [])
    with pytest.raises(NotWritable, match="cannot be written"):
        write_page(other / "page.html", "one", [])


def test_without_plotly_the_message_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(ConfigError, match=r"pip install 'fp8cfg\[report\]'"):
        write_page(tmp_path / "page.html", "one", [])
