"""The report of runs: its data, its sources, its messages, and its page in a browser."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("plotly")
from plotly import graph_objects

import fp8cfg
from fp8cfg.__main__ import main
from fp8cfg.run_folder.files import RunFolderError
from fp8cfg.schema.errors import ConfigError
from fp8cfg.studies import report
from fp8cfg.studies.fp8_history import STATISTICS, FP8History
from fp8cfg.studies.page import Block, Figure, Fold, Section, Table, Tabs, Text, packed, write_page
from fp8cfg.studies.report_figures import MOST_COLUMNS, heat_map_columns
from fp8cfg.studies.reported_run import MOST_RUNS, read_runs
from tests.support import chromium
from tests.support.chromium import Browser
from tests.support.short_runs import WORDS
from tests.support.small import small
from tools.bench_report import write_synthetic_run

STATS = ("precision=bf16_fp8", "log.fp8_stats_every_n_steps=2")
needs_chromium = pytest.mark.skipif(chromium.PATH is None, reason="chromium is not installed")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of four steps. One has FP8 statistics."""
    folder = tmp_path_factory.mktemp("runs")
    for name, words in {"bf16": (), "fp8": STATS}.items():
        recipe = small(*WORDS, "trainer.compile=off", *words)
        fp8cfg.fit(fp8cfg.build(recipe), folder / name, say=lambda _: None)
    return folder


