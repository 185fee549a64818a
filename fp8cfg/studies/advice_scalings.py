"""Scalings for precision advice to compare, each with its recipe and coverage."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from fp8cfg.backends.choice import Hardware, choose
from fp8cfg.planning.coverage import Coverage
from fp8cfg.schema.errors import ConfigError
from fp8cfg.schema.presets import choices, precision_preset
from fp8cfg.schema.recipe import Recipe
from fp8cfg.schema.scalings import SCALINGS
from fp8cfg.studies.operand_errors import Candidate

PRESETS = {
    "delayed": "fp8",
    "current": "fp8_current",
    "block": "fp8_block",
    "mxfp8": "mxfp8",
    "nvfp4": "nvfp4",
}
"""Name of each scaling's preset without its prefix, "bf16_" or "fp16_"."""
Compose = Callable[[Sequence[str]], Recipe]
"""Returns the recipe with overrides. Raises ConfigError."""
Cover = Callable[[Recipe], Coverage]
"""Returns the planned coverage of a recipe."""


@dataclass(frozen=True)
class Choice:
    """A scaling with its recipe.

    Attributes:
        candidate: The scaling.
        recipe: The recipe under this scaling.
        coverage: Planned coverage of the recipe.
    """

    candidate: Candidate
    recipe: Recipe
    coverage: Coverage


def list_choices(
    recipe: Recipe, compose: Compose, cover: Cover, hardware: Hardware
) -> tuple[list[Choice], dict[str, str]]:
    """Lists the scalings with hardware support.

    Args:
        recipe: The recipe. If it has FP8, its own settings replace the preset of its scaling.
        compose: Adds overrides to the recipe.
        cover: Plans the coverage of a recipe.
        hardware: The hardware. A CPU emulates every scaling.

    Returns:
        The supported scalings from coarse to fine scales, and a reason for each other scaling.
    """
    # FP8 presets exist for bf16 and fp16. An fp32 recipe is compared with the bf16 presets.
    compute = "fp16" if recipe.precision.compute == "fp16" else "bf16"
    recipe_scaling = ""
    if recipe.fp8.enabled:
        recipe_scaling = _name(recipe)
    supported = []
    unsupported = {}
    for name, words in _words_of_scalings(compute):
        try:
            changed = recipe
            if name != recipe_scaling:
                changed = compose([*words, *_kept_words(recipe)])
            # Only for its ConfigError. here=False, because the target GPU may be elsewhere.
            choose(
                changed.precision,
                hardware,
                here=False,
                strategy=changed.trainer.strategy,
                adapters=changed.lora.enabled,
            )
            coverage = cover(changed)
        except ConfigError as error:
            unsupported[name] = error.problems[0]
            continue
        # Without overrides for the recipe's own scaling: `_choose` recognizes it by this.
        preset = words[0].partition("=")[2]
        overrides = () if name == recipe_scaling else tuple(words)
        candidate = Candidate(name, preset, overrides, changed.fp8)
        supported.append(Choice(candidate, changed, coverage))
    return supported, unsupported


def _words_of_scalings(compute: str) -> Iterable[tuple[str, list[str]]]:
    """Yields the name of each scaling and its overrides, from coarse to fine scales."""
    for scaling, descriptor in SCALINGS.items():
        preset = f"{compute}_{PRESETS.get(scaling, scaling)}"
        if preset not in choices():
            continue
        granularities = ("tensor", "row") if "granularity" in descriptor.keys else ("tensor",)
        # An override equal to the preset's value would be noise in the advice.
        own_format = precision_preset(preset).fp8.format
        for granularity in granularities:
            for fp8_format in descriptor.formats:
                words = [f"precision={preset}"]
                if granularity == "row":
                    words.append("fp8.granularity=row")
                if fp8_format != own_format:
                    words.append(f"fp8.format={fp8_format}")
                yield _name_of(scaling, granularity, fp8_format), words


def _name(recipe: Recipe) -> str:
    """Returns the name of a recipe's scaling in tables."""
    fp8 = recipe.fp8
    return _name_of(fp8.scaling, fp8.granularity, fp8.format)


def _name_of(scaling: str, granularity: str, fp8_format: str) -> str:
    """Returns the name of a scaling in tables, such as "current row e4m3"."""
    parts = [scaling]
    if granularity == "row":
        parts.append("row")
    # The format only tells scalings apart if there is a choice: MXFP8 and NVFP4 have one format.
    if len(SCALINGS[scaling].formats) > 1:
        parts.append(fp8_format)
    return " ".join(parts)


def _kept_words(recipe: Recipe) -> list[str]:
    """Returns overrides for the user's choice of layers. It holds under every scaling."""
    # A preset replaces all of fp8, so the choice has to be set again.
    if not recipe.fp8.enabled:
        return []
    words = []
    for key in ("include", "exclude"):
        patterns = getattr(recipe.fp8, key)
        if patterns:
            words.append(f"fp8.{key}=[{','.join(patterns)}]")
    if recipe.fp8.output_layer:
        words.append("fp8.output_layer=true")
    return words
