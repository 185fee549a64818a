"""Installations of this checkout: builds, and virtual environments to install them in."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Builds:
    """Files of one build of this checkout; `unpacked` is the root of the unpacked sdist."""

    wheel: Path
    sdist: Path
    unpacked: Path
    wheel_from_sdist: Path
    editable: Path


@dataclass(frozen=True)
class Environment:
    """A virtual environment with the packages of this one but fp8cfg, and with `wheels` installed."""

    python: Path
    site: Path

    def run(self, code: str, cwd: Path, path: Path | None = None) -> str:
        """What `code` prints, in the empty folder `cwd`; `path` is PYTHONPATH."""
        env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | (
            {"PYTHONPATH": str(path)} if path else {}
        )
        done = subprocess.run(
            [self.python, "-c", code], cwd=cwd, env=env, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


def environment(folder: Path, *wheels: Path) -> Environment:
    """An Environment in `folder`. A pure wheel is installed by unpacking it."""
    venv.create(folder, with_pip=False, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "other_packages.pth").write_text(
        "\n".join(p for p in sys.path if p.endswith("site-packages"))
    )
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
    return Environment(folder / "bin" / "python", site)
