"""metrics.jsonl loses at most a half line and no bit; the progress line is plain where nobody watches."""

from __future__ import annotations

import errno
import math
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8cfg.run_folder.files import RunFiles
from fp8cfg.run_folder.metrics_file import read_metrics
from fp8cfg.training.metrics import MetricsLog


def bits(value: float) -> bytes:
    return struct.pack("<d", value)


@settings(max_examples=200, deadline=None)
@given(value=st.floats(allow_nan=False))
def test_floats_come_back_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, value: float
) -> None:
    path = tmp_path_factory.getbasetemp() / "floats.jsonl"
    path.unlink(missing_ok=True)
    with MetricsLog(RunFiles.at(path.parent), path.name) as log:
        log.write(1, {"loss": value})
    (line,) = read_metrics(path)
    assert isinstance(line["loss"], float) and bits(line["loss"]) == bits(value)


def test_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(RunFiles.at(path.parent), path.name) as log:
        log.write(1, {"loss": 2.5, "n": 2**60, "note": "é\n", "ok": True, "none": None})
        assert len(read_metrics(path)) == 1  # there before close
        log.write(2, {"loss": math.nan, "up": math.inf, "down": -math.inf})
    first, second = read_metrics(path)
    assert first == {"step": 1, "loss": 2.5, "n": 2**60, "note": "é\n", "ok": True, "none": None}
    assert math.isnan(second["loss"]) and (second["up"], second["down"]) == (math.inf, -math.inf)
    assert (
        path.read_text().splitlines()[1]
        == '{"step": 2, "loss": "NaN", "up": "Infinity", "down": "-Infinity"}'
    )


def test_a_tensor_is_refused_and_writes_nothing(tmp_path: Path) -> None:
    with MetricsLog(RunFiles.at(tmp_path), "m") as log:
        with pytest.raises(TypeError):
            log.write(1, {"loss": torch.tensor(1.0)})
        log.write(2, {})
    assert read_metrics(tmp_path / "m") == [{"step": 2}]


@pytest.mark.parametrize("half", [b'{"step": 3, "lo', b"{", b"\0\0\0", b'{"step": 3}', b"\xff"])
def test_half_a_line(tmp_path: Path, half: bytes) -> None:
    path = tmp_path / "m"
    with MetricsLog(RunFiles.at(path.parent), path.name) as log:
        log.write(1, {})
        log.write(2, {})
    with open(path, "ab") as file:
        file.write(half)
    assert [line["step"] for line in read_metrics(path)] == [1, 2]
    with MetricsLog(RunFiles.at(path.parent), path.name) as log:
        log.write(3, {"loss": 1.0})
    assert [line["step"] for line in read_metrics(path)] == [1, 2, 3]


def test_lines_after_the_step_that_a_run_goes_on_from_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "m"
    with MetricsLog(RunFiles.at(tmp_path), "m") as log:
        for step in (1, 2, 2, 3, 4):
            log.write(step, {"loss": 0.1 * step})
    kept = path.read_bytes().splitlines()[:3]
    with MetricsLog(RunFiles.at(tmp_path), "m", 2) as log:
        assert log.last["loss"] == (2, 0.2)
        assert path.read_bytes().splitlines() == kept
        log.write(3, {"loss": 9.0})
    with MetricsLog(RunFiles.at(tmp_path), "m", 9):
        assert [line["step"] for line in read_metrics(path)] == [1, 2, 2, 3]
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "line", [b"{", b"[]", b"{}", b'{"step": 1.5}', b'{"step": Infinity}', b"[" * 100_000, b""]
)
def test_other_damage_is_told(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "m"
    path.write_bytes(b'{"step": 1}\n' + line + b'\n{"step": 2}\n')
    with pytest.raises(ValueError, match=str(path)):
        read_metrics(path)


KILLED = """
import os, signal, sys
from pathlib import Path
from fp8cfg.training.metrics import MetricsLog
import fp8cfg
from fp8cfg.run_folder.files import RunFiles
from fp8cfg.training import loop
log = MetricsLog(RunFiles.at(Path(sys.argv[1]).parent), "m")
for step in range(1, 6):
    log.write(step, {"loss": 1 / step})
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_each_line_outlives_a_kill(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "m")], check=False)
    assert [line["loss"] for line in read_metrics(tmp_path / "m")] == [
        1 / step for step in range(1, 6)
    ]


def test_lines_without_space_wait_and_hide_no_other_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, full = (
        MetricsLog(RunFiles.at(tmp_path), "metrics.jsonl"),
        OSError(errno.ENOSPC, "No space left on device"),
    )

    def flush() -> None:
        raise full

    with monkeypatch.context() as patch:
        patch.setattr(log, "_flush", flush)
        log.write(1, {"loss": 1.0})
        with pytest.raises(RuntimeError, match="the last save"), log:
            raise RuntimeError("the last save")
    log = MetricsLog(RunFiles.at(tmp_path), "metrics.jsonl")
    monkeypatch.setattr(log, "_flush", flush)
    with pytest.raises(OSError, match=r"No space left on device: '.*/metrics.jsonl'"), log:
        log.write(1, {"loss": 1.0})
