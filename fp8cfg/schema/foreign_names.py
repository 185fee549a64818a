"""Keys and values of other projects, for error messages with the name here.

A recipe never accepts a foreign name, so that each setting has one spelling. The tables below are
data. `unknown` builds the message about a key, `meant` translates a value.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from fp8cfg.schema.errors import did_you_mean, nearest
from fp8cfg.schema.keys import PLUGIN
from fp8cfg.schema.scalings import SCALINGS

_KEYS_BY_LAST_NAME = {
    "fp8_margin": "fp8.margin",
    "fp8_interval": "fp8.interval",
    "fp8_format": "fp8.format",
    "fp8_amax_history_len": "fp8.amax_history_len",
    "amax_history_length": "fp8.amax_history_len",
    "fp8_amax_compute_algo": "fp8.amax_compute_algo",
    "amax_compute_algorithm": "fp8.amax_compute_algo",
    "fp8_params": "fp8.params",
    "fp8_param": "fp8.params",
    "fp8_param_gather": "fp8.params",
    "keep_fp8_transpose_cache": "fp8.keep_transpose_cache",
    "keep_fp8_weight_transpose_cache": "fp8.keep_transpose_cache",
    "fp8_recipe": "fp8.scaling",
    "fp8_wgrad": "fp8.override_linear_precision.wgrad",
    "fp8_dot_product_attention": "fp8.dot_product_attention",
    "fp8_dpa": "fp8.dot_product_attention",
    "fp8_multi_head_attention": "fp8.multi_head_attention",
    "fp8_mha": "fp8.multi_head_attention",
    "first_last_layers_bf16": "fp8.high_precision_at_start and fp8.high_precision_at_end",
    "num_layers_at_start_in_bf16": "fp8.high_precision_at_start",
    "num_layers_at_end_in_bf16": "fp8.high_precision_at_end",
    "disable_rht": "fp8.random_hadamard_transform",
    "disable_stochastic_rounding": "fp8.stochastic_rounding",
    "disable_2d_quantization": "fp8.enable_2d_quantization",
    "use_mxfp8_block_scaling": "fp8.scaling=mxfp8",
    "optimization_level": "opt_level",
    "enable_fsdp_float8_all_gather": "storage.gather=fp8",
    "grad_reduce_in_fp32": "storage.comm",
    "mixed_precision": "precision",
    "params_dtype": "precision.compute",
    "autocast_dtype": "precision.compute",
    "fp16_loss_scale": "precision.loss_scale",
    "fp16_initial_loss_scale": "precision.initial_loss_scale",
    "fp16_min_loss_scale": "precision.min_loss_scale",
    "fp16_loss_scale_window": "precision.loss_scale_window",
    "fp16_hysteresis": "precision.hysteresis",
    "clip_grad": "trainer.gradient_clip_val",
    "max_iters": "trainer.max_steps",
    "train_iters": "trainer.max_steps",
    "hidden_dim": "model.hidden_size",
    "n_layers": "model.num_layers",
    "n_heads": "model.num_attention_heads",
    "num_hidden_layers": "model.num_layers",
    "intermediate_size": "model.ffn_hidden_size",
    "num_key_value_heads": "model.num_query_groups",
    "rms_norm_eps": "model.layernorm_epsilon",
    "rope_theta": "model.rotary_base",
    "head_dim": "model.kv_channels",
    "learning_rate": "optim.lr",
    "batch_size": "trainer.global_batch_size",
    "limit_test_batches": "trainer.limit_val_batches",
    "dtype": "precision.compute",
    "steps": "trainer.max_steps",
    "context_length": "model.seq_length",
    "peft_scheme": "task=lora",
    "lora_rank": "lora.rank",
    "lora_dim": "lora.rank",
    "lora_alpha": "lora.alpha",
    "lora_dropout": "lora.dropout",
    "lora_r": "lora.rank",
    "target_modules": "lora.targets",
    "lora_target_modules": "lora.targets",
    "tp": "trainer.strategy.tensor_model_parallel_size",
    "cp": "trainer.strategy.context_parallel_size",
    "pp": "trainer.strategy.pipeline_model_parallel_size",
    "plugin": "trainer.plugins",
    "recipe_name": "fp8.scaling",
    # transformers' TrainingArguments
    "output_dir": "log.dir",
    "run_name": "name",
    "logging_dir": "log.dir",
    "per_device_train_batch_size": "trainer.micro_batch_size",
    "gradient_accumulation_steps": "trainer.global_batch_size",
    "max_grad_norm": "trainer.gradient_clip_val",
    "adam_beta1": "optim.betas",
    "adam_beta2": "optim.betas",
    "adam_epsilon": "optim.eps",
    "lr_scheduler_type": "optim.lr_decay_style",
    "logging_steps": "log.every_n_steps",
    "log_level": "log.level",
    "logging_level": "log.level",
    "loglevel": "log.level",
    "verbose": "log.level=debug",
    "verbosity": "log.level",
    "disable_tqdm": "log.progress=plain",
    "enable_progress_bar": "log.progress",
    "progress_bar": "log.progress",
    "save_steps": "checkpoint.every_n_steps",
    "eval_steps": "trainer.val_check_interval",
    "save_total_limit": "checkpoint.keep",
    "torch_compile": "trainer.compile",
    "gradient_checkpointing": "model.recompute_granularity",
    "bf16": "precision=bf16",
    "fp16": "precision=fp16",
    "eval_strategy": "trainer.val_check_interval",
    "evaluation_strategy": "trainer.val_check_interval",
    "save_strategy": "checkpoint.every_n_steps",
    "logging_strategy": "log.every_n_steps",
    "report_to": "log.loggers",
    "log_with": "log.loggers",
    "logger": "log.loggers",
    "tensorboard": "log.loggers=[tensorboard]",
    "wandb": "log.loggers=[wandb]",
    "mlflow": "log.loggers=[mlflow]",
    "trackio": "log.loggers=[trackio]",
    "project_name": "log.project",
    "wandb_project": "log.loggers=[wandb] and log.project",
    "wandb_name": "log.loggers=[wandb] and name",
    "wandb_exp_name": "log.loggers=[wandb] and name",
    "data_seed": "trainer.seed",
    "half_precision_backend": "backend",
    "fsdp": "storage.shard=fsdp",
    "model_name_or_path": "recipe and model.path",
    "per_device_eval_batch_size": "trainer.micro_batch_size",
    "torch_compile_backend": "trainer.compile",
    "dynamo_backend": "trainer.compile",
    "resume_from_checkpoint": "fp8cfg resume FOLDER",
    "do_train": "fp8cfg train",
    # Accelerate
    "num_processes": "trainer.devices",
    "num_machines": "trainer.num_nodes",
    "use_cpu": "trainer.accelerator=cpu",
    "distributed_type": "storage.shard",
    "fsdp_sharding_strategy": "storage.shard",
    # torchtitan
    "local_batch_size": "trainer.micro_batch_size",
    "seq_len": "model.seq_length",
    "sequence_len": "model.seq_length",
    "skip_layers": "fp8.exclude",
    "ignored_modules": "fp8.exclude",
    "modules_to_not_convert": "fp8.exclude",
    "save_dir": "log.dir",
    "max_norm": "trainer.gradient_clip_val",
    "dump_folder": "log.dir",
    "tensor_parallel_degree": "trainer.strategy.tensor_model_parallel_size",
    "context_parallel_degree": "trainer.strategy.context_parallel_size",
    "data_parallel_replicate_degree": "trainer.strategy.data_parallel_replicate_size",
    "max_context_length": "model.seq_length",
    "log_freq": "log.every_n_steps",
    "keep_latest_k": "checkpoint.keep",
    "min_lr_factor": "optim.min_lr",
    "decay_type": "optim.lr_decay_style",
    "flavor": "recipe",
    "filter_fqns": "fp8.exclude",
    "mixed_precision_param": "precision.compute",
    "mixed_precision_reduce": "storage.comm",
    "enable_tensorboard": "log.loggers=[tensorboard]",
    "enable_wandb": "log.loggers=[wandb]",
    "use_wandb": "log.loggers=[wandb]",
    "create_wandb_logger": "log.loggers=[wandb]",
    "create_mlflow_logger": "log.loggers=[mlflow]",
    "create_tensorboard_logger": "log.loggers=[tensorboard]",
    "profiling": "log.profile",
    "enable_profiling": "log.profile",
    "use_pytorch_profiler": "log.profile",
    "profile_step_start": "log.profile",
    "profile_step_end": "log.profile",
    "enable_memory_snapshot": "log.memory_snapshot",
    "record_memory_history": "log.memory_snapshot",
    "precompute_float8_dynamic_scale_for_fsdp": "storage.gather=fp8",
    "pipeline_parallel_degree": "trainer.strategy.pipeline_model_parallel_size",
    # axolotl, TRL, LLaMA-Factory
    "adapter": "task=lora",
    "base_model": "recipe and model.path",
    "dataset": "data.path",
    "dataset_name": "data.path",
    "datasets": "data.path",
    # NeMo, Megatron-Bridge, DeepSpeed
    "exp_dir": "log.dir",
    "lr_warmup_steps": "optim.warmup_steps",
    "lr_warmup_iters": "optim.warmup_steps",
    "eval_interval": "trainer.val_check_interval",
    "save_interval": "checkpoint.every_n_steps",
    "train_batch_size": "trainer.global_batch_size",
    "train_micro_batch_size_per_gpu": "trainer.micro_batch_size",
    "gradient_clipping": "trainer.gradient_clip_val",
    "zero_stage": "storage.shard",
    "fp8_hybrid": "fp8.format=hybrid",
    "fp8_e4m3": "fp8.format=e4m3",
    "encoder_seq_length": "model.seq_length",
    "log_every_n_steps": "log.every_n_steps",
    "log_interval": "log.every_n_steps",
    "tensorboard_dir": "log.dir",
    "limit_train_batches": "trainer.max_steps",
    "activations_checkpoint_granularity": "model.recompute_granularity",
    "megatron_amp_o2": "precision.compute",
    "transformer_engine": "backend=te",
    "transformer_impl": "backend",
    "data_prefix": "data.path",
    "data_path": "data.path",
    "tokenizer_model": "data.tokenizer",
    "train_file": "data.path",
    "train_data_path": "data.path",
    "validation_file": "data.validation_path",
    "valid_data_path": "data.validation_path",
    "tokenizer_path": "data.tokenizer",
    "json_keys": "data.text_key",
    "dataset_text_field": "data.text_key",
    "blend": "data.mixture",
    "data_blend": "data.mixture",
    "resume_if_exists": "log.resume",
    "eval_iters": "trainer.limit_val_batches",
    "use_distributed_optimizer": "storage.shard=zero1",
    "lr_decay_iters": "trainer.max_steps",
    "warmup_num_steps": "optim.warmup_steps",
    "total_num_steps": "trainer.max_steps",
    "initial_scale_power": "precision.initial_loss_scale",
    "communication_data_type": "storage.comm",
    "steps_per_print": "log.every_n_steps",
    "partition_activations": "model.recompute_granularity",
}
_KEYS_BY_FULL_NAME = {
    # sections of torchtitan's and NeMo's files
    "training": "trainer.max_steps and trainer.micro_batch_size and model.seq_length",
    "parallelism": "trainer.strategy and storage.shard",
    "activation_checkpoint": "model.recompute_granularity",
    "float8": "fp8",
    "job": "log.dir and name",
    "exp_manager": "log and checkpoint",
    "fp8.block_size": "fp8.scaling=block",
    "fp8.attention": "fp8.dot_product_attention",
    "fp8.lm_head": "fp8.output_layer",
    "data.split": "data.validation_fraction",
    "data.seq_length": "model.seq_length",
    "data.vocab_size": "model.vocab_size",
    "data.micro_batch_size": "trainer.micro_batch_size",
    "data.global_batch_size": "trainer.global_batch_size",
    "data.seed": "trainer.seed",
    "optim.max_steps": "trainer.max_steps",
    "optim.clip_grad": "trainer.gradient_clip_val",
    "trainer.precision": "precision",
    "model.precision": "precision",
    "precision.precision": "precision.compute",
    "precision.params_dtype": "precision.compute",
    "fp8.fp8": "fp8.enabled",
    "storage.master": "storage.master_weight",
    "storage.grad": "storage.weight_grad",
    "storage.moments": "storage.exp_avg and storage.exp_avg_sq",
    "fp16.enabled": "precision=fp16",
    "bf16.enabled": "precision=bf16",
    "compile.enable": "trainer.compile",
    "training.compile": "trainer.compile",
    "msamp.enabled": "backend=msamp",
    "zero_optimization.stage": "storage.shard",
    "training.dtype": "storage.weight",
    "model.name": "recipe",
    "optimizer.name": "optim.name",
    "optimizer.type": "optim.name",
    "lr_scheduler.type": "optim.lr_decay_style",
    "scheduler.type": "optim.lr_decay_style",
    "model.converters": "backend=torchao",
    "activation_checkpoint.mode": "model.recompute_granularity",
    "checkpoint.save": "log.dir",
    "checkpoint.folder": "log.dir",
    "training.dataset": "data.path",
    "validation.freq": "trainer.val_check_interval",
    "rng.seed": "trainer.seed",
    "model.fp8": "fp8.enabled",
    "mixed_precision.fp8": "fp8.format",
    "plugins": "trainer.plugins",
    "training.steps": "trainer.max_steps",
    "checkpoint.interval": "checkpoint.every_n_steps",
    "peft.dim": "lora.rank",
    "peft.r": "lora.rank",
    "peft.alpha": "lora.alpha",
    "peft.dropout": "lora.dropout",
    "peft.target_modules": "lora.targets",
    "lora.dim": "lora.rank",
    "lora.r": "lora.rank",
    "lora.lora_alpha": "lora.alpha",
    "lora.target_modules": "lora.targets",
    "fp8.recipe": "fp8.scaling",
    "fp8.backend": "backend",
    "fp8.opt_level": "opt_level",
}
_NEMO_NODES = {
    # nodes of NeMo's recipes, with all keys inside them
    "resume": (
        "log.resume=auto with log.folder, or fp8cfg resume FOLDER, in Python fp8cfg.resume(folder)"
    ),
    "log.ckpt": "checkpoint: checkpoint.every_n_steps, checkpoint.keep",
    "log.extra_loggers": "log.loggers",
    "trainer.callbacks": "fp8cfg.fit(job, callbacks=[...]) with subclasses of fp8cfg.Callback",
    "trainer.logger": "log.loggers",
    "optim.lr_scheduler": "optim: optim.lr_decay_style, optim.warmup_steps, optim.min_lr",
    "peft": "lora: task=lora, lora.rank, lora.alpha, lora.targets",
    "optim.config": "optim itself, as in optim.lr",
    "model.config": "model itself, as in model.num_layers",
    "trainer.strategy.ddp": "trainer.devices, storage.comm and storage.shard",
    # arguments of its recipe functions, and methods of run.Config
    "callbacks": "fp8cfg.fit(job, callbacks=[...]) with subclasses of fp8cfg.Callback",
    "tokenizer": "data.tokenizer",
    "clone": "copy.deepcopy(recipe)",
    "to_yaml": "fp8cfg.to_yaml(recipe)",
    "visualize": "fp8cfg plan --dot",
    "walk": "fiddle.selectors on fp8cfg.lower(recipe)",
    "broadcast": "fiddle.selectors on fp8cfg.lower(recipe)",
}
_VALUES = {
    # our key: their value -> ours, with other keys if one value is not enough
    "fp8.scaling": (
        {word: name for name, scaling in SCALINGS.items() for word in (*scaling.spellings, name)}
        | {
            "dynamic": "current",
            "rowwise": "current fp8.granularity=row",
            "row": "current fp8.granularity=row",
        }
    ),
    "backend": {
        "ao": "torchao",
        "transformer_engine": "te",
        "transformer-engine": "te",
        "transformerengine": "te",
        "ms-amp": "msamp",
        "ms_amp": "msamp",
    },
    "trainer.accelerator": {"gpu": "cuda", "nvidia": "cuda"},
    "trainer.compile": {"yes": "on", "no": "off"},
    "recipe": {"llama_7b": "llama2_7b", "llama_13b": "llama2_13b"},
    "storage.shard": {
        "zero3": "fsdp",
        "fsdp2": "fsdp",
        "full_shard": "fsdp",
        "fully_shard": "fsdp",
        "ddp": "none",
    },
    **dict.fromkeys(
        ("storage.exp_avg", "storage.exp_avg_sq"),
        dict.fromkeys(("int8", "8bit", "8-bit"), "fp8_block"),
    ),
    "precision": {
        "no": "fp32",
        "16": "fp16",
        "32": "fp32",
        "amp": "bf16",
        "transformer-engine": "bf16_fp8",
        "transformer-engine-float16": "fp16_fp8",
    },
}
_DTYPES = {
    "32": "fp32",
    "float32": "fp32",
    "16": "fp16",
    "float16": "fp16",
    "half": "fp16",
    "bfloat16": "bf16",
    "float8": "fp8",
}
_TYPO_CUTOFF = 0.75
"""Least similarity of a key and its misspelling, from 0 to 1 (difflib)."""
_WITHOUT_PRESET = {("fp16", "nvfp4")}
_IGNORED_WORDS = {"mixed", "true", "precision", "with", "scaling", "training"}
"""Words in foreign names of precisions without a meaning in names of our presets."""
_WORDS_OF_SCALING = {
    "delayed": ["fp8"],
    "current": ["fp8", "current"],
    "block": ["fp8", "block"],
    "mxfp8": ["mxfp8"],
    "nvfp4": ["nvfp4"],
}
"""Words for a scaling in the name of a preset."""
_COMPUTE_DTYPES = ("fp32", "bf16", "fp16")
_ZERO_STAGES = {"1": "zero1", "2": "zero2", "3": "fsdp"}
"""storage.shard by DeepSpeed's numbers of ZeRO stages."""
DERIVED = {
    "trainer.accumulate_grad_batches": (
        "trainer.global_batch_size / (trainer.micro_batch_size x data-parallel size)"
    ),
    "model.head_dim": (
        "model.kv_channels, or model.hidden_size / model.num_attention_heads if that is null"
    ),
    "attn_implementation": "chosen by torch's scaled_dot_product_attention",
    "model.attn_implementation": "chosen by torch's scaled_dot_product_attention",
    "expert_model_parallel_size": "1, because no model here has experts",
    "trainer.strategy.expert_model_parallel_size": "1, because no model here has experts",
    "optim.end_lr": "optim.min_lr, or 0.1 x optim.lr if that is null",
    "trainer.strategy.size": "the product of trainer.strategy's parallel sizes",
}
"""Keys that follow from other keys and cannot be set, with their definition."""

