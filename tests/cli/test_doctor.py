"""`fp8cfg doctor`: what it says of this machine, and of machines that are not this one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import fp8cfg
from fp8cfg.__main__ import main
from fp8cfg.backends.choice import Hardware
from fp8cfg.cli.doctor import report
from fp8cfg.run_folder import environment
from fp8cfg.schema.sections import plain_text

HOPPER, AMPERE, CPU = (
    Hardware("cuda", (9, 0), (12, 9)),
    Hardware("cuda", (8, 0), (12, 9)),
    Hardware("cpu"),
)


def text(found: dict[str, Any]) -> str:
    """What `doctor` prints into a pipe."""
    return plain_text(report(found))


@pytest.mark.parametrize(
    ("precision", "backend", "hardware", "answer"),
    [
        (fp8cfg.bf16_mixed(), "native", AMPERE, "runs"),
        (fp8cfg.bf16_with_fp8_mixed(), "native", HOPPER, "runs"),
        (fp8cfg.bf16_with_fp8_mixed(), "native", CPU, "emulated"),
        (fp8cfg.bf16_with_fp8_mixed(), "native", None, "torch is not installed"),
    ],
)
def test_what_can_run(
    precision: object, backend: str, hardware: Hardware | None, answer: str
) -> None:
    assert environment.backend_support(precision, backend, hardware) == answer  # type: ignore[arg-type]


def test_why_not() -> None:
    assert "compute capability 8.0" in environment.backend_support(
        fp8cfg.bf16_with_fp8_mixed(), "native", AMPERE
    )
    assert (
        environment.backend_support(fp8cfg.bf16_mixed(), "te", CPU)
        == "no FP8 in this preset: torch runs the GEMMs for every backend"
    )
    assert environment.backend_support(
        fp8cfg.bf16_with_fp8_current_scaling_mixed(), "torchao", CPU
    ).startswith("fp8.params=true: torchao")


def test_the_machine_at_hand(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    for part in (
        "compiler  ",
        "torch  ",
        "transformer-engine  ",
        "bf16_fp8_current  ",
        "precision  ",
    ):
        assert part in out
    assert max(len(line) for line in out.splitlines() if not line.startswith("[")) <= 80
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (
        found["precision"]["bf16"]["native"] == "runs"
        and found["packages"]["torch"]
        and found["free_memory"] > 0
    )
    assert set(found["precision"]["bf16"]) == set(environment.BACKENDS)


def test_variables_that_change_results_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in environment.INSTALL_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert "none is set" in text(environment.describe_machine())
    shown = text(
        environment.describe_machine(
            {"NVTE_UNFUSED_FP8_UPDATE": "1", "NVTE_NEW": "2", "NVTE_API_KEY": "x", "HOME": "/root"}
        )
    )
    effect = environment.INSTALL_VARIABLES["NVTE_UNFUSED_FP8_UPDATE"]
    assert f" NVTE_UNFUSED_FP8_UPDATE=1: {effect} " in " ".join(shown.split())
    assert "  NVTE_NEW=2\n" in shown and "HOME" not in shown and "API_KEY" not in shown


def test_without_torch_it_still_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    found = environment.describe_machine()
    assert (
        found["precision"]["bf16"]["native"] == "torch is not installed" and found["torch_problem"]
    )
    assert "no [1]" in text(found) and "GPU       none" in text(found)


def test_a_machine_with_gpus() -> None:
    found = environment.describe_machine() | {
        "gpus": [{"name": "NVIDIA H200", "capability": "9.0", "memory": 150_000_000_000}],
        "cuda": "12.8",
        "driver": "570.86",
    }
    assert (
        "GPU       NVIDIA H200, compute capability 9.0, 139.7 GiB\nCUDA      12.8, driver 570.86\n"
        in text(found)
    )


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (
            ["recipe=llama_8b"],
            "recipe=llama_8b: doctor looks at the machine, and takes no recipe; fp8cfg plan does",
        ),
        (["--jsn"], "--jsn: no such option; did you mean '--json'?"),
        (["--json=1"], "--json: takes no value"),
    ],
)
def test_mistakes(argv: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *argv]) == 2
    assert capsys.readouterr().err.startswith(f"error: {line}")


def test_backends_are_found_and_not_imported() -> None:
    script = "import sys; from fp8cfg.__main__ import main; main(['doctor']); assert not {'transformer_engine', 'msamp', 'torchao'} & set(sys.modules)"
    subprocess.run(
        [sys.executable, "-c", script],
        check=True,
        capture_output=True,
        cwd=Path(__file__).parents[2],
    )
