"""`check`, `plan` and a training start report the same violations, with the same exit code."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

import fp8cfg
from fp8cfg.__main__ import main
from fp8cfg.planning.violations import violations

CPU = "trainer.accelerator=cpu"
TENSOR = "trainer.strategy.tensor_model_parallel_size"
PIPELINE = "trainer.strategy.pipeline_model_parallel_size"
TINY = f"recipe=llama_tiny precision=bf16_fp8 {CPU}"
OFFERS = re.compile("; (the whole model needs|runs (here|there): |as a smoke run: ).*")
"""What `plan` and a start append to the last line: command lines that run on their hardware."""


def errors(capsys: pytest.CaptureFixture[str], verb: str, words: str) -> tuple[int, list[str]]:
    """The exit code of a command and its errors without offers."""
    code = main([verb, *shlex.split(words)])
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    return code, [OFFERS.sub("", line.removeprefix("error: ")) for line in lines]


@pytest.mark.parametrize(
    ("words", "code", "settings"),
    [
        (
            f"recipe=llama_8b precision=bf16_fp8 opt_level=O2 data.tokenizer=bytes {CPU}",
            2,
            ["opt_level=O2"],
        ),
        (f"{TINY} fp8.scaling=current fp8.margin=1", 2, ["fp8.margin=1"]),
        (
            f"{TINY} fp8.exclude=[*.linear_fc9] fp8.dot_product_attention=true"
            " fp8.multi_head_attention=true",
            2,
            ["fp8.exclude=*.linear_fc9", "fp8.multi_head_attention=true"],
        ),
        (f"{TINY} fp8.exclude=[*]", 2, ["fp8.exclude=['*']"]),
        (
            f"{TINY} trainer.devices=2 {TENSOR}=2 fp8.dot_product_attention=true",
            2,
            ["fp8.dot_product_attention=true"],
        ),
        (
            f"{TINY} trainer.devices=2 {PIPELINE}=2 trainer.micro_batch_size=16",
            2,
            [f"{PIPELINE}=2"],
        ),
        (
            f"{TINY} trainer.devices=2 {TENSOR}=2 backend=torchao fp8.params=true",
            2,
            ["fp8.scaling=delayed", "fp8.params=true", "backend=torchao"],
        ),
        (f"{TINY} data=jsonl", 2, ["data=jsonl"]),
        (f"{TINY} fp8.min_coverage=0.99", 3, ["fp8.min_coverage=0.99"]),
    ],
)
def test_check_plan_and_a_start_agree(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, words: str, code: int, settings: list[str]
) -> None:
    checked = errors(capsys, "check", words)
    assert checked[0] == code
    assert sorted(line.partition(": ")[0] for line in checked[1]) == sorted(settings)
    assert errors(capsys, "plan", words) == checked
    assert errors(capsys, "train", f"{words} log.dir={tmp_path}") == checked
    assert list(tmp_path.iterdir()) == []


def test_build_reports_every_kind_of_violation() -> None:
    recipe = fp8cfg.compose(shlex.split(TINY))
    recipe.fp8.exclude = ("*.linear_fc9",)
    recipe.fp8.dot_product_attention = True
    recipe.fp8.multi_head_attention = True
    with pytest.raises(fp8cfg.ConfigError) as caught:
        fp8cfg.build(recipe)
    assert caught.value.problems == [str(violation) for violation in violations(recipe)]
    assert len(caught.value.problems) == 2


def test_a_smoke_run_has_no_violation_of_its_layout() -> None:
    words = f"recipe=llama_8b precision=bf16_fp8 opt_level=O2 {CPU}"
    layout = violations(fp8cfg.compose(shlex.split(words)))
    assert [violation.source for violation in layout] == ["layout"]
    assert violations(fp8cfg.compose(shlex.split(f"{words} trainer.smoke=true"))) == []
