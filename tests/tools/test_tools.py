"""Tools that take overrides answer mistakes in them as `python -m fp8cfg` does, before anything is trained."""

from __future__ import annotations

from pathlib import Path

import pytest

from fp8cfg.planning.hardware import no_cuda
from tests.support.ranks import launch

TOOLS = Path(__file__).parents[2] / "tools"
START = {
    "measure_bytes": ["--ranks", "1,2"],
    "kill_resume": ["--kills", "1", "--rows"],
    "check_memory": ["--size", "tiny"],
    "compare_losses": ["--steps", "2", "--seeds", "1"],
}
"""Tools with words for overrides, and options that would keep them short."""


def ends(tool: str, *argv: str) -> tuple[int, str, str]:
    done = launch(1, *argv, script=TOOLS / f"{tool}.py")
    notes = [
        line for line in done.stderr.splitlines(keepends=True) if line.startswith("note: ")
    ]  # what gives way to the tool's own words
    return done.returncode, done.stdout, done.stderr.removeprefix("".join(notes))


@pytest.mark.parametrize("tool", START)
@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("precison=bf16_fp8", "precison: no such key; did you mean 'precision'?"),
        ("opt_level=O9", "opt_level=O9: not an option; choose from O1, O2, O3"),
        ("trainer.max_step=3", "trainer.max_step: no such key; did you mean 'trainer.max_steps'?"),
        ("bf16_fp8", "bf16_fp8: not of the form key=value"),
    ],
)
def test_a_mistyped_override_is_one_line(tool: str, word: str, line: str) -> None:
    assert ends(tool, *START[tool], word) == (2, "", f"error: {line}\n")


@pytest.mark.parametrize("tool", ["measure_bytes", "kill_resume", "compare_losses"])
def test_data_that_is_not_there_is_one_line(tool: str, tmp_path: Path) -> None:
    code, out, err = ends(tool, *START[tool], "data=text", f"data.path={tmp_path / 'nowhere'}")
    assert (code, out, err.count("\n")) == (2, "", 1) and err.startswith(
        f"error: data=text: {tmp_path / 'nowhere'}: no such file or folder"
    )


@pytest.mark.parametrize(
    ("tool", "argv", "line"),
    [
        (
            "measure_bytes",
            ["--ranks", "3"],
            "trainer.global_batch_size=4: 3 ranks take a multiple of 6",
        ),
        (
            "kill_resume",
            ["--ranks", "3"],
            "trainer.global_batch_size=8: 3 ranks take a multiple of 12",
        ),
        (
            "kill_resume",
            ["--kills", "1", "backend=msamp", "opt_level=O9"],
            "opt_level=O9: not an option; choose from O1, O2, O3",
        ),
        (
            "measure_bytes",
            ["--ranks", "1", "trainer.accelerator=cuda"],
            "trainer.accelerator=cuda: torch has no CUDA device here ({no_cuda}); set cpu or auto",
        ),
        (
            "bench_step",
            ["--hidden", "100"],
            "model.hidden_size=100: not a multiple of model.num_attention_heads=8; nearest is 96, or set model.kv_channels",
        ),
        (
            "compare_losses",
            ["--recipe", "lama_tiny"],
            "recipe=lama_tiny: no such recipe; did you mean 'llama_tiny'?",
        ),
    ],
)
def test_what_cannot_run_here_is_one_line(
    tool: str, argv: list[str], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert ends(tool, *argv) == (2, "", f"error: {line.format(no_cuda=no_cuda())}\n")


@pytest.mark.parametrize(
    ("tool", "option"),
    [
        ("kill_resume", "--kills"),
        ("compare_losses", "--seeds"),
        ("compare_losses", "--jobs"),
        ("measure_bytes", "--ranks"),
    ],
)
def test_numbers_begin_with_one(tool: str, option: str) -> None:
    code, out, err = ends(tool, option, "0")
    assert (code, out) == (2, "") and err.splitlines()[-1].endswith("value: '0'")
