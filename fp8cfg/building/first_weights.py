"""Initial weights of a job's model: random, or from pretrained files.

Also makes LoRA adapters, with random or pretrained weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from fp8cfg.models import hf_checkpoint, lora, weight_init
from fp8cfg.models.config import parameter_shapes, projections
from fp8cfg.models.hf_checkpoint import Layout
from fp8cfg.models.lora import Adapters
from fp8cfg.models.transformer import Transformer
from fp8cfg.planning.layer_plan import adapted_projections, transformer_config
from fp8cfg.schema import hub, hugging_face
from fp8cfg.schema.errors import ConfigError
from fp8cfg.schema.hugging_face import Family, family_of_weights
from fp8cfg.schema.recipe import Recipe

WeightFiller = Callable[[Transformer], None]
"""Writes the initial weights of a model in place, or of this rank's shards."""


def first_weights(recipe: Recipe) -> WeightFiller:
    """Returns a function to fill the recipe's Transformer.

    It reads model.weights, or draws random weights from trainer.seed.

    Args:
        recipe: The recipe.

    Raises:
        ConfigError: model.weights is not found. The returned function raises it if the files have
            the weights of another model.
    """
    weights = recipe.model.weights
    seed = recipe.trainer.seed
    if weights is None:
        return lambda model: model.init_weights(seed)
    config = transformer_config(recipe)
    folder = hub.local_folder(weights, "model.weights", hub.HUB_WEIGHTS)
    layout = hf_layout(family_of_weights(recipe.model))

    def read(model: Transformer) -> None:
        """Reads pretrained weights into `model`."""
        with _config_errors(weights):
            hf_checkpoint.load(model, config, folder, layout)

    return read


def zero_weights(model: Transformer) -> None:
    """Fills the model with zeros, before a checkpoint is loaded into it.

    The weights are quantized once before the load, and uninitialized memory can have NaN.
    """
    for parameter in model.parameters():
        parameter.data.zero_()


def first_weight(recipe: Recipe) -> Callable[[str], Tensor]:
    """Returns a function to read or draw one initial weight, without building the model.

    The function takes the name of a parameter and returns its full weight on the CPU. A random
    weight is float32. A pretrained weight has the dtype of its file.

    Args:
        recipe: The recipe.

    Raises:
        ConfigError: See `first_weights`.
    """
    config = transformer_config(recipe)
    weights = recipe.model.weights
    if weights is None:
        shapes = parameter_shapes(config)

        def draw(name: str) -> Tensor:
            # `init_parameter` draws each weight from the seed and its name, in any order.
            weight = torch.empty(shapes[name], dtype=torch.float32)
            weight_init.init_parameter(weight, name, config, recipe.trainer.seed)
            return weight

        return draw
    folder = hub.local_folder(weights, "model.weights", hub.HUB_WEIGHTS)
    layout = hf_layout(family_of_weights(recipe.model))
    with _config_errors(weights):
        read_weight = hf_checkpoint.checkpoint_reader(config, folder, layout)

    def read(name: str) -> Tensor:
        with _config_errors(weights):
            return read_weight(name)

    return read


def hf_layout(family: Family) -> Layout:
    """Returns how a model family stores its weights in Hugging Face checkpoints."""
    return Layout(family.names, family.conv1d, family.model.layernorm_zero_centered_gamma)


@contextmanager
def _config_errors(weights: str) -> Iterator[None]:
    """Turns a ValueError of the weight reader into a ConfigError with the key model.weights."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(f"model.weights={weights}: {error}") from None


def make_adapters(recipe: Recipe) -> Adapters | None:
    """Makes the LoRA adapters of a recipe, not attached to a model yet.

    Returns:
        The adapters, or None if lora.enabled is false.

    Raises:
        ConfigError: lora.weights is not found, or has adapters of another rank, alpha or layers.
    """
    settings = recipe.lora
    if not settings.enabled:
        return None
    config = transformer_config(recipe)
    adapted = adapted_projections(recipe)
    weights = None
    if settings.weights:
        family = hugging_face.family_of_model(recipe.model)
        folder = hub.local_folder(settings.weights, "lora.weights", hub.HUB_WEIGHTS)
        try:
            weights = lora.read_peft(folder, adapted, family.names, settings.rank, settings.alpha)
        except ValueError as error:
            raise ConfigError(f"lora.weights={settings.weights}: {error}") from None
    return Adapters(
        adapted,
        projections(config),
        config.num_query_groups,
        settings.rank,
        settings.alpha,
        settings.dropout,
        weights,
    )
