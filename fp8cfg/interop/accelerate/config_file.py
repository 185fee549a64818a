"""Accelerate configuration file, in every spelling in use: the wizard's, the launcher's and the documentation's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fp8cfg.config.errors import ConfigError
from fp8cfg.interop.accelerate.fp8_keys import (
    BACKENDS,
    DOUBTS,
    HANDLER,
    LEVELS,
    differs_under_deepspeed,
    differs_under_torchao,
    engine,
    first_layer_runs,
    held_otherwise,
    without_effect,
)
from fp8cfg.interop.key_table import SILENT, Dialect, Entry, Unsaid, Values, delayed, runs_fp8
from fp8cfg.interop.value_spellings import (
    boolean,
    is_on,
    number,
    one_of,
    read_only,
    shown,
    write_only,
)
from fp8cfg.scalings import SCALINGS

_PRECISIONS: dict[str, dict[str, Any]] = {
    "fp8": {"precision.compute": "bf16", "fp8.enabled": True},
    "no": {"precision.compute": "fp32"},
    "bf16": {"precision.compute": "bf16"},
    "fp16": {"precision.compute": "fp16"},
    "false": {"precision.compute": "fp32"},
    "none": {"precision.compute": "fp32"},
}
_GATHER = "fp8_config.enable_fsdp_float8_all_gather"
_MSAMP, _LEVEL = "deepspeed_config.enable_msamp", "deepspeed_config.msamp_opt_level"
_DYNAMO, _COMPILED = "dynamo_config.dynamo_backend", {"inductor": "on", "no": "off", "false": "off"}
_RANKS = ("no", "false", "multi_gpu", "multi_cpu", "deepspeed", "fsdp")
SHARDS = {"0": "none", "1": "zero1", "2": "zero2", "3": "fsdp"}
"""By the stage of ZeRO; what its third splits too, weights, torch's FSDP2 splits here."""
STAGES = {shard: int(stage) for stage, shard in SHARDS.items()}


def world(ours: Values) -> int:
    """Processes of the whole run."""
    return int(ours["trainer.num_nodes"] * ours["trainer.devices"])


def _distributed_type(ours: Values) -> str:
    if ours["storage.shard"] != "none":
        return "FSDP" if _fsdp(ours) else "DEEPSPEED"
    return "MULTI_GPU" if world(ours) > 1 else "NO"


def _clipping(value: Any) -> dict[str, Any]:
    return {} if value == "auto" else {"trainer.gradient_clip_val": number(value)}


def _zero(ours: Values) -> bool:
    return bool(ours["storage.shard"] in ("zero1", "zero2"))


def _fsdp(ours: Values) -> bool:
    return bool(ours["storage.shard"] == "fsdp")


