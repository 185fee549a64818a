"""Keys of complete jobs of NeMo and Megatron-Bridge: model, batches, optimizer and parallelism.

A key has the path of its section, such as `trainer.strategy.tensor_model_parallel_size` or
`optimizer.lr`. Most leaves have the names of Megatron-LM's flags, and are read by its key table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fp8cfg.interop.key_table import (
    Entry,
    flatten_keys,
    parse_bool,
    parse_choice,
    parse_float,
    parse_int,
    read_only,
)
from fp8cfg.interop.megatron import JOB_ENTRIES, apply_model_defaults, combine_betas
from fp8cfg.interop.source_files import Source


def _parse_steps(value: Any) -> int:
    """Parses a number of steps. Lightning reads a float as a fraction of an epoch."""
    if isinstance(value, float):
        raise ValueError("counts epochs there; expected a number of steps")
    return parse_int(value)


def _read_validation_batches(value: Any) -> dict[str, Any]:
    if isinstance(value, float):
        raise ValueError("is a fraction of the validation data there; expected a number of batches")
    batches = parse_int(value)
    if batches == 0:
        return {"trainer.val_check_interval": 0}
    return {"trainer.limit_val_batches": batches}


def _import_as(key: str, recipe_key: str, parse: Callable[[Any], Any]) -> Entry:
    return read_only(key, lambda setting: {recipe_key: parse(setting)})


_NORMS = {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm", "layernorm1p": "LayerNorm"}
# NeMo 1 names the library too. Its "adam" is here what Megatron's is.
_OPTIMIZERS = {
    "adam": "adamw",
    "adamw": "adamw",
    "fused_adam": "adamw",
    "distributed_fused_adam": "adamw",
    "mcore_distributed_optim": "adamw",
    "sgd": "sgd",
}
_ACTIVATIONS = {
    "swiglu": "swiglu",
    "fast-swiglu": "swiglu",
    "geglu": "geglu",
    "fast-geglu": "geglu",
    "gelu": "gelu",
    "squared-relu": "squared_relu",
}

# These are imported but never exported: files for NeMo and Bridge have only precision.
RUN_ENTRIES: tuple[Entry, ...] = (
    *(
        read_only(entry.key, entry.read)
        for entry in JOB_ENTRIES
        if entry.key not in ("normalization", "qk_layernorm")
    ),
    _import_as("num_nodes", "trainer.num_nodes", parse_int),
    _import_as("devices", "trainer.devices", parse_int),
    _import_as("val_check_interval", "trainer.val_check_interval", _parse_steps),
    read_only("limit_val_batches", _read_validation_batches),
    _import_as(
        "virtual_pipeline_model_parallel_size",
        "trainer.strategy.virtual_pipeline_model_parallel_size",
        parse_int,
    ),
    _import_as("log_every_n_steps", "log.every_n_steps", parse_int),
    _import_as("save_interval", "checkpoint.every_n_steps", parse_int),
    _import_as("constant_steps", "optim.constant_steps", parse_int),
    _import_as("run_name", "name", str),
    _import_as("log_dir", "log.dir", str),
    _import_as("layernorm_zero_centered_gamma", "model.layernorm_zero_centered_gamma", parse_bool),
    read_only("optim_name", lambda setting: {"optim.name": parse_choice(setting, _OPTIMIZERS)}),
    read_only(
        "normalization",
        lambda setting: {"model.normalization": parse_choice(setting, _NORMS)},
    ),
    read_only(
        "activation",
        lambda setting: {"model.activation": parse_choice(setting, _ACTIVATIONS)},
    ),
    read_only(
        "qk_layernorm",
        lambda setting: {"model.qk_layernorm": "head" if parse_bool(setting) else "none"},
    ),
    _import_as("add_bias_linear", "model.add_bias_linear", parse_bool),
    _import_as(
        "share_embeddings_and_output_weights",
        "model.share_embeddings_and_output_weights",
        parse_bool,
    ),
    _import_as("scale_factor", "model.rope_scaling.factor", parse_float),
    _import_as("low_freq_factor", "model.rope_scaling.low_freq_factor", parse_float),
    _import_as("high_freq_factor", "model.rope_scaling.high_freq_factor", parse_float),
    _import_as("old_context_len", "model.rope_scaling.original_max_position", parse_int),
    read_only(
        "use_distributed_optimizer",
        lambda setting: {"storage.shard": "zero1"} if parse_bool(setting) else {},
    ),
)


def _same_names(*names: str) -> dict[str, str]:
    return {name: name for name in names}


_PARALLEL = _same_names(
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "sequence_parallel",
)
_MODEL = {
    **_same_names(
        "num_layers",
        "hidden_size",
        "ffn_hidden_size",
        "num_attention_heads",
        "num_query_groups",
        "kv_channels",
        "seq_length",
        "vocab_size",
        "rotary_base",
        "rotary_percent",
        "init_method_std",
        "normalization",
        "activation",
        "add_bias_linear",
        "add_qkv_bias",
        "qk_layernorm",
        "position_embedding_type",
        "max_position_embeddings",
        "layernorm_zero_centered_gamma",
        "share_embeddings_and_output_weights",
        "recompute_granularity",
        "recompute_modules",
        "gated_linear_unit",
        "activation_func",
        "scale_factor",
        "low_freq_factor",
        "high_freq_factor",
        "old_context_len",
        "transformer_impl",
    ),
    # NeMo 1
    "layernorm_epsilon": "norm_epsilon",
    "encoder_seq_length": "seq_length",
    "bias": "add_bias_linear",
    "rotary_percentage": "rotary_percent",
    "activations_checkpoint_granularity": "recompute_granularity",
}
_BATCH_SIZES = _same_names("global_batch_size", "micro_batch_size")
_OPTIMIZER = {
    **_same_names(
        "lr",
        "min_lr",
        "weight_decay",
        "adam_beta1",
        "adam_beta2",
        "adam_eps",
        "optimizer",
        "clip_grad",
        "use_distributed_optimizer",
    ),
    "betas": "BETAS",
}
_SCHEDULE = {
    **_same_names("min_lr", "lr_decay_style", "lr_warmup_iters", "constant_steps"),
    "warmup_steps": "lr_warmup_iters",
}
_TRAINER = {
    **_same_names(
        "num_nodes", "devices", "val_check_interval", "limit_val_batches", "log_every_n_steps"
    ),
    "max_steps": "train_iters",
    "gradient_clip_val": "clip_grad",
    "precision": "precision",
}
_MODEL_PRECISION = _same_names(
    "fp8",
    "fp8_margin",
    "fp8_interval",
    "fp8_amax_history_len",
    "fp8_amax_compute_algo",
    "fp8_recipe",
    "fp8_params",
    "fp8_param",
    "fp8_wgrad",
    "fp8_dot_product_attention",
    "fp8_multi_head_attention",
    "first_last_layers_bf16",
    "num_layers_at_start_in_bf16",
    "num_layers_at_end_in_bf16",
    "tp_only_amax_red",
)

SECTIONS: dict[str, Mapping[str, str]] = {
    "trainer": _TRAINER,
    "trainer.strategy": _PARALLEL,
    "trainer.strategy.ddp": _same_names("use_distributed_optimizer"),
    "data": {**_BATCH_SIZES, "seq_length": "seq_length"},
    "dataset": {
        "sequence_length": "seq_length",
        **_same_names("seq_length", "eod_mask_loss", "reset_attention_mask", "reset_position_ids"),
    },
    "optim.config": _OPTIMIZER,
    "optim.lr_scheduler": _SCHEDULE,
    "model.optim": {**_OPTIMIZER, "name": "optim_name"},
    "model.optim.sched": _SCHEDULE,
    "model.data": _same_names("eod_mask_loss", "reset_attention_mask", "reset_position_ids"),
    "model.config": {**_MODEL, **_PARALLEL},
    "model": {**_MODEL, **_PARALLEL, **_BATCH_SIZES, **_MODEL_PRECISION, "seed": "seed"},
    "optimizer": _OPTIMIZER,
    "scheduler": _SCHEDULE,
    "ddp": _same_names("use_distributed_optimizer"),
    "train": {
        **_BATCH_SIZES,
        "train_iters": "train_iters",
        "eval_interval": "val_check_interval",
        "eval_iters": "limit_val_batches",
    },
    "validation": {"eval_interval": "val_check_interval", "eval_iters": "limit_val_batches"},
    "rng": _same_names("seed"),
    "checkpoint": _same_names("save_interval"),
    "logger": {"log_interval": "log_every_n_steps"},
    "log": {"log_dir": "log_dir", "name": "run_name"},
    # Arguments of a recipe function.
    "": {
        "name": "run_name",
        "dir": "log_dir",
        "num_nodes": "num_nodes",
        "num_gpus_per_node": "devices",
        "tensor_parallelism": "tensor_model_parallel_size",
        "pipeline_parallelism": "pipeline_model_parallel_size",
        "virtual_pipeline_parallelism": "virtual_pipeline_model_parallel_size",
        "context_parallelism": "context_parallel_size",
        "max_steps": "train_iters",
        "gradient_clip_val": "clip_grad",
        "warmup_steps": "lr_warmup_iters",
        "lr_warmup_iters": "lr_warmup_iters",
        "train_iters": "train_iters",
        **_same_names(
            "global_batch_size",
            "micro_batch_size",
            "seq_length",
            "lr",
            "min_lr",
            "sequence_parallel",
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "virtual_pipeline_model_parallel_size",
            "context_parallel_size",
            "limit_val_batches",
            "val_check_interval",
            "log_every_n_steps",
        ),
    },
}
"""Key tables' names of the keys in each section.

