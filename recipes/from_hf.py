"""Recipe with shape and weights of a Hugging Face checkpoint.

Use `recipe=from_hf model.path=FOLDER`, or `of_folder(FOLDER)` in Python. Training defaults are
NeMo's for full fine-tuning: learning rate 5e-6 with 50 warmup steps, 128 samples per step, 1000
steps.
"""

from __future__ import annotations

from fp8cfg.schema.hugging_face import with_pretrained_shape
from fp8cfg.schema.presets import precision_preset
from fp8cfg.schema.recipe import Recipe
from fp8cfg.schema.recipe_registry import recipe
from fp8cfg.schema.training import Optim, Trainer


@recipe
def from_hf() -> Recipe:
    """The shape and the weights of a local Hugging Face checkpoint, model.path=FOLDER."""
    return Recipe(
        name="from_hf",
        optim=Optim(lr=5e-6, min_lr=0, warmup_steps=50, betas=(0.9, 0.98)),
        trainer=Trainer(
            plugins=precision_preset("bf16"),
            max_steps=1000,
            global_batch_size=128,
            micro_batch_size=1,
        ),
    )


def of_folder(folder: str) -> Recipe:
    """Returns the recipe of `recipe=from_hf model.path=FOLDER`.

    Args:
        folder: Folder of the checkpoint, or hf://ORG/NAME.

    Raises:
        ConfigError: The folder does not exist, or its model is not supported.
    """
    result = from_hf()
    result.model.path = folder
    return with_pretrained_shape(result)
