"""Draws the pictures of the pages in docs/pictures, light and dark: SVG files, and screenshots of a report as PNG.

    python tools/make_pictures.py                 draw all pictures
    python tools/make_pictures.py gemms scalings  draw these
    python tools/make_pictures.py --train         train again for the loss curves, about ten minutes, then draw all

Losses are kept in docs/pictures/losses.json. Text follows the color scheme of the reader. The picture `report` trains two small runs,
for about two minutes, and needs Chromium.
"""

from __future__ import annotations

import argparse
import fcntl
import io
import json
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Callable, Sequence
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "pictures"
LOSSES = FOLDER / "losses.json"
STEPS = 100
COLUMNS = 96
"""Columns of the drawn terminal."""
PRECISIONS = {"bf16": "BF16", "bf16_fp8": "FP8, delayed", "bf16_fp8_current": "FP8, current"}
STYLE = """
  svg { --ink: #1f2328; --soft: #59636e; --box: #eef1f6; --line: #8c959f; --one: #4051b5; --two: #c2410c; --three: #0f766e; --bad: #d1242f }
  @media (prefers-color-scheme: dark) {
    svg { --ink: #e6edf3; --soft: #9198a1; --box: #21262d; --line: #6e7681; --one: #8c9eff; --two: #fb923c; --three: #2dd4bf; --bad: #ff7b72 }
  }
  text { font: 14px system-ui, sans-serif; fill: var(--ink) }
  .soft { fill: var(--soft); font-size: 12px }
  .mono { font: 13px ui-monospace, monospace }
  .head { font-weight: 600 }
  .box { fill: var(--box); stroke: var(--line) }
  .edge { stroke: var(--line); stroke-width: 1.5; fill: none; marker-end: url(#tip) }
  .axis { stroke: var(--line); fill: none }
"""
TIP = (
    '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
    '<path d="M0 0 L8 4 L0 8 z" fill="var(--line)"/></marker></defs>'
)
COLORS = ("var(--one)", "var(--two)", "var(--three)")


