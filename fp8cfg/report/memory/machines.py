"""Machines: the nodes and GPUs that a number of ranks is started on, as a recipe has them."""

from __future__ import annotations

from fp8cfg.config.recipe import Recipe


def machines(ranks: int) -> tuple[int, int]:
    """Nodes, and GPUs of each: eight, or as many below that as divide `ranks`."""
    devices = next(n for n in range(8, 0, -1) if ranks % n == 0)
    return ranks // devices, devices


def placed(recipe: Recipe, nodes: int, devices: int) -> Recipe:
    """`recipe` on so many nodes with so many GPUs each; its batch stays, whether or not they divide it."""
    trainer = recipe.trainer.model_copy(update={"num_nodes": nodes, "devices": devices})
    return recipe.model_copy(update={"trainer": trainer})
