"""`check`: one line for a recipe that can be, every problem for one that cannot."""

from __future__ import annotations

from pathlib import Path

import pytest

from fp8cfg.__main__ import main
from tests.support.verbs import loads, refused, said

Out = pytest.CaptureFixture[str]


@pytest.mark.parametrize(("argv", "line"), [
    ([], "ok: llama_tiny, bf16"),
    (["recipe=llama_405b", "precision=bf16_fp8"], "ok: llama_405b, bf16, FP8 delayed in 504 of 505 linear layers"),
    (["precision=fp16_fp8_current", "fp8.exclude=['*.linear_fc2']"], "ok: llama_tiny, fp16, FP8 current in 6 of 17 linear layers"),
])
def test_a_recipe_that_can_be(capsys: Out, argv: list[str], line: str) -> None:
    assert said(capsys, "check", *argv) == f"{line}\n"


def test_a_file(capsys: Out, tmp_path: Path) -> None:
    (tmp_path / "precision").mkdir()
    (tmp_path / "precision/mine.yaml").write_text("compute: bf16\nfp8: {enabled: true}\n")
    file = tmp_path / "my.yaml"
    file.write_text("recipe: llama_1b\nprecision: mine\n")
    assert said(capsys, "check", str(file), "--config-dir", str(tmp_path)).startswith("ok: llama_1b, bf16, FP8 delayed in ")
    assert refused(capsys, "check", str(file)) == [f"{file}:2: precision=mine: no such precision preset"]


@pytest.mark.parametrize(("argv", "lines"), [
    (["fp8.margin=1", "optim.warmup_steps=999", "storage.exp_avg_sq=fp8"], [
        "optim.warmup_steps=999: with optim.constant_steps=0 more than trainer.max_steps=100; nearest is 100",
        "fp8.margin=1: has no effect, precision.compute=bf16 runs no FP8; write precision=bf16_fp8 or fp8.enabled=true",
        "storage.exp_avg_sq=fp8: second moments do not fit one FP8 scale a tensor, training diverges; write fp8_block"]),
    (["precision=bf16_fp8", "fp8.exclude=['*.linear_fc9']", "fp8.dot_product_attention=true", "fp8.multi_head_attention=true"], [
        "fp8.exclude=*.linear_fc9: matches no linear layer; did you mean 'layers.*.mlp.linear_fc2'?",
        "fp8.multi_head_attention=True: needs FP8 outputs of the projections: backend=te; drop it"]),
    (["precision=bf16_fp8", "storage.rounding=stochastic"], [
        "storage.rounding=stochastic: has no effect, FP8 layers round their weights themselves; drop it"]),
    (["fp8.margn=1", "precision=bf16_pf8"], [
        "fp8.margn: no such key; did you mean 'fp8.margin'?", "precision=bf16_pf8: no such precision preset; did you mean 'bf16_fp8'?"]),
    (["nonsense", "fp8.margn=1"], ["nonsense: no command, recipe file or key=value; fp8cfg --help has them", "fp8.margn: no such key; did you mean 'fp8.margin'?"]),
    (["nowhere.yaml"], ["nowhere.yaml: cannot be read (No such file or directory)"]),
    (["--config-dir", "nowhere"], ["--config-dir nowhere: no such folder"]),
    (["--full"], ["--full: no such option; choose from --config-dir, --help, --version"]),
    ([""], ["'': not of the form key=value"]),
])
def test_every_problem_at_once(capsys: Out, argv: list[str], lines: list[str]) -> None:
    assert refused(capsys, "check", *argv) == lines


@pytest.mark.parametrize(("words", "line"), [
    ("opt_level=O3", "opt_level=O3: on one rank it takes more than O2's 6 B/param; storage.shard=zero1 or zero2 splits its state"),
    ("opt_level=O2 optim.lr=3e-5", "optim.min_lr=3e-06: storage.weight=fp16_scaled rounds most updates below 7.6e-06 away, where the schedule ends; "
     "storage.rounding=stochastic keeps their mean"),
    ("storage.exp_avg_sq=bf16 optim.betas=[0.9,0.997]", "optim.betas=[0.9, 0.997]: storage.exp_avg_sq=bf16 follows gradients that shrink only by halves; "
     "up to 0.9961 it follows all the way"),
    ("storage.shard=zero1", "storage.shard=zero1: splits state over data-parallel ranks; on one there is nothing to split"),
])
def test_what_may_not_be_meant_is_noted_in_one_line(capsys: Out, words: str, line: str) -> None:
    assert main(["check", "precision=bf16_fp8", *words.split()]) == 0
    out, err = capsys.readouterr()
    assert (out, err) == ("ok: llama_tiny, bf16, FP8 delayed in 16 of 17 linear layers\n", f"note: {line}\n")


def test_ranks_are_those_of_the_recipe(capsys: Out) -> None:
    assert said(capsys, "check", "precision=bf16_fp8", "opt_level=O3", "storage.shard=zero1", "trainer.devices=2", "trainer.global_batch_size=32").startswith("ok: ")


def test_neither_torch_nor_fiddle_is_loaded() -> None:
    assert not loads("check", "precision=bf16_fp8") & {"torch", "fiddle"}
