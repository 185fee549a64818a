"""Summary of a run folder for a notebook."""

from __future__ import annotations

import html
from typing import Any

from fp8cfg.run_folder.files import RunFiles, StrangeFile
from fp8cfg.run_folder.metrics_file import read_history
from fp8cfg.run_folder.status import read_status
from fp8cfg.schema.errors import printable
from fp8cfg.schema.sections import in_notebook, table_html

_LOSSES = {"loss": "training loss", "val_loss": "validation loss"}


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
