"""Weights that the Triton kernels store, under Triton's interpreter, on a CPU: fields, scales and amaxes are those of the plain torch code,
also in shards and in one of two tensor-parallel parts.

The interpreter is chosen when Triton is imported, hence the process of its own. What kernels write here: tests/support/kernel_values.py."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from fp8cfg.numerics import E2M1, E4M3, Scaling
from fp8cfg.numerics.fp8_weights import FP8Weight, store
from fp8cfg.numerics.scaling import INPUT, WEIGHT, choose_tensor_scale
from tests.support.interpreted import (
    interpreted,
    not_interpreted,
    quantize_by_kernels,
    under_the_interpreter,
)
from tests.support.kernel_values import exact

pytestmark = pytest.mark.filterwarnings(
    "ignore::RuntimeWarning:triton"
)  # numpy, of infinities and NaN: the interpreter computes with it


@pytest.mark.slow
@not_interpreted
def test_under_the_interpreter() -> None:
    under_the_interpreter(__file__)


STORED = {
    "delayed": Scaling(),
    "current": Scaling("current"),
    "rows": Scaling("current", granularity="row", power_2_scales=True),
    "128x128": Scaling("block", power_2_scales=True, weights_2d=True),
    "1x128": Scaling("block", power_2_scales=True),
    "MX": Scaling("mxfp8"),
    "MX 32x32": Scaling("mxfp8", weights_2d=True),
    "NVFP4": Scaling("nvfp4", forward=E2M1, backward=E2M1),
    "NVFP4 16x16": Scaling("nvfp4", forward=E2M1, backward=E2M1, weights_2d=True),
}


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    quantize_by_kernels(monkeypatch)


def same(made: FP8Weight, want: FP8Weight) -> bool:
    return all(
        a is b is None
        or (
            a is not None
            and b is not None
            and a.shape == b.shape
            and a.dtype == b.dtype
            and a.is_contiguous()
            and torch.equal(a.view(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
        )
        for a, b in zip(made, want, strict=True)
    )


@interpreted
@pytest.mark.parametrize("shape", [(256, 192), (200, 96), (80, 352)], ids=str)
@pytest.mark.parametrize("kind", STORED)
def test_a_stored_weight_and_its_shards_are_those_of_plain_code(
    kind: str, shape: tuple[int, int], on_cpu: None
) -> None:
    """Fields, layouts, dtypes and bits, with the amax that is recorded; shards of two ranks, of which no tile or all are cut."""
    from fp8cfg.numerics import fsdp_weights
    from fp8cfg.numerics.kernels.store import store_and_record

    scaling, t = STORED[kind], exact(*shape)
    state = (torch.zeros(3), torch.zeros(4, 3)) if scaling.layout.history else (None, None)
    scale = (
        choose_tensor_scale(t, WEIGHT, scaling, *state, record=False)
        if scaling.tile(WEIGHT, 1) is None
        else None
    )
    want = store(t, scaling, scale)
    assert same(store_and_record(t, scaling, *state, None), want), kind
    held = FP8Weight(*(None if field is None else torch.zeros_like(field) for field in want))
    versions = [field._version for field in held if field is not None]
    again = store_and_record(t, scaling, *state, None, held)
    assert same(held, want) and all(a is b for a, b in zip(again, held, strict=True)), (
        "written where it is held"
    )
    assert all(
        field._version > version
        for field, version in zip((f for f in held if f is not None), versions, strict=True)
    )
    assert state[1] is None or state[1].tolist() == [[0, 3.5, 0], *[[0, 0, 0]] * 3]
    for ranks in (2, 4):
        pieces, places = (
            t.chunk(ranks),
            [fsdp_weights.ShardPlace(shape[0], ranks, rank) for rank in range(ranks)],
        )
        found = [
            torch.stack(each).amax(0)
            for each in zip(
                *fsdp_weights.compute_shard_amaxes(pieces, scaling, places), strict=True
            )
        ]
        known = (
            fsdp_weights.compute_shard_scales(found, scaling, places[0])
            if scale is None
            else fsdp_weights.ShardScales(scale)
        )
        made = [
            fsdp_weights.quantize_shard(piece, scaling, place, known)
            for piece, place in zip(pieces, places, strict=True)
        ]
        split = fsdp_weights.split_fields(scaling, places[0])
        joined = FP8Weight(
            *(
                None
                if t is None
                else torch.cat([getattr(each, field) for each in made])
                if field in split
                else t
                for field, t in made[0]._asdict().items()
            )
        )
        assert same(joined, want), (kind, ranks)


@interpreted
@pytest.mark.parametrize("kind", ["current", "delayed"])
def test_parts_are_scaled_as_the_whole(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two tensor-parallel ranks, with the larger amax at the other one; what is recorded is its own."""
    from fp8cfg.numerics import amax as amax_group
    from fp8cfg.numerics.kernels import launch as fused_quantize

    scaling, t, asked = STORED[kind], exact(192, 160), []

    def largest(amax: Tensor, group: str) -> Tensor:
        asked.append((amax.item(), group))
        return torch.maximum(amax, torch.tensor(7.0))

    monkeypatch.setattr(amax_group, "all_reduce_max", largest)
    parts = amax_group.AmaxGroup(((WEIGHT, 0),), "two ranks")
    for first in (0.0, 2.0) if scaling.layout.history else (None,):
        state = (None, None) if first is None else (torch.full((3,), first), torch.zeros(4, 3))
        made = fused_quantize.quantize_tensor_fused(
            t, WEIGHT, scaling, *state, record=True, both=True, amax_group=parts
        )
        scale = torch.tensor(first or E4M3.max / 7.0)
        assert made.scale_inv == 1 / scale and torch.equal(made.data.float(), t * scale)
        assert made.columnwise is not None and torch.equal(
            made.columnwise.data.float(), made.data.t().float()
        )
        assert state[1] is None or state[1][0].tolist() == [0, 3.5, 0]
        fused_quantize.quantize_tensor_fused(
            t, INPUT, scaling, *state, record=True, both=False, amax_group=parts
        )
    read = [0.0 if first else 3.5 for first in ((0.0, 2.0) if scaling.layout.history else (0.0,))]
    assert asked == [(amax, "two ranks") for amax in read], (
        "of the role that is split; not read where its scale is set"
    )


