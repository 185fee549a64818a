"""How much memory a recipe's run takes on one rank, by kind, from shapes alone; and the nearest recipe that fits.

Training is data-parallel: each rank holds the whole model. Activations are an estimate for the model of this package run
eagerly; the other kinds are exact sums over parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from fp8cfg.backends.planning import PlannedLinear
from fp8cfg.builder import plan, transformer_config
from fp8cfg.config.errors import ConfigError
from fp8cfg.config.precision import resolved
from fp8cfg.config.recipe import Recipe
from fp8cfg.config.registry import recipes
from fp8cfg.models.shapes import parameter_shapes
from fp8cfg.report.tables import size, table

_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "none": 0}


def memory(recipe: Recipe, device: str) -> dict[str, int]:
    """Bytes by kind for one rank on `device` ("cpu" or "cuda")."""
    columns = resolved(recipe.precision)
    compute = _BYTES[recipe.precision.compute]
    plans = {p.name: p for p in plan(recipe) if p.fp8}
    in_fp8 = sum(p.in_features * p.out_features for p in plans.values())
    count = _parameters(recipe)
    held = _held_in_fp8(recipe, plans)
    moments = {"sgd": 4}.get(recipe.optim.name, 8)
    grads = _BYTES[columns["weight_grad"]]
    return {
        "weights": held + (count - held) * compute,
        "masters": (count if compute < 4 else held) * 4,
        "gradients": count * (grads + (4 if grads == 2 else 0)),  # fp16 gradients are widened for the step
        "moments": count * moments,
        "FP8 copies": (in_fp8 - held) * (1 if device == "cuda" else 2 if recipe.precision.compute == "bf16" else 4),
        "activations": _activations(recipe),
        "logits": recipe.trainer.micro_batch_size * recipe.model.seq_length * recipe.model.vocab_size * (compute + 12),
    }


def memory_table(recipe: Recipe, device: str) -> str:
    """The table of `memory`, with bytes per parameter for what grows with the parameters."""
    count = _parameters(recipe)
    kinds = memory(recipe, device)
    rows = [[kind, size(n), f"{n / count:.1f}" if kind not in ("activations", "logits") else "", _note(recipe, kind)]
            for kind, n in kinds.items()]
    rows.append(["total", size(sum(kinds.values())), "", ""])
    return table(["memory per rank", "size", "B/param", ""], rows, right=(1, 2))


def refuse_if_too_large(recipe: Recipe, device: str, free: int) -> None:
    """Raise ConfigError where the run needs more than `free` bytes, with the nearest overrides that fit."""
    need = sum(memory(recipe, device).values())
    if need > free:
        near = list(_fitting(recipe, device, free))
        hint = f"; nearest that fit: {' · '.join(near)}" if near else ""
        raise ConfigError(f"recipe={recipe.name}: needs {size(need)}, this machine has {size(free)} free on {device}{hint}")


def _held_in_fp8(recipe: Recipe, plans: dict[str, PlannedLinear]) -> int:
    """Parameters held in FP8 alone; a tied output layer's weight is the embedding's and stays in high precision."""
    if not (recipe.fp8.enabled and recipe.fp8.params):
        return 0
    tied = recipe.model.share_embeddings_and_output_weights
    return sum(p.in_features * p.out_features for n, p in plans.items() if not (tied and n == "output_layer"))


def _activations(recipe: Recipe) -> int:
    m, compute = recipe.model, _BYTES[recipe.precision.compute]
    tokens = recipe.trainer.micro_batch_size * m.seq_length
    query, qkv = m.num_attention_heads * m.head_dim, (m.num_attention_heads + 2 * m.num_query_groups) * m.head_dim
    norms = 2 * (4 + compute) * m.hidden_size  # their float32 inputs, and the inputs of the linear layers behind them
    layer = norms + compute * (qkv + 2 * query + 4 * m.ffn_hidden_size)
    if m.recompute_granularity == "full":
        return tokens * (m.num_layers * compute * m.hidden_size + layer)
    return tokens * m.num_layers * layer


def _note(recipe: Recipe, kind: str) -> str:
    columns = resolved(recipe.precision)
    held = recipe.fp8.enabled and recipe.fp8.params
    return {
        "weights": f"{recipe.precision.compute}, FP8 layers fp8" if held else recipe.precision.compute,
        "masters": columns["master_weight"], "gradients": columns["weight_grad"],
        "moments": "fp32 momentum" if recipe.optim.name == "sgd" else f"{columns['exp_avg']} + {columns['exp_avg_sq']}",
        "FP8 copies": "quantized weights, forward to backward",
        "activations": f"{recipe.trainer.micro_batch_size} x {recipe.model.seq_length} tokens, "
                       f"recompute {recipe.model.recompute_granularity}",
        "logits": f"vocab_size={recipe.model.vocab_size}",
    }.get(kind, "")


def _fitting(recipe: Recipe, device: str, free: int) -> Iterator[str]:
    """Words that make `recipe` fit: the same model held more leanly, else with fewer layers; and the largest recipe."""

    def fits(r: Recipe) -> bool:
        return _valid(r) and sum(memory(r, device).values()) <= free

    lean, words = recipe.model_copy(deep=True), list[str]()
    for node, key, value in ((lean.trainer, "micro_batch_size", 1), (lean.model, "recompute_granularity", "full")):
        if getattr(node, key) != value:
            setattr(node, key, value)
            words.append(f"{node.key(key)}={value}")
            if fits(lean):
                yield " ".join(words)
                return
    least, most = 0, recipe.model.num_layers  # fits with `least` layers, does not with `most`: halve what lies between
    while most - least > 1:
        lean.model.num_layers = (least + most) // 2
        least, most = (lean.model.num_layers, most) if fits(lean) else (least, lean.model.num_layers)
    if least:
        yield " ".join([f"model.num_layers={least}", *words])
    others = [r for make in recipes().values() if (r := make()) and r.name != recipe.name]
    for other in others:
        other.precision = recipe.precision
    fitting = [r for r in others if fits(r)]
    if fitting:
        yield f"recipe={max(fitting, key=_parameters).name}"


def _parameters(recipe: Recipe) -> int:
    return sum(map(prod, parameter_shapes(transformer_config(recipe)).values()))


def _valid(recipe: Recipe) -> bool:
    try:
        recipe.check()
        plan(recipe)
    except ConfigError:
        return False
    return True
