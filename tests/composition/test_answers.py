"""Words of other projects, and of our own in the wrong place: each answer names what to write."""

from __future__ import annotations

from pathlib import Path

import pytest

from fp8cfg.__main__ import main

FOREIGN = {  # the most used arguments of each project: theirs -> ours
    "TrainingArguments": {
        "learning_rate": "optim.lr",
        "per_device_eval_batch_size": "trainer.micro_batch_size",
        "gradient_accumulation_steps": "trainer.global_batch_size",
        "gradient_checkpointing": "model.recompute_granularity",
        "lr_scheduler_type": "optim.lr_decay_style",
        "adam_beta2": "optim.betas",
        "adam_epsilon": "optim.eps",
        "logging_steps": "log.every_n_steps",
        "save_total_limit": "checkpoint.keep",
        "eval_strategy": "trainer.val_check_interval",
        "report_to": "log.loggers",
        "torch_compile": "trainer.compile",
        "resume_from_checkpoint": "fp8cfg resume FOLDER",
        "fp16": "precision=fp16",
        "fsdp": "storage.shard=fsdp",
        "train_file": "data.path",
        "validation_file": "data.validation_path",
    },
    "Accelerate": {
        "mixed_precision": "precision (precision=bf16_fp8)",
        "num_processes": "trainer.devices",
        "num_machines": "trainer.num_nodes",
        "dynamo_backend": "trainer.compile",
        "use_cpu": "trainer.accelerator=cpu",
        "distributed_type": "storage.shard",
        "fp8_config.fp8_format": "fp8.format",
        "fp8_config.amax_history_length": "fp8.amax_history_len",
        "optimization_level": "opt_level",
        "fsdp_config.fsdp_sharding_strategy": "storage.shard",
        "fp8_config.use_mxfp8_block_scaling": "fp8.scaling=mxfp8",
    },
    "torchtitan": {
        "job.dump_folder": "log.dir",
        "training.max_norm": "trainer.gradient_clip_val",
        "training.dtype": "storage.weight",
        "training.mixed_precision_param": "precision.compute",
        "training.mixed_precision_reduce": "storage.comm",
        "compile.enable": "trainer.compile",
        "metrics.log_freq": "log.every_n_steps",
        "metrics.enable_tensorboard": "log.loggers=[tensorboard]",
        "checkpoint.keep_latest_k": "checkpoint.keep",
        "activation_checkpoint.mode": "model.recompute_granularity",
        "parallelism.context_parallel_degree": "trainer.strategy.context_parallel_size",
        "float8.filter_fqns": "fp8.exclude",
        "model.flavor": "recipe",
        "float8.enable_fsdp_float8_all_gather": "storage.gather=fp8",
        "lr_scheduler.min_lr_factor": "optim.min_lr",
    },
    "NeMo": {
        "trainer.limit_train_batches": "trainer.max_steps",
        "trainer.log_every_n_steps": "log.every_n_steps",
        "model.encoder_seq_length": "model.seq_length",
        "model.fp8": "fp8.enabled",
        "model.fp8_hybrid": "fp8.format=hybrid",
        "model.fp8_e4m3": "fp8.format=e4m3",
        "model.fp8_amax_history_len": "fp8.amax_history_len",
        "model.transformer_engine": "backend=te",
        "model.megatron_amp_O2": "precision.compute",
        "model.data.data_prefix": "data.path",
        "exp_manager.resume_if_exists": "log.resume",
        "model.activations_checkpoint_granularity": "model.recompute_granularity",
        "fp8_params": "fp8.params",
    },
    "Megatron-Bridge": {
        "train.train_iters": "trainer.max_steps",
        "train.eval_interval": "trainer.val_check_interval",
        "train.eval_iters": "trainer.limit_val_batches",
        "scheduler.lr_warmup_iters": "optim.warmup_steps",
        "scheduler.lr_decay_iters": "trainer.max_steps",
        "rng.seed": "trainer.seed",
        "checkpoint.save": "log.dir",
        "checkpoint.save_interval": "checkpoint.every_n_steps",
        "logger.log_interval": "log.every_n_steps",
        "logger.tensorboard_dir": "log.dir",
        "ddp.grad_reduce_in_fp32": "storage.comm",
        "ddp.use_distributed_optimizer": "storage.shard=zero1",
        "mixed_precision.fp8_param_gather": "fp8.params",
        "mixed_precision.fp8": "fp8.format",
        "optimizer.clip_grad": "trainer.gradient_clip_val",
    },
    "DeepSpeed": {
        "train_batch_size": "trainer.global_batch_size",
        "gradient_clipping": "trainer.gradient_clip_val",
        "bf16.enabled": "precision=bf16",
        "fp16.enabled": "precision=fp16",
        "fp16.initial_scale_power": "precision.initial_loss_scale",
        "communication_data_type": "storage.comm",
        "steps_per_print": "log.every_n_steps",
        "msamp.enabled": "backend=msamp",
        "optimizer.type": "optim.name",
        "scheduler.type": "optim.lr_decay_style",
        "scheduler.params.warmup_num_steps": "optim.warmup_steps",
        "activation_checkpointing.partition_activations": "model.recompute_granularity",
    },
}
ALIKE = {  # whose last name is ours
    "model.tensor_model_parallel_size": "trainer.strategy.tensor_model_parallel_size",
    "model.optim.lr": "optim.lr",
    "fp8_config.margin": "fp8.margin",
    "train.global_batch_size": "trainer.global_batch_size",
    "optimizer.min_lr": "optim.min_lr",
    "dataset.seq_length": "model.seq_length",
    "dataset.reset_attention_mask": "data.reset_attention_mask",
    "optimizer.params.betas": "optim.betas",
    "fp16.loss_scale": "precision.loss_scale",
    "msamp.opt_level": "opt_level",
    "float8.emulate": "fp8.emulate",
    "weight_decay": "optim.weight_decay",
    "seed": "trainer.seed",
    "training.seed": "trainer.seed",
}
ANSWERS = {
    "fp8=true": "fp8=true: expected keys of fp8; write fp8.enabled=true",
    "fp8=hybrid": "fp8=hybrid: expected keys of fp8; write fp8.format=hybrid",
    "fp8=mxfp8": "fp8=mxfp8: expected keys of fp8; write fp8.scaling=mxfp8",
    "optim=adam": "optim=adam: expected keys of optim; write optim.name=adam",
    "model=llama_8b": "model=llama_8b: expected keys of model; did you mean 'recipe=llama_8b'?",
    "+fp8.foo=1": "fp8.foo: no such key",
    "+fp8.margin=1": "+fp8.margin=1: fp8.margin already exists; remove the +: fp8.margin=1",
    "+_target_=x": "_target_: a recipe cannot name code to run; values name things by registry key, as in optim.name=adamw",
    "precision=mxfp8": "precision=mxfp8: no such precision preset; did you mean 'bf16_mxfp8'?",
    "precision=nvfp4": "precision=nvfp4: no such precision preset; did you mean 'bf16_nvfp4'?",
    "recipe=llama_7b": "recipe=llama_7b: no such recipe; did you mean 'llama2_7b'?",
    "recipe=llama3": "recipe=llama3: no such recipe; did you mean one of llama3_70b, llama3_8b?",
    "backend=AO": "backend=AO: not an option; did you mean 'torchao'?",
    "backend=ms-amp": "backend=ms-amp: not an option; did you mean 'msamp'?",
    "fp8.scaling=rowwise": "fp8.scaling=rowwise: not an option; write fp8.scaling=current fp8.granularity=row",
    "float8.recipe_name=rowwise": "float8.recipe_name=rowwise: no such key; set fp8.scaling=current fp8.granularity=row",
    "float8.recipe_name=mxfp8": "float8.recipe_name=mxfp8: no such key; set fp8.scaling=mxfp8",
    "plugins=bf16_fp8": "plugins: no such key; it belongs to trainer.plugins (precision=bf16_fp8)",
    "trainer.plugin=x": "trainer.plugin: no such key; it belongs to trainer.plugins (precision=bf16_fp8)",
    **{
        f"{theirs}=1": f"{theirs}: no such key; it belongs to {ours}"
        for theirs, ours in {
            "output_dir": "log.dir",
            "training.steps": "trainer.max_steps",
            "training.local_batch_size": "trainer.micro_batch_size",
            "per_device_train_batch_size": "trainer.micro_batch_size",
            "max_grad_norm": "trainer.gradient_clip_val",
            "adam_beta1": "optim.betas",
            "save_steps": "checkpoint.every_n_steps",
            "checkpoint.interval": "checkpoint.every_n_steps",
            "train_micro_batch_size_per_gpu": "trainer.micro_batch_size",
            "training.seq_len": "model.seq_length",
            "exp_manager.exp_dir": "log.dir",
            "lr_warmup_iters": "optim.warmup_steps",
            "parallelism.tensor_parallel_degree": "trainer.strategy.tensor_model_parallel_size",
        }.items()
    },
    **{
        f"{theirs}=1": f"{theirs}: no such key; it belongs to {ours}"
        for project in FOREIGN.values()
        for theirs, ours in project.items()
    },
    **{
        f"{theirs}=1": f"{theirs}: no such key; did you mean {ours!r}?"
        for theirs, ours in ALIKE.items()
    },
    **{
        f"zero_optimization.{stage}=3": f"zero_optimization.{stage}=3: no such key; set storage.shard=fsdp"
        for stage in ("stage", "zero_stage")
    },
    "bf16=true": "bf16: no such key; it belongs to precision=bf16",
    "storage.shard=2": "storage.shard=2: not an option; did you mean 'zero2'?",
    "fp8=on": "fp8=on: expected keys of fp8; write fp8.enabled=true",
    "--recipe": "--recipe: no such option; write it without dashes: recipe=NAME",
    "--fp8.margin=1": "--fp8.margin: no such option; write it without dashes: fp8.margin=VALUE",
    "--dry-run": "--dry-run: no such option; did you mean 'fp8cfg plan'?",
}


