"""Sweep results: what each job writes into its folder, and the table and results.json of all."""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
from pathlib import Path
from typing import Any

from fp8cfg.cli.run_json import read_object
from fp8cfg.config.errors import ConfigError, printable
from fp8cfg.report.tables import fits, table, wrapped
from fp8cfg.training.run_files import RunFiles
from fp8cfg.training.run_folder import COVERAGE, METRICS

JOB, ALL = "job-{number}.json", "results.json"
"""Of one job, by its number: jobs that are sent to one folder do not overwrite each other's."""
Result = dict[str, Any]


def write(
    folder: Path, number: int, overrides: list[str], code: int, error: str, ran: bool
) -> Result:
    """Write and return the result of the job in `folder`: how it ended, and what its run folder says where it `ran`."""
    from fp8cfg.config.key_names import short

    files = RunFiles.at(folder)
    words = {short(key): value for key, _, value in (o.partition("=") for o in overrides)}
    result = {
        "job": number,
        "overrides": words,
        "exit_code": code,
        "error": error or None,
        **_metrics(files if ran else None),
        "fp8_share": _share(files) if ran else None,
        "run_folder": str(folder),
    }
    files.replace(JOB.format(number=number), (json.dumps(result, indent=1) + "\n").encode())
    return result


def read(folder: Path) -> list[Result]:
    """The results of the jobs below `folder`, in the order of their numbers."""
    files = folder.rglob(JOB.format(number="*"))
    return sorted(
        (json.loads(p.read_text(encoding="utf-8")) for p in files), key=lambda r: int(r["job"])
    )


def report(folder: Path, ended: str) -> int:
    """Print the table of the sweep in `folder`, and why it `ended` early where it did, and write results.json. Returns the
    largest exit code."""
    results = read(folder)
    RunFiles.at(folder).replace(ALL, (json.dumps(results, indent=1) + "\n").encode())
    print(f"\nsweep folder: {printable(str(folder))}\n{_table(folder, results)}")
    for r in results:
        for line in (r["error"] or "").splitlines():
            print(
                f"{_name(folder, r)}"
                f" {'refused' if r['exit_code'] == ConfigError.exit_code else 'failed'}:"
                f" {printable(line)}"
            )
    if ended:
        sys.stdout.flush()
        print(f"error: {printable(ended)}", file=sys.stderr)
    return max([1 if ended else 0, *(int(r["exit_code"]) for r in results)])


def _table(folder: Path, results: list[Result]) -> str:
    """One line a job, with the keys that differ between jobs; these go under the table where it would be too wide."""
    every = {key: None for r in results for key in r["overrides"]}
    keys = [k for k in every if len({r["overrides"].get(k) for r in results}) > 1]
    header = ["folder", *keys, "loss", "val loss", "tokens/s", "FP8", "exit"]
    rows = [
        [
            _name(folder, r),
            *(r["overrides"].get(k, "") for k in keys),
            _number(r["training_loss"], ".4f"),
            _number(r["validation_loss"], ".4f"),
            _number(r["tokens_per_second"], ",.0f"),
            _number(r["fp8_share"], ".1%"),
            str(r["exit_code"]),
        ]
        for r in results
    ]
    text = table(header, rows, right=range(len(keys) + 1, len(header)))
    if keys and not fits(header, rows):
        text = table(
            ["folder", *header[-5:]], [[row[0], *row[-5:]] for row in rows], right=range(1, 6)
        )
        for row in rows:
            words = " ".join(f"{k}={v}" for k, v in zip(keys, row[1:], strict=False))
            text += "\n" + wrapped(f"{row[0]}: {words}", more="  ")
    return text


def _name(folder: Path, result: Result) -> str:
    return printable(os.path.relpath(result["run_folder"], folder))


def _number(value: float | str | None, form: str) -> str:
    return "" if value is None else value if isinstance(value, str) else format(value, form)


def _metrics(files: RunFiles | None) -> Result:
    """The last losses, and the median of tokens per second after the first step, which warms up."""
    from fp8cfg.training import metrics

    rows: list[Any] = metrics.read(files, METRICS) if files and files.kind(METRICS) else []
    steps = [r for r in rows if "seconds" in r]
    pace = [r["tokens"] / r["step"] / r["seconds"] for r in steps[1:] or steps]
    last = {
        name: next((r[name] for r in reversed(rows) if name in r), None)
        for name in ("loss", "val_loss")
    }
    return {
        "training_loss": _json(last["loss"]),
        "validation_loss": _json(last["val_loss"]),
        "tokens_per_second": statistics.median(pace) if pace else None,
    }


def _json(value: float | None) -> float | str | None:
    """JSON has no word for NaN and infinities."""
    return value if value is None or math.isfinite(value) else str(value)


def _share(files: RunFiles) -> float | None:
    if not files.kind(COVERAGE):
        return None
    share: float = read_object(files, COVERAGE)["share_of_matmul_flops"]
    return share