def rows_of(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def sections(*folders: Path) -> dict[str, Section]:
    found = report.report_sections(read_runs(folders))
    return {section.title: section for section in found}


def blocks(all_blocks: Any) -> Iterator[Block]:
    """All blocks, also those in tabs and folds."""
    for block in all_blocks:
        yield block
        if isinstance(block, Fold):
            yield from blocks(block.blocks)
        if isinstance(block, Tabs):
            for panel in block.panels.values():
                yield from blocks(panel)


def figures(section: Section) -> dict[str, Figure]:
    return {block.title: block for block in blocks(section.blocks) if isinstance(block, Figure)}


def numbers(spec: dict[str, str]) -> np.ndarray:
    array = np.frombuffer(base64.b64decode(spec["bdata"]), f"<{spec['dtype']}")
    return array.reshape([int(n) for n in spec["shape"].split(",")]) if "shape" in spec else array


def test_curves_are_the_metrics(runs: Path) -> None:
    training = figures(sections(runs / "bf16", runs / "fp8")["Training"])
    names = {"Training loss": "loss", "Validation loss": "val_loss", "Gradient norm": "grad_norm"}
    for title, field in names.items():
        figure = training[title]
        graph_objects.Figure(data=list(figure.data), layout=dict(figure.layout))
        for i, name in enumerate(("bf16", "fp8")):
            rows = [row for row in rows_of(runs / name, "metrics.jsonl") if field in row]
            assert figure.data[i]["legendgroup"] == name
            np.testing.assert_allclose(
                numbers(figure.data[i]["y"]), [row[field] for row in rows], rtol=1e-6
            )
            steps = numbers(figure.x_choices["steps"][i])
            assert steps.tolist() == [row["step"] for row in rows]
            tokens = numbers(figure.x_choices["tokens"][i])
            assert (tokens == steps * rows_of(runs / name, "metrics.jsonl")[0]["tokens"]).all()


def test_the_difference_to_the_reference(runs: Path) -> None:
    gap = figures(sections(runs / "bf16", runs / "fp8")["Differences"])["Training loss"]
    losses = [
        [row["loss"] for row in rows_of(runs / name, "metrics.jsonl") if "loss" in row]
        for name in ("bf16", "fp8")
    ]
    np.testing.assert_allclose(numbers(gap.data[0]["y"]), np.subtract(*losses[::-1]), atol=1e-6)


def test_heat_maps_are_the_statistics_in_layer_order(runs: Path) -> None:
    tabs = next(b for b in sections(runs / "fp8")["FP8 tensors"].blocks if isinstance(b, Tabs))
    assert list(tabs.panels) == ["input", "weight", "grad_output"]
    rows = rows_of(runs / "fp8", "fp8_stats.jsonl")
    layers = list(dict.fromkeys(row["layer"] for row in rows))
    for tensor, panel in tabs.panels.items():
        maps = {block.title: block for block in panel if isinstance(block, Figure)}
        for title, (field, factor) in {
            "amax": ("amax", 1),
            "Underflow": ("underflow", 100),
            "Rounding error": ("error", 1),
        }.items():
            trace = maps[title].data[0]
            graph_objects.Figure(data=[trace], layout=dict(maps[title].layout))
            assert trace["y"] == layers
            expected = [
                [r[field] * factor for r in rows if (r["layer"], r["tensor"]) == (layer, tensor)]
                for layer in layers
            ]
            np.testing.assert_allclose(numbers(trace["z"]), expected, rtol=1e-6)


def test_without_statistics_the_report_names_the_key(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "fp8", tmp_path / "fp8")
    (tmp_path / "fp8" / "fp8_stats.jsonl").unlink()
    texts = [
        b.text for b in sections(tmp_path / "fp8")["FP8 tensors"].blocks if isinstance(b, Text)
    ]
    assert any("log.fp8_stats_every_n_steps=100" in text for text in texts)
    assert sections(runs / "bf16")["FP8 tensors"].blocks == [Text("The run trained without FP8.")]


def test_memory_is_planned_and_measured(runs: Path) -> None:
    table = next(b for b in sections(runs / "fp8")["Memory"].blocks if isinstance(b, Table))
    rows = dict(table.rows)
    planned = fp8cfg.plan(small(*WORDS, *STATS)).widest
    assert rows["planned peak"] == report.size(planned.total)
    measured = max(row.get("memory", 0) for row in rows_of(runs / "fp8", "metrics.jsonl"))
    assert rows["measured peak"] == report.size(measured)


def test_the_sources_of_values(runs: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(runs / "fp8", tmp_path / "fp8")

    def sources_by_key() -> dict[str, str]:
        tables = [b for b in blocks(sections(folder)["Recipe"].blocks) if isinstance(b, Table)]
        all_values = max(tables, key=lambda table: len(table.rows))
        return {key: source for key, _, source in all_values.rows}

    assert sources_by_key() == json.loads((folder / "sources.json").read_text())
    assert sources_by_key()["fp8.enabled"] == "preset: bf16_fp8"
    (folder / "sources.json").unlink()
    assert sources_by_key()["fp8.enabled"] == "recipe.yaml"
    assert sources_by_key()["optim.eps"] == "schema default"


def test_the_command_and_its_messages(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "new" / "r.html"
    # A folder of runs, and the reference comes first.
    assert main(["report", str(runs), "--reference", str(runs / "fp8"), "--output", str(page)]) == 0
    assert capsys.readouterr().out.startswith(f"wrote {page} (")
    assert "Compared with fp8" in page.read_text()
    shutil.copytree(runs / "bf16", tmp_path / "broken")
    (tmp_path / "broken" / "metrics.jsonl").write_text("nonsense\n")
    for words, message in {
        (): "report: needs a run folder",
        ("nowhere",): "nowhere: run folder not found",
        (str(runs / "bf16"), str(tmp_path / "broken")): "metrics.jsonl:1: not a line of metrics",
        (str(runs / "bf16"), "fp8.margin=1"): "fp8.margin=1: report takes run folders",
    }.items():
        assert main(["report", *words, "--output", str(tmp_path / "x.html")]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "x.html").exists()


def test_a_run_that_has_just_begun(runs: Path, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    begun.mkdir()
    for name in ("recipe.yaml", "environment.json"):
        shutil.copy(runs / "fp8" / name, begun)
    texts = [
        b.text for s in sections(begun).values() for b in blocks(s.blocks) if isinstance(b, Text)
    ]
    assert "begun has no steps yet." in texts
    assert "There are no steps yet." in texts
    (begun / "coverage.json").write_text("[]")
    with pytest.raises(RunFolderError, match=r"coverage.json: is no JSON object"):
        sections(begun)


def test_losses_that_are_not_finite_and_skipped_steps_are_reported(
    runs: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "bad"
    shutil.copytree(runs / "bf16", folder)
    rows = rows_of(folder, "metrics.jsonl")
    rows[-1] |= {"loss": "NaN", "stepped": False, "step": 4}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts = [b.text for b in sections(folder)["Overview"].blocks if isinstance(b, Text)]
    assert "bad: The loss is not finite in 1 step, first in step 4." in texts
    assert "bad: The optimizer skipped 1 step, last step 4." in texts


def test_too_many_runs(runs: Path, tmp_path: Path) -> None:
    for i in range(MOST_RUNS + 1):
        (tmp_path / f"{i}").mkdir()
        for name in ("recipe.yaml", "environment.json"):
            shutil.copy(runs / "fp8" / name, tmp_path / f"{i}")
    with pytest.raises(ConfigError, match="33 runs are too many; choose up to 32"):
        fp8cfg.write_report(tmp_path, tmp_path / "r.html")


def test_a_long_run_stays_below_10_mb(tmp_path: Path) -> None:
    # Statistics of 100 steps fill all columns of the heat maps.
    write_synthetic_run(tmp_path / "long", steps=100_000, layers=400, every=1000)
    page = fp8cfg.write_report(tmp_path / "long", tmp_path / "r.html")
    assert 6e6 < page.stat().st_size < 10e6
    text = page.read_text()
    assert "Measured in 100 steps from 1,000 to 100,000." in text
    assert "They are drawn with at most 2,000 points" in text


def test_heat_maps_of_many_layers_and_runs_fit_the_page() -> None:
    values = {name: np.ones((4800, 3)) for name in STATISTICS}
    rows = [(f"layers.{i}", "input") for i in range(4800)]
    history = FP8History(rows, np.zeros((3, 2), dtype=np.int64), values, num_steps=3)
    for count in (1, 4):
        columns = heat_map_columns([history] * count)
        assert 2 <= columns <= MOST_COLUMNS
        assert 4 / 3 * 4 * columns * 4800 * 6 * count < 4e6


# In a browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium.chromium(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture(scope="module")
def page(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fp8cfg.write_report(
        [runs / "bf16", runs / "fp8"], tmp_path_factory.mktemp("page") / "r.html"
    )


def figure(title: str) -> str:
    """JavaScript expression of the visible figure with a title."""
    return f"figures.find(f => f.querySelector('h3').textContent === {title!r} && f.clientWidth)"


@needs_chromium
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_every_visible_figure_is_drawn(
    browser: Browser, page: Path, runs: Path, dark: bool, tmp_path: Path
) -> None:
    browser.open(page, dark=dark)
    browser.screenshot(tmp_path / "page.png", full=True)
    assert browser.problems == []
    visible = "figures.filter(f => !f.closest('[hidden]'))"
    assert browser.run(f"{visible}.every(f => f.dataset.drawn === '{'dark' if dark else 'light'}')")
    plot = f"{figure('Training loss')}.querySelector('.plot')"
    assert browser.run(f"{plot}.querySelectorAll('.scatterlayer .trace').length") == 2
    for i, name in enumerate(("bf16", "fp8")):
        rows = [row for row in rows_of(runs / name, "metrics.jsonl") if "loss" in row]
        found = browser.run(f"{plot}.calcdata[{i}].map(point => [point.x, point.y])")
        np.testing.assert_allclose(found, [[row["step"], row["loss"]] for row in rows], rtol=1e-6)
    layers = {row["layer"] for row in rows_of(runs / "fp8", "fp8_stats.jsonl")}
    for title in ("amax", "Scale", "Underflow", "Overflow", "Rounding error"):
        plot = f"{figure(title)}.querySelector('.plot')"
        assert browser.run(f"{plot}.querySelectorAll('.heatmaplayer image').length") == 1
        assert browser.run(f"{plot}.calcdata[0][0].z.length") == len(layers)
    # Text is readable: light on dark or dark on light.
    color = browser.run(f"getComputedStyle({plot}.querySelector('.xtick text')).fill")
    brightness = sum(int(part) for part in color[4:-1].split(",")) / 3
    assert (brightness > 128) == dark


@needs_chromium
def test_hover_shows_the_values(browser: Browser, page: Path, runs: Path) -> None:
    browser.open(page)

    def label(title: str, x: float, y: float) -> str:
        plot = f"{figure(title)}.querySelector('.plot')"
        browser.run(f"{plot}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
        browser.frames()
        box = browser.run(
            f"(b => [b.left, b.top, b.width, b.height])({plot}.querySelector('.nsewdrag')"
            ".getBoundingClientRect())"
        )
        browser.move(box[0] + box[2] * x, box[1] + box[3] * y)
        return str(
            browser.run(
                "new Promise(done => { const wait = () => {"
                f" const found = {plot}.querySelector('.hoverlayer').textContent;"
                " found ? done(found) : setTimeout(wait, 50); }; wait(); })"
            )
        )

    last = {
        name: [row["loss"] for row in rows_of(runs / name, "metrics.jsonl") if "loss" in row][-1]
        for name in ("bf16", "fp8")
    }
    text = label("Training loss", 0.99, 0.5)
    for name, loss in last.items():
        assert name in text
        assert f"{loss:.5g}"[:6] in text
    # The label of a heat map has the value, not its logarithm.
    rows = rows_of(runs / "fp8", "fp8_stats.jsonl")
    layer = rows[0]["layer"]
    amax = [r["amax"] for r in rows if (r["layer"], r["tensor"]) == (layer, "input")][-1]
    text = label("amax", 0.9, 0.02)
    assert layer in text
    assert float(text.rpartition(":")[2]) == pytest.approx(amax, rel=1e-3)
    assert browser.problems == []


@needs_chromium
def test_switches_work_with_the_keyboard(browser: Browser, page: Path) -> None:
    browser.open(page)
    plot = f"{figure('Training loss')}.querySelector('.plot')"
    browser.run(f"draw({figure('Training loss')})")
    # The first stop is the link to the contents, the second the theme.
    browser.press("Tab", 9)
    assert browser.run("document.activeElement.className") == "skip"
    browser.press("Tab", 9)
    browser.press("Enter", 13)
    assert browser.run("[root.dataset.theme, themeButton.textContent]") == ["dark", "Light theme"]
    assert browser.run(f"{figure('Training loss')}.dataset.drawn") == "dark"
    browser.run("themeButton.click()")
    before = browser.run(f"{plot}.calcdata[0].at(-1).x")
    browser.run("document.querySelector('#x-axis input').focus()")
    browser.press("ArrowRight", 39)
    assert browser.run(f"{plot}.calcdata[0].at(-1).x") > 100 * before
    assert browser.run(f"{plot}.layout.xaxis.title.text") == "tokens"
    browser.run("document.querySelector('#legend input').focus()")
    browser.press(" ", 32)
    assert browser.run(f"{plot}.querySelectorAll('.scatterlayer .trace').length") == 1
    browser.run(f"{figure('Training loss')}.querySelector('.log').focus()")
    browser.press("Enter", 13)
    assert browser.run(f"{plot}.layout.yaxis.type") == "log"
    browser.run("document.querySelector('input[type=radio][name^=tabs]').focus()")
    browser.press("ArrowRight", 39)
    assert browser.run("document.querySelectorAll('.tabs .panel[hidden]').length") > 0
    assert browser.problems == []


@needs_chromium
def test_a_phone_and_paper(browser: Browser, page: Path, tmp_path: Path) -> None:
    browser.open(page, width=390, height=844)
    assert browser.run("document.documentElement.scrollWidth") == 390
    browser.pdf(tmp_path / "page.pdf")
    assert browser.run("figures.filter(f => !f.closest('[hidden]')).every(f => drawn.has(f))")
    assert browser.problems == []


@needs_chromium
def test_logarithmic_colors(browser: Browser, tmp_path: Path) -> None:
    z = packed(np.array([[1e-3, 1.0, np.inf], [0.0, np.nan, 10.0]], dtype=np.float32))
    heat_map = Figure("amax", [{"type": "heatmap", "z": z}], log_colors=True)
    zeros = {"type": "heatmap", "z": packed(np.zeros((1, 2), dtype=np.float32))}
    blocks = [heat_map, Figure("zeros", [zeros], log_colors=True)]
    write_page(tmp_path / "r.html", "title", [Section("section", blocks)])
    browser.open(tmp_path / "r.html")
    browser.run("figures.forEach(draw)")
    trace = browser.run(f"{figure('amax')}.querySelector('.plot').data[0]")
    # JSON has neither NaN nor infinity.
    assert trace["z"] == [[pytest.approx(-3), 0, 1], [pytest.approx(-3), None, 1]]
    assert trace["customdata"][0][:2] == [pytest.approx(1e-3), 1]
    assert trace["colorbar"]["ticktext"] == ["0.001", "0.01", "0.1", "1", "10"]
    assert browser.problems == []


@needs_chromium
def test_names_of_users_run_no_code(browser: Browser, tmp_path: Path) -> None:
    evil = "<img src=x onerror=alert(1)><script>alert(2)</script>"
    trace = {"type": "scatter", "x": [1, 2], "y": [1, 2], "name": evil, "legendgroup": evil}
    evil_figure = Figure(evil, [trace], {"showlegend": True}, evil)
    write_page(tmp_path / "r.html", evil, [Section(evil, [evil_figure, Text(evil)])], legend=[evil])
    browser.open(tmp_path / "r.html")
    browser.run("figures.forEach(draw)")
    browser.frames()
    assert browser.run("document.querySelectorAll('img').length") == 0
    assert browser.run("document.querySelectorAll('.trace').length") > 0
    assert browser.problems == []