@pytest.mark.parametrize("word", ANSWERS)
def test_a_word_of_another_project_is_answered_with_ours(
    word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", word]) == 2
    assert capsys.readouterr().err == f"error: {ANSWERS[word]}\n"


def test_what_the_answers_name_exists() -> None:
    from fp8cfg.cli import VERBS
    from fp8cfg.schema import foreign_names
    from fp8cfg.schema.recipe import short_keys

    ours = {*short_keys(), "recipe", "task", "trainer.plugins"}
    for home in {
        *foreign_names._KEYS_BY_LAST_NAME.values(),
        *foreign_names._KEYS_BY_FULL_NAME.values(),
    }:
        for part in home.split(" and "):
            verb = part.removeprefix("fp8cfg ").split()[0]
            assert part.partition("=")[0] in ours or (
                part.startswith("fp8cfg ") and verb in VERBS
            ), part
            if "=" in part:
                assert main(["explain", "log.dir", part]) == 0 or part == "backend=te", part


ELSEWHERE = {
    (
        "explain",
        "bf16_fp8",
    ): "bf16_fp8: is a choice, not a key; write precision=bf16_fp8 with a key, as in: fp8cfg explain fp8.margin precision=bf16_fp8",
    (
        "explain",
        "llama_8b",
    ): "llama_8b: is a choice, not a key; write recipe=llama_8b with a key, as in: fp8cfg explain fp8.margin recipe=llama_8b",
    (
        "check",
        "accelerate.yaml",
    ): "accelerate.yaml: has the keys of another project; run fp8cfg import accelerate accelerate.yaml",
    (
        "plan",
        "deepspeed.yaml",
    ): "deepspeed.yaml: has the keys of another project; run fp8cfg import deepspeed deepspeed.yaml",
    (
        "check",
        "pretrain.sh",
    ): "pretrain.sh: not a recipe file; its name must end in .yaml or .json; write: fp8cfg import megatron pretrain.sh",
    (
        "check",
        "8b.toml",
    ): "8b.toml: not a recipe file; its name must end in .yaml or .json",
    ("check", "typo.yaml"): "typo.yaml:4: fp8.margn: no such key; did you mean 'fp8.margin'?\n"
    "error: typo.yaml:6: trainer.max_steps=ten: expected an integer, got str",
    (
        "check",
        "recipe=typo",
    ): "recipe=typo: no such recipe; to run a file: fp8cfg typo.yaml",
    (
        "check",
        "recipe=typo.yaml",
    ): "recipe=typo.yaml: no such recipe; to run a file: fp8cfg typo.yaml",
    ("check", "typo"): "typo: no command, recipe file or key=value; did you mean 'typo.yaml'?",
    (
        "check",
        "preset.yaml",
    ): "preset.yaml:2: precision=bf16_fp9: no such precision preset; did you mean 'bf16_fp8'?",
    (
        "import",
        "accelerate",
        "handler.py",
    ): "handler.py: FP8RecipeKwargs(**KWARGS): KWARGS is not read; write the keywords",
    (
        "sweep",
        "fp8.margin=range(0,99)",
    ): "fp8.margin=17: must be at most 16\nerror: fp8.margin=18: must be at most 16\n"
    "error: fp8.margin=range(0,99): and 80 more lines like these",
    (
        "sweep",
        "recipe=llama_tiny",
        "model.num_attention_heads=range(9,13)",
    ): "model.hidden_size=256: not a multiple of model.num_attention_heads=9; nearest is 252, or set model.kv_channels\n"
    "error: model.hidden_size=256: not a multiple of model.num_attention_heads=10; nearest is 260, or set model.kv_channels\n"
    "error: the sweep: and 2 more lines like these",
}
FILES = {
    "accelerate.yaml": "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nmixed_precision: fp8\nfp8_config: {backend: TE}\n",
    "deepspeed.yaml": "bf16: {enabled: true}\nzero_optimization: {stage: 2}\n",
    "pretrain.sh": "python x.py --bf16\n",
    "8b.toml": "[model]\n",
    "typo.yaml": "recipe: llama_tiny\nprecision: bf16_fp8\nfp8:\n  margn: 1\ntrainer:\n  max_steps: ten\n",
    "preset.yaml": "trainer:\n  plugins: bf16_fp9\n",
    "handler.py": "KWARGS = {}\nh = FP8RecipeKwargs(**KWARGS)\n",
}


@pytest.mark.parametrize("argv", ELSEWHERE, ids=" ".join)
def test_an_answer_of_another_verb_or_on_a_file(
    argv: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    assert main(list(argv)) == 2
    assert capsys.readouterr().err == f"error: {ELSEWHERE[argv]}\n"
