"""Adjustments of imported recipe values.

The settings of another project can be valid there and still conflict in a recipe. Its library may
ignore a setting, run it differently, or derive a size that a recipe states. The functions change
the values and return a remark on each change that the user did not ask for.

Common arguments:
    values: Recipe values by short key, as far as the source has them. Changed in place.
    origins: The setting in the source by recipe key, such as {"fp8.margin": "--fp8-margin=1"}.
        Values from defaults of the other project have no origin, and cause no remark.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd
from typing import Any

from fp8cfg.interop.key_table import Values
from fp8cfg.planning.layer_plan import plan_layers
from fp8cfg.schema.backends import capabilities
from fp8cfg.schema.errors import ConfigError
from fp8cfg.schema.fp8 import ONLY_UNDER
from fp8cfg.schema.keys import full
from fp8cfg.schema.precision import Precision
from fp8cfg.schema.recipe import Recipe, fields
from fp8cfg.schema.rules_precision import FSDP_COLUMNS
from fp8cfg.schema.scalings import SCALINGS
from fp8cfg.schema.storage import COLUMNS, of_level

PARALLEL_SIZES = (
    "trainer.strategy.tensor_model_parallel_size",
    "trainer.strategy.pipeline_model_parallel_size",
    "trainer.strategy.context_parallel_size",
)
NOT_IN_SOURCE = "not read from the source"
"""Part of each remark on a value that the source does not set, or not in a setting that is read."""

_LINEAR_OVERRIDES = tuple(
    f"fp8.override_linear_precision.{gemm}" for gemm in ("fprop", "dgrad", "wgrad")
)
_LOSS_SCALE_KEYS = {
    "precision.loss_scale",
    "precision.initial_loss_scale",
    "precision.min_loss_scale",
    "precision.loss_scale_window",
    "precision.hysteresis",
}
_E4M3_ONLY = (
    "MXFP8 and NVFP4 use E4M3 in both passes here; with E5M2 gradients and block scales training"
    " diverges"
)
# MS-AMP's fixed behavior where it differs from the recipe's defaults.
_MSAMP_VALUES = {
    "fp8.amax_history_len": 16,
    "fp8.reduce_amax": False,
    "storage.accumulate": "stored",
}
_MSAMP_NEEDS_DEEPSPEED = "MS-AMP has sharding and O3 only with DeepSpeed"


def default_value(key: str) -> Any:
    """Returns the recipe's default of a short key."""
    return fields()[full(key)].get_default(call_default_factory=True)


def changed_keys(values: Values) -> list[str]:
    """Returns the keys whose values differ from the recipe's defaults."""
    return [key for key, value in values.items() if value != default_value(key)]


# Values without effect.


def drop_ineffective_values(values: dict[str, Any], origins: Mapping[str, str]) -> list[str]:
    """Removes values without effect. The other project ignores them, a recipe rejects them."""
    remarks = []
    for key in list(values):
        reason = _why_ineffective(key, values)
        if reason is None:
            continue
        value = values.pop(key)
        # A default without effect is no loss. The format is different: hybrid, its default, does
        # change the gradients in the other project.
        is_loss = value != default_value(key) or reason == _E4M3_ONLY
        if key in origins and is_loss:
            remarks.append(f"{origins[key]}: {reason}")
    formats = SCALINGS[values.get("fp8.scaling", "delayed")].formats
    if values.get("fp8.enabled") and len(formats) == 1:
        values["fp8.format"] = formats[0]
    return list(dict.fromkeys(remarks))


def _why_ineffective(key: str, values: Values) -> str | None:
    """Returns why a value has no effect, or None if it has one."""
    is_fp8_key = key.startswith("fp8.")
    if (is_fp8_key or key in ("backend", "opt_level")) and not values.get("fp8.enabled"):
        return "has no effect, FP8 is off"
    scaling = values.get("fp8.scaling", "delayed")
    if is_fp8_key and scaling not in ONLY_UNDER.get(key.removeprefix("fp8."), (scaling,)):
        return f"has no effect under {scaling} scaling"
    if key == "fp8.format" and values[key] not in SCALINGS[scaling].formats:
        return _E4M3_ONLY
    if key == "fp8.amax_compute_algo" and values.get("fp8.amax_history_len") == 1:
        return "has no effect with a history of length 1"
    if key in _LOSS_SCALE_KEYS:
        if values.get("precision.compute") != "fp16":
            return "has no effect, loss scaling is for fp16"
        fixed_scale = values.get("precision.loss_scale")
        if fixed_scale and key != "precision.loss_scale":
            return f"has no effect with the fixed loss scale {fixed_scale:g}"
    return None


# Values that depend on the backend.


