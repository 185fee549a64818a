"""Key table of Accelerate's configuration file, in all spellings.

The questionnaire (`accelerate config`), the launcher and the documentation name the same keys
differently. `fp8_config` has the fields of the FP8 handlers, see `accelerate_handlers`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fp8cfg.interop.key_table import (
    AMAX_COMPUTE_ALGOS,
    FORMATS,
    OMIT,
    Entry,
    KeyTable,
    Unsupported,
    Values,
    format_setting,
    is_on,
    parse_bool,
    parse_choice,
    parse_float,
    parse_int,
    read_only,
    renamed_choice,
    runs_fp8,
    same_value,
    uses_delayed_scaling,
    write_only,
)
from fp8cfg.schema.errors import ConfigError
from fp8cfg.schema.scalings import SCALINGS

# Accelerate converts the output layer with TE and MS-AMP. With torchao it skips the first and the
# last linear layer.
_TE = {"backend": "te", "fp8.output_layer": True}
_TORCHAO = {"backend": "torchao", "fp8.scaling": "current"}
_MSAMP = {"backend": "msamp", "fp8.output_layer": True}
BACKENDS: dict[str, dict[str, Any]] = {
    "te": _TE,
    "ao": _TORCHAO,
    "msamp": _MSAMP,
    "transformer_engine": _TE,
    "torchao": _TORCHAO,
    "ms-amp": _MSAMP,
}
"""Recipe values of the names of FP8 backends, in lower case."""
LEVELS = {"o1": "O1", "o2": "O2"}
ZERO_STAGES = {"none": 0, "zero1": 1, "zero2": 2, "fsdp": 3}
"""ZeRO stage by storage.shard. FSDP2 replaces stage 3."""
SHARDS = {str(stage): shard for shard, stage in ZERO_STAGES.items()}
_GEMMS = ("fprop", "dgrad", "wgrad")

_SKIPS_FIRST_LAYER = "Accelerate's torchao also keeps the model's first linear layer out of FP8"
# msamp.deepspeed: FP8Optimizer and FP8DeepSpeedZeroOptimizer. The level sets only the moments.
_DEEPSPEED_WEIGHTS = "under DeepSpeed MS-AMP stores E4M3 weights and FP16 masters at every level"


def find_backend(values: Values) -> str:
    """Returns Accelerate's name of the backend for a recipe, "" without FP8."""
    if not runs_fp8(values):
        return ""
    if values["backend"] == "msamp" or (values["backend"] == "auto" and values["opt_level"]):
        return "MSAMP"
    return SCALINGS[values["fp8.scaling"]].accelerate or "TE"


def _uses_te(values: Values) -> bool:
    return find_backend(values) == "TE"


def _uses_te_delayed(values: Values) -> bool:
    return _uses_te(values) and uses_delayed_scaling(values)


def _uses_msamp(values: Values) -> bool:
    return find_backend(values) == "MSAMP"


def _named_backend(settings: Values, key: str) -> str | None:
    """Returns the recipe's backend for the setting of a key, or None."""
    name = str(settings.get(key)).strip().lower()
    return BACKENDS.get(name, {}).get("backend")


# Fields of fp8_config and of the handlers.


def _read_fp8_format(value: Any) -> dict[str, Any]:
    # Accelerate accepts E5M2, and Transformer Engine rejects it later.
    if str(value).strip().lower() == "e5m2":
        raise ValueError("Transformer Engine trains with HYBRID or E4M3, never with E5M2 only")
    return {"fp8.format": parse_choice(value, FORMATS)}


def _read_level(value: Any) -> dict[str, Any]:
    if str(value).lower() == "o3":
        raise ValueError("Accelerate has only O1 and O2; remove it there, and set opt_level=O3")
    return {"opt_level": parse_choice(value, LEVELS)}


def _write_level(values: Values) -> Any:
    return values["opt_level"] if values["opt_level"] in LEVELS.values() else OMIT


