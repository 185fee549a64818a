"""Remarks on keys that the user wrote, and that nothing reads at the sizes of his recipe."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from fp8cfg.config.recipe import Recipe
from fp8cfg.config.refusal import changed
from fp8cfg.scalings import SCALINGS


def unread(recipe: Recipe, written: Collection[str]) -> Iterator[str]:
    """A line for each of the keys `written`, by their short names. Sizes are often cut for a trial, so none is refused."""
    m, o, steps = recipe.model, recipe.optim, recipe.trainer.max_steps
    if (
        m.sliding_window is not None
        and m.sliding_window >= m.seq_length
        and "model.sliding_window" in written
    ):
        yield (
            f"note: model.sliding_window={m.sliding_window}: masks nothing,"
            f" model.seq_length={m.seq_length} is no longer; an exported checkpoint states it"
        )
    if (
        (every := m.window_attn_skip_freq)
        and every > m.num_layers
        and "model.window_attn_skip_freq" in written
    ):
        yield (
            f"note: model.window_attn_skip_freq={every}: leaves the window to all layers, there are"
            f" model.num_layers={m.num_layers}"
        )
    p, good = recipe.precision, recipe.precision.loss_scale_window
    if (
        p.compute == "fp16"
        and p.loss_scale is None
        and good >= steps
        and "precision.loss_scale_window" in written
    ):
        yield (
            f"note: precision.loss_scale_window={good}: doubles no scale, the run ends with"
            f" trainer.max_steps={steps}"
        )
    yield from _history(recipe, written)
    if o.warmup_steps < steps - 1:  # the step after warm-up is the first of the decay
        return
    found = [
        said
        for name in ("min_lr", "lr_decay_style")
        if f"optim.{name}" in written
        for said in changed(o, name)
    ]
    if found:
        yield (
            f"note: {', '.join(found)}: of the decay, and there is none;"
            f" optim.warmup_steps={o.warmup_steps}, trainer.max_steps={steps}"
        )


def _history(recipe: Recipe, written: Collection[str]) -> Iterator[str]:
    """Of a history of amaxes that no step reads whole. One amax is all that the rules leave to read with it."""
    f = recipe.fp8
    if not f.enabled or not SCALINGS[f.scaling].history or "fp8.amax_history_len" not in written:
        return
    if f.amax_compute_algo == "most_recent" and f.amax_history_len > 1:
        yield (
            f"note: fp8.amax_history_len={f.amax_history_len}: fp8.amax_compute_algo=most_recent"
            " reads the last amax alone"
        )