def svg(width: int, height: int, title: str, parts: Sequence[str]) -> str:
    """Returns a picture of `parts` with the common style. Units are pixels."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">'
        f"\n<title>{escape(title)}</title>\n<style>{STYLE}</style>\n{TIP}\n"
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def text(x: float, y: float, content: str, kind: str = "", anchor: str = "start") -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{escape(content)}</text>'
    )


def box(x: float, y: float, width: float, height: float, lines: Sequence[str]) -> str:
    """Returns a box with a heading and smaller lines below it."""
    middle = x + width / 2
    top = y + height / 2 - 8 * (len(lines) - 1) + 5
    parts = [
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" class="box"/>'
    ]
    for number, line in enumerate(lines):
        kind = "head" if number == 0 else "soft"
        parts.append(text(middle, top + 17 * number, line, kind, "middle"))
    return "\n".join(parts)


def arrow(x1: float, y1: float, x2: float, y2: float, label: str = "") -> str:
    line = f'<path d="M{x1:g} {y1:g} L{x2:g} {y2:g}" class="edge"/>'
    if not label:
        return line
    return line + text((x1 + x2) / 2, (y1 + y2) / 2 - 7, label, "mono", "middle")


def draw_flow() -> str:
    parts = []
    for y, line in ((10, "arguments"), (60, "YAML files"), (110, "Python")):
        parts += [box(10, y, 110, 40, [line]), arrow(120, y + 20, 208, 80)]
    parts += [
        text(160, 152, "compose", "mono", "middle"),
        box(210, 50, 130, 60, ["Recipe", "typed, checked"]),
        arrow(340, 80, 428, 80, "lower"),
        box(430, 50, 130, 60, ["Fiddle graph", "edit, diff, JSON"]),
        arrow(560, 80, 648, 80, "build"),
        box(650, 50, 140, 60, ["Job", "model, optimizer, FP8"]),
        arrow(790, 80, 858, 80, "fit"),
        box(860, 50, 130, 60, ["Run folder", "metrics, checkpoints"]),
        arrow(275, 110, 275, 148),
        box(210, 150, 350, 50, ["plan", "formats, memory, traffic; no torch, no GPU"]),
        arrow(720, 110, 720, 148),
        box(650, 150, 340, 50, ["prove", "the first step's GEMMs equal the plan, or exit code 3"]),
    ]
    return svg(1000, 215, "From arguments to a run folder", parts)


def draw_gemms() -> str:
    rows = (
        ("fprop", "y = x wᵀ", "input x", "E4M3", "weight w", "E4M3", "output y", "BF16"),
        (
            "dgrad",
            "dx = dy w",
            "gradient dy",
            "E5M2",
            "weight w",
            "E4M3",
            "input gradient dx",
            "BF16",
        ),
        (
            "wgrad",
            "dw = dyᵀ x",
            "gradient dy",
            "E5M2",
            "input x",
            "E4M3",
            "weight gradient dw",
            "FP32",
        ),
    )
    parts = []
    for number, (
        name,
        formula,
        left,
        left_format,
        right,
        right_format,
        result,
        result_format,
    ) in enumerate(rows):
        y = 10 + 80 * number
        parts += [
            text(10, y + 26, name, "head"),
            text(10, y + 46, formula, "mono"),
            box(130, y, 150, 60, [left, left_format]),
            text(295, y + 36, "\u00d7", "head", "middle"),
            box(310, y, 150, 60, [right, right_format]),
            arrow(460, y + 30, 618, y + 30, "FP32 sums"),
            box(620, y, 170, 60, [result, result_format]),
        ]
    parts.append(
        text(10, 265, "fp8.format=hybrid. With fp8.format=e4m3 all operands are E4M3.", "soft")
    )
    return svg(800, 275, "The three GEMMs of a linear layer and their formats", parts)


def draw_scalings() -> str:
    """Draws one tensor under three scalings. Colors are relative errors, computed with torch's E4M3."""
    import torch

    rows, columns, block, largest = 12, 24, 8, 448.0
    generator = torch.Generator().manual_seed(3)
    tensor = torch.randn(rows, columns, generator=generator, dtype=torch.float32)
    tensor *= 0.05 * 2.0 ** torch.randint(-5, 4, (rows, 1), generator=generator)
    tensor[3, 5], tensor[8, 17] = 40.0, -25.0  # outliers
    amax = tensor.abs().amax()
    blocks = (
        tensor.reshape(rows, -1, block)
        .abs()
        .amax(-1, keepdim=True)
        .expand(-1, -1, block)
        .reshape(tensor.shape)
    )
    panels = (
        ("delayed", "amax of earlier steps: outliers are clipped", torch.full_like(tensor, 6.0)),
        ("current", "amax of the tensor: small values vanish", amax.expand_as(tensor)),
        ("block", "amax of 8 values here, 128 in practice", blocks),
    )
    cell, left = 11, 20
    parts = []
    for number, (name, explanation, amaxes) in enumerate(panels):
        scaled = (tensor / amaxes * largest).clamp(-largest, largest)
        quantized = scaled.to(torch.float8_e4m3fn).to(torch.float32) * amaxes / largest
        error = ((quantized - tensor).abs() / tensor.abs()).clamp(max=1.0)
        x0 = left + number * (columns * cell + 40)
        parts += [text(x0, 20, name, "head"), text(x0, 38, explanation, "soft")]
        for row in range(rows):
            for column in range(columns):
                value = float(error[row, column])
                color = (
                    "var(--bad)"
                    if value > 0.2
                    else "var(--two)"
                    if value > 0.07
                    else "var(--three)"
                )
                opacity = 1.0 if value > 0.07 else 0.35
                parts.append(
                    f'<rect x="{x0 + column * cell}" y="{50 + row * cell}" width="{cell - 1}" height="{cell - 1}"'
                    f' fill="{color}" opacity="{opacity}"/>'
                )
    y = 50 + rows * cell + 25
    for x, color, label in (
        (20, "var(--three)", "error below 7 %: a normal FP8 value"),
        (300, "var(--two)", "7 to 20 %: subnormal"),
        (500, "var(--bad)", "over 20 %: clipped or flushed"),
    ):
        parts += [
            f'<rect x="{x}" y="{y - 10}" width="11" height="11" fill="{color}"/>',
            text(x + 18, y, label, "soft"),
        ]
    return svg(930, y + 15, "One tensor under delayed, current and block scaling", parts)


