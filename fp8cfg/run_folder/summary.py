"""Summary of a run folder for a notebook."""

from __future__ import annotations

import html
from typing import Any

from fp8cfg.run_folder import metrics_file
from fp8cfg.run_folder.file_names import METRICS
from fp8cfg.run_folder.files import RunFiles, StrangeFile
from fp8cfg.run_folder.status import read_status
from fp8cfg.schema.errors import printable
from fp8cfg.schema.sections import in_notebook, table_html

_LOSSES = {"loss": "training loss", "val_loss": "validation loss"}


def read_history(files: RunFiles) -> list[dict[str, Any]]:
    """Reads metrics.jsonl with one row per optimizer step.

    Args:
        files: The run folder.

    Returns:
        The rows in order of steps. A row has "step" and the metrics of this step, also those of an
        evaluation or a save after it. Empty without a file.

    Raises:
        OSError: The file cannot be read.
        ValueError: A line is damaged.
    """
    if not files.kind(METRICS):
        return []
    rows: dict[int, dict[str, Any]] = {}
    for row in metrics_file.read_metrics(files, METRICS):
        step = row["step"]
        assert isinstance(step, int)
        rows.setdefault(step, {}).update(row)
    return [rows[step] for step in sorted(rows)]


def run_folder_html(files: RunFiles, recipe: str) -> str:
    """Returns the state, the last losses and the files of a run as HTML.

    Args:
        files: The run folder.
        recipe: One line on the recipe.
    """
    facts: dict[str, Any] = {"recipe": recipe}
    status = read_status(files)
    if status:
        facts["state"] = f"{status.state} {status.message}".strip()
    try:
        history = read_history(files)
    except (OSError, ValueError, StrangeFile) as error:
        history = []
        facts["metrics"] = printable(str(error))
    if history:
        facts["steps"] = history[-1]["step"]
    for name, label in _LOSSES.items():
        values = [row[name] for row in history if name in row]
        if values:
            facts[label] = f"{values[-1]:.4f}"
    facts["files"] = ", ".join(sorted(files.names()))
    title = f"<div><b>run folder {html.escape(printable(str(files.path)))}</b></div>"
    return in_notebook(title + table_html([], [[name, value] for name, value in facts.items()]))