def apply_backend(values: dict[str, Any], origins: Mapping[str, str]) -> list[str]:
    """Adds the fixed behavior of the backend. Replaces a backend without a requested feature."""
    remarks = []
    if values.get("storage.shard") == "fsdp":
        remarks += _drop_storage_under_fsdp(values, origins)
    backend = values.get("backend")
    if backend == "te":
        remarks += _apply_te(values, origins)
    elif backend == "msamp":
        remarks += _apply_msamp(values, origins)
    return remarks + _drop_compile(values, origins)


def find_contradictions(values: Values, origins: Mapping[str, str]) -> list[str]:
    """Returns an error for MS-AMP with sharded weights. MS-AMP itself does not support them."""
    uses_msamp = values.get("backend") == "msamp" or values.get("opt_level")
    if not (values.get("fp8.enabled") and uses_msamp and values.get("storage.shard") == "fsdp"):
        return []
    keys = ("storage.shard", "opt_level", "backend")
    settings = list(dict.fromkeys(origins[key] for key in keys if key in origins))
    return [
        f"{' and '.join(settings[:2])}: MS-AMP does not shard weights; use DeepSpeed's ZeRO stage"
        " 1 or 2, or remove MS-AMP"
    ]


def _drop_storage_under_fsdp(values: dict[str, Any], origins: Mapping[str, str]) -> list[str]:
    """Removes dtypes without support in FSDP2."""
    supported: dict[str, tuple[str, ...]] = {
        f"storage.{column}": (dtype,) for column, dtype in FSDP_COLUMNS.items()
    }
    supported["storage.comm"] = ("fp32", "bf16", values.get("precision.compute", "bf16"))
    dropped = []
    for key, dtypes in supported.items():
        if key in values and values[key] not in dtypes:
            del values[key]
            dropped.append(key)
    settings = dict.fromkeys(origins[key] for key in dropped if key in origins)
    return [
        f"{setting}: storage.shard=fsdp keeps weights and gradients in float32, and reduces"
        " gradients in float32 or bf16"
        for setting in settings
    ]


def _apply_te(values: dict[str, Any], origins: Mapping[str, str]) -> list[str]:
    has_history = SCALINGS[values.get("fp8.scaling", "delayed")].history
    overrides = [key for key in _LINEAR_OVERRIDES if values.get(key)]
    # TE 2 has backward_override instead: dgrad and wgrad together, and not under delayed scaling.
    is_backward_override = not has_history and overrides == list(_LINEAR_OVERRIDES[1:])
    if is_backward_override:
        overrides = []
    changed = changed_keys(values)
    keys_without_te = ("fp8.interval", "fp8.multi_head_attention", *overrides)
    missing = [key for key in keys_without_te if key in changed]
    if values.get("storage.shard") == "fsdp":
        missing.append("storage.shard=fsdp")
    if missing:
        del values["backend"]
        if "backend" not in origins:
            return []
        return [f"{origins['backend']}: backend stays auto, backend=te has no {', '.join(missing)}"]
    if has_history:
        values["fp8.first_step"] = "te"  # TE starts with scale 1
    return []


def _apply_msamp(values: dict[str, Any], origins: Mapping[str, str]) -> list[str]:
    remarks = []
    for column in COLUMNS:
        key = f"storage.{column}"
        if key in values:
            del values[key]
            if key in origins:
                remarks.append(f"{origins[key]}: MS-AMP's level sets the dtypes of state")
    values |= _MSAMP_VALUES

    is_sharded = values.get("storage.shard", "none") not in ("auto", "none")
    if values.get("opt_level") == "O3" or is_sharded:
        # The native backend has the same storage without DeepSpeed. Its levels have other scales
        # than MS-AMP's, so the columns with power-of-two scales become explicit values.
        precision = Precision(backend="msamp", opt_level=values.get("opt_level"))
        for column, dtype in of_level(precision).items():
            if dtype == "fp8_pow2":
                values[f"storage.{column}"] = dtype
        values["backend"] = "native"
        values.setdefault("opt_level", "O2")
        if "backend" in origins:
            remarks.append(
                f"{origins['backend']}: imported as backend=native with the same storage;"
                f" {_MSAMP_NEEDS_DEEPSPEED}"
            )
    return list(dict.fromkeys(remarks))


def _drop_compile(values: dict[str, Any], origins: Mapping[str, str]) -> list[str]:
    backend = values.get("backend", "auto")
    if values.get("trainer.compile") != "on" or capabilities(backend).compiles:
        return []
    # auto, the default, does not compile such a backend. on would be an error.
    del values["trainer.compile"]
    setting = origins.get("trainer.compile", "trainer.compile=on")
    return [f"{setting}: layers of backend={backend} are not compiled here"]


