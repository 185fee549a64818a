"""Rules of resuming: keys of a recipe that may change, with or without --allow."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from fp8cfg.planning.layer_plan import plan_layers
from fp8cfg.schema import foreign_names
from fp8cfg.schema.errors import ConfigError
from fp8cfg.schema.keys import full, short, spelled
from fp8cfg.schema.node import Node
from fp8cfg.schema.recipe import short_keys
from fp8cfg.schema.storage import Columns, resolve_state_dtypes

if TYPE_CHECKING:
    from fp8cfg.schema.recipe import Recipe

FREE = (
    "name",
    "log.*",
    "checkpoint.*",
    "trainer.max_steps",
    "trainer.val_check_interval",
    "trainer.limit_val_batches",
    "trainer.micro_batch_size",
    "trainer.num_nodes",
    "trainer.devices",
    "trainer.strategy.*",
    "trainer.timeout.*",
    "trainer.spike_factor",
    "trainer.on_bad_step",
    "trainer.max_bad_steps",
    "trainer.gradient_clip_val",
    "optim.lr",
    "optim.min_lr",
    "optim.weight_decay",
    "optim.warmup_steps",
    "optim.constant_steps",
    "optim.lr_decay_style",
    "data.path",
    "data.validation_path",
    "data.tokenizer",
    "storage.shard",
    "fp8.min_coverage",
    "fp8.use_autocast_during_eval",
    "model.recompute_granularity",
)
"""Keys that may differ without --allow: duration, paths, speed. They take precedence over FIXED."""
ORIGIN = ("model.path", "model.weights", "lora.weights")
"""Sources of the initial weights. A resumed run loads its weights from the checkpoint."""
FIXED = (
    "model.*",
    "lora.enabled",
    "lora.rank",
    "lora.alpha",
    "lora.targets",
    "precision.compute",
    "optim.name",
    "data.name",
    "data.mixture",
    "data.streaming",
    "data.text_key",
    "data.eod_mask_loss",
    "data.reset_attention_mask",
    "data.reset_position_ids",
    "data.validation_fraction",
    "trainer.seed",
    "trainer.global_batch_size",
    "trainer.smoke",
)
"""Keys that --allow cannot change: the tensors or the position in the data would not fit.

