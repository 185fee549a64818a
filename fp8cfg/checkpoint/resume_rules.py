"""Resume rules: which keys of a recipe may differ from those of the run that is resumed, and which only where that is allowed."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from fp8cfg.planning.layer_plan import plan_layers
from fp8cfg.schema import foreign_names
from fp8cfg.schema.errors import ConfigError
from fp8cfg.schema.keys import full, short, spelled
from fp8cfg.schema.node import Node
from fp8cfg.schema.recipe import Recipe, short_keys
from fp8cfg.schema.storage import Columns, resolve_state_dtypes

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
"""Keys that may differ on resume without being allowed, though they be of a node that may not: how long, where, how fast. Each
change is printed."""
ORIGIN = ("model.path", "model.weights", "lora.weights")
"""Keys that say where the first weights came from: a resumed run has others, and does without."""
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
"""Keys that a checkpoint cannot change at all: its tensors, or its place in the data, would not fit. Files that were moved are
known again by their digests."""
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
"""Keys that it cannot change either where the optimizer would keep other state: see `_kept`."""


def changes(saved: Recipe, wanted: Recipe) -> list[str]:
    """The keys, by their short names, that differ between two recipes."""
    return [short(k) for k, v in _flat(wanted).items() if v != _flat(saved)[k]]


def refuse_changes(
    saved: Recipe,
    wanted: Recipe,
    allow: list[str],
    causes: Mapping[str, str] | None = None,
    line: Sequence[str] = (),
    step: int | None = None,
) -> None:
    """Raise ConfigError for each change that a resumed run may not make, or not without being allowed; with its cause where a value
    gave way to it, by the short name of its key. `line` are the words of a command that makes the change where it is allowed, for
    one that has no --allow. `saved` is the recipe of the checkpoint of `step`, or of a run that has none."""
    whose = "this run" if step is None else f"the checkpoint of step {step}"
    old, new = _flat(saved), _flat(wanted)
    allow = [short(full(key)) for key in allow]
    lines = [
        foreign_names.unknown(a, short_keys())
        for a in allow
        if not any(matches(k, [a]) for k in short_keys())
    ]
    state = STATE if _kept(saved) != _kept(wanted) else ()
    fixed = (*FIXED, *state)
    refused = [
        key
        for key in changes(saved, wanted)
        if key not in ORIGIN
        and not (matches(key, FREE) and not matches(key, state))
        and not (matches(key, allow) and not matches(key, fixed))
    ]
    allowed = [word for key in refused if not matches(key, fixed) for word in ("--allow", key)]
    for key in refused:
        was, now = (spelled(flat[next(k for k in flat if short(k) == key)]) for flat in (old, new))
        resumed = (
            f"write {shlex.join([*line, *allowed])}" if line else f"resume it with --allow {key}"
        )
        cure = "start a new run" if matches(key, fixed) else resumed
        if cause := (causes or {}).get(key):
            lines.append(
                f"{cause}: {key}={was}, which {whose} has, would change to {now} with it; {cure}"
            )
        else:
            lines.append(f"{key}={now}: {whose} has {was}; {cure}")
    if lines:
        raise ConfigError(lines)


def allowing_nothing(saved: Recipe, wanted: Recipe, allow: list[str]) -> list[str]:
    """Those of `allow` that have no key that differs."""
    return [
        key
        for key in allow
        if not any(matches(k, [short(full(key))]) for k in changes(saved, wanted))
    ]


def goes_on(saved: Recipe, wanted: Recipe, allow: list[str]) -> bool:
    """Whether a run of `saved` goes on as `wanted`."""
    try:
        refuse_changes(saved, wanted, allow)
    except ConfigError:
        return False
    return True


def _kept(recipe: Recipe) -> dict[str, Any]:
    """What a checkpoint has of the weight of each linear layer and, under an empty name, of all other parameters: float32 values,
    in a master or the weight itself, or the columns of both; and those of moments that the low-bit optimizer keeps.
    """
    precision = recipe.precision
    tied = {"output_layer"} if recipe.model.share_embeddings_and_output_weights else set()
    dtypes = resolve_state_dtypes(precision)
    columns = {}
    for linear in plan_layers(recipe):
        columns[linear.name] = dtypes.of_parameter(linear.name not in tied, linear.fp8)
    columns[""] = dtypes.other
    narrow, made = (
        dtypes.low_bit,
        (
            "fp32",
            "fp8",
            precision.compute,
        ),
    )  # from masters, if not float32

    def state(c: Columns) -> list[str | bool]:
        exact = "fp32" in (c["master_weight"], c["weight"]) and c["weight"] in made
        return [
            narrow,
            "" if exact else c["weight"],
            "fp32" if exact else c["master_weight"],
            c["exp_avg"],
            c["exp_avg_sq"],
        ]

    return {name: state(c) for name, c in columns.items()}


def matches(key: str, patterns: tuple[str, ...] | list[str]) -> bool:
    """Whether one of `patterns`, globs or names of nodes, has the key."""
    return any(fnmatchcase(key, p) or key.startswith(p + ".") for p in patterns)


def _flat(node: Node, at: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name in type(node).model_fields:
        value = getattr(node, name)
        out |= _flat(value, f"{at}{name}.") if isinstance(value, Node) else {at + name: value}
    return out