_TOP = (
    Entry(
        "mixed_precision",
        lambda value: one_of(value, _PRECISIONS),
        lambda ours: (
            "fp8"
            if runs_fp8(ours)
            else {"fp32": "no"}.get(ours["precision.compute"], ours["precision.compute"])
        ),
    ),
    read_only("fp16", lambda value: {"precision.compute": "fp16"} if boolean(value) else {}),
    write_only("compute_environment", lambda _: "LOCAL_MACHINE"),
    Entry(
        "distributed_type",
        lambda value: {"storage.shard": "fsdp"} if str(value).lower() == "fsdp" else {},
        _distributed_type,
    ),
    write_only("fsdp_config.fsdp_version", lambda _: 2, _fsdp),
    write_only("fsdp_config.fsdp_reshard_after_forward", lambda _: True, _fsdp),
    write_only("num_machines", lambda ours: ours["trainer.num_nodes"]),
    write_only("num_processes", world),
    Entry(
        "use_cpu",
        lambda value: {"trainer.accelerator": "cpu"} if boolean(value) else {},
        lambda ours: ours["trainer.accelerator"] == "cpu" or SILENT,
    ),
    Entry(
        _DYNAMO,
        lambda value: {"trainer.compile": one_of(value, _COMPILED)},
        lambda ours: {"on": "INDUCTOR", "off": "NO"}.get(ours["trainer.compile"], SILENT),
    ),
    Entry(
        "deepspeed_config.zero_stage",
        lambda value: {"storage.shard": one_of(value, SHARDS)},
        lambda ours: STAGES[ours["storage.shard"]],
        _zero,
    ),
    Entry(
        "deepspeed_config.gradient_clipping",
        _clipping,
        lambda ours: ours["trainer.gradient_clip_val"],
        _zero,
    ),
    read_only(_LEVEL, lambda value: {"opt_level": one_of(value, LEVELS)}),
    read_only(_MSAMP, lambda value: dict(BACKENDS["msamp"]) if boolean(value) else {}),
    read_only(
        "fsdp_config.fsdp_activation_checkpointing",
        lambda value: {"model.recompute_granularity": "full" if boolean(value) else "none"},
    ),
    Entry("fp8_config.backend", lambda value: one_of(value, BACKENDS), engine, runs_fp8),
    Entry(
        _GATHER,
        lambda value: {"storage.gather": "fp8" if boolean(value) else "bf16"},
        lambda ours: ours["storage.gather"] == "fp8",
        lambda ours: engine(ours) == "AO",
    ),
)
_LAUNCH = Unsaid(
    "how processes are started; torchrun says that",
    ("", None, 0, False, True, "main", "no", "static", "all"),
)
_SHARDING = Unsaid("how FSDP wraps, moves and saves; storage.shard=fsdp splits each layer by FSDP2")
_UNSAID = {
    **dict.fromkeys(
        (
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
        ),
        _LAUNCH,
    ),
    "fsdp_config.": _SHARDING,
    "fsdp_config.fsdp_activation_checkpointing_offload": _SHARDING,
    "parallelism_config.": Unsaid("training here is data-parallel"),
    "fsdp_config.fsdp_version": _SHARDING._replace(usual=(2,)),
    "fsdp_config.fsdp_reshard_after_forward": _SHARDING._replace(usual=(True, "FULL_SHARD")),
    "megatron_lm_config.": Unsaid("Megatron-LM's own; `fp8cfg import megatron` reads its flags"),
    "deepspeed_config.gradient_accumulation_steps": Unsaid(
        "follows here from trainer.global_batch_size, trainer.micro_batch_size and the ranks",
        (1, "auto"),
    ),
    "deepspeed_config.deepspeed_config_file": Unsaid("read with `fp8cfg import deepspeed FILE`"),
    "deepspeed_config.": Unsaid("DeepSpeed's own", ("none", False, None)),
    "dynamo_config.": Unsaid(
        "torch.compile's own; trainer.compile is on, off or auto", (False, None, "default")
    ),
    "fp8_config.pad_inner_dim": Unsaid(
        "layers whose sizes are not multiples of 16 stay in high precision here"
    ),
}
_HANDLED = {f"fp8_config.{e.theirs}": e.theirs for e in HANDLER}
_SPELLINGS = {
    **{f"fp8_config.fp8_{name}": key for key, name in _HANDLED.items()},
    "fp8_config.fp8_backend": "fp8_config.backend",
    "fp8_config.amax_history_length": "fp8_config.amax_history_len",
    "fp8_config.format": "fp8_config.fp8_format",
    "fp8_config.amax_compute_algorithm": "fp8_config.amax_compute_algo",
    "fp8_config.optimization_level": "fp8_config.opt_level",
    "dynamo_backend": "dynamo_config.dynamo_backend",
}


def _msamp(theirs: dict[str, Any]) -> list[str]:
    """DeepSpeed's switch of MS-AMP is a backend of FP8; its level is nobody else's."""
    named = BACKENDS.get(str(theirs.get("fp8_config.backend")).lower(), {}).get("backend")
    if is_on(theirs.get(_MSAMP)):
        if named not in (None, "msamp") and str(theirs.get("mixed_precision")).lower() == "fp8":
            both = " and ".join(shown(key, theirs[key]) for key in (_MSAMP, "fp8_config.backend"))
            raise ConfigError(f"{both}: two backends of FP8; drop one")
        theirs.setdefault("fp8_config.backend", "MSAMP")
    elif named != "msamp" and _LEVEL in theirs:
        return [f"{shown(_LEVEL, theirs.pop(_LEVEL))}: has no effect without {_MSAMP}"]
    return []