def read_linear_override(value: Any) -> dict[str, Any]:
    """Reads override_linear_precision: three booleans for fprop, dgrad and wgrad.

    The questionnaire writes one for all three. YAML reads `(false, false, false)` as text.
    """
    flags = value
    if not isinstance(value, (list, tuple)):
        flags = str(value).strip("()[] ").split(",")
    if len(flags) == 1:
        flags = list(flags) * 3
    if len(flags) != 3:
        raise ValueError("expected three of true and false, for fprop, dgrad and wgrad")
    return {
        f"fp8.override_linear_precision.{gemm}": parse_bool(flag)
        for gemm, flag in zip(_GEMMS, flags, strict=True)
    }


def _write_linear_override(values: Values) -> list[bool]:
    return [values[f"fp8.override_linear_precision.{gemm}"] for gemm in _GEMMS]


HANDLER_ENTRIES = (
    Entry("fp8_format", _read_fp8_format, lambda values: values["fp8.format"].upper(), _uses_te),
    same_value("margin", "fp8.margin", parse_int, _uses_te_delayed),
    same_value("interval", "fp8.interval", parse_int, _uses_te_delayed),
    same_value("amax_history_len", "fp8.amax_history_len", parse_int, _uses_te_delayed),
    renamed_choice(
        "amax_compute_algo", "fp8.amax_compute_algo", AMAX_COMPUTE_ALGOS, _uses_te_delayed
    ),
    Entry("override_linear_precision", read_linear_override, _write_linear_override, _uses_te),
    same_value("use_autocast_during_eval", "fp8.use_autocast_during_eval", parse_bool, _uses_te),
    Entry(
        "use_mxfp8_block_scaling",
        lambda setting: {"fp8.scaling": "mxfp8"} if parse_bool(setting) else {},
        lambda values: values["fp8.scaling"] == "mxfp8" or OMIT,
        _uses_te,
    ),
    Entry("opt_level", _read_level, _write_level, _uses_msamp),
)
"""Fields of the handlers except the backend."""


def drop_fields_of_other_backends(settings: dict[str, Any], prefix: str = "") -> list[str]:
    """Removes fields that the chosen backend does not read, and returns a remark on each.

    Args:
        settings: Settings of a file or a handler. Changed in place.
        prefix: Beginning of the fields' names.
    """
    backend = _named_backend(settings, f"{prefix}backend")
    if backend is None:
        return []
    remarks = []
    for entry in HANDLER_ENTRIES:
        key = f"{prefix}{entry.key}"
        owner = "msamp" if entry.key == "opt_level" else "te"
        if key in settings and backend != owner:
            setting = format_setting(key, settings.pop(key))
            name = str(settings[f"{prefix}backend"]).strip().upper()
            remarks.append(f"{setting}: has no effect with backend={name}")
    return remarks


# Remarks on differences between the libraries and fp8cfg.


def other_weights_remark(setting: str) -> str:
    """Returns the remark on a source with a level of MS-AMP under DeepSpeed."""
    return f"{setting}: {_DEEPSPEED_WEIGHTS}; without DeepSpeed, as here, O1 and O2 use scaled FP16"


def list_level_remarks(values: Values) -> list[str]:
    """Returns a remark if a level of MS-AMP is exported for DeepSpeed."""
    level = values["opt_level"]
    if level not in LEVELS.values():
        return []
    remark = f"opt_level={level}: exported, but {_DEEPSPEED_WEIGHTS}, not in scaled FP16"
    if level == "O2":
        remark += "; opt_level=O3 is the same here"
    return [remark]


def first_layer_remark(setting: str) -> str:
    """Returns the remark on a source with torchao and Accelerate's default filter."""
    return (
        f"{setting}: {_SKIPS_FIRST_LAYER}; here it runs in FP8, see fp8cfg plan for the layers and"
        " set fp8.exclude"
    )


def list_torchao_remarks() -> list[str]:
    """Returns a remark on a recipe that is exported for torchao."""
    return [
        f"fp8.scaling=current: exported, but {_SKIPS_FIRST_LAYER}; pass your own filter to change it"
        " (AORecipeKwargs.module_filter_func)"
    ]


