"""`compare`: compares losses, speed, memory and keys of runs."""

from __future__ import annotations

import json
from pathlib import Path

from fp8cfg.cli.argv import split
from fp8cfg.cli.output import print_or_write
from fp8cfg.schema.errors import ConfigError, refuse_if

USAGE = """
fp8cfg compare RUN RUN ... [--json] [--output FILE]

Compare runs with the first one: keys, losses, speed, memory and FP8 share.

Examples:
  fp8cfg compare runs/bf16 runs/fp8
  fp8cfg compare runs/sweep/* --json
  fp8cfg compare runs/bf16 runs/fp8 --output comparison.txt

Losses are compared at the steps that both runs have. A gap is the run's loss
minus the loss of the first run. A run may still be going.

Options:
  --json         print JSON
  --output FILE  write a new FILE instead
"""


def run(argv: list[str]) -> int:
    """Compares the runs of `argv`. Returns the exit code."""
    arguments = split(argv, ("--output",), ("--json",))
    refuse_if([f"compare: takes run folders, remove {word}" for word in arguments.words])
    folders = arguments.plain
    if len(folders) < 2:
        raise ConfigError("compare: needs two run folders, as in: fp8cfg compare runs/A runs/B")
    # Two names of one folder would compare a run with itself.
    folder_by_path: dict[Path, str] = {}
    for folder in folders:
        place = Path(folder).resolve()
        if place in folder_by_path:
            raise ConfigError(f"{folder}: given twice; name each run once")
        folder_by_path[place] = folder

    from fp8cfg.studies.comparison import compare_runs

    comparison = compare_runs(*folders)
    text = str(comparison)
    if "--json" in arguments.flags:
        text = json.dumps(comparison.as_data(), indent=1)
    return print_or_write(text + "\n", arguments.one("--output"))
