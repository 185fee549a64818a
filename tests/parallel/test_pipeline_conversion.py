"""FP8 layers of a pipeline stage have the numbers of the whole model."""

from __future__ import annotations

import pytest

from fp8cfg.backends.native.backend import convert
from fp8cfg.building.model import make_transformer
from fp8cfg.numerics.autocast import Region
from fp8cfg.numerics.fp8_attention import FP8Attention
from fp8cfg.planning.layer_plan import plan_layers, transformer_config
from tests.support.small import small


@pytest.mark.parametrize(("stage", "numbers"), [((0, 1), [0, 1]), ((2, 3), [2])])
def test_attention_of_a_stage(stage: tuple[int, int], numbers: list[int]) -> None:
    recipe = small(
        "precision=bf16_fp8",
        "fp8.params=false",
        "fp8.dot_product_attention=true",
        "fp8.high_precision_at_end=1",
        "model.num_layers=4",
    )
    model = make_transformer(transformer_config(recipe))
    for number in set(range(4)) - set(stage):
        del model.layers._modules[str(number)]
    names = {name for name, _ in model.named_modules()}
    plan = [planned for planned in plan_layers(recipe) if planned.name in names]
    convert(model, recipe.fp8, plan, Region(), "emulate")
    found = [name for name, layer in model.named_modules() if isinstance(layer, FP8Attention)]
    assert found == [f"layers.{number}.self_attention.core_attention" for number in numbers]