_REMOVED_IN_TE_2 = "Transformer Engine 2 ignores it without a message"
CAVEATS = {
    "fp8.amax_compute_algo": (
        "Accelerate does not pass most_recent on to Transformer Engine, so TE uses max"
    ),
    "fp8.interval": _REMOVED_IN_TE_2,
    **{f"fp8.override_linear_precision.{gemm}": _REMOVED_IN_TE_2 for gemm in _GEMMS},
}
_FILTER = "a filter is Python code in Accelerate (AORecipeKwargs.module_filter_func)"
REASONS = {
    "precision.compute": "under fp8 Accelerate computes other layers in bf16",
    "fp8.output_layer": (
        "Accelerate converts every linear layer with TE and MS-AMP, and all but the last with"
        " torchao"
    ),
    "fp8.include": _FILTER,
    "fp8.exclude": _FILTER,
    "fp8.granularity": "a file has only tensorwise; AORecipeKwargs(config=...) has rows too",
    "opt_level": "Accelerate has only MS-AMP's O1 and O2",
    "storage.": (
        "Accelerate has no key for it; weights, gradients and moments have the dtype of the"
        " script's model"
    ),
}


# The configuration file.

_PRECISIONS: dict[str, dict[str, Any]] = {
    "fp8": {"precision.compute": "bf16", "fp8.enabled": True},
    "no": {"precision.compute": "fp32"},
    "bf16": {"precision.compute": "bf16"},
    "fp16": {"precision.compute": "fp16"},
    "false": {"precision.compute": "fp32"},
    "none": {"precision.compute": "fp32"},
}
_BACKEND = "fp8_config.backend"
_GATHER = "fp8_config.enable_fsdp_float8_all_gather"
_MSAMP_SWITCH = "deepspeed_config.enable_msamp"
_MSAMP_LEVEL = "deepspeed_config.msamp_opt_level"
_DYNAMO = "dynamo_config.dynamo_backend"
_COMPILE = {"inductor": "on", "no": "off", "false": "off"}
_DISTRIBUTED_TYPES = ("no", "false", "multi_gpu", "multi_cpu", "deepspeed", "fsdp")
_PARALLEL_SIZES = {
    "parallelism_config.parallelism_config_tp_size": "trainer.strategy.tensor_model_parallel_size",
    "parallelism_config.parallelism_config_cp_size": "trainer.strategy.context_parallel_size",
    "parallelism_config.parallelism_config_dp_replicate_size": (
        "trainer.strategy.data_parallel_replicate_size"
    ),
}


def _num_processes(values: Values) -> int:
    return int(values["trainer.num_nodes"] * values["trainer.devices"])


def _uses_zero(values: Values) -> bool:
    return bool(values["storage.shard"] in ("zero1", "zero2"))


def _uses_fsdp(values: Values) -> bool:
    return bool(values["storage.shard"] == "fsdp")


def _has_parallel_sizes(values: Values) -> bool:
    return any(values[key] > 1 for key in _PARALLEL_SIZES.values())


def _write_mixed_precision(values: Values) -> str:
    if runs_fp8(values):
        return "fp8"
    compute = str(values["precision.compute"])
    return "no" if compute == "fp32" else compute


def _write_distributed_type(values: Values) -> str:
    if _uses_fsdp(values):
        return "FSDP"
    if values["storage.shard"] != "none":
        return "DEEPSPEED"
    return "MULTI_GPU" if _num_processes(values) > 1 else "NO"


def _write_dynamo_backend(values: Values) -> Any:
    return {"on": "INDUCTOR", "off": "NO"}.get(values["trainer.compile"], OMIT)


