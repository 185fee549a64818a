"""What a release is made of, built once a session: the wheel, the sdist, the wheel from that, an editable wheel."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.installs import ROOT, Builds, Environment, environment


@pytest.fixture(scope="session")
def builds(tmp_path_factory: pytest.TempPathFactory) -> Builds:
    out = tmp_path_factory.mktemp("builds")
    code = "import build, sys; print(build.ProjectBuilder(sys.argv[1]).build(sys.argv[2], sys.argv[3]))"

    def made(source: Path, kind: str, folder: str) -> Path:
        done = subprocess.run(
            [sys.executable, "-c", code, str(source), kind, str(out / folder)],
            cwd=out,
            capture_output=True,
            text=True,
            check=True,
        )
        return Path(done.stdout.splitlines()[-1])

    sdist = made(ROOT, "sdist", "sdist")
    unpacked_folder = out / "unpacked"
    unpacked_folder.mkdir()
    # Not by tarfile: its safe mode needs Python 3.11.4.
    subprocess.run(["tar", "-xf", str(sdist), "-C", str(unpacked_folder)], check=True)
    (unpacked,) = unpacked_folder.iterdir()
    return Builds(
        made(ROOT, "wheel", "wheel"),
        sdist,
        unpacked,
        made(unpacked, "wheel", "from_sdist"),
        made(ROOT, "editable", "editable"),
    )


@pytest.fixture(scope="session")
def installed(builds: Builds, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Where the wheel from the sdist is installed."""
    return environment(tmp_path_factory.mktemp("installed"), builds.wheel_from_sdist)