def draw_losses() -> str:
    losses = json.loads(LOSSES.read_text(encoding="utf-8"))
    width, height, left, top = 720, 300, 60, 20
    low, high = 2.0, 6.0
    parts = []
    for value in range(int(low), int(high) + 1):
        y = top + height * (high - value) / (high - low)
        parts += [
            f'<path d="M{left} {y:g} H{left + width}" class="axis" opacity="0.3"/>',
            text(left - 10, y + 5, str(value), "soft", "end"),
        ]
    for step in range(0, STEPS + 1, 50):
        parts.append(
            text(left + width * step / STEPS, top + height + 20, str(step), "soft", "middle")
        )
    for color, (precision, label) in zip(COLORS, PRECISIONS.items(), strict=True):
        points = [
            f"{left + width * step / STEPS:.1f},{top + height * (high - min(loss, high)) / (high - low):.1f}"
            for step, loss in enumerate(losses[precision], start=1)
        ]
        number = list(PRECISIONS).index(precision)
        parts += [
            f'<polyline points="{" ".join(points)}" fill="none" stroke="{color}" stroke-width="1.6"/>',
            f'<path d="M{left + 480} {top + 20 + 22 * number} h24" stroke="{color}" stroke-width="3"/>',
            text(left + 512, top + 25 + 22 * number, f"{label}: {losses[precision][-1]:.3f}"),
        ]
    parts.append(
        text(
            left,
            top + height + 40,
            f"llama_tiny on the source of Python's standard library, {STEPS} steps, training loss",
            "soft",
        )
    )
    return svg(left + width + 20, top + height + 50, "Training loss in BF16 and FP8", parts)