The path of data may differ. Its files are recognized by their digests."""
STATE = (
    "storage.*",
    "opt_level",
    "backend",
    "fp8.enabled",
    "fp8.params",
    "fp8.scaling",
    "fp8.include",
    "fp8.exclude",
    "fp8.output_layer",
    "fp8.high_precision_at_start",
    "fp8.high_precision_at_end",
)
"""Keys that are fixed if they change the stored state. See `_saved_dtypes`."""


def changes(saved: Recipe, resumed: Recipe) -> list[str]:
    """Returns the short names of keys that differ between two recipes."""
    saved_values = _flatten(saved)
    return [short(key) for key, value in _flatten(resumed).items() if value != saved_values[key]]


def refuse_changes(
    saved: Recipe,
    resumed: Recipe,
    allow: list[str],
    causes: Mapping[str, str] | None = None,
    line: Sequence[str] = (),
    step: int | None = None,
) -> None:
    """Checks that a run can resume with another recipe.

    Args:
        saved: The recipe of the checkpoint, or of a run without one.
        resumed: The recipe of the resumed run.
        allow: Keys to change although resume rejects them by default.
        causes: The cause of a change, by key: another key and its value.
        line: The arguments of the command that makes the change, if it has no --allow.
        step: Step of the checkpoint, None without one.

    Raises:
        ConfigError: One line for each rejected change and each unknown key in `allow`.
    """
    source = "this run" if step is None else f"the checkpoint of step {step}"
    saved_values = {short(key): value for key, value in _flatten(saved).items()}
    resumed_values = {short(key): value for key, value in _flatten(resumed).items()}
    allow = [short(full(key)) for key in allow]
    lines = []
    for key in allow:
        if not any(matches(known, [key]) for known in short_keys()):
            lines.append(foreign_names.unknown(key, short_keys()))

    # These keys are fixed only if they change the dtypes in the checkpoint.
    state = STATE if _saved_dtypes(saved) != _saved_dtypes(resumed) else ()
    fixed = (*FIXED, *state)
    rejected = []
    for key in changes(saved, resumed):
        is_free = key in ORIGIN or (matches(key, FREE) and not matches(key, state))
        is_allowed = matches(key, allow) and not matches(key, fixed)
        if not is_free and not is_allowed:
            rejected.append(key)
    # One command with all needed flags, for each line.
    allow_words = []
    for key in rejected:
        if not matches(key, fixed):
            allow_words += ["--allow", key]
    for key in rejected:
        saved_value = spelled(saved_values[key])
        wanted_value = spelled(resumed_values[key])
        if matches(key, fixed):
            fix = "start a new run"
        elif line:
            fix = f"run {shlex.join([*line, *allow_words])}"
        else:
            fix = f"to change it, add --allow {key}"
        cause = (causes or {}).get(key)
        if cause:
            lines.append(
                f"{cause}: changes {key}={saved_value} of {source} to {wanted_value}; {fix}"
            )
        else:
            lines.append(f"{key}={wanted_value}: {source} has {key}={saved_value}; {fix}")
    if lines:
        raise ConfigError(lines)


def unused_allows(saved: Recipe, resumed: Recipe, allow: list[str]) -> list[str]:
    """Returns the keys of `allow` that match no changed key."""
    changed = changes(saved, resumed)
    unused = []
    for key in allow:
        if not any(matches(changed_key, [short(full(key))]) for changed_key in changed):
            unused.append(key)
    return unused


def can_resume(saved: Recipe, resumed: Recipe, allow: list[str]) -> bool:
    """Returns whether `refuse_changes` accepts the recipe."""
    try:
        refuse_changes(saved, resumed, allow)
    except ConfigError:
        return False
    return True


def _saved_dtypes(recipe: Recipe) -> dict[str, Any]:
    """Returns the dtypes of a checkpoint's state by linear layer, and by "" for the rest.

    Recipes with equal results can load each other's checkpoints.
    """
    precision = recipe.precision
    is_tied = recipe.model.share_embeddings_and_output_weights
    dtypes = resolve_state_dtypes(precision)
    columns = {}
    for linear in plan_layers(recipe):
        # The weight of a tied output layer is the embedding's, which is no linear weight.
        is_linear = not (is_tied and linear.name == "output_layer")
        columns[linear.name] = dtypes.of_parameter(is_linear, linear.fp8)
    columns[""] = dtypes.other
    # Weights in these dtypes can be made from float32 masters.
    from_masters = ("fp32", "fp8", precision.compute)

    def saved_state(column: Columns) -> list[str | bool]:
        """Returns the dtypes of one parameter's state."""
        weight = column["weight"]
        master = column["master_weight"]
        # All else can be computed from float32 values, in a master or in the weight itself.
        if "fp32" in (master, weight) and weight in from_masters:
            weight, master = "", "fp32"
        # Low-bit moments and the moments of torch's optimizers have different layouts.
        return [dtypes.low_bit, weight, master, column["exp_avg"], column["exp_avg_sq"]]

    return {name: saved_state(column) for name, column in columns.items()}


def matches(key: str, patterns: Sequence[str]) -> bool:
    """Returns whether a key matches a pattern: a glob, or a node above the key."""
    return any(fnmatchcase(key, pattern) or key.startswith(f"{pattern}.") for pattern in patterns)


def _flatten(node: Node, prefix: str = "") -> dict[str, Any]:
    """Returns the values of a node and all nodes below, by full key."""
    values: dict[str, Any] = {}
    for name in type(node).model_fields:
        value = getattr(node, name)
        if isinstance(value, Node):
            values |= _flatten(value, f"{prefix}{name}.")
        else:
            values[prefix + name] = value
    return values
