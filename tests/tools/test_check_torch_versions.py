"""The table of torch versions: what it shows of an environment, its exit codes, and what it does not take. Its environments are shell
scripts here, which say what Python would."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "check_torch_versions.py"
RIGHT = (
    "compiled gradients of the first microbatch match the eager ones (2.0% apart at most, 2.0 s)"
)


def environment(
    folder: Path,
    compiled: str,
    training: str = "echo done: 30 steps, training loss 3.25, validation loss 4",
) -> str:
    python = folder / "python"
    python.write_text(f"""#!/bin/sh
case "$*" in
*__version__*) echo 2.11.0 3.11.7 ;;
*pytest*) echo "7 passed, 1 skipped in 0.10s" ;;
*trainer.compile=on*) {compiled} ;;
*) {training} ;;
esac
""")
    python.chmod(0o755)
    return str(python)


def ends(*argv: str) -> tuple[int, list[str], str]:
    done = subprocess.run([sys.executable, str(TOOL), *argv], capture_output=True, text=True)
    return (
        done.returncode,
        [" ".join(line.split()) for line in done.stdout.splitlines()],
        done.stderr.strip().splitlines()[-1] if done.stderr else "",
    )


def test_an_environment_in_which_all_is_right(tmp_path: Path) -> None:
    python = environment(
        tmp_path, f"echo '{RIGHT}'; echo 'done: 3 steps, training loss 5.1916, validation loss 5.2'"
    )
    code, lines, _ = ends("--env", python, "--env", python)
    assert code == 0 and len(lines) == 9 and lines[0] == "torch Python what seconds result"
    for line, start, end in zip(
        lines[1:5] * 2,
        ["numerics", "compiled, fp32", "compiled, bf16", "training"] * 2,
        [
            "7 passed, 1 skipped",
            "training loss 5.1916",
            "training loss 5.1916",
            "training loss 3.25",
        ]
        * 2,
        strict=True,
    ):
        assert line.startswith(f"2.11.0 3.11.7 {start} ") and line.endswith(end)


@pytest.mark.parametrize(
    ("compiled", "training", "failed"),
    [
        (
            "echo 'error: torch 2.11.0 compiles layers wrongly'; exit 3",
            "echo training loss 3",
            {"compiled, fp32": "exit code 3: error: torch 2.11.0", "compiled, bf16": "exit code 3"},
        ),
        (
            "echo 'done: training loss 5.1'",
            "echo training loss 3",
            {"compiled, fp32": "exit code 0: done", "compiled, bf16": "exit code 0"},
        ),
        (
            f"echo '{RIGHT}'; echo training loss 5",
            "exit 139",
            {"training": "exit code 139: printed nothing"},
        ),
    ],
)
def test_a_failure_is_a_row_and_exit_code_1(
    tmp_path: Path, compiled: str, training: str, failed: dict[str, str]
) -> None:
    code, lines, _ = ends("--env", environment(tmp_path, compiled, training))
    assert code == 1 and {
        line.split(" FAILED")[0].split(" ", 2)[2].rpartition(" ")[0]
        for line in lines
        if "FAILED" in line
    } == set(failed)
    for line in (line for line in lines if "FAILED" in line):
        assert any(name in line and f"FAILED, {why}" in line for name, why in failed.items())


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--env", "/no/python"], "--env /no/python: no Python that imports torch"),
        (["--env", "false"], "--env false: no Python that imports torch"),
        (
            ["--env", sys.executable, "--newest", "2.13"],
            "--env makes no environment; drop --oldest, --newest and --torch-index",
        ),
        (["--oldest", "new"], "new: no version of torch; write one such as 2.11.0"),
        (["--newest", "2.13 --pre"], "2.13 --pre: no version of torch"),
        (["2.13"], "unrecognized arguments: 2.13"),
    ],
)
def test_what_it_does_not_take(argv: list[str], line: str) -> None:
    code, _, said = ends(*argv)
    assert code == 2 and f"error: {line}" in said


@pytest.mark.slow
def test_an_environment_that_cannot_be_made_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
        "PIP_RETRIES": "0",
        "PIP_CONFIG_FILE": "/dev/null",
        "PIP_FIND_LINKS": "",
    }.items():
        monkeypatch.setenv(name, value)
    code, lines, _ = ends("--oldest", "2.11.0", "--newest", "2.13.0")
    assert code == 1
    assert [line.split(" FAILED, no environment: ") for line in lines[1:]] == [
        [f"torch=={v}", f"ERROR: No matching distribution found for torch=={v}"]
        for v in ("2.11.0", "2.13.0")
    ]