def draw_memory() -> str:
    names = {
        "weights": "weights",
        "masters": "master weights",
        "gradients": "gradients",
        "moments": "moments",
        "accumulation": "gradient sums",
        "activations": "activations",
        "logits": "logits",
        "backward": "backward",
    }
    shades = (
        "#4051b5",
        "#6366c9",
        "#8b8fe0",
        "#b0b4ef",
        "#c2410c",
        "#0f766e",
        "#2f9e91",
        "#74c7bc",
    )
    left, scale, limit = 130, 8.6, 79.1
    parts = []
    for number, precision in enumerate(("bf16", "bf16_fp8")):
        arguments = ["plan", "recipe=llama_8b", f"precision={precision}", "--gpu", "h100", "--json"]
        memory = json.loads(run_fp8cfg(arguments))["ranks"][0]["memory"]
        y = 20 + 60 * number
        x = float(left)
        total = sum(memory.values()) / 2**30
        parts.append(text(left - 10, y + 17, precision, "mono", "end"))
        parts.append(text(left - 10, y + 34, f"{total:.1f} GiB", "soft", "end"))
        for name, shade in zip(names, shades, strict=True):
            size = memory.get(name, 0) / 2**30
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{size * scale:.1f}" height="38" fill="{shade}"/>'
            )
            x += size * scale
    parts += [
        f'<path d="M{left + limit * scale:.1f} 10 V125" class="axis" stroke-dasharray="4 3"/>',
        text(left + limit * scale, 142, "H100: 79.1 GiB", "soft", "middle"),
    ]
    for number, (name, shade) in enumerate(zip(names.values(), shades, strict=True)):
        x, y = left + 170 * (number % 4), 168 + 22 * (number // 4)
        parts += [
            f'<rect x="{x}" y="{y - 10}" width="11" height="11" fill="{shade}"/>',
            text(x + 18, y, name, "soft"),
        ]
    return svg(900, 205, "Planned memory of llama_8b on eight H100 GPUs, per GPU", parts)


def draw_graph() -> str:
    """Draws the builders of the graph and their references to one another, as `plan --tree` prints them."""
    places = {
        "recipe": (20, 20, "settings of the schema"),
        "plan": (220, 20, "backend, layout, dtypes"),
        "model": (420, 20, "layers in FP8"),
        "loss_scaler": (420, 110, "fp16 only"),
        "optimizer": (620, 20, "master weights, moments"),
        "schedule": (620, 110, "learning rate"),
        "autocast": (620, 200, "FP8 inside, BF16 outside"),
        "job": (840, 110, "fdl.build(graph)"),
    }
    arguments = ["plan", "recipe=llama_tiny", "precision=bf16_fp8", "--tree"]
    edges = set()
    for line in run_fp8cfg(arguments).splitlines():
        path, arrow_sign, target = line.partition(" -> ")
        user, used = path.split(".")[0], target.split(".")[0]
        if arrow_sign and used in places and user in places and user != used:
            edges.add((used, user))
    edges |= {(name, "job") for name in ("optimizer", "schedule", "autocast")}
    width, height = 160, 56
    parts = []
    for used, user in sorted(edges):
        if used == "plan" and user not in ("model", "loss_scaler"):
            continue  # every builder takes the plan; the picture shows two
        x1, y1, _ = places[used]
        x2, y2, _ = places[user]
        parts.append(arrow(x1 + width, y1 + height / 2, x2 - 2, y2 + height / 2))
    for name, (x, y, explanation) in places.items():
        parts.append(box(x, y, width, height, [name, explanation]))
    return svg(1020, 275, "The builders of the Fiddle graph", parts)


def run_fp8cfg(arguments: Sequence[str]) -> str:
    """Runs fp8cfg in an empty folder and returns its output."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory() as folder:
        return subprocess.run(
            [sys.executable, "-m", "fp8cfg", *arguments],
            capture_output=True,
            text=True,
            check=False,
            cwd=folder,
            env=environment,
        ).stdout


def run_on_terminal(arguments: Sequence[str], stop_at: str = "") -> list[Any]:
    """Runs fp8cfg in an empty folder on a terminal of 96 columns.

    Args:
        arguments: Its arguments.
        stop_at: A text. The screen is taken once it is there. By default at the end.

    Returns:
        The lines of the screen as rich's Text.
    """
    import pyte

    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color"}
    environment.pop("NO_COLOR", None)
    screen = pyte.Screen(COLUMNS, 200)
    stream = pyte.ByteStream(screen)
    with tempfile.TemporaryDirectory() as folder:
        primary, secondary = pty.openpty()
        fcntl.ioctl(secondary, termios.TIOCSWINSZ, struct.pack("HHHH", 200, COLUMNS, 0, 0))
        process = subprocess.Popen(
            [sys.executable, "-m", "fp8cfg", *arguments],
            stdin=secondary,
            stdout=secondary,
            stderr=secondary,
            cwd=folder,
            env=environment,
        )
        os.close(secondary)
        while not stop_at or not any(stop_at in line for line in screen.display):
            try:
                stream.feed(os.read(primary, 65536))
            except OSError:  # the process has ended
                break
        process.kill()
        process.wait()
        os.close(primary)
    lines = [_line_of(screen, row) for row in range(screen.lines)]
    while lines and not lines[-1].plain.strip():
        lines.pop()
    return lines


def _line_of(screen: Any, row: int) -> Any:
    """Returns a line of the screen as rich's Text, with its colors."""
    from rich.style import Style
    from rich.text import Text

    cells = [screen.buffer[row][column] for column in range(screen.columns)]
    line = Text()
    for (color, bold), run in groupby(cells, key=lambda cell: (cell.fg, cell.bold)):
        if re.fullmatch("[0-9a-f]{6}", color):
            color = f"#{color}"
        color = {"default": None, "brown": "yellow"}.get(color, color)
        line.append("".join(cell.data for cell in run), Style(color=color, bold=bold))
    line.rstrip()
    return line


def draw_terminal(arguments: Sequence[str], title: str, stop_at: str = "") -> str:
    """Runs fp8cfg on a terminal and draws its screen. Arguments as of `run_on_terminal`."""
    from rich.console import Console
    from rich.text import Text

    lines = run_on_terminal(arguments, stop_at)
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    console.print(Text(f"$ fp8cfg {' '.join(arguments)}", style="bold"))
    for line in lines:
        console.print(line, soft_wrap=True)
    drawn = console.export_svg(title=title, unique_id="terminal")
    # The fonts of rich's template are on another host, and a comment names that of rich.
    return re.sub(r"@font-face \{.*?\}\s*|<!--.*?-->\s*", "", drawn, flags=re.DOTALL)


def draw_errors() -> str:
    return draw_terminal(
        ["fp8.margn=1", "precision=bf16_pf8", "trainer.fp8_params=true"], "Mistakes"
    )


def draw_plan() -> str:
    return draw_terminal(
        ["plan", "recipe=llama_8b", "precision=bf16_fp8", "--gpu", "h100"], "A plan without a GPU"
    )


def draw_run() -> str:
    """A run in the middle, with its live lines."""
    words = ["recipe=llama_tiny", "precision=bf16_fp8", "trainer.max_steps=40"]
    words += ["trainer.global_batch_size=4", "trainer.micro_batch_size=4"]
    # Workers of the compiler would keep the terminal open.
    words.append("trainer.compile=off")
    return draw_terminal(words, "A run", stop_at="step 30/40  loss")


PICTURES: dict[str, Callable[[], str]] = {
    "flow": draw_flow,
    "gemms": draw_gemms,
    "scalings": draw_scalings,
    "losses": draw_losses,
    "memory": draw_memory,
    "graph": draw_graph,
    "errors": draw_errors,
    "plan": draw_plan,
    "run": draw_run,
}
FIXED = ("flow", "gemms", "scalings", "losses", "memory", "graph", "errors")
"""Pictures without times and machines: a test draws them again and compares."""
REPORT = "report"
"""Name of the screenshots of a report, light and dark."""


def take_screenshots() -> None:
    """Trains two small runs and writes screenshots of their report."""
    sys.path.insert(0, str(ROOT))
    import fp8cfg
    from tests.support.chromium import chromium

    words = [
        "recipe=llama_tiny",
        "trainer.max_steps=120",
        "trainer.val_check_interval=20",
        "trainer.global_batch_size=8",
        "trainer.micro_batch_size=8",
        "model.seq_length=64",
    ]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        folder = Path(temporary)
        for precision in ("bf16", "bf16_fp8"):
            stats = ["log.fp8_stats_every_n_steps=4"] if precision == "bf16_fp8" else []
            recipe = fp8cfg.compose([*words, f"precision={precision}", *stats])
            fp8cfg.fit(fp8cfg.build(recipe), folder / precision)
        runs = [folder / "bf16", folder / "bf16_fp8"]
        page = fp8cfg.write_report(runs, folder / "report.html")
        heading = "[...document.querySelectorAll('h2')].find(h => h.textContent === 'FP8 tensors')"
        with chromium(folder / "profile") as browser:
            for theme in ("light", "dark"):
                browser.open(page, width=1240, height=1010, dark=theme == "dark")
                browser.screenshot(FOLDER / f"report-{theme}.png")
            browser.open(page, width=1240, height=1010)
            browser.run("document.documentElement.style.scrollBehavior = 'auto'")
            browser.run(f"{heading}.scrollIntoView()")
            browser.frames()
            browser.screenshot(FOLDER / "report-fp8-light.png")


def train() -> None:
    """Trains llama_tiny in each precision and writes losses.json."""
    import fp8cfg

    losses = {}
    for precision in PRECISIONS:
        words = [
            "recipe=llama_tiny",
            f"precision={precision}",
            f"trainer.max_steps={STEPS}",
            "trainer.val_check_interval=0",
        ]
        with tempfile.TemporaryDirectory() as folder:
            result = fp8cfg.fit(fp8cfg.build(fp8cfg.compose(words)), Path(folder) / "run")
            rows = [
                json.loads(line)
                for line in Path(result.folder, "metrics.jsonl").read_text().splitlines()
            ]
        losses[precision] = [round(row["loss"], 4) for row in rows if "loss" in row]
    LOSSES.write_text(json.dumps(losses) + "\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    """Draws the pictures and returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join((*PICTURES, REPORT)))
    parser.add_argument("--train", action="store_true", help="train again for the loss curves")
    chosen = parser.parse_args(arguments)
    unknown = sorted(set(chosen.names) - {*PICTURES, REPORT})
    if unknown:
        parser.error(f"{unknown[0]}: no such picture; choose from {', '.join((*PICTURES, REPORT))}")
    FOLDER.mkdir(exist_ok=True)
    if chosen.train:
        train()
    for name in chosen.names or (*PICTURES, REPORT):
        if name == REPORT:
            take_screenshots()
            continue
        (FOLDER / f"{name}.svg").write_text(PICTURES[name](), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
