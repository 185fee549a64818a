"""Backend choice: the backend that runs a recipe on given hardware, or a refusal with every reason."""

from __future__ import annotations

import os
from dataclasses import dataclass

from fp8cfg.backends import REFERENCE, registry
from fp8cfg.backends.native.rules import ALIGNMENT, BLOCK_CUDA, FP8_CAPABILITY
from fp8cfg.schema.backends import Hardware
from fp8cfg.schema.errors import ConfigError, refuse_if
from fp8cfg.schema.precision import Precision
from fp8cfg.schema.refusal import LayoutRefusal
from fp8cfg.schema.storage import as_held
from fp8cfg.schema.training import Strategy

__all__ = [
    "ALIGNMENT",
    "BLOCK_CUDA",
    "FP8_CAPABILITY",
    "Choice",
    "Hardware",
    "against",
    "against_layout",
    "choose",
]


@dataclass(frozen=True)
class Choice:
    """The backend that runs the recipe, its product ("emulate", "scaled_mm" or "none"), and the reason for the choice.
    `passed_over` has a line for each backend that auto would have preferred.
    """

    backend: str
    product: str
    why: str
    passed_over: tuple[str, ...] = ()


def choose(
    precision: Precision,
    hardware: Hardware,
    *,
    statistics: int = 0,
    here: bool = True,
    strategy: Strategy | None = None,
    adapters: bool = False,
) -> Choice:
    """The backend for `precision` on `hardware`. Raises ConfigError with every reason against it.

    A capability is never downgraded: what cannot run is refused, naming what can. `backend=auto` takes the first of
    backend_registry.preference() that can run the recipe; where FP8 is emulated the native backend goes first, whose emulation is
    exact and has every key. `statistics` is the recipe's log.fp8_stats_every_n_steps, `strategy` its trainer.strategy, None of a
    model that is whole on each rank, `adapters` its lora.enabled. Not `here`, an explicit backend need not be installed: the
    hardware is elsewhere.
    """
    if precision.backend != "auto" and not registry.exists(precision.backend):
        raise ConfigError(against(precision.backend, precision, hardware))
    if not precision.fp8.enabled:
        return Choice(REFERENCE, "none", "no FP8 asked for")
    if precision.backend != "auto":
        refuse_if(
            against(precision.backend, precision, hardware, statistics, here, strategy, adapters)
        )
        return _choice(precision.backend, precision, hardware, "asked for")
    emulates = hardware.device == "cpu" or precision.fp8.emulate
    preference = registry.preference()
    others = tuple(name for name in preference if name != REFERENCE)
    order = (REFERENCE, *others) if emulates else preference
    passed_over: list[str] = []
    for name in order:
        lines = against(name, precision, hardware, statistics, strategy=strategy, adapters=adapters)
        if not lines:
            if emulates and name == REFERENCE:
                passed_over.append(
                    f"{', '.join(others)}: {REFERENCE} goes first where FP8 is emulated"
                )
            return _choice(name, precision, hardware, "auto", tuple(passed_over))
        passed_over.append(
            f"{name}: {lines[0].removeprefix(f'backend={name}: ').partition('; ')[0]}"
        )
    raise ConfigError(against(REFERENCE, precision, hardware) + _could(precision, hardware))


def against(
    name: str,
    precision: Precision,
    hardware: Hardware,
    statistics: int = 0,
    here: bool = True,
    strategy: Strategy | None = None,
    adapters: bool = False,
) -> list[str]:
    """Every reason against running `precision` on backend `name`, where FP8 is enabled: one line each."""
    if problem := registry.problem(name):
        return [f"backend={name}: {problem}"]
    rules = registry.rules(name)
    lines = (
        [f"backend={name}: {why}; write {rules.instead(precision)}"]
        if here and (why := rules.unavailable())
        else []
    )
    if statistics and not registry.capabilities(name).statistics:
        lines.append(
            f"log.fp8_stats_every_n_steps={statistics}: backend={name} has no such statistics;"
            " write backend=native, or drop it"
        )
    has, split = registry.capabilities(name), strategy or Strategy()
    lines += against_layout(
        name, split.tensor_model_parallel_size, split.pipeline_model_parallel_size
    )
    if (groups := split.data_parallel_replicate_size) > 1 and not has.fully_shards:
        lines.append(
            f"backend={name}: FSDP2 does not shard its layers, as"
            f" data_parallel_replicate_size={groups} has it; write backend={REFERENCE}"
        )
    if precision.fp8.keep_transpose_cache and not has.weight_workspace:
        lines.append(
            f"fp8.keep_transpose_cache=true: has no effect, backend={name} decides itself what it"
            f" keeps of a weight; drop it or write backend={REFERENCE}"
        )
    if adapters and not has.adapters:
        lines.append(
            f"backend={name}: has no adapters over its layers (lora.enabled=true); write"
            " backend=native"
        )
    lines += rules.against_sharding(precision)
    if here:
        lines += rules.against_environment(precision.fp8, os.environ)
    return lines + rules.refusals(as_held(precision), hardware)


def against_layout(name: str, tensor: int = 1, stages: int = 1) -> list[str]:
    """Why an explicit backend `name` does not train parts of matrices of `tensor` ranks, or so many pipeline `stages`: a line each,
    with the backend that does."""
    if name == "auto" or not registry.exists(name):
        return []
    has, lines = registry.capabilities(name), list[str]()
    if tensor > 1 and not has.tensor_parallel:
        lines.append(f"its layers are not split by tensor_model_parallel_size={tensor}")
    if stages > 1 and not has.pipeline_parallel:
        lines.append(
            f"its scales are not those of the stages of pipeline_model_parallel_size={stages}"
        )
    return [LayoutRefusal(f"backend={name}: {line}; write backend={REFERENCE}") for line in lines]


def _choice(
    name: str,
    precision: Precision,
    hardware: Hardware,
    asked: str,
    passed_over: tuple[str, ...] = (),
) -> Choice:
    product, why = registry.rules(name).product(precision, hardware)
    return Choice(name, product, f"{asked}; {why}", passed_over)


def _could(precision: Precision, hardware: Hardware) -> list[str]:
    """A line for each backend that could run `precision` on `hardware` if it were installed."""
    rules = {name: registry.rules(name) for name in registry.preference()}
    return [
        f"backend=auto: {name} could run this, but {why}"
        for name in rules
        if (why := rules[name].unavailable())
        and not rules[name].refusals(as_held(precision), hardware)
    ]