def has_msamp_scales(key: str, values: Values, imported: Values) -> bool:
    """Returns whether an FP8 column comes back from MS-AMP with power-of-two scales."""
    return bool(values[key] == "fp8" and imported[key] == "fp8_pow2")


def backend_reason(key: str, values: Values, imported: Values) -> str:
    """Returns the reason if the backend causes the difference between two values, or "".

    Args:
        key: The short key of the value.
        values: Values of the exported recipe.
        imported: Values after the export was imported again.
    """
    before, after = values[key], imported[key]
    if key == "backend" and (before, after) == ("te", "auto"):
        return "backend=te lacks a part of the recipe"
    if key == "backend" and (before, after) == ("msamp", "native"):
        return _MSAMP_NEEDS_DEEPSPEED
    if key == "fp8.first_step" and after == "te":
        return "Transformer Engine starts with scale 1"
    is_msamp_value = key in _MSAMP_VALUES and after == _MSAMP_VALUES[key]
    if has_msamp_scales(key, values, imported) or (imported["opt_level"] and is_msamp_value):
        return f"MS-AMP has {str(after).lower()}"
    return ""


# Sizes without a setting in the source.


def fit_gpus(recipe: Recipe, values: Values) -> list[str]:
    """Sets the number of GPUs to the product of the parallel sizes, unless it is a multiple already.

    GPUs from the source stay. Without parallel sizes in the source nothing changes.
    """
    trainer, size = recipe.trainer, recipe.trainer.strategy.size
    has_sizes = any(key in values for key in PARALLEL_SIZES)
    if trainer.num_nodes * trainer.devices % size == 0 or not has_sizes:
        return []
    nodes, devices = trainer.num_nodes, trainer.devices
    if "trainer.devices" not in values:
        devices = gcd(size, 8)  # a node has 8 GPUs
        if "trainer.num_nodes" in values:
            devices = size // nodes
    if "trainer.num_nodes" not in values:
        nodes = size // devices
    if nodes * devices != size:
        return []  # the check of the recipe reports it
    trainer.num_nodes = nodes
    trainer.devices = devices
    sizes = {"trainer.num_nodes": nodes, "trainer.devices": devices}
    changes = [f"{key}={value}" for key, value in sizes.items() if key not in values]
    return [
        f"{' and '.join(changes)}: {NOT_IN_SOURCE}; tensor x pipeline x context parallel ="
        f" {size} GPUs"
    ]


def fit_batch_sizes(recipe: Recipe, values: Values) -> list[str]:
    """Fits a batch size to the number of ranks, if it is missing in the source."""
    trainer = recipe.trainer
    replicas = max(trainer.num_nodes * trainer.devices // trainer.strategy.size, 1)
    if trainer.global_batch_size % (trainer.micro_batch_size * replicas) == 0:
        return []
    is_divisible = trainer.global_batch_size % replicas == 0
    if "trainer.micro_batch_size" not in values and is_divisible:
        sequences_per_replica = trainer.global_batch_size // replicas
        trainer.micro_batch_size = gcd(trainer.micro_batch_size, sequences_per_replica)
        change = f"trainer.micro_batch_size={trainer.micro_batch_size}"
    elif "trainer.global_batch_size" not in values:
        multiple = trainer.micro_batch_size * replicas
        # Rounded up to the next multiple.
        trainer.global_batch_size = -(-trainer.global_batch_size // multiple) * multiple
        change = f"trainer.global_batch_size={trainer.global_batch_size}"
    else:
        return []  # the check of the recipe reports it
    return [f"{change}: {NOT_IN_SOURCE}; set to fit {replicas} data-parallel replicas"]


def fit_warmup(recipe: Recipe, values: Values) -> list[str]:
    """Shortens the warmup to the number of steps, if it is missing in the source."""
    optim, max_steps = recipe.optim, recipe.trainer.max_steps
    longest = max(max_steps - optim.constant_steps, 0)
    if "optim.warmup_steps" in values or optim.warmup_steps <= longest:
        return []
    optim.warmup_steps = longest
    return [
        f"optim.warmup_steps={longest}: {NOT_IN_SOURCE}; set to fit trainer.max_steps={max_steps}"
    ]


def exclude_output_layer(recipe: Recipe) -> list[str]:
    """Takes the output layer out of FP8 if its sizes do not allow FP8.

    Other projects convert all linear layers, and skip a layer with unsupported sizes.
    """
    if not recipe.fp8.output_layer:
        return []
    try:
        plan_layers(recipe)
    except ConfigError as error:
        remarks = [line for line in error.problems if line.startswith("fp8.output_layer=")]
        if remarks:
            recipe.fp8.output_layer = False
        return remarks
    return []
