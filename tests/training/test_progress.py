"""Progress of a run: plain lines, the live lines of a terminal, JSON, and the share of peak."""

from __future__ import annotations

import io
import json
import math
import re
from typing import Any

import pytest
from rich.console import Console

import fp8cfg
from fp8cfg.planning.hardware import gpu_of_device
from fp8cfg.run_folder.metrics_file import NON_FINITE
from fp8cfg.training import runs
from fp8cfg.training.progress import SPARK_WIDTH, Peak, Progress, Sparkline, peak_speed
from tests.support.small import small

ROW = {"lr": 3e-4, "tokens_per_second": 12345.6, "memory": 3 << 30, "grad_norm": 2.345}


def shown(
    *words: str, width: int = 100, terminal: bool = False, last: int = 12, **more: Any
) -> str:
    """What twelve steps print, one each second."""
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=terminal)
    recipe = small(f"trainer.max_steps={last}", "log.every_n_steps=5", *words)
    lines: list[str] = []
    with Progress(recipe, lines.append, console=console, **more) as progress:
        for step in range(1, last + 1):
            progress.update(ROW | {"step": step, "loss": 2.25 / step, "time": float(step)})
            if step == 10:
                progress.evaluation(step, 1.5)
    return "\n".join([*lines, out.getvalue()])


def test_a_pipe_has_a_line_every_few_steps() -> None:
    assert shown(width=20).splitlines() == [
        "step 5/12  loss 0.4500  lr 0.0003  12,346 tokens/s  ETA 0:00:07",
        "step 10/12  loss 0.2250  lr 0.0003  12,346 tokens/s  ETA 0:00:02",
        "step 12/12  loss 0.1875  lr 0.0003  12,346 tokens/s  ETA 0:00:00",
    ]


@pytest.fixture
def xterm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)


def test_a_terminal_has_a_bar_and_the_lines_above(xterm: None) -> None:
    text = shown(terminal=True, peak=Peak("bf16", 50_000.0))
    assert text.startswith("step 5/12  loss 0.4500"), "the lines stay"
    live = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    assert re.search(r"step 12/12 .*━━━.* 100%  0:00:00 left", live)
    parts = "24.7% of bf16 peak  3.0 GiB  lr 0.0003"
    assert "loss 0.1875 █" in live and parts in live and "val 1.5000" in live
    assert "grad norm 2.35" in live
    assert "━━━" in shown("log.progress=bar", terminal=True)


@pytest.mark.parametrize("width", [40, 80, 180])
def test_live_lines_are_wrapped_and_not_cut(xterm: None, width: int) -> None:
    text = shown(terminal=True, width=width, peak=Peak("bf16", 50_000.0))
    live = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).split("left")[-1]
    assert "grad norm 2.35" in live and "…" not in text
    assert max(map(len, live.splitlines())) <= width


@pytest.mark.parametrize("words", [["log.progress=plain"], ["log.progress=off"]])
def test_a_terminal_without_a_bar(xterm: None, words: list[str]) -> None:
    text = shown(*words, terminal=True)
    assert "\x1b" not in text and text.count("tokens/s") == (3 if "plain" in words[0] else 0)


def test_no_bar_if_a_function_of_the_user_gets_the_lines(xterm: None) -> None:
    assert "\x1b" not in shown(terminal=True, can_draw=False)
    assert "\x1b" not in shown("log.level=warning", terminal=True)


def test_json_is_one_object_a_printed_step(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown("log.progress=json").strip() == ""
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["step"] for row in rows] == [5, 10, 10, 12]
    assert rows[0] == ROW | {"step": 5, "max_steps": 12, "loss": 0.45, "time": 5.0}
    assert rows[2] == {"step": 10, "max_steps": 12, "val_loss": 1.5}


