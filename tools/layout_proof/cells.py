"""Layout proof cells: a recipe in a precision on so many GPUs, and the ranks that are looked at."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import fp8cfg
from fp8cfg.parallel.mesh import axis_sizes
from fp8cfg.planning.layout import split_into_nodes
from fp8cfg.schema import recipe_registry
from fp8cfg.schema.recipe import Recipe

MANY = 105 << 20
"""Samples that any layout divides."""
PRECISIONS = ("bf16", "bf16_fp8")
OTHERS = (("llama_70b", 64), ("llama_8b", 1024), ("llama_70b", 1024), ("llama_405b", 16384))
"""Recipes on other numbers of GPUs than they are meant for."""
SPLIT_SCALES = (("bf16_nvfp4", ()), ("bf16_fp8_current", ("fp8.granularity=row",)))
"""Precisions, with words, whose scales lie across the ranks that split matrices, for the first of `OTHERS`."""


@dataclass(frozen=True)
class Cell:
    """`recipe` in `precision` on `ranks` GPUs, with `words` beside these. A step has `accumulate` times the fewest microbatches that
    the layout takes."""

    recipe: str
    precision: str
    ranks: int
    words: tuple[str, ...] = ()
    accumulate: int = 1

    def compose(self) -> Recipe:
        """The recipe; the fewest microbatches of a step are one, or with a pipeline as many as it has stages. That is also the batch
        that is raised where the layout asks for it."""
        nodes, devices = split_into_nodes(self.ranks)
        words = [
            f"recipe={self.recipe}",
            f"precision={self.precision}",
            f"trainer.num_nodes={nodes}",
            f"trainer.devices={devices}",
            *self.words,
        ]
        recipe = fp8cfg.compose([*words, f"trainer.global_batch_size={MANY}"])
        strategy, sizes = recipe.trainer.strategy, axis_sizes(recipe.trainer.strategy, self.ranks)
        samples = recipe.trainer.micro_batch_size * sizes["dp_replicate"] * sizes["dp_shard"]
        fewest = strategy.pipeline_model_parallel_size
        return fp8cfg.compose(
            [*words, f"trainer.global_batch_size={samples * fewest * self.accumulate}"]
        )

    @property
    def places(self) -> dict[str, int]:
        """The first, a middle and the last rank."""
        return {
            name: rank
            for rank, name in {
                0: "first",
                self.ranks - 1: "last",
                self.ranks // 2: "middle",
            }.items()
        }


def every(names: Iterable[str] = ()) -> list[Cell]:
    """All large recipes, those for more than one GPU, or these of them, on as many GPUs as they are meant for, and `OTHERS`; of
    recipes that differ in their name alone the short one; and `SPLIT_SCALES`."""
    made = {name: make() for name, make in recipe_registry.recipes().items() if name != "from_hf"}
    distinct = {
        recipe.model_copy(update={"name": "any"}).model_dump_json(): name
        for name, recipe in made.items()
    }
    meant = [
        (name, made[name].trainer.num_nodes * made[name].trainer.devices)
        for name in distinct.values()
    ]
    wanted, chosen = {*names}, [(name, ranks) for name, ranks in (*meant, *OTHERS) if ranks > 1]
    kinds = [
        (name, ranks, kind) for name, ranks in chosen for kind in ((p, ()) for p in PRECISIONS)
    ]
    kinds += [(*OTHERS[0], kind) for kind in SPLIT_SCALES]
    return [
        Cell(name, precision, ranks, words)
        for name, ranks, (precision, words) in kinds
        if name in (wanted or {name})
    ]