_WANDB_VARIABLES = "set WANDB_ENTITY, WANDB_MODE or WANDB_RUN_GROUP, and log.loggers=[wandb]"
_NO_EPOCHS = "trainer.max_steps counts steps, not epochs"
_NO_SHARE = "optim.warmup_steps counts steps, not a share of the run"
_NO_TIME = (
    "a run has no time limit; checkpoint.every_minutes saves by time, and a signal of the scheduler"
    " ends a run"
)
ABSENT = {
    **dict.fromkeys(("wandb_entity", "wandb_mode", "wandb_group"), _WANDB_VARIABLES),
    **dict.fromkeys(
        ("load_in_8bit", "load_in_4bit", "quantization_config"),
        "integer weights cannot be trained; fp8.params=true stores weights in FP8",
    ),
    **dict.fromkeys(
        ("flash_attention", "use_flash_attn", "use_flash_attention", "flash_attn"),
        "torch's scaled_dot_product_attention chooses the kernel",
    ),
    **dict.fromkeys(("epochs", "num_epochs", "num_train_epochs", "max_epochs"), _NO_EPOCHS),
    **dict.fromkeys(("warmup_ratio", "lr_warmup_fraction"), _NO_SHARE),
    **dict.fromkeys(("max_time", "max_time_per_run", "exit_duration_in_mins"), _NO_TIME),
    "config_file": "pass a file without a key: fp8cfg FILE.yaml",
    "data_parallel_shard_degree": (
        "set storage.shard=fsdp; its size follows from the number of ranks"
    ),
    "model.hf": "set recipe=from_hf model.path=FOLDER",
}
"""Keys of features that do not exist here, or their last names, with an alternative."""

