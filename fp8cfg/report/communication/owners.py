"""Communication of owners (ZeRO): gradients to the rank that keeps a tensor's state, and its weights from there to all."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from fp8cfg.backends.gemm_plan import PlannedLinear
from fp8cfg.config.fp8 import per_row, weights_2d
from fp8cfg.config.recipe import Recipe
from fp8cfg.config.storage import SCALED, fp8_weights
from fp8cfg.report.communication.collectives import NUMBER, Collective, same_parameters
from fp8cfg.report.communication.gradients import sent_elements
from fp8cfg.report.memory.gradient_sums import MESSAGE
from fp8cfg.report.memory.layout import Part
from fp8cfg.report.memory.operands import CODEC, held_beside
from fp8cfg.report.memory.shards import owner_of, parameter_columns, trained_shapes
from fp8cfg.scalings import SCALE_BYTES, SCALINGS


def summed_on_owners(
    recipe: Recipe, part: Part, linears: list[PlannedLinear], rank: int | None
) -> Iterator[Collective]:
    """Sums on the owner of each tensor alone."""
    axis, (owner, _) = same_parameters(part), owner_of(recipe, part, linears)
    for comm, elements in sent_elements(recipe, part, linears).items():
        loads = _loads(elements, owner)
        own = (
            min(loads.get(one, 0) for one in range(axis.ranks))
            if rank is None
            else loads.get(rank, 0)
        )
        others = int((sum(loads.values()) - own) * CODEC[comm])
        yield from axis.all_to_all("gradients", others, _rounds(loads, axis.ranks))
        if comm in SCALED:
            yield from axis.all_gather("scales", NUMBER * len(elements))


def handed_round(recipe: Recipe, part: Part, linears: list[PlannedLinear]) -> Iterator[Collective]:
    """Weights from their owners to all, as they are stored, in messages as long as the longest of a rank; the scales of those in a
    codec; then the amaxes of FP8 weights, which owners recorded."""
    axis, (owner, _) = same_parameters(part), owner_of(recipe, part, linears)
    shapes = trained_shapes(recipe, part)
    columns = parameter_columns(recipe, linears, shapes)
    held = fp8_weights(recipe.precision)
    fp8 = {name for p in linears if held and p.fp8 and (name := f"{p.name}.weight") in shapes}
    stored = {
        name: int(
            prod(shape) * CODEC[columns[name]["weight"]]
            + (_beside(recipe, shape) if name in fp8 else 0)
        )
        for name, shape in shapes.items()
    }
    scales = {
        name: NUMBER for name in shapes if name not in fp8 and columns[name]["weight"] in SCALED
    }  # one for all of a weight
    for what, loads in (("weights", _loads(stored, owner)), ("scales", _loads(scales, owner))):
        if loads:
            yield from axis.all_gather_in(what, max(loads.values()), _rounds(loads, axis.ranks))
    if fp8 and SCALINGS[recipe.fp8.scaling].history:
        yield from axis.all_reduce("amaxes", NUMBER * len(fp8))


def _beside(recipe: Recipe, shape: tuple[int, ...]) -> float:
    """Bytes of the scales of a weight held in FP8, and of its other matrix where it has one."""
    fp8, scaling = recipe.fp8, SCALINGS[recipe.fp8.scaling]
    tile = scaling.tile(1, fp8.granularity, square=weights_2d(fp8))
    whole = NUMBER if tile is None or scaling.two_levels else 0
    if tile is None or tile[0] == tile[1]:
        tiles = prod(-(-n // side) for n, side in zip(shape, tile, strict=True)) if tile else 0
        return whole + SCALE_BYTES[scaling.scale] * tiles
    return whole + held_beside(recipe) * prod(shape) + (NUMBER * sum(shape) if per_row(fp8) else 0)


def _loads(sizes: dict[str, int], owner: dict[str, int]) -> dict[int, int]:
    loads: dict[int, int] = {}
    for name, count in sizes.items():
        loads[owner[name]] = loads.get(owner[name], 0) + count
    return loads


def _rounds(loads: dict[int, int], ranks: int) -> int:
    """Messages in which each rank sends, or gets, a part of what is its own."""
    return -(-max(loads.values()) // max(MESSAGE // ranks, 1))
