"""Progress of a run: a live line on a terminal, plain lines, or JSON. Loads no torch.

`Progress` gets rows as in metrics.jsonl, from the training loop or from the file itself (`fp8cfg
watch`).
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fp8cfg.planning.coverage import planned_coverage
from fp8cfg.planning.hardware import gpu_of_device
from fp8cfg.planning.layer_plan import plan_layers
from fp8cfg.run_folder.metrics_file import to_json_value
from fp8cfg.schema import messages
from fp8cfg.schema.messages import LEVELS, Say
from fp8cfg.schema.tables import size

if TYPE_CHECKING:
    from fp8cfg.schema.recipe import Recipe

Row = Mapping[str, Any]
SPARK_WIDTH = 16
_BLOCKS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Peak:
    """Peak speed of the ranks of a run.

    Attributes:
        name: Dtype of the peak, such as "bf16".
        tokens_per_second: Tokens per second if all matmul FLOPs of the model ran at this peak.
    """

    name: str
    tokens_per_second: float


def peak_speed(recipe: Recipe, gpus: Sequence[str], ranks: int) -> Peak | None:
    """Returns the peak speed of a recipe's Transformer.

    The peak is the dense peak of precision.compute on the tensor cores, also for FP8 layers. So the
    share of peak is the model FLOPs utilization (MFU), without recomputation.

    Args:
        recipe: The recipe.
        gpus: Names of the GPUs, as the driver reports them.
        ranks: Number of ranks.

    Returns:
        The peak. None if a GPU is not in the table, or for float32.
    """
    known = [gpu_of_device(name) for name in gpus]
    compute = recipe.precision.compute
    if not known or compute == "fp32":
        return None
    slowest = float("inf")
    for gpu in known:
        if gpu is None:
            return None
        slowest = min(slowest, gpu.bf16 * 1e12)
    flops = planned_coverage(recipe, plan_layers(recipe)).flops
    return Peak(compute, ranks * slowest / flops)


class Progress:
    """Shows the steps of a run. A context manager.

    Args:
        recipe: The recipe, for trainer.max_steps and the node `log`.
        say: Prints a message. Gets the plain lines.
        can_draw: Whether a terminal may have a live line.
        peak: Peak speed of the ranks, None if it is unknown.
        console: Where to draw. For tests.
    """

    def __init__(
        self,
        recipe: Recipe,
        say: Say = messages.say,
        can_draw: bool = True,
        peak: Peak | None = None,
        console: Console | None = None,
    ) -> None:
        self.max_steps = recipe.trainer.max_steps
        self._interval = recipe.log.every_n_steps
        self._say = say
        self._peak = peak
        self._losses = Sparkline()
        self._speed = _StepTimes()
        self._row: Row = {}
        self._val_loss: float | None = None
        self.kind = recipe.log.progress
        if self.kind in ("auto", "bar", "plain") and LEVELS[recipe.log.level] > LEVELS["info"]:
            self.kind = "off"
        if self.kind in ("auto", "bar"):
            console = console or Console()
            self.kind = "plain"
            if can_draw and console.is_terminal and not console.is_dumb_terminal:
                self.kind = "bar"
        self._console = console
        self._live: Live | None = None

    def update(self, row: Row) -> None:
        """Shows a finished optimizer step.

        Args:
            row: Metrics of the step, as in metrics.jsonl, with "step".
        """
        step = row["step"]
        if self.kind == "off":
            return
        self._row = row
        self._losses.add(row["loss"])
        self._speed.add(step, row.get("time", time.time()))
        if self._live:
            self._live.update(self._draw_live())
        is_printed = step % self._interval == 0 or step == self.max_steps
        if self.kind == "json" and is_printed:
            self._print_json({"step": step, "max_steps": self.max_steps} | dict(row))
        elif is_printed:
            self._say(self._format_line())

    def replay(self, rows: Sequence[Row]) -> None:
        """Shows the last of earlier steps, for a display that starts in the middle of a run.

        Args:
            rows: Metrics of the steps and evaluations so far.
        """
        steps = [row for row in rows if "loss" in row]
        for row in steps[:-1]:
            self._losses.add(row["loss"])
            if "time" in row:
                self._speed.add(row["step"], row["time"])
        for row in rows:
            self._val_loss = row.get("val_loss", self._val_loss)
        if steps:
            self.update(steps[-1])

    def evaluation(self, step: int, loss: float) -> None:
        """Shows a validation loss. With plain lines the training loop prints it."""
        self._val_loss = loss
        if self.kind == "json":
            self._print_json({"step": step, "max_steps": self.max_steps, "val_loss": loss})

    def __enter__(self) -> Progress:
        if self.kind == "bar":
            # Transient: the last step has a line of its own above.
            self._live = Live(console=self._console, refresh_per_second=4, transient=True)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()
            self._live = None

    def _print_json(self, values: dict[str, Any]) -> None:
        line = json.dumps({name: to_json_value(value) for name, value in values.items()})
        print(line, flush=True)

    def _format_line(self) -> str:
        """Returns the line of a step for an output without a live display."""
        row = self._row
        text = f"step {row['step']}/{self.max_steps}  loss {row['loss']:.4f}  lr {row['lr']:.3g}"
        if "tokens_per_second" in row:
            text += f"  {row['tokens_per_second']:,.0f} tokens/s"
        return f"{text}  ETA {self._speed.remaining_time(self.max_steps)}"

    def _draw_live(self) -> Group:
        """Returns the live lines: a bar, and the metrics of the last step."""
        step = self._row["step"]
        bar = Table.grid(padding=(0, 1), expand=True)
        bar.add_column(no_wrap=True)
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True, justify="right")
        bar.add_row(
            Text(f"step {step}/{self.max_steps}", style="bold"),
            ProgressBar(total=self.max_steps, completed=step),
            f"{step / self.max_steps:.0%}  {self._speed.remaining_time(self.max_steps)} left",
        )
        assert self._console
        return Group(bar, *pack_lines(self._metric_texts(), self._console.width))

    def _metric_texts(self) -> list[str]:
        """Returns texts for the metrics of the last step."""
        row = self._row
        parts = [f"loss {row['loss']:.4f} {self._losses}".rstrip()]
        if self._val_loss is not None:
            parts.append(f"val {self._val_loss:.4f}")
        if "tokens_per_second" in row:
            speed = row["tokens_per_second"]
            parts.append(f"{speed:,.0f} tokens/s")
            if self._peak:
                share = speed / self._peak.tokens_per_second
                parts.append(f"{share:.1%} of {self._peak.name} peak")
        if row.get("memory"):
            parts.append(size(row["memory"]))
        parts.append(f"lr {row['lr']:.3g}")
        if row.get("grad_norm") is not None:
            parts.append(f"grad norm {row['grad_norm']:#.3g}")
        if row.get("stepped") is False:
            parts.append("skipped")
        if row.get("fp8_clipped"):
            parts.append(f"{row['fp8_clipped']} clipped")
        if row.get("fp8_infinite"):
            parts.append(f"{row['fp8_infinite']} infinite")
        return parts


class Sparkline:
    """Small chart of a whole run in text. Keeps at most twice SPARK_WIDTH points."""

    def __init__(self) -> None:
        self._points: list[float] = []
        self._current: list[float] = []
        self._stride = 1

    def add(self, value: float) -> None:
        """Adds a value. Values that are not finite are left out of the chart."""
        if value != value or abs(value) == float("inf"):
            return
        self._current.append(value)
        if len(self._current) < self._stride:
            return
        self._points.append(sum(self._current) / len(self._current))
        self._current = []
        if len(self._points) == 2 * SPARK_WIDTH:
            pairs = zip(self._points[::2], self._points[1::2], strict=True)
            self._points = [(first + second) / 2 for first, second in pairs]
            self._stride *= 2

    def __str__(self) -> str:
        points = self._points
        if len(points) < 2:
            return ""
        low, high = min(points), max(points)
        step = (high - low) / (len(_BLOCKS) - 1) or 1.0
        return "".join(_BLOCKS[round((point - low) / step)] for point in points)


class _StepTimes:
    """Remaining time at the average speed of the last steps."""

    def __init__(self) -> None:
        # The first step compiles and warms up. It only marks the beginning of the second one.
        self._ends: deque[tuple[int, float]] = deque(maxlen=200)

    def add(self, step: int, seconds: float) -> None:
        """Adds the end of a step, in seconds since any moment."""
        self._ends.append((step, seconds))

    def remaining_time(self, max_steps: int) -> str:
        """Returns the remaining time as h:mm:ss."""
        first_step, start_time = self._ends[0]
        step, end_time = self._ends[-1]
        # The system clock can be set back. A rewound run repeats steps.
        if step <= first_step or end_time < start_time:
            return "-:--:--"
        seconds = round((max_steps - step) * (end_time - start_time) / (step - first_step))
        return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"


def pack_lines(parts: list[str], width: int) -> list[Text]:
    """Puts texts into as few lines as possible, without a break in any of them."""
    lines = [""]
    for part in parts:
        joined = part
        if lines[-1]:
            joined = f"{lines[-1]}  {part}"
        if len(joined) <= width:
            lines[-1] = joined
        else:
            lines.append(part)
    return [Text(line, no_wrap=True, overflow="ellipsis") for line in lines]
