"""Validation rules of the `lora` node."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from fp8cfg.config.backend_capabilities import capabilities
from fp8cfg.config.lora import LoRA
from fp8cfg.config.refusal import Refusal, idle

if TYPE_CHECKING:
    from fp8cfg.config.recipe import Recipe


def lora_rules(recipe: Recipe) -> Iterator[str]:
    """Every rule about adapters."""
    lora, p = recipe.lora, recipe.precision
    if not lora.enabled:
        others = [name for name in LoRA.model_fields if name != "enabled"]
        yield from idle(lora, others, " while lora.enabled=false; write task=lora", "lora.enabled")
        return
    if not lora.targets:
        yield "lora.targets=[]: leaves no layer with an adapter; write [q_proj,v_proj], or drop it"
    if (
        p.backend != "auto"
        and (p.fp8.enabled or capabilities(p.backend).own_state)
        and not capabilities(p.backend).adapters
    ):
        yield Refusal(
            f"backend={p.backend}: has no adapters over its layers; write backend=native",
            [("backend", "auto")],
            ["lora.enabled"],
        )
    if every := recipe.log.fp8_stats_every_n_steps:
        yield Refusal(
            f"log.fp8_stats_every_n_steps={every}: measures the gradients of weights, which"
            " lora.enabled=true freezes; drop it",
            [("log.fp8_stats_every_n_steps", 0)],
            ["lora.enabled"],
        )
