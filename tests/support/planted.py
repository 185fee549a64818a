"""Small Transformers with planted numerical trouble, and the error of their gradients in FP8."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import fp8cfg
from fp8cfg.models.config import TransformerConfig
from fp8cfg.models.transformer import Transformer
from fp8cfg.schema.recipe import Recipe
from fp8cfg.studies.advice_report import Advice

HIDDEN, HEADS, LAYERS, VOCABULARY, TOKENS = 128, 4, 4, 64, 256
CHANNEL = 37
HEAD = 2


class ScaledGradient(torch.autograd.Function):
    """Multiplies the gradient of each feature, and nothing in the forward pass."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, factors: Tensor) -> Tensor:
        ctx.save_for_backward(factors)
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.saved_tensors[0], None


def scale_gradient(layer: nn.Module, factors: Tensor) -> None:
    """Lets the gradients of the output of `layer` have other sizes, by feature."""
    layer.register_forward_hook(lambda _, args, y: ScaledGradient.apply(y, factors))


def outlier(model: Transformer, factor: float) -> None:
    """Makes a channel of the input of a layer `factor` times larger. The function stays the same."""
    layer: Any = model.layers[1]
    with torch.no_grad():
        layer.pre_mlp_layernorm.weight[CHANNEL] *= factor
        layer.mlp.linear_fc1.weight[:, CHANNEL] /= factor


def wide_gradients(model: Transformer) -> None:
    """Lets the gradients of a layer span 2^20, by feature."""
    layer: Any = model.layers[2]
    scale_gradient(layer.mlp.linear_fc2, torch.logspace(-20, 0, HIDDEN, 2, dtype=torch.float32))


def tiny_head(model: Transformer) -> None:
    """Lets the queries of one attention head have tiny gradients."""
    layer: Any = model.layers[1]
    qkv = layer.self_attention.linear_qkv
    factors = torch.ones(qkv.out_features, dtype=torch.float32)
    size = qkv.out_features // HEADS
    factors[HEAD * size : (HEAD + 1) * size] = 2.0**-40
    scale_gradient(qkv, factors)


@dataclass(frozen=True)
class Plant:
    """Planted trouble.

    Attributes:
        name: What it is.
        plant: Plants it.
        layer: The layer that has it.
        tensors: The tensors of the layer that have it, the main one first.
    """

    name: str
    plant: Callable[[Transformer], None]
    layer: str
    tensors: tuple[str, ...]


NOTHING = Plant("nothing", lambda model: None, "", ())
OUTLIER = Plant(
    "a channel of 1,000x",
    lambda model: outlier(model, 1e3),
    "layers.1.mlp.linear_fc1",
    ("input", "weight"),
)
LARGE_OUTLIER = Plant(
    "a channel of 2^18",
    lambda model: outlier(model, 2.0**18),
    "layers.1.mlp.linear_fc1",
    ("input", "weight"),
)
WIDE = Plant("gradients span 2^20", wide_gradients, "layers.2.mlp.linear_fc2", ("grad_output",))
TINY_HEAD = Plant(
    "a head's gradients of 2^-40", tiny_head, "layers.1.self_attention.linear_qkv", ("grad_output",)
)
PLANTS = [NOTHING, OUTLIER, LARGE_OUTLIER, WIDE, TINY_HEAD]