CODE_KEYS = frozenset(
    {
        "_target_",
        "_partial_",
        "_args_",
        "_recursive_",
        "_convert_",
        "_component_",
        "_call_",
        "__fn_or_cls__",
        "_class_path",
        "class_path",
        "_instantiator",
        "target",
        "pickle",
    }
)
"""Keys that name code to run in Hydra, Fiddle and other frameworks. A recipe must never run code."""


def meant(key: str, value: object) -> str | None:
    """Translates another project's value to our spelling.

    Args:
        key: Short name of our key.
        value: The foreign value.

    Returns:
        Our value, possibly followed by a space and another key: "current fp8.granularity=row". None
        if the value is unknown or already valid.
    """
    ours = None
    if key == "storage.shard":
        ours = _ZERO_STAGES.get(str(value))
    ours = ours or _our_value(key, value)
    if ours == str(value).lower():
        return None
    return ours


def _our_value(key: str, value: object) -> str | None:
    """Looks up `value` in our spelling. Returns None if no table has it."""
    word = str(value).lower()
    ours = _VALUES.get(key, {}).get(word)
    if ours is None and key == "precision":
        return _preset(word)
    return ours


def _preset(name: str) -> str | None:
    """Returns the preset for a name with its words in any order, or None.

    Examples: fp8_mixed, bfloat16, bf16_fp8_delayed, fp8_tensorwise.
    """
    # NeMo says bf16-mixed or bf16_with_fp8_mixed, Lightning bf16-true, Megatron-Bridge
    # bf16_with_fp8_current_scaling_mixed. Only dtypes and scalings count.
    words = [
        _DTYPES.get(word, word) for word in re.split("[-_ ]+", name) if word not in _IGNORED_WORDS
    ]
    compute_dtypes = [word for word in words if word in _COMPUTE_DTYPES]
    scalings = set()
    for word in words:
        if word != "fp8" and word not in _COMPUTE_DTYPES:
            # "" for a word that is no scaling
            scalings.add(_VALUES["fp8.scaling"].get(word, "").partition(" ")[0])
    if not words or len(compute_dtypes) > 1 or len(scalings) > 1:
        return None
    if not scalings <= _WORDS_OF_SCALING.keys():
        return None
    # Without a compute dtype, as in Accelerate's fp8, the rest runs in BF16.
    compute = compute_dtypes[0] if compute_dtypes else "bf16"
    fp8_words: list[str] = []
    if scalings:
        fp8_words = _WORDS_OF_SCALING[scalings.pop()]
    elif "fp8" in words:
        fp8_words = ["fp8"]
    # No preset exists for these combinations.
    if (compute, *fp8_words) in _WITHOUT_PRESET or (fp8_words and compute == "fp32"):
        return None
    return "_".join([compute, *fp8_words])


