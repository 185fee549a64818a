"""Keys, options and words of other projects are answered with ours, never with a key that only looks alike."""

from __future__ import annotations

import pytest

from fp8cfg.__main__ import main

ANSWERS = {
    "check checkpoint.save_dir=x": "it belongs to log.dir",
    "check fp8.block_size=128": "it belongs to fp8.scaling=block",
    "check fp8.skip_layers=[a]": "it belongs to fp8.exclude",
    "check fp8.ignored_modules=[a]": "it belongs to fp8.exclude",
    "check fp8.attention=true": "it belongs to fp8.dot_product_attention",
    "check fp8.lm_head=true": "it belongs to fp8.output_layer",
    "check model.attn_implementation=sdpa": "chosen by torch's scaled_dot_product_attention",
    "check data.split=train": "data.validation_fraction",
    "check model_name_or_path=x": "recipe and model.path",
    "check sequence_len=2048": "it belongs to model.seq_length",
    "check expert_model_parallel_size=2": "have no experts",
    "--nodes 2": "write trainer.num_nodes=N",
    "sample run hi --temp 0.5": "write --temperature T",
    "--config x.yaml": "fp8cfg FILE.yaml",
    "--factory llama_8b": "write recipe=NAME",
    "plan recipe=llama_8b --gpu v100": "it has a100-40, a100-80, h100",
    "explain mxfp8": "write: fp8cfg explain fp8.scaling",
    "explain O2": "write: fp8cfg explain opt_level",
    "plot": "fp8cfg --help has them",
    "compare": "fp8cfg --help has them",
}


@pytest.mark.parametrize("line", ANSWERS)
def test_the_answer_names_what_does_it_here(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.split()) == 2
    error = capsys.readouterr().err
    assert ANSWERS[line] in error and "did you mean" not in error