If two sections have a key with the same meaning, the first section wins, as in the projects: the
strategy wins over the fields of the model.
"""


_SECTION_ORDER = {section: index for index, section in enumerate(SECTIONS)}
_PRECISION_NAMES = frozenset(_MODEL_PRECISION.values()) | {"precision"}


def find_section_key(key: str) -> str | None:
    """Returns the key tables' name of a key with its section, or None if it is not imported."""
    section, _, leaf = key.rpartition(".")
    return SECTIONS.get(section, {}).get(leaf)


def _section_order(key: str) -> int:
    section = key.rpartition(".")[0]
    return _SECTION_ORDER.get(section, len(SECTIONS))


def select_job_keys(flat: Mapping[str, Any], plugin: str | None = None) -> Source:
    """Selects the keys of a job that have a meaning for a recipe.

    Args:
        flat: Settings by key with its section.
        plugin: Section of the precision plugin, None for a job without a plugin. Its fields lose
            their section, and precision fields of the model are ignored, as in the projects.
    """
    settings: dict[str, Any] = {}
    read_keys: set[str] = set()
    by_name: dict[str, Any] = {}
    for key in sorted(flat, key=_section_order):
        value = flat[key]
        if plugin and key.startswith(f"{plugin}."):
            settings[key.removeprefix(f"{plugin}.")] = value
            read_keys.add(key)
            continue
        name = find_section_key(key)
        if name is None or (plugin and name in _PRECISION_NAMES):
            continue
        # A different value in a later section has no effect.
        if value is None or by_name.setdefault(name, value) == value:
            settings[key] = value
            read_keys.add(key)
    return Source(settings, items=tuple(flat), read_items=frozenset(read_keys))


