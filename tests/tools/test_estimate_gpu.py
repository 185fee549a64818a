"""Estimates for a GPU against sums by hand, and the table."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

import fp8cfg
from tools.gpu_rows import estimate
from tools.gpu_rows.contenders import SCALINGS
from tools.gpu_rows.estimate import BANDWIDTH, Device, device_called
from tools.gpu_rows.shapes import GOALS

H200 = Device(989e12, 1979e12, 4.8e12)


def test_a_linear_layer_by_hand() -> None:
    t, k, n = 15872, 4096, 16384
    seconds = 6 * t * k * n / (0.7 * 1979e12) + 4 * (t * k + k * n + t * n) / (0.85 * 4.8e12)
    assert estimate.linear(H200, "delayed", t, k, n) == pytest.approx(seconds)
    assert estimate.linear(H200, "bf16", t, k, n) == pytest.approx(6 * t * k * n / (0.7 * 989e12))
    assert estimate.linear(H200, "bf16", 1, k, n) == pytest.approx(
        3 * 2 * (k * n + k + n) / (0.85 * 4.8e12)
    ), "one token moves the weight"


def test_row_scaling_and_four_bits_by_hand() -> None:
    t, k, n, b200 = 15872, 4096, 16384, Device.of("b200")
    elements = t * k + k * n + t * n
    assert estimate.linear(H200, "row", t, k, n) == pytest.approx(
        6 * t * k * n / (0.7 * 1979e12) + 8 * elements / (0.85 * 4.8e12)
    )
    for scaling in ("delayed", "nvfp4"):  # too few tokens for the peak: the weight's bytes
        wide = {"delayed": 1, "nvfp4": 0.5}[scaling]
        assert b200.product(scaling, 1, n, k) == pytest.approx(
            (wide * (k + k * n) + 2 * n) / (0.85 * 7.7e12)
        )
    assert b200.product("nvfp4", t, n, k) == pytest.approx(2 * t * k * n / (0.7 * 9e15))
    assert set(estimate.OF_PEAK) == set(estimate.QUANTIZED) == {"bf16", *SCALINGS}


def test_a_step_is_the_sum_of_its_passes() -> None:
    words = [
        "recipe=llama_1b",
        "precision=bf16_fp8",
        "trainer.devices=1",
        "trainer.micro_batch_size=1",
    ]
    one, four = (
        estimate.step(H200, "delayed", fp8cfg.compose([*words, f"trainer.global_batch_size={n}"]))
        for n in (1, 4)
    )
    assert one["optimizer"] == four["optimizer"] and four["linear layers"] == pytest.approx(
        4 * one["linear layers"]
    )
    assert (
        list(one) == ["linear layers", "attention", "elementwise", "loss", "optimizer"]
        and min(one.values()) > 0
    )


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA L4", ""),
        ("NVIDIA GH200 480GB", ""),
        ("NVIDIA H200 MIG 3g.71gb", ""),
    ],
)
def test_devices_by_the_name_that_cuda_says(name: str, device: str) -> None:
    assert device_called(name) == (Device.of(device) if device else None)
    assert not device or Device.of(device).bandwidth == BANDWIDTH[device]


def test_recomputation_repeats_what_it_drops() -> None:
    words = ["recipe=llama_1b", "precision=bf16", "trainer.devices=1", "trainer.micro_batch_size=1"]
    none, selective, full = (
        estimate.layers(
            H200, "bf16", fp8cfg.compose([*words, f"model.recompute_granularity={how}"])
        )
        for how in ("none", "selective", "full")
    )
    m = fp8cfg.compose(words).model
    tokens = m.seq_length * m.num_layers
    repeated = 2 * (
        2 * 2 * m.hidden_size + 3 * m.ffn_hidden_size
    )  # two norms read and write, SwiGLU reads two and writes one, bf16
    assert selective["elementwise"] - none["elementwise"] == pytest.approx(
        repeated * tokens / (0.85 * 4.8e12)
    )
    assert full["elementwise"] == pytest.approx(4 / 3 * none["elementwise"])
    assert (
        "recomputed products" not in selective
        and full["recomputed products"] > none["linear layers"] / 5
    )
    assert full["linear layers"] == selective["linear layers"] == none["linear layers"]


@pytest.mark.parametrize("gpu", ["h200", "b200"])
def test_the_table_says_what_it_assumes_and_each_goal(
    gpu: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tool = Path(__file__).parents[2] / "tools" / "estimate_gpu.py"
    monkeypatch.setattr(sys, "argv", ["estimate_gpu.py", "--gpu", gpu])
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(tool), run_name="__main__")
    out = capsys.readouterr().out
    assert (
        ended.value.code == 0
        and "Nothing is measured." in out
        and "assumed: bf16 products 70%" in out
    )
    rows = [
        line.split()
        for line in out.splitlines()
        if line.startswith(("linear 15872", "llama_8b step, 8 x"))
    ]
    goals = {
        ("linear" if row[0] == "linear" else "8b whole", row[6]): float(row[9])
        for row in rows
        if len(row) > 9
    }
    assert len(rows) == {"h200": 10, "b200": 12}[gpu] and goals == (GOALS if gpu == "h200" else {})
    assert ("there are goals for an H200 alone" in out) == (gpu == "b200")
    assert ("what trains there is model.recompute_granularity=full " in " ".join(out.split())) == (
        gpu == "h200"
    )
    assert "transposes of weights in 8 backward passes" in out and out.endswith(
        "; kept (fp8.keep_transpose_cache) they take 6.5 GiB\n"
    )
