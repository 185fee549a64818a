"""Which backend runs a recipe on given hardware, and the lines that refuse where none does."""

from __future__ import annotations

import os
from dataclasses import dataclass

from fp8cfg.backends import backend_registry
from fp8cfg.backends.msamp import rules as msamp_rules
from fp8cfg.backends.native.rules import BLOCK_CUDA, FP8_CAPABILITY
from fp8cfg.backends.protocol import Hardware
from fp8cfg.backends.te.environment import contradictions
from fp8cfg.config.errors import ConfigError, refuse_if
from fp8cfg.config.precision import Precision
from fp8cfg.config.storage import against_fp8_gather, as_held, fp8_weights

__all__ = ["BLOCK_CUDA", "FP8_CAPABILITY", "Choice", "Hardware", "against", "choose"]


@dataclass(frozen=True)
class Choice:
    """The backend that runs the recipe, how it multiplies ("emulate", "scaled_mm" or "none"), and why it was chosen;
    `passed_over` has a line for each backend that auto would rather have had."""

    backend: str
    product: str
    why: str
    passed_over: tuple[str, ...] = ()


def choose(precision: Precision, hardware: Hardware, *, statistics: int = 0, here: bool = True) -> Choice:
    """The backend for `precision` on `hardware`. Raises ConfigError with every reason against it.

    A capability is never downgraded: what cannot run is refused, naming what can. `backend=auto` takes the first of
    backend_registry.PREFERENCE that can run the recipe; where FP8 is emulated the native backend goes first, whose emulation is
    exact and has every key. `statistics` is the recipe's log.fp8_stats_every_n_steps. Not `here`, an explicit backend need not be
    installed: the hardware is elsewhere.
    """
    if precision.backend != "auto" and not backend_registry.exists(precision.backend):
        raise ConfigError(against(precision.backend, precision, hardware))
    if not precision.fp8.enabled:
        return Choice("native", "none", "no FP8 asked for")
    if precision.backend != "auto":
        refuse_if(against(precision.backend, precision, hardware, statistics, here))
        return _choice(precision.backend, precision, hardware, "asked for")
    emulates = hardware.device == "cpu" or precision.fp8.emulate
    order = sorted(backend_registry.PREFERENCE, key=lambda other: other != "native") if emulates else backend_registry.PREFERENCE
    passed_over: list[str] = []
    for name in order:
        lines = against(name, precision, hardware, statistics)
        if not lines:
            if emulates and name == "native":
                passed_over.append(f"{', '.join(backend_registry.PREFERENCE[:-1])}: native goes first where FP8 is emulated")
            return _choice(name, precision, hardware, "auto", tuple(passed_over))
        passed_over.append(f"{name}: {lines[0].removeprefix(f'backend={name}: ').partition('; ')[0]}")
    raise ConfigError(against("native", precision, hardware) + _could(precision, hardware))


def against(name: str, precision: Precision, hardware: Hardware, statistics: int = 0, here: bool = True) -> list[str]:
    """Every reason against backend `name` for `precision`, where FP8 is enabled: a line each."""
    if not backend_registry.exists(name):
        return [f"backend={name}: not in this version; write backend=native"]
    rules = backend_registry.rules(name)
    native = msamp_rules.native(precision) if name == "msamp" else "backend=native"
    lines = [f"backend={name}: {why}; write {native}"] if here and (why := rules.unavailable()) else []
    if statistics and name != "native":
        lines.append(f"log.fp8_stats_every_n_steps={statistics}: backend={name} has no such statistics; write backend=native, or "
                     "drop it")
    if name == "te" and precision.storage.shard != "none" and fp8_weights(precision):
        lines.append(f"storage.shard={precision.storage.shard}: Transformer Engine's FP8 weights are not handed round; write "
                     "backend=native, or storage.weight=fp16_scaled with fp8.params=false")
    if precision.storage.shard == "fsdp":
        lines += _against_fsdp(name, precision)
    if name == "te" and here:
        lines += contradictions(precision.fp8, os.environ)
    return lines + rules.refusals(as_held(precision), hardware)


def _against_fsdp(name: str, precision: Precision) -> list[str]:
    if name == "te":
        return ["storage.shard=fsdp: not in this version with Transformer Engine's layers; write backend=torchao or native, or "
                "storage.shard=zero2"]
    if precision.storage.gather == "fp8" and name == "native":
        return [f"storage.gather=fp8: {why}" for why in against_fp8_gather(precision, name)]
    return []


def _choice(name: str, precision: Precision, hardware: Hardware, asked: str, passed_over: tuple[str, ...] = ()) -> Choice:
    product, why = backend_registry.rules(name).product(precision, hardware)
    return Choice(name, product, f"{asked}; {why}", passed_over)


def _could(precision: Precision, hardware: Hardware) -> list[str]:
    """A line for each backend that could run `precision` on `hardware` if it were installed."""
    others = [name for name in backend_registry.PREFERENCE if backend_registry.exists(name)]
    rules = {name: backend_registry.rules(name) for name in others}
    return [f"backend=auto: {name} could run this, but {why}" for name in others
            if (why := rules[name].unavailable()) and not rules[name].refusals(as_held(precision), hardware)]
