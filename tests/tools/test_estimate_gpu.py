"""Estimates for a GPU against sums by hand, and the table."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

import fp8cfg
from tools.gpu_rows import estimate
from tools.gpu_rows.estimate import BANDWIDTH, GOALS, Device, device_called

H200 = Device(989e12, 1979e12, 4.8e12)


def test_a_linear_layer_by_hand() -> None:
    t, k, n = 15872, 4096, 16384
    seconds = 6 * t * k * n / (0.7 * 1979e12) + 4 * (t * k + k * n + t * n) / (0.85 * 4.8e12)
    assert estimate.linear(H200, "delayed", t, k, n) == pytest.approx(seconds)
    assert estimate.linear(H200, "bf16", t, k, n) == pytest.approx(6 * t * k * n / (0.7 * 989e12))
    assert estimate.linear(H200, "bf16", 1, k, n) == pytest.approx(3 * 2 * (k * n + k + n) / (0.85 * 4.8e12)), "one token moves the weight"


def test_a_step_is_the_sum_of_its_passes() -> None:
    words = ["recipe=llama_1b", "precision=bf16_fp8", "trainer.devices=1", "trainer.micro_batch_size=1"]
    one, four = (estimate.step(H200, "delayed", fp8cfg.compose([*words, f"trainer.global_batch_size={n}"])) for n in (1, 4))
    assert one["optimizer"] == four["optimizer"] and four["linear layers"] == pytest.approx(4 * one["linear layers"])
    assert list(one) == ["linear layers", "attention", "elementwise", "loss", "optimizer"] and min(one.values()) > 0


@pytest.mark.parametrize(("name", "device"), [
    ("NVIDIA H200", "h200"), ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H100 PCIe", "h100-pcie"), ("NVIDIA B200", "b200"), ("NVIDIA L4", "")])
def test_devices_by_the_name_that_cuda_says(name: str, device: str) -> None:
    assert device_called(name) == (Device.of(device) if device else None)
    assert not device or Device.of(device).bandwidth == BANDWIDTH[device]


def test_the_table_says_what_it_assumes_and_each_goal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    tool = Path(__file__).parents[2] / "tools" / "estimate_gpu.py"
    monkeypatch.setattr(sys, "argv", ["estimate_gpu.py"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(tool), run_name="__main__")
    out = capsys.readouterr().out
    assert ended.value.code == 0 and "Nothing is measured." in out and "assumed: bf16 products 70%" in out
    rows = [line.split() for line in out.splitlines() if line.startswith("linear 15872")]
    assert {row[6]: float(row[9]) for row in rows if row[6] in GOALS} == GOALS