def read_run_config(data: Mapping[str, Any]) -> Source:
    """Reads a YAML file of NeMo or Megatron-Bridge: a job, or the fields of a precision plugin.

    A job has the plugin at `mixed_precision`, `plugins` or `trainer.plugins`: its fields, or the
    name of a preset. NeMo 1 has no plugin but `trainer.precision` and fields of `model`.
    """
    data = _without_classes(data)
    plugin = _find_plugin(data)
    is_job = any(isinstance(value, Mapping) for key, value in data.items() if key != plugin)
    if plugin is None and not is_job:
        return Source(data)
    flat = flatten_keys(data)
    preset = None
    read_items: set[str] = set()
    if plugin is not None:
        read_items.add(plugin)
        value = flat.get(plugin)
        if isinstance(value, list) and len(value) == 1:  # Lightning takes a list of plugins
            value = value[0]
        if isinstance(value, Mapping):
            del flat[plugin]
            flat |= flatten_keys(_without_classes(value), f"{plugin}.")
        elif value is not None:
            preset = str(value)
    # Keys of a job always have a section.
    sections = {key: value for key, value in flat.items() if "." in key}
    if plugin is None:
        read_items |= _combine_fp8_switches(sections)
    source = select_job_keys(sections, plugin)
    if "model.hidden_size" in sections:
        source.settings["has_model"] = True
    return source._replace(
        items=tuple(flat), read_items=source.read_items | read_items, preset=preset
    )


def _find_plugin(data: Mapping[str, Any]) -> str | None:
    trainer = data.get("trainer")
    if isinstance(trainer, Mapping) and "plugins" in trainer:
        return "trainer.plugins"
    for key in ("mixed_precision", "plugins"):
        if key in data:
            return key
    return None


def _combine_fp8_switches(flat: dict[str, Any]) -> set[str]:
    """Replaces NeMo 1's switches by the name of the format. Returns the keys of the switches."""
    keys = ("model.fp8_e4m3", "model.fp8_hybrid", "model.transformer_engine")
    # NeMo 1 has fp8: True with a switch for each format. Newer files have the format itself.
    if flat.get("model.fp8") is True:
        flat["model.fp8"] = "e4m3" if flat.get("model.fp8_e4m3") else "hybrid"
    return {key for key in keys if key in flat}


def _without_classes(data: Mapping[str, Any]) -> dict[str, Any]:
    """Removes the names of classes. An object without fields becomes the name of its class.

    `read_mapping` has renamed `_target_` to `their_target`.
    """
    cleaned: dict[str, Any] = {}
    for key, value in data.items():
        if key.startswith("their_"):
            continue
        if isinstance(value, Mapping):
            has_fields = any(not name.startswith("their_") for name in value)
            if "their_target" in value and not has_fields:
                value = value["their_target"].rpartition(".")[2]
            else:
                value = _without_classes(value)
        cleaned[key] = value
    return cleaned


def combine_model_settings(settings: dict[str, Any]) -> list[str]:
    """Combines dependent settings of the model in place. Returns remarks."""
    remarks: list[str] = []
    # Megatron-Bridge has a function and a switch for its gate.
    is_gated = settings.pop("gated_linear_unit", None)
    function = settings.pop("activation_func", None)
    if function is not None:
        names = {"squared_relu": "squared-relu"}
        if is_gated:
            names = {"silu": "swiglu", "gelu": "geglu"}
        settings["activation"] = names.get(str(function), str(function))
    elif is_gated is not None:
        remarks.append(f"gated_linear_unit={is_gated}: not read without activation_func")
    if str(settings.get("normalization")).lower() == "layernorm1p":
        settings["layernorm_zero_centered_gamma"] = True
    if settings.pop("has_model", False):
        return remarks + apply_model_defaults(settings)
    combine_betas(settings)
    return remarks
