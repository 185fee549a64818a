"""A recipe in Python, with the types that it has: what a type checker passes, and what runs."""

from typing import Literal, assert_type

import fp8cfg
from fp8cfg import FP8, Precision, Recipe, compose
from fp8cfg.recipes import llama_8b, llama_tiny


@fp8cfg.recipe
def mine() -> Recipe:
    recipe = llama_8b()
    recipe.name = "mine"
    recipe.trainer.plugins = fp8cfg.bf16_with_fp8_mixed(fp8={"margin": 1})
    recipe.fp8.margin = 1
    recipe.fp8 = FP8(enabled=True, scaling="current", granularity="row")
    recipe.fp8 = {"margin": 2}
    recipe.precision = "bf16-mixed"
    recipe.precision = fp8cfg.bf16_with_mxfp8_mixed()
    recipe.storage.shard = "zero1"
    recipe.backend = "native"
    recipe.opt_level = None
    recipe.model.rope_scaling = fp8cfg.RopeScaling(factor=8)
    recipe.optim = fp8cfg.Optim(lr=3e-4, betas=(0.9, 0.98))
    return recipe


recipe = mine()
assert_type(recipe, Recipe)
assert_type(recipe.precision, Precision)
assert_type(recipe.fp8, FP8)
assert_type(recipe.fp8.margin, int)
assert_type(recipe.fp8.format, Literal["hybrid", "e4m3"])
assert_type(recipe.storage, fp8cfg.Storage)
assert_type(fp8cfg.recipes.llama_tiny(), Recipe)
assert_type(llama_tiny(), Recipe)
assert_type(fp8cfg.fp32(), Precision)
assert_type(compose(["recipe=llama_8b", "precision=bf16_fp8", "fp8.margin=1"]), Recipe)
assert_type(fp8cfg.to_yaml(recipe), str)

plan = fp8cfg.plan(recipe, gpu="h100", gpus=64)
assert_type(plan, fp8cfg.Plan)
assert_type(plan.coverage.share, float)
assert_type(fp8cfg.explain(recipe, "fp8.margin").effect, str)
assert_type(fp8cfg.explain(["recipe=llama_8b"], "fp8.margin"), fp8cfg.Explanation)
assert_type(fp8cfg.interop.from_mapping("te", {}).recipe, Recipe)

try:
    recipe.check()
except fp8cfg.ConfigError as error:
    assert_type(error.problems, list[str])