def home_of(key: str, known: Iterable[str] = ()) -> str | None:
    """Returns our key for another project's key, or None if no table has it.

    Args:
        key: The foreign key, with dots.
        known: Our keys. NeMo nests some nodes deeper, and a key without that level may be ours.
    """
    # The full name wins: torchtitan's training.dtype is storage.weight, any other dtype is
    # precision.compute.
    ours = _KEYS_BY_FULL_NAME.get(key.lower())
    ours = ours or _KEYS_BY_LAST_NAME.get(key.rpartition(".")[2].lower())
    node = _nemo_node(key)
    if ours or not node:
        return ours
    # NeMo has optim.config.lr for optim.lr.
    without_config = node.removesuffix(".config") + key.removeprefix(node)
    if key != node and without_config in known:
        return without_config
    return _NEMO_NODES[node]


def absence(key: str) -> str | None:
    """Returns the alternative to a feature that does not exist here, or None for other keys."""
    return ABSENT.get(key.lower()) or ABSENT.get(key.rpartition(".")[2].lower())


def _nemo_node(key: str) -> str | None:
    """Returns the node of NeMo's recipes for `key`: itself, or a node above it. None otherwise."""
    for node in _NEMO_NODES:
        if f"{key}.".startswith(f"{node}."):
            return node
    return None


