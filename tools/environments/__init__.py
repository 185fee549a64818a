"""Virtual environments that tools make for themselves: torch, what fp8cfg requires, and other libraries, from a package index."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
TORCH = "torch==2.13.0"


def made(folder: Path, index_url: str | None, libraries: Sequence[str]) -> str:
    """The Python of an environment in `folder` with torch, our requirements and transformers at the versions of constraints.txt, and
    the requirements `libraries`; made where it is not there. Raises CalledProcessError."""
    python = str(folder / "bin" / "python")
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    commands = [
        [*pip, *(["--index-url", index_url] if index_url else []), TORCH],
        [
            *pip,
            "-c",
            str(ROOT / "constraints.txt"),
            TORCH,
            *libraries,
            "transformers",
            *requirements(),
        ],
    ]
    if not Path(python).exists():
        commands.insert(0, [sys.executable, "-m", "venv", str(folder)])
    for command in commands:
        subprocess.run(command, check=True, capture_output=True, text=True)
    return python


def requirements() -> list[str]:
    """Ours, but for torch."""
    import tomllib

    listed = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "dependencies"
    ]
    return [line for line in listed if re.split(r"[^\w.-]", line)[0] != "torch"]
