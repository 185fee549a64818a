"""Words of other projects, and of our own in the wrong place: each answer names what to write."""

from __future__ import annotations

import pytest

from fp8cfg.__main__ import main

ANSWERS = {
    "fp8=true": "fp8=True: expected keys of fp8; write fp8.enabled=true",
    "fp8=hybrid": "fp8=hybrid: expected keys of fp8; write fp8.format=hybrid",
    "fp8=mxfp8": "fp8=mxfp8: expected keys of fp8; write fp8.scaling=mxfp8",
    "optim=adam": "optim=adam: expected keys of optim; write optim.name=adam",
    "model=llama_8b": "model=llama_8b: expected keys of model; did you mean 'recipe=llama_8b'?",
    "+fp8.foo=1": "fp8.foo: no such key",
    "+fp8.margin=1": "+fp8.margin=1: every key exists already; write fp8.margin=1",
    "+_target_=x": "_target_: a recipe cannot name code to run; values name things by registry key, as in optim.name=adamw",
    "precision=mxfp8": "precision=mxfp8: no such precision preset; did you mean 'bf16_mxfp8'?",
    "precision=nvfp4": "precision=nvfp4: no such precision preset; did you mean 'bf16_nvfp4'?",
    "recipe=llama_7b": "recipe=llama_7b: no such recipe; did you mean 'llama2_7b'?",
    "recipe=llama3": "recipe=llama3: no such recipe; did you mean one of llama3_70b, llama3_8b?",
    "backend=AO": "backend=AO: not an option; did you mean 'torchao'?",
    "backend=ms-amp": "backend=ms-amp: not an option; did you mean 'msamp'?",
    "fp8.scaling=rowwise": "fp8.scaling=rowwise: not an option; write fp8.scaling=current fp8.granularity=row",
    "float8.recipe_name=rowwise": "float8.recipe_name=rowwise: no such key; write fp8.scaling=current fp8.granularity=row",
    "float8.recipe_name=mxfp8": "float8.recipe_name=mxfp8: no such key; write fp8.scaling=mxfp8",
    "plugins=bf16_fp8": "plugins: no such key; it belongs to trainer.plugins (precision=bf16_fp8)",
    "trainer.plugin=x": "trainer.plugin: no such key; it belongs to trainer.plugins (precision=bf16_fp8)",
    **{f"{theirs}=1": f"{theirs}: no such key; it belongs to {ours}" for theirs, ours in {
        "output_dir": "log.dir", "training.steps": "trainer.max_steps", "training.local_batch_size": "trainer.micro_batch_size",
        "per_device_train_batch_size": "trainer.micro_batch_size", "max_grad_norm": "trainer.gradient_clip_val",
        "adam_beta1": "optim.betas", "save_steps": "checkpoint.every_n_steps", "checkpoint.interval": "checkpoint.every_n_steps",
        "train_micro_batch_size_per_gpu": "trainer.micro_batch_size", "zero_optimization.zero_stage": "storage.shard",
        "training.seq_len": "model.seq_length", "exp_manager.exp_dir": "log.dir", "lr_warmup_iters": "optim.warmup_steps",
        "parallelism.tensor_parallel_degree": "trainer.strategy.tensor_model_parallel_size"}.items()},
    "--recipe": "--recipe: no such option; write it without dashes: recipe=NAME",
    "--fp8.margin=1": "--fp8.margin: no such option; write it without dashes: fp8.margin=VALUE",
    "--dry-run": "--dry-run: no such option; did you mean 'fp8cfg plan'?",
}


@pytest.mark.parametrize("word", ANSWERS)
def test_a_word_of_another_project_is_answered_with_ours(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", word]) == 2
    assert capsys.readouterr().err == f"error: {ANSWERS[word]}\n"