def _prepare(theirs: dict[str, Any]) -> list[str]:
    """What has no effect where it stands is said and taken out."""
    lines = _msamp(theirs) + without_effect(theirs, "fp8_config.")
    if (
        "mixed_precision" in theirs
        and is_on(theirs.pop("fp16", None))
        and theirs["mixed_precision"] != "fp16"
    ):
        lines.append(
            f"fp16: Accelerate reads {shown('mixed_precision', theirs['mixed_precision'])} alone"
        )
    theirs.setdefault("mixed_precision", "no")
    started = [
        shown(key, theirs[key])
        for key in ("num_machines", "num_processes")
        if theirs.get(key, 1) not in (1, -1)
    ]
    lines += [f"{', '.join(started)}: {_LAUNCH.why}"] if started else []
    if str(theirs.get("distributed_type", "no")).lower() not in _RANKS:
        lines.append(
            f"{shown('distributed_type', theirs['distributed_type'])}: training here is"
            " data-parallel"
        )
    if str(theirs.get(_DYNAMO, "no")).lower() not in _COMPILED:
        lines.append(
            f"{shown(_DYNAMO, theirs.pop(_DYNAMO))}: trainer.compile=on compiles with inductor"
        )
    if str(theirs.get("deepspeed_config.zero_stage")) == "3":
        lines.append("deepspeed_config.zero_stage=3: weights are split by torch's FSDP2 here")
    backend = BACKENDS.get(str(theirs.get("fp8_config.backend")).lower(), {}).get("backend")
    if backend != "torchao" or str(theirs.get("distributed_type")).lower() != "fsdp":
        gathers = theirs.pop(_GATHER, False)
        lines += (
            [f"{_GATHER}={gathers}: has no effect without backend=AO and distributed_type=FSDP"]
            if is_on(gathers)
            else []
        )
    lines += (
        _held_otherwise(theirs, backend)
        if str(theirs.get("mixed_precision")).lower() == "fp8"
        else []
    )
    if str(theirs.get("mixed_precision")).lower() == "fp8" and "fp8_config.backend" not in theirs:
        lines.append(
            "fp8_config.backend is not given: Accelerate takes torchao (current scaling), TE"
            " (delayed) or MS-AMP, the first that is installed; fp8.scaling says it here"
        )
    return lines


def _held_otherwise(theirs: Values, backend: str | None) -> list[str]:
    """A line on what that backend has otherwise there, and no key of ours says."""
    if backend == "torchao":
        return [first_layer_runs(shown("fp8_config.backend", theirs["fp8_config.backend"]))]
    under = (
        str(theirs.get("distributed_type")).lower() == "deepspeed"
        or "deepspeed_config.zero_stage" in theirs
    )
    if backend == "msamp" and (under or is_on(theirs.get(_MSAMP))):
        return [
            held_otherwise(
                next(
                    shown(key, theirs[key])
                    for key in (_MSAMP, "fp8_config.backend")
                    if key in theirs
                )
            )
        ]
    return []


def _differs(ours: Values) -> list[str]:
    if engine(ours) == "AO":
        return differs_under_torchao()
    return differs_under_deepspeed(ours) if engine(ours) == "MSAMP" and _zero(ours) else []


def _refuse(ours: Values) -> list[str]:
    scaling = ours["fp8.scaling"]
    if engine(ours) == "MSAMP" and not delayed(ours):
        return [
            f"fp8.scaling={scaling}: MS-AMP has delayed scaling alone; drop opt_level, or write"
            " fp8.scaling=delayed"
        ]
    if runs_fp8(ours) and not SCALINGS[scaling].accelerate:
        te, ao = (
            " and ".join(n for n, s in SCALINGS.items() if s.accelerate == engine)
            for engine in ("TE", "AO")
        )
        return [
            f"fp8.scaling={scaling}: Accelerate has no such scaling; it has {te} (TE) and {ao}"
            " (torchao)"
        ]
    return []


WHY = {
    "precision.compute": "under fp8 Accelerate computes the rest in bf16",
    "fp8.output_layer": (
        "Accelerate converts every linear layer with TE and MS-AMP, and not the last one with"
        " torchao"
    ),
    "fp8.include": "a filter is Python code there (AORecipeKwargs.module_filter_func)",
    "fp8.exclude": "a filter is Python code there (AORecipeKwargs.module_filter_func)",
    "fp8.granularity": "the file has tensorwise alone; AORecipeKwargs(config=...) has rows",
    "opt_level": "Accelerate has O1 and O2, of MS-AMP alone",
    "storage.": (
        "Accelerate has no key for it; weights, gradients and moments have the dtype of the"
        " script's model"
    ),
}
_FP8 = tuple(replace(entry, theirs=key) for key, entry in zip(_HANDLED, HANDLER, strict=True))
ACCELERATE = Dialect(
    "Accelerate",
    (*_TOP, *_FP8),
    _SPELLINGS,
    {},
    _UNSAID,
    _prepare,
    _refuse,
    WHY,
    DOUBTS,
    differs=_differs,
)