def test_a_loss_that_is_no_number(capsys: pytest.CaptureFixture[str]) -> None:
    row = {"step": 1, "loss": math.nan, "lr": 0.0, "tokens_per_second": math.inf, "time": 1.0}
    lines: list[str] = []
    Progress(small("trainer.max_steps=1", "optim.warmup_steps=0"), lines.append).update(row)
    assert lines == ["step 1/1  loss nan  lr 0  inf tokens/s  ETA -:--:--"]
    Progress(small("trainer.max_steps=1", "optim.warmup_steps=0", "log.progress=json")).update(row)
    loss = json.loads(capsys.readouterr().out)["loss"]
    assert math.isnan(NON_FINITE[loss]), "as in metrics.jsonl: JSON has no NaN"


def test_a_run_in_json_has_nothing_else_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = small("trainer.max_steps=3", "log.every_n_steps=2", "log.progress=json")
    result = runs.train_job(fp8cfg.build(recipe))
    out, err = capsys.readouterr()
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["step"] for row in rows] == [2, 3, 3]
    assert rows[1]["loss"] == result.loss and rows[2]["val_loss"] == result.val_loss
    assert "data: " in err


def test_say_gets_the_lines_of_steps(capsys: pytest.CaptureFixture[str]) -> None:
    messages: list[str] = []
    words = "trainer.max_steps=5", "log.every_n_steps=2"
    runs.train_job(fp8cfg.build(small(*words)), say=messages.append)
    lines = [message.split("  loss")[0] for message in messages if "tokens/s" in message]
    assert lines == ["step 2/5", "step 4/5", "step 5/5"]
    assert capsys.readouterr().out == ""


def test_a_sparkline_keeps_its_size_and_its_shape() -> None:
    line = Sparkline()
    assert str(line) == ""
    for step in range(1000):
        line.add(math.nan if step == 7 else 1000.0 - step)
    assert SPARK_WIDTH <= len(str(line)) < 2 * SPARK_WIDTH
    assert list(str(line)) == sorted(str(line), reverse=True)
    assert str(line)[0] == "█" and str(line)[-1] == "▁"
    flat = Sparkline()
    flat.add(1.0)
    flat.add(1.0)
    assert str(flat) == "▁▁"


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA H200", "h200"),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA H20", None),
        ("NVIDIA B200", "b200"),
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("NVIDIA A100-PCIE-40GB", "a100-40"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("NVIDIA H100 PCIe MIG 1g.10gb", None),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L40", None),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 5090", "rtx5090"),
        ("Tesla V100-SXM2-32GB", None),
    ],
)
def test_a_gpu_is_known_by_the_name_of_its_driver(device: str, name: str | None) -> None:
    gpu = gpu_of_device(device)
    assert (gpu.name if gpu else None) == name


def test_the_peak_counts_six_flops_a_weight() -> None:
    """6 N per token (Kaplan et al. 2020, arXiv 2001.08361) plus attention, which is small here."""
    recipe = fp8cfg.compose(["recipe=llama_8b", "precision=bf16_fp8"])
    peak = peak_speed(recipe, ["NVIDIA H100 80GB HBM3"] * 8, 8)
    assert peak is not None and peak.name == "bf16"
    weights = 8.03e9 - 128256 * 4096  # without the embedding
    without_attention = 8 * 989e12 / (6 * weights)
    assert 0.8 * without_attention < peak.tokens_per_second < without_attention
    assert peak_speed(recipe, ["NVIDIA H20"], 1) is None
    assert peak_speed(fp8cfg.compose(["precision=fp32"]), ["NVIDIA H200"], 1) is None


def test_a_clock_that_is_set_back_gives_no_negative_time() -> None:
    lines: list[str] = []
    progress = Progress(small("trainer.max_steps=12", "log.every_n_steps=1"), lines.append)
    for step, clock in ((1, 100.0), (2, 40.0)):
        progress.update(ROW | {"step": step, "loss": 1.0, "time": clock})
    assert lines[-1].endswith("ETA -:--:--")
