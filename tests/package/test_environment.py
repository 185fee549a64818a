"""The environment that `make train` and `make test` make: what is missing is one line, and the next run goes on."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = ("make", "sh", "grep", "head", "ls", "sed", "tail", "rm", "touch")
REAL = Path(sys.base_prefix, "bin", f"python{sys.version_info[0]}.{sys.version_info[1]}")
OLD = f"""[ "$1" = -c ] && exec {REAL} -c "import sys; sys.version_info = (3, 9, 2); exec(sys.argv[1])" "$2"; exit 9"""
NO_ENSUREPIP = f"""if [ "$2" = venv ]; then
    mkdir -p "$4/bin"; echo home > "$4/pyvenv.cfg"; ln -s {REAL} "$4/bin/python"
    echo "The virtual environment was not created successfully because ensurepip is not"
    echo "available.  On Debian/Ubuntu systems, you need to install the python3-venv"
    echo "package using the following command."; exit 1
fi
exec {REAL} "$@" """
NO_VENV = f"""[ "$2" = venv ] && echo "$0: No module named venv" >&2 && exit 1; exec {REAL} "$@" """
NO_NETWORK = {
    "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
    "PIP_RETRIES": "1",
    "PIP_CONFIG_FILE": os.devnull,
}

pytestmark = pytest.mark.skipif(
    not (REAL.exists() and shutil.which("make")), reason="make or the base Python is not here"
)


def path(folder: Path, **pythons: str) -> str:
    """A PATH of the tools that make and the script use, and of these Pythons, each a shell script."""
    folder.mkdir(exist_ok=True)
    for tool in (*TOOLS, "mkdir", "ln"):
        (folder / tool).symlink_to(shutil.which(tool) or pytest.fail(tool))
    for name, script in pythons.items():
        (folder / name.replace("_", ".")).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name.replace("_", ".")).chmod(0o755)
    return str(folder)


def make(venv: Path, target: str, python_path: str, *words: str) -> str:
    """The line of `make target`, which must fail with that and make's own line alone on stderr."""
    environ = (
        {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "MAKE"))}
        | NO_NETWORK
        | {"PATH": python_path}
    )
    done = subprocess.run(
        ["make", target, f"VENV={venv}", *words],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
    )
    line, own = done.stderr.splitlines()
    assert done.returncode == 2 and own.startswith("make: *** [")
    assert line.startswith("error: ")
    return line.removeprefix("error: ")


@pytest.mark.parametrize("target", ["train", "test"])
@pytest.mark.parametrize(
    ("pythons", "line"),
    [
        (
            {},
            "python3: not found; install Python 3.11 or newer, and run make again, with PYTHON=python3.11 where that is its name",
        ),
        (
            {"python3": OLD},
            "python3 is Python 3.9; install Python 3.11 or newer, and run make again, with PYTHON=python3.11 where that is its name",
        ),
        (
            {"python3": OLD, "python3_11": OLD, "python3_12": f'exec {REAL} "$@"'},
            "python3 is Python 3.9; install Python 3.11 or newer, or run make with PYTHON=python3.12",
        ),
        (
            {"python3": NO_VENV},
            f"python3 has no module venv; install it (Debian and Ubuntu: apt install python3.{sys.version_info[1]}-venv), and run make again",
        ),
        (
            {"python3": 'echo "cannot execute" >&2; exit 126'},
            "python3 is Python no version; install Python 3.11 or newer, and run make again, with PYTHON=python3.11 where that is its name",
        ),
    ],
)
def test_a_python_that_will_not_do_is_one_line(
    tmp_path: Path, target: str, pythons: dict[str, str], line: str
) -> None:
    assert make(tmp_path / "venv", target, path(tmp_path / "bin", **pythons)) == line
    assert not (tmp_path / "venv").exists()


def test_a_folder_that_is_no_environment_is_left_alone(tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "thesis.txt").write_text("all of it")
    assert "holds other files, and is no virtual environment; remove it" in make(
        venv, "train", path(tmp_path / "bin", python3=f'exec {REAL} "$@"')
    )
    assert (venv / "thesis.txt").read_text() == "all of it"


@pytest.fixture
def half_made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What Debian without python3-venv leaves behind."""
    folder = tmp_path_factory.mktemp("half-made")
    line = make(folder / "venv", "train", path(folder / "bin", python3=NO_ENSUREPIP))
    assert line.startswith(
        "python3 has no module venv; install it (Debian and Ubuntu: apt install python3."
    )
    assert (folder / "venv/bin/python").exists() and not (folder / "venv/bin/pip").exists()
    return folder


@pytest.mark.slow
def test_a_half_made_environment_is_made_anew_and_then_completed(
    half_made: Path, tmp_path: Path
) -> None:
    venv, python = half_made / "venv", path(tmp_path / "bin", python3=f'exec {REAL} "$@"')
    (venv / ".installed").touch()
    (venv / "bin/python").unlink()  # as where the Python that it was made of has gone
    line = make(venv, "train", python)
    assert (
        line
        == "pip reaches no package index; connect to a network, or set PIP_INDEX_URL or HTTPS_PROXY, and run make again"
    )
    assert (venv / "bin/pip").exists() and not (venv / ".installed").exists()

    made = (venv / "pyvenv.cfg").stat().st_mtime_ns
    assert make(venv, "test", python) == line
    wheel = tmp_path / "small-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("small.py", "")
        file.writestr(
            "small-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: small\nVersion: 1\n"
        )
        file.writestr(
            "small-1.dist-info/WHEEL",
            "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        file.writestr("small-1.dist-info/RECORD", "")
    subprocess.run(
        ["sh", "tools/environment.sh", "install", venv, "--no-index", wheel], cwd=ROOT, check=True
    )
    subprocess.run([venv / "bin/python", "-c", "import small"], check=True)
    done = subprocess.run(
        ["sh", "tools/environment.sh", "install", venv, tmp_path / "none.whl"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and done.stderr.splitlines()[1:] == [] and "none.whl" in done.stderr
    assert (venv / "pyvenv.cfg").stat().st_mtime_ns == made, "a whole environment is kept"