def unknown_lines(key: str, known: Iterable[str], value: object) -> list[str]:
    """Returns the messages about an unknown key, or about each key inside it.

    A mapping under an unknown key is probably a section of another project's file. Its keys have
    better messages than its name.

    Args:
        key: The key, with dots.
        known: Short names of our keys.
        value: Value of the key.
    """
    known = set(known)
    # These keys have a message that is about the whole section.
    keys_inside: Mapping[str, object] = {}
    if isinstance(value, Mapping):
        keys_inside = value
    has_own_message = (
        key.rpartition(".")[2] in CODE_KEYS
        or key == "hydra"
        or key in DERIVED
        or _nemo_node(key)
        or absence(key)
        or _typo_of(key, known)
    )
    has_names = all(isinstance(name, str) for name in keys_inside)
    if has_own_message or not keys_inside or not has_names:
        return [unknown(key, known, value)]
    lines: list[str] = []
    for name, inner in keys_inside.items():
        lines += unknown_lines(f"{key}.{name}", known, inner)
    return lines


def unknown(key: str, known: Iterable[str], value: object = None) -> str:
    """Returns the message about a key that does not exist.

    Args:
        key: The key, with dots.
        known: Short names of our keys.
        value: Value of the key, for a complete suggestion such as backend=te.
    """
    # From the most specific message to a guess. Code comes first: it is a security boundary, and no
    # other table may explain it away.
    leaf = key.rsplit(".", 1)[-1]
    if leaf in CODE_KEYS:
        return (
            f"{key}: a recipe cannot name code to run; values name things by registry key, as in"
            " optim.name=adamw"
        )
    if re.split("[./]", key)[0] == "hydra":
        return (
            f"{key}: Hydra's own settings are not part of a recipe; pass them on the command line"
        )
    if key in DERIVED:
        return f"{key}: cannot be set, it is {DERIVED[key]}"
    known = set(known)
    # The plugin's full name is valid too, and typos of it should find it.
    if "precision" in known:
        known.add(PLUGIN)
    ours = home_of(key, known)
    if ours:
        return f"{key}{_our_key(leaf, value, ours)}"
    absent = absence(key)
    if absent and key not in known:
        return f"{key}: no such key; {absent}"
    # The key exists, so it must be a dotted name inside a node.
    if key in known:
        return f"{key}: use dotted names only at the top level of a file; write a node for each dot"
    return f"{key}: no such key{_hint(key, known)}"


