"""Job weights: the first weights of a Transformer, and the adapters beside them that the `lora` node of a recipe asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8cfg.config import hub, hugging_face
from fp8cfg.config.errors import ConfigError
from fp8cfg.config.hugging_face import Family
from fp8cfg.config.hugging_face_folder import family_of_weights
from fp8cfg.config.recipe import Recipe
from fp8cfg.layer_plan import adapted, transformer_config
from fp8cfg.models.config import TransformerConfig
from fp8cfg.models.lora_shapes import projections
from fp8cfg.models.shapes import parameter_shapes

if TYPE_CHECKING:
    from torch import Tensor

    from fp8cfg.models.hf import Layout
    from fp8cfg.models.lora import Adapters
    from fp8cfg.models.transformer import Transformer


def first_weights(
    config: TransformerConfig, seed: int, weights: str | None = None, family: Family | None = None
) -> Callable[[Any], None]:
    """The weights that a Transformer of `config` starts with: drawn from `seed`, or read from the folder `weights`, here or on the
    hub, as `family` lays them out. What is returned raises ConfigError for a folder without weights of this model.
    """
    if weights is None or family is None:
        return partial(_drawn, seed)
    return partial(
        _read,
        config,
        hub.local_folder(weights, "model.weights", hub.WEIGHTS),
        weights,
        hf_layout(family),
    )


def zeros(model: Transformer) -> None:
    """Fill weights that a load overwrites at once: what memory has by chance may be no number, and would be quantized."""
    for p in model.parameters():
        p.data.zero_()


def first_weight(recipe: Recipe) -> Callable[[str], Tensor]:
    """What gives a parameter of the Transformer of `recipe` by name as `first_weights` would have it, whole, on the CPU: drawn in
    float32, or read from model.weights in the dtype that it has there. Raises ConfigError as they do.
    """
    import torch

    from fp8cfg.models import hf_checkpoint, weight_init

    config, seed, named = transformer_config(recipe), recipe.trainer.seed, recipe.model.weights

    def drawn(name: str) -> Tensor:
        out = torch.empty(parameter_shapes(config)[name], dtype=torch.float32)
        weight_init.fill_first(out, name, config, seed)
        return out

    if named is None:
        return drawn
    family = family_of_weights(recipe.model)
    folder = hub.local_folder(named, "model.weights", hub.WEIGHTS)
    with _as_config_error(named):
        one = hf_checkpoint.reader(config, folder, hf_layout(family))

    def read(name: str) -> Tensor:
        with _as_config_error(named):
            return one(name)

    return read


def hf_layout(family: Family) -> Layout:
    """How `family` lays out its weights at Hugging Face."""
    from fp8cfg.models import hf

    return hf.Layout(family.names, family.conv1d, family.model.layernorm_zero_centered_gamma)


def _drawn(seed: int, model: Transformer) -> None:
    model.init_weights(seed)


def _read(
    config: TransformerConfig, folder: Path, named: str, layout: Layout, model: Transformer
) -> None:
    from fp8cfg.models import hf_checkpoint

    with _as_config_error(named):
        hf_checkpoint.load(model, config, folder, layout)


@contextmanager
def _as_config_error(weights: str) -> Iterator[None]:
    """Around the reading of model.weights, where `weights` is what the user wrote."""
    try:
        yield
    except ValueError as e:
        raise ConfigError(f"model.weights={weights}: {e}") from None


def adapters(recipe: Recipe) -> Adapters | None:
    """The adapters of `recipe`; None without lora.enabled. Raises ConfigError for a folder of lora.weights that does not fit."""
    if not recipe.lora.enabled:
        return None
    from fp8cfg.models import lora, peft

    node, config, found = recipe.lora, transformer_config(recipe), adapted(recipe)
    first = None
    if node.weights:
        family = hugging_face.of_model(recipe.model)
        folder = hub.local_folder(node.weights, "lora.weights", hub.WEIGHTS)
        try:
            first = peft.read(folder, found, family.names, node.rank, node.alpha)
        except ValueError as e:
            raise ConfigError(f"lora.weights={node.weights}: {e}") from None
    return lora.Adapters(
        found,
        projections(config),
        config.num_query_groups,
        node.rank,
        node.alpha,
        node.dropout,
        first,
    )