def make_model(plant: Plant = NOTHING) -> Transformer:
    """Returns a float32 Transformer that has trained a little, with planted trouble."""
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        ffn_hidden_size=256,
        num_attention_heads=HEADS,
        num_query_groups=HEADS,
        vocab_size=VOCABULARY,
        seq_length=TOKENS // 4,
        head_dim=HIDDEN // HEADS,
    )
    model = Transformer(config)
    model.init_weights(1)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for step in range(6):
        train(model, optimizer, step)
    plant.plant(model)
    return model


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Tokens of a noisy cycle, and the next tokens, int64 [4, TOKENS / 4]."""
    generator = torch.Generator().manual_seed(step)
    start = torch.randint(VOCABULARY, (4, 1), generator=generator, dtype=torch.int64)
    steps = torch.randint(1, 4, (4, TOKENS // 4 + 1), generator=generator, dtype=torch.int64)
    tokens = (start + steps.cumsum(1)) % VOCABULARY
    return tokens[:, :-1], tokens[:, 1:]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    """Takes one optimizer step. Returns its loss."""
    optimizer.zero_grad()
    loss = model(*batch(step))
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def training(model: nn.Module, lr: float = 1e-4) -> Callable[[], float]:
    """Returns a function that takes the next optimizer step."""
    optimizer = torch.optim.Adam(model.parameters(), lr)
    steps = iter(range(100, 1000))
    return lambda: train(model, optimizer, next(steps))


def gradients(model: nn.Module, context: Any, step: int = 50) -> dict[str, Tensor]:
    """Returns the gradients of the matrices of linear layers for one batch, by layer."""
    model.zero_grad()
    with context:
        model(*batch(step)).backward()
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and "linear" in name:
            found[name.removesuffix(".weight")] = parameter.grad.clone()
    return found


def gradient_errors(expected: dict[str, Tensor], actual: dict[str, Tensor]) -> dict[str, float]:
    """Returns the error of each weight gradient: the mean relative error of its rows.

    Adam rescales the gradient of each weight, so a small row counts as much as a large one.
    """
    errors = {}
    for name, gradient in expected.items():
        norms = gradient.double().norm(dim=1)
        lost = (actual[name].double() - gradient.double()).norm(dim=1)
        errors[name] = float((lost / norms)[norms > 0].clamp(max=1).mean())
    return errors


def copy_of(model: Transformer) -> Transformer:
    """Returns a deep copy with the same hooks."""
    return copy.deepcopy(model)


def fp8_errors(
    model: Transformer, exact: dict[str, Tensor], recipe: Recipe | list[str]
) -> dict[str, float]:
    """Returns the errors of the gradients in FP8, after two steps that fill the amax histories.

    Args:
        model: The model. It is not changed.
        exact: Its gradients in float32.
        recipe: The recipe of the conversion, or its overrides.
    """
    if not isinstance(recipe, Recipe):
        recipe = fp8cfg.compose(recipe)
    converted = copy_of(model)
    fp8 = fp8cfg.convert_model(converted, recipe)
    warnings.filterwarnings("ignore", "only .* ran in FP8", RuntimeWarning)
    for step in (48, 49):
        gradients(converted, fp8.autocast(), step)
        fp8.step()
    return gradient_errors(exact, gradients(converted, fp8.autocast()))


@dataclass(frozen=True)
class Row:
    """A plant under a scaling.

    Attributes:
        plant: The plant.
        scaling: Name of the scaling.
        blamed: The layers and tensors that the advice names.
        ratio: The largest error of a GEMM relative to healthy ones.
        overrides: What the advice adds to the preset.
        plain: The largest error of a weight gradient under the preset.
        advised: The same with the overrides.
    """

    plant: Plant
    scaling: str
    blamed: set[tuple[str, str]]
    ratio: float
    overrides: list[str]
    plain: float
    advised: float


SCALINGS = ("delayed hybrid", "current hybrid", "current e4m3", "mxfp8", "nvfp4")


def table(advice_on: Callable[[Transformer], Advice]) -> list[Row]:
    """Returns all plants under five scalings."""
    rows = []
    for plant in PLANTS:
        model = make_model(plant)
        advice = advice_on(model)
        exact = gradients(copy_of(model), nullcontext())
        for remedy in advice.remedies:
            if remedy.scaling not in SCALINGS:
                continue
            errors = [error for error in advice.errors if error.scaling == remedy.scaling]
            assert remedy.recipe is not None
            advised = fp8_errors(model, exact, remedy.recipe)
            plain = advised
            if remedy.overrides:
                plain = fp8_errors(model, exact, [*remedy.preset, "fp8.params=false"])
            rows.append(
                Row(
                    plant,
                    remedy.scaling,
                    {
                        (error.layer, error.tensor)
                        for error in errors
                        if error.layer in remedy.layers and error.alarming
                    },
                    max(error.ratio for error in errors),
                    [override.word for override in remedy.overrides],
                    max(plain.values()),
                    max(advised.values()),
                )
            )
    return rows


def text(rows: list[Row]) -> str:
    """Returns the table as text."""
    heads = ["planted", "scaling", "GEMM", "gradient", "advised", "blamed"]
    cells = []
    for row in rows:
        blamed = ", ".join(f"{layer} {tensor}" for layer, tensor in sorted(row.blamed)) or "-"
        numbers = [f"{row.ratio:.1f}", f"{row.plain:.1%}", f"{row.advised:.1%}"]
        cells.append([row.plant.name, row.scaling, *numbers, blamed])
    widths = [max(len(line[i]) for line in [heads, *cells]) for i in range(len(heads))]
    lines = []
    for line in [heads, *cells]:
        lines.append(
            "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip()
        )
    return "\n".join(lines)