def _write_shard_size(values: Values) -> Any:
    """Returns the number of ranks that share the weights of one replica."""
    if not _uses_fsdp(values):
        return OMIT
    other_ranks = 1
    for key in _PARALLEL_SIZES.values():
        other_ranks *= values[key]
    return max(_num_processes(values) // other_ranks, 1)


def _read_clipping(value: Any) -> dict[str, Any]:
    if value == "auto":
        return {}
    return {"trainer.gradient_clip_val": parse_float(value)}


_FILE_ENTRIES = (
    Entry(
        "mixed_precision",
        lambda setting: parse_choice(setting, _PRECISIONS),
        _write_mixed_precision,
    ),
    read_only("fp16", lambda setting: {"precision.compute": "fp16"} if parse_bool(setting) else {}),
    write_only("compute_environment", lambda values: "LOCAL_MACHINE"),
    Entry(
        "distributed_type",
        lambda setting: {"storage.shard": "fsdp"} if str(setting).lower() == "fsdp" else {},
        _write_distributed_type,
    ),
    write_only("fsdp_config.fsdp_version", lambda values: 2, _uses_fsdp),
    write_only("fsdp_config.fsdp_reshard_after_forward", lambda values: True, _uses_fsdp),
    write_only("num_machines", lambda values: values["trainer.num_nodes"]),
    write_only("num_processes", _num_processes),
    Entry(
        "use_cpu",
        lambda setting: {"trainer.accelerator": "cpu"} if parse_bool(setting) else {},
        lambda values: values["trainer.accelerator"] == "cpu" or OMIT,
    ),
    Entry(
        _DYNAMO,
        lambda setting: {"trainer.compile": parse_choice(setting, _COMPILE)},
        _write_dynamo_backend,
    ),
    Entry(
        "deepspeed_config.zero_stage",
        lambda setting: {"storage.shard": parse_choice(setting, SHARDS)},
        lambda values: ZERO_STAGES[values["storage.shard"]],
        _uses_zero,
    ),
    Entry(
        "deepspeed_config.gradient_clipping",
        _read_clipping,
        lambda values: values["trainer.gradient_clip_val"],
        _uses_zero,
    ),
    read_only(_MSAMP_LEVEL, lambda setting: {"opt_level": parse_choice(setting, LEVELS)}),
    read_only(
        _MSAMP_SWITCH, lambda setting: dict(BACKENDS["msamp"]) if parse_bool(setting) else {}
    ),
    read_only(
        "fsdp_config.fsdp_activation_checkpointing",
        lambda setting: {"model.recompute_granularity": "full" if parse_bool(setting) else "none"},
    ),
    Entry(_BACKEND, lambda setting: parse_choice(setting, BACKENDS), find_backend, runs_fp8),
    Entry(
        _GATHER,
        lambda setting: {"storage.gather": "fp8" if parse_bool(setting) else "bf16"},
        lambda values: values["storage.gather"] == "fp8",
        lambda values: find_backend(values) == "AO",
    ),
    *(
        same_value(key, recipe_key, parse_int, _has_parallel_sizes)
        for key, recipe_key in _PARALLEL_SIZES.items()
    ),
    write_only(
        "parallelism_config.parallelism_config_dp_shard_size",
        _write_shard_size,
        _has_parallel_sizes,
    ),
    read_only(
        "RANKS",
        lambda ranks: {"trainer.num_nodes": ranks[0], "trainer.devices": ranks[1]},
    ),
)

_LAUNCH_KEYS = (
    "machine_rank",
    "gpu_ids",
    "main_process_ip",
    "main_process_port",
    "main_training_function",
    "rdzv_backend",
    "same_network",
    "debug",
    "enable_cpu_affinity",
    "downcast_bf16",
    "tpu_name",
    "tpu_zone",
    "tpu_use_cluster",
    "tpu_use_sudo",
    "tpu_vm",
    "tpu_env",
    "command_file",
    "commands",
    "mpirun_config.",
    "ec2_instance_type",
    "iam_role_name",
    "image_uri",
    "profile",
    "region",
    "base_job_name",
    "pytorch_version",
    "py_version",
    "transformers_version",
    "sagemaker_inputs_file",
    "sagemaker_metrics_file",
    "additional_args",
)
_LAUNCH = Unsupported(
    "belongs to the launch; use torchrun's arguments",
    ("", None, 0, False, True, "main", "no", "static", "all"),
)
_FSDP = Unsupported("FSDP's wrapping, offload and saving; storage.shard=fsdp shards each layer")
_PARALLELISM_OPTIONS = (
    "sp_size",
    "sp_backend",
    "sp_seq_length",
    "sp_seq_length_is_variable",
    "sp_attn_implementation",
    "cp_backend",
    "cp_comm_strategy",
)
_PARALLELISM = Unsupported(
    "Ulysses and the communication of context parallelism have no key here", (1, None)
)
PAD_INNER_DIM = Unsupported(
    "layers with sizes that are not multiples of 16 stay in high precision here"
)
_UNSUPPORTED = {
    **dict.fromkeys(_LAUNCH_KEYS, _LAUNCH),
    "fsdp_config.": _FSDP,
    "fsdp_config.fsdp_activation_checkpointing_offload": _FSDP,
    "fsdp_config.fsdp_version": _FSDP._replace(usual=(2,)),
    "fsdp_config.fsdp_reshard_after_forward": _FSDP._replace(usual=(True, "FULL_SHARD")),
    "parallelism_config.": _PARALLELISM,
    **{
        f"parallelism_config.parallelism_config_{name}": _PARALLELISM
        for name in _PARALLELISM_OPTIONS
    },
    "megatron_lm_config.": Unsupported(
        "Megatron-LM's configuration; run fp8cfg import megatron with its flags"
    ),
    "deepspeed_config.gradient_accumulation_steps": Unsupported(
        "follows from trainer.global_batch_size, trainer.micro_batch_size and the ranks",
        (1, "auto"),
    ),
    "deepspeed_config.deepspeed_config_file": Unsupported("run fp8cfg import deepspeed FILE"),
    "deepspeed_config.": Unsupported("only for DeepSpeed, no key here", ("none", False, None)),
    "dynamo_config.": Unsupported(
        "options of torch.compile; trainer.compile is on, off or auto", (False, None, "default")
    ),
    "fp8_config.pad_inner_dim": PAD_INNER_DIM,
}
_ALIASES = {
    **{f"fp8_config.fp8_{entry.key}": f"fp8_config.{entry.key}" for entry in HANDLER_ENTRIES},
    "fp8_config.fp8_backend": _BACKEND,
    "fp8_config.amax_history_length": "fp8_config.amax_history_len",
    "fp8_config.format": "fp8_config.fp8_format",
    "fp8_config.amax_compute_algorithm": "fp8_config.amax_compute_algo",
    "fp8_config.optimization_level": "fp8_config.opt_level",
    "dynamo_backend": _DYNAMO,
    **{
        f"parallelism_config.{name}": f"parallelism_config.parallelism_config_{name}"
        for name in ("tp_size", "cp_size", "dp_replicate_size", "dp_shard_size")
    },
}


def _prepare(settings: dict[str, Any]) -> list[str]:
    remarks = _resolve_msamp_switch(settings)
    remarks += drop_fields_of_other_backends(settings, "fp8_config.")
    remarks += _resolve_mixed_precision(settings)
    remarks += _resolve_ranks(settings)
    if str(settings.get(_DYNAMO, "no")).lower() not in _COMPILE:
        setting = format_setting(_DYNAMO, settings.pop(_DYNAMO))
        remarks.append(f"{setting}: not supported; trainer.compile=on compiles with inductor")
    if str(settings.get("deepspeed_config.zero_stage")) == "3":
        remarks.append("deepspeed_config.zero_stage=3: imported as FSDP2 (storage.shard=fsdp)")
    backend = _named_backend(settings, _BACKEND)
    is_fsdp = str(settings.get("distributed_type")).lower() == "fsdp"
    if not (backend == "torchao" and is_fsdp):
        gather = settings.pop(_GATHER, False)
        if is_on(gather):
            remarks.append(
                f"{_GATHER}={gather}: has no effect without backend=AO and distributed_type=FSDP"
            )
    if str(settings.get("mixed_precision")).lower() == "fp8":
        remarks += _list_backend_remarks(settings, backend)
    return remarks


def _resolve_msamp_switch(settings: dict[str, Any]) -> list[str]:
    """Replaces DeepSpeed's switch of MS-AMP by the backend."""
    backend = _named_backend(settings, _BACKEND)
    if is_on(settings.get(_MSAMP_SWITCH)):
        is_fp8 = str(settings.get("mixed_precision")).lower() == "fp8"
        if is_fp8 and backend not in (None, "msamp"):
            switch = format_setting(_MSAMP_SWITCH, settings[_MSAMP_SWITCH])
            name = format_setting(_BACKEND, settings[_BACKEND])
            raise ConfigError(f"{switch} and {name}: two FP8 backends; remove one")
        settings.setdefault(_BACKEND, "MSAMP")
        return []
    if backend != "msamp" and _MSAMP_LEVEL in settings:
        setting = format_setting(_MSAMP_LEVEL, settings.pop(_MSAMP_LEVEL))
        return [f"{setting}: has no effect without {_MSAMP_SWITCH}"]
    return []


def _resolve_mixed_precision(settings: dict[str, Any]) -> list[str]:
    """Removes the old key fp16 if there is a new one. Without both, Accelerate uses float32."""
    remarks = []
    if "mixed_precision" in settings:
        fp16 = settings.pop("fp16", None)
        if is_on(fp16) and settings["mixed_precision"] != "fp16":
            setting = format_setting("mixed_precision", settings["mixed_precision"])
            remarks.append(f"fp16: has no effect, Accelerate reads {setting}")
    settings.setdefault("mixed_precision", "no")
    return remarks


def _resolve_ranks(settings: dict[str, Any]) -> list[str]:
    """Reads the number of ranks, if parallel sizes depend on it."""
    remarks = []
    has_parallel_sizes = any(settings.get(key, 1) not in (1, "1") for key in _PARALLEL_SIZES)
    if has_parallel_sizes and "num_processes" in settings:
        machines = parse_int(settings.get("num_machines", 1))
        processes = parse_int(settings["num_processes"])
        settings["RANKS"] = (machines, processes // max(machines, 1))
    else:
        # -1 is a placeholder of the launcher.
        launch_settings = [
            format_setting(key, settings[key])
            for key in ("num_machines", "num_processes")
            if settings.get(key, 1) not in (1, -1)
        ]
        if launch_settings:
            remarks.append(f"{', '.join(launch_settings)}: {_LAUNCH.reason}")
    if str(settings.get("distributed_type", "no")).lower() not in _DISTRIBUTED_TYPES:
        setting = format_setting("distributed_type", settings["distributed_type"])
        remarks.append(
            f"{setting}: not read; set storage.shard and trainer.strategy for several ranks"
        )
    return remarks


def _list_backend_remarks(settings: Values, backend: str | None) -> list[str]:
    """Returns a remark on what the FP8 backend does differently, or on a missing backend."""
    if _BACKEND not in settings:
        return [
            "fp8_config.backend is missing: Accelerate uses the first installed of torchao (current"
            " scaling), TE (delayed) and MS-AMP; set fp8.scaling to choose here"
        ]
    if backend == "torchao":
        return [first_layer_remark(format_setting(_BACKEND, settings[_BACKEND]))]
    uses_deepspeed = (
        str(settings.get("distributed_type")).lower() == "deepspeed"
        or "deepspeed_config.zero_stage" in settings
        or is_on(settings.get(_MSAMP_SWITCH))
    )
    if backend == "msamp" and uses_deepspeed:
        key = _MSAMP_SWITCH if _MSAMP_SWITCH in settings else _BACKEND
        return [other_weights_remark(format_setting(key, settings[key]))]
    return []


def _list_export_remarks(values: Values) -> list[str]:
    if find_backend(values) == "AO":
        return list_torchao_remarks()
    if _uses_msamp(values) and _uses_zero(values):
        return list_level_remarks(values)
    return []


def find_export_errors(values: Values) -> list[str]:
    scaling = values["fp8.scaling"]
    if _uses_msamp(values) and not uses_delayed_scaling(values):
        return [
            f"fp8.scaling={scaling}: MS-AMP has only delayed scaling; remove opt_level or set"
            " fp8.scaling=delayed"
        ]
    if runs_fp8(values) and not SCALINGS[scaling].accelerate:
        of_te = [name for name, row in SCALINGS.items() if row.accelerate == "TE"]
        of_torchao = [name for name, row in SCALINGS.items() if row.accelerate == "AO"]
        return [
            f"fp8.scaling={scaling}: Accelerate has no such scaling; set one of"
            f" {' and '.join(of_te)} (TE) or {' and '.join(of_torchao)} (torchao)"
        ]
    return []


_FP8_ENTRIES = tuple(replace(entry, key=f"fp8_config.{entry.key}") for entry in HANDLER_ENTRIES)
ACCELERATE = KeyTable(
    "Accelerate",
    (*_FILE_ENTRIES, *_FP8_ENTRIES),
    aliases=_ALIASES,
    unsupported=_UNSUPPORTED,
    prepare=_prepare,
    export_errors=find_export_errors,
    reasons=REASONS,
    caveats=CAVEATS,
    extra_keys=tuple(_PARALLEL_SIZES.values()),
    export_remarks=_list_export_remarks,
)
