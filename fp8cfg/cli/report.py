"""`report`: writes one HTML page about one or several runs."""

from __future__ import annotations

from fp8cfg.cli.argv import split
from fp8cfg.schema.errors import ConfigError
from fp8cfg.schema.messages import say
from fp8cfg.schema.tables import size

USAGE = """
fp8cfg report RUN ... [--output FILE] [--reference RUN]

Write an HTML page about runs: curves, FP8 tensors, memory, recipe.

Examples:
  fp8cfg report runs/llama_tiny-20260102-030405
  fp8cfg report runs/fp8 runs/bf16 --reference runs/bf16 --output fp8.html
  fp8cfg report runs/sweep

RUN is a run folder or a folder with runs in it. The page is one file that needs
no server and no network. It shows losses, learning rate, gradient norm and
speed by step and by tokens, differences to a reference run, the formats of
GEMMs, planned and measured memory, and the recipe with the source of each
value. Runs with log.fp8_stats_every_n_steps also get heat maps of each FP8
tensor: amax, scale, underflow, overflow and rounding error.

You can write the report while a run trains. Needs Plotly:
pip install 'fp8cfg[report]'

Options:
  --output FILE    the page; report.html by default. An older report is replaced
  --reference RUN  the run to compare with; the first one by default
"""
DEFAULT_OUTPUT = "report.html"


def run(argv: list[str]) -> int:
    """Writes the report of the runs in `argv`. Returns the exit code."""
    arguments = split(argv, ("--output", "--reference"))
    if arguments.words:
        raise ConfigError(f"{arguments.words[0]}: report takes run folders, no keys")
    # After the checks of the arguments: numpy and the planner take a moment to import.
    from fp8cfg.studies.report import write_report

    output = arguments.one("--output") or DEFAULT_OUTPUT
    path = write_report(arguments.plain, output, arguments.one("--reference"))
    say(f"wrote {path} ({size(path.stat().st_size)})")
    return 0
