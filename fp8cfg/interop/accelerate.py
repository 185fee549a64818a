"""Key table of Accelerate's configuration file, in all spellings.

The questionnaire (`accelerate config`), the launcher and the documentation name the same keys
differently. `fp8_config` has the fields of the FP8 backends.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fp8cfg.interop.accelerate_backends import (
    BACKENDS,
    CAVEATS,
    HANDLER_ENTRIES,
    LEVELS,
    PAD_INNER_DIM,
    REASONS,
    SHARDS,
    ZERO_STAGES,
    drop_fields_of_other_backends,
    find_backend,
    find_export_errors,
    find_named_backend,
    first_layer_remark,
    list_level_remarks,
    list_torchao_remarks,
    other_weights_remark,
    uses_msamp,
)
from fp8cfg.interop.key_table import (
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
    runs_fp8,
    same_value,
    write_only,
)
from fp8cfg.schema.errors import ConfigError

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
    # Accelerate has ZeRO-1 and ZeRO-2 only through DeepSpeed.
    if values["storage.shard"] != "none":
        return "DEEPSPEED"
    return "MULTI_GPU" if _num_processes(values) > 1 else "NO"


def _write_dynamo_backend(values: Values) -> Any:
    return {"on": "INDUCTOR", "off": "NO"}.get(values["trainer.compile"], OMIT)


def _write_shard_size(values: Values) -> Any:
    """Returns the number of ranks for the shards of one replica."""
    if not _uses_fsdp(values):
        return OMIT
    other_ranks = 1
    for key in _PARALLEL_SIZES.values():
        other_ranks *= values[key]
    return max(_num_processes(values) // other_ranks, 1)


def _read_clipping(value: Any) -> dict[str, Any]:
    if value == "auto":  # max_grad_norm of the Trainer
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
_UNSUPPORTED = {
    **dict.fromkeys(_LAUNCH_KEYS, _LAUNCH),
    "compute_environment": _LAUNCH._replace(usual=("LOCAL_MACHINE",)),
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
    backend = find_named_backend(settings, _BACKEND)
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
    backend = find_named_backend(settings, _BACKEND)
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
        machines = _parse_count(settings, "num_machines")
        processes = _parse_count(settings, "num_processes")
        if processes % machines:
            raise ConfigError(
                f"num_processes={processes}: is not a multiple of num_machines={machines}"
            )
        settings["RANKS"] = (machines, processes // machines)
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


def _parse_count(settings: Values, key: str) -> int:
    """Returns the number of machines or processes. The default is 1."""
    setting = settings.get(key, 1)
    try:
        count = parse_int(setting)
    except ValueError as error:
        raise ConfigError(f"{format_setting(key, setting)}: {error}") from None
    if count < 1:
        raise ConfigError(f"{key}={count}: must be at least 1")
    return count


def _list_backend_remarks(settings: Values, backend: str | None) -> list[str]:
    """Returns a remark on a difference of the FP8 backend, or on a missing backend."""
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
    if uses_msamp(values) and _uses_zero(values):
        return list_level_remarks(values)
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
