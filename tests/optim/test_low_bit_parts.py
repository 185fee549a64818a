"""Low-bit Adam on parts of tensors, as tensor-parallel ranks have them: the codes and scales of the whole tensor, and none in blocks that a cut goes through."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fp8cfg.checkpoint import tensor_layout
from fp8cfg.models.weight_init import TensorShard
from fp8cfg.numerics.codecs import BLOCK
from fp8cfg.numerics.formats import StridedStart, element_numbers, random_key, uniform_numbers
from fp8cfg.optim.low_bit.adam_step import compiled_code
from fp8cfg.optim.low_bit.columns import FLOAT32, columns_of_shard, decode_shard, named_columns
from tests.support.low_bit import bits, build, normal

SHAPE = (12, 3 * BLOCK)
CUTS = {
    "rows": TensorShard(1, 2),
    "pieces": TensorShard(2, 3, 0, 2),
    "columns": TensorShard(1, 3, 1),
}
MOMENTS = {"tensor": ("fp8", "fp16_scaled"), "blocks": ("fp8_expand", "fp8_block")}


def strided(shard: TensorShard, part: Tensor) -> StridedStart:
    return StridedStart(0, shard.run(part.shape), shard.rank, shard.ranks)


def scales_of_part(scales: Tensor, cut: str) -> Tensor:
    """The one scale of a tensor, or those of the blocks of its part."""
    if not scales.dim():
        return scales
    return (
        tensor_layout.slice_column_scales(scales, SHAPE[0], CUTS[cut])
        if cut == "columns"
        else CUTS[cut].part(scales)
    )


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("moments", MOMENTS)
def test_a_part_has_the_bits_of_the_whole(moments: str, cut: str) -> None:
    shard, columns = CUTS[cut], named_columns("bf16", "fp32", "fp32", *MOMENTS[moments])
    whole = nn.Parameter(normal(*SHAPE, scale=0.02).bfloat16())
    part = nn.Parameter(shard.part(whole.detach()).clone())
    every, mine = build(columns, {"p0": whole}, seed=5), build(columns, {"p0": part}, seed=5)
    amaxes: list[Tensor] = []

    def recorded(found: Tensor) -> Tensor:
        amaxes.append(found)
        return found

    every.max_over_ranks, mine.max_over_ranks, mine.shard_starts = (
        recorded,
        lambda here: torch.maximum(here, amaxes.pop()),
        {part: strided(shard, part)},
    )
    for step in range(3):
        whole.grad = normal(*SHAPE, seed=10 + step, scale=1e-3).bfloat16()
        part.grad = shard.part(whole.grad).clone()
        every.step()
        mine.step()
    assert torch.equal(shard.part(whole.detach()), part.detach())
    for name, t in mine.state_tensors().items():
        theirs = every.state_tensors()[name]
        if not name.endswith("scale_inv"):
            wanted = shard.part(theirs.view(torch.uint8) if t.itemsize == 1 else theirs)
        else:
            wanted = scales_of_part(theirs, cut)
        assert torch.equal(bits(t), bits(wanted)), name


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("grad", ["fp8", "fp8_pow2", "fp16_scaled", "fp8_block"])
def test_a_part_of_a_gradient_has_the_codes_of_the_whole(grad: str, cut: str) -> None:
    """Added up in its codec too; and where another rank has one that is not a number, none here is."""
    shard, columns, whole = CUTS[cut], named_columns(weight_grad=grad), nn.Parameter(normal(*SHAPE))
    part = nn.Parameter(shard.part(whole.detach()).clone())
    every, mine = build(columns, {"p0": whole}), build(columns, {"p0": part})
    amaxes: list[Tensor] = []

    def recorded(found: Tensor) -> Tensor:
        amaxes.append(found)
        return found

    every.gradients.max_over_ranks, mine.gradients.max_over_ranks = (
        recorded,
        lambda here: torch.maximum(here, amaxes.pop()),
    )
    mine.gradients.groups = {part: {part}}
    for step, first in enumerate((1.0, 1.0, float("nan"))):
        gradient = normal(*SHAPE, seed=step)
        gradient[0, 0] *= first
        for optimizer, p, g in ((every, whole, gradient), (mine, part, shard.part(gradient))):
            with optimizer.storing(add=True):
                (p * g).sum().backward()
        theirs, own = every.stored_grads[whole], mine.stored_grads[part]
        if grad == "fp8_block" or step < 2:
            assert torch.equal(
                bits(own[0]),
                bits(
                    shard.part(
                        theirs[0].view(torch.uint8) if theirs[0].itemsize == 1 else theirs[0]
                    )
                ),
            )
            assert torch.equal(own[1], scales_of_part(theirs[1], cut))
        else:
            assert (
                columns.read.decode(own).isnan().all() and columns.read.decode(theirs).isnan().all()
            )


@pytest.mark.parametrize("cut", CUTS)
def test_elements_of_a_part_are_numbered_as_in_the_whole(cut: str) -> None:
    shard, numbers = CUTS[cut], torch.arange(SHAPE[0] * SHAPE[1], dtype=torch.int32).view(SHAPE)
    part = shard.part(numbers)
    place = strided(shard, part)
    assert torch.equal(element_numbers(place, part.numel(), part.device), part.flatten())
    assert torch.equal(
        element_numbers(place._replace(start=40), 7, part.device), part.flatten()[40:47]
    )


@pytest.mark.parametrize(
    ("shard", "shape", "kept"),
    [
        (TensorShard(1, 2), (2, 2 * BLOCK), True),
        (TensorShard(1, 4), (4, BLOCK // 2), False),
        (TensorShard(1, 2, 1), (2, 2 * BLOCK), True),
        (TensorShard(1, 4, 1), (2, 2 * BLOCK), False),
        (TensorShard(1, 2, 0, 2), (4, BLOCK // 2), False),
        (TensorShard(1, 2, 0, 2), (4, BLOCK), True),
    ],
)
def test_moments_of_cut_blocks_are_float32_and_decode_from_those_of_the_whole(
    shard: TensorShard, shape: tuple[int, int], kept: bool
) -> None:
    columns = named_columns("bf16", "fp32", "fp32", "fp8_expand", "fp8_block")
    values = normal(*shape).abs()
    part = shard.part(values)
    place = strided(shard, part)
    found = columns_of_shard(columns, part, place)
    assert (found == columns) == kept and (
        found.exp_avg == found.exp_avg_sq == FLOAT32.exp_avg
    ) == (not kept)
    assert (found.weight, found.master) == (columns.weight, columns.master)
    for codec in (columns.exp_avg, columns.exp_avg_sq):
        data, scales = codec.encode(values, random_key(1, "draw"))
        here = shard.part(data.view(torch.uint8)).view(data.dtype)
        assert torch.equal(
            decode_shard(codec, here, scales, place), shard.part(codec.decode((data, scales)))
        )


@pytest.mark.parametrize(
    ("shape", "shard", "split"),
    [
        ((BLOCK,), TensorShard(1, 2), True),
        ((96,), TensorShard(1, 2), False),
        ((4, BLOCK), TensorShard(1, 2, 1), True),
        ((4, 96), TensorShard(1, 4, 1), False),
    ],
)
def test_scales_of_cut_blocks_are_read_whole(
    shape: tuple[int, ...], shard: TensorShard, split: bool
) -> None:
    """Of 192 elements too, two blocks of 128 and 64, of which each of two ranks has 96."""
    assert tensor_layout.split_scales(torch.empty(shape), shard) == (shard if split else None, None)
    assert tensor_layout.split_scales(torch.empty(shape), None) == (None, None)


@pytest.mark.slow
def test_compiled_code_takes_places_of_any_part() -> None:
    """With no graph for each."""
    torch._dynamo.reset()
    key, run = random_key(1, "draw"), compiled_code(uniform_numbers)
    for size, rank, ranks in ((96, 3, 4), (160, 5, 8)):
        place = StridedStart(0, size, rank, ranks)
        assert torch.equal(run(key, 2, place, 4 * size), uniform_numbers(key, 2, place, 4 * size))
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for size, rank, ranks in ((224, 2, 4), (288, 6, 7), (96, 9, 12)):
        place = StridedStart(0, size, rank, ranks)
        assert torch.equal(run(key, 2, place, 4 * size), uniform_numbers(key, 2, place, 4 * size))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


@pytest.mark.slow
def test_a_compiled_step_of_parts_has_the_bits_of_an_eager_one() -> None:
    found = []
    for compiled in (False, True):
        params = {
            f"p{i}": nn.Parameter(normal(4, width, seed=i).bfloat16())
            for i, width in enumerate((BLOCK, 3 * BLOCK))
        }
        optimizer = build(
            named_columns("bf16", "fp32", "fp32", "fp8_block", "fp8_block"),
            params,
            seed=5,
            compiled=compiled,
        )
        optimizer.shard_starts = {p: StridedStart(0, p.shape[1], 2, 4) for p in params.values()}
        for step in range(2):
            for p in params.values():
                p.grad = normal(*p.shape, seed=step, scale=1e-3).bfloat16()
            optimizer.step()
        found.append({name: bits(t).clone() for name, t in optimizer.state_tensors().items()})
    assert found[0].keys() == found[1].keys() and all(
        torch.equal(t, found[1][name]) for name, t in found[0].items()
    )