@interpreted
def test_no_amax_is_looked_for_where_scales_begin_with_1(
    on_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Transformer Engine's; one that is not set is 1."""
    from fp8cfg.numerics.kernels import launch as fused_quantize
    from fp8cfg.numerics.kernels import store as fused_store
    from fp8cfg.numerics.kernels import tensor

    launches, launch = [], tensor.compute_part_amaxes
    monkeypatch.setattr(
        tensor,
        "compute_part_amaxes",
        lambda *args, **kwargs: launches.append(launch(*args, **kwargs)),
    )
    t, scaling = exact(192, 160), Scaling(first_step="te")
    for first in (1.0, 2.0, 0.0):
        scales, history = torch.full((3,), first), torch.zeros(4, 3)
        made = fused_quantize.quantize_tensor_fused(
            t, INPUT, scaling, scales, history, record=True, both=False
        )
        data, scale_inv, *_ = fused_store.store_and_record(t, scaling, scales, history, None)
        for q, inverse in ((made.data, made.scale_inv), (data, scale_inv)):
            assert inverse == 1 / (first or 1) and torch.equal(q.float(), t * (first or 1))
        assert history[0].tolist() == [3.5, 3.5, 0]
    assert not launches
    fused_quantize.quantize_tensor_fused(
        t, INPUT, Scaling(), torch.ones(3), history, record=True, both=False
    )
    assert len(launches) == 1, "by default a scale that is not set is that of the tensor"