def _our_key(leaf: str, value: object, ours: str) -> str:
    """Returns the end of a message about a foreign key.

    Args:
        leaf: Last part of the foreign key.
        value: Its value.
        ours: Our key.
    """
    # DeepSpeed numbers its ZeRO stages.
    if leaf in ("stage", "zero_stage"):
        our_value = _ZERO_STAGES.get(str(value))
    else:
        our_value = _our_value(ours, value)
    if our_value:
        return f"={value}: no such key; set {ours}={our_value}"
    preset = " (precision=bf16_fp8)" if ours in ("precision", "trainer.plugins") else ""
    return f": no such key; it belongs to {ours}{preset}"


def _hint(key: str, known: set[str]) -> str:
    """Returns the end of a message about a key without a table entry: the nearest keys."""
    leaf = key.rsplit(".", 1)[-1]
    parent = key.removesuffix(leaf)
    same_leaf = sorted(name for name in known if name.rsplit(".", 1)[-1] == leaf)
    if len(same_leaf) > 1:
        return f"; did you mean one of {', '.join(same_leaf)}?"
    if parent:
        siblings = {name for name in known if name.startswith(parent)}
    else:
        siblings = {name for name in known if "." not in name}
    # From the surest guess to the weakest: the right name in another node, a typo anywhere, a similar
    # name in the same node, a similar name anywhere.
    if same_leaf:
        suggestion: str | None = same_leaf[0]
    else:
        suggestion = (
            _typo_of(key, known)
            or _nearest_leaf(leaf, siblings, 0.6)
            or _nearest_leaf(leaf, known, 0.7)
        )
    if suggestion:
        return did_you_mean(suggestion)
    if parent and 0 < len(siblings) <= 16:
        names = sorted(name.removeprefix(parent) for name in siblings)
        return f"; {parent[:-1]} has {', '.join(names)}"
    return ""


def _typo_of(key: str, known: set[str]) -> str | None:
    """Returns the key most similar to `key`, or None. The node of `key` is not one of them."""
    return nearest(key, known - {key.rpartition(".")[0]}, _TYPO_CUTOFF)


def _nearest_leaf(leaf: str, known: set[str], cutoff: float) -> str | None:
    """Returns the key with the last part most similar to `leaf`, or None."""
    # Reversed, so that of several keys with one last part the first in order wins.
    by_leaf = {key.rsplit(".", 1)[-1]: key for key in sorted(known, reverse=True)}
    match = nearest(leaf, by_leaf, cutoff)
    if match is None:
        return None
    return by_leaf[match]
