"""What goes over the wire: the same bits from processes as from threads, errors, infinities, bytes."""

from __future__ import annotations

import itertools
import math
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fp8cfg.numerics.codecs import CODECS, Codec, EncodedTensor, get_codec
from fp8cfg.parallel import quantized_allreduce
from fp8cfg.parallel.process_group import Traffic, World
from fp8cfg.parallel.quantized_allreduce import (
    even_shares,
    owned_shares,
    sum_over_ranks,
    sum_stored,
    sum_stored_to_owners,
    sum_to_owners,
)
from tests.support.ranks import on_ranks
from tools.gradient_sums.threaded_ranks import on_threads

FP8 = ("fp8", "fp8_pow2")
SMALL_MESSAGE = 1000  # elements: of the tensors below one is cut, others share a message


def gradients(rank: int) -> list[Tensor]:
    """Tensors of all kinds that are sent, other numbers on each rank."""
    g = torch.Generator().manual_seed(rank)
    normal = [
        torch.randn(shape, generator=g) * 10.0**-i
        for i, shape in enumerate([(60, 50), (1,), (3,), (77,), (2, 5, 7)])
    ]
    return [
        *normal,
        torch.empty(0),
        torch.zeros(20),
        torch.randn(30, 40, generator=g).t(),
        torch.randn(90, generator=g).bfloat16(),
        torch.full((5,), 1e-44),
        torch.tensor([1.0, math.inf if rank == 1 else 2.0]),
        torch.tensor([math.nan if rank == 0 else 1.0, 2.0]),
    ]


FINITE, BROKEN = slice(0, -2), slice(-2, None)


def owner_of(ranks: int) -> list[int]:
    return [i * i % ranks for i in range(len(gradients(0)))]


def stored_gradients(rank: int, c: Codec) -> list[EncodedTensor]:
    found = []
    for t in gradients(rank):
        found.append(c.zeros(t.shape, t.device))
        c.store(t, found[-1])
    return found


def threaded(ranks: int, name: str, to_owners: bool = False) -> list[list[Tensor]]:
    every = [gradients(rank) for rank in range(ranks)]
    summed(every, name, owner_of(ranks) if to_owners else None)
    return every


def summed(every: list[list[Tensor]], name: str, owners: list[int] | None = None) -> Traffic:
    """Sum the tensors of each rank, in place; what the first has sent."""

    def work(world: World) -> Traffic:
        if owners is None:
            sum_over_ranks(every[world.rank], name, world)
        else:
            sum_to_owners(every[world.rank], owners, name, world)
        return world.traffic

    return on_threads(len(every), work)[0]


def threaded_stored(ranks: int, name: str, to_owners: bool = False) -> list[list[EncodedTensor]]:
    c = get_codec(name)
    every = [stored_gradients(rank, c) for rank in range(ranks)]

    def work(world: World) -> None:
        if to_owners:
            sum_stored_to_owners(every[world.rank], owner_of(ranks), c, world)
        else:
            sum_stored(every[world.rank], c, world)

    on_threads(ranks, work)
    return every


def exact(ranks: int) -> list[Tensor]:
    return [
        torch.stack([t.double() for t in ts]).sum(0)
        for ts in zip(*map(gradients, range(ranks)), strict=True)
    ]


def bits(x: Any) -> list[Tensor]:
    """Float32 bits of tensors, however deep in lists; one NaN is as good as another."""
    if isinstance(x, Tensor):
        v = x.float()
        return [v.masked_fill(v.isnan(), math.pi).contiguous().view(torch.int32)]
    return [b for part in x for b in bits(part)]


def same(a: Any, b: Any) -> bool:
    return all(torch.equal(x, y) for x, y in zip(bits(a), bits(b), strict=True))


def error(got: Tensor, want: Tensor, of: Tensor | None = None) -> float:
    return ((got.double() - want).norm() / (want.norm() if of is None else of)).item()


def all_sums(world: World) -> dict[str, Any]:
    """Everything that quantized_allreduce.py does, on one of the processes."""
    quantized_allreduce.MESSAGE = SMALL_MESSAGE
    found: dict[str, Any] = {}
    owners, world = owner_of(world.size), World(world.rank, world.size, Traffic())
    for name in quantized_allreduce.CODECS:
        found[name] = gradients(world.rank)
        quantized_allreduce.sum_over_ranks(found[name], name, world)
        found[f"{name} to owners"] = gradients(world.rank)
        quantized_allreduce.sum_to_owners(found[f"{name} to owners"], owners, name, world)
    for name in FP8:
        found[f"{name} stored"] = stored_gradients(world.rank, get_codec(name))
        quantized_allreduce.sum_stored(found[f"{name} stored"], get_codec(name), world)
        found[f"{name} stored to owners"] = stored_gradients(world.rank, get_codec(name))
        quantized_allreduce.sum_stored_to_owners(
            found[f"{name} stored to owners"], owners, get_codec(name), world
        )
    for name in CODECS:
        found[f"{name} weights"] = [
            get_codec(name).encode(t.contiguous().float()) for t in gradients(world.rank)
        ]
        quantized_allreduce.gather_from_owners(found[f"{name} weights"], owners, world)
    return {**found, "bytes": dict(world.traffic.bytes), "messages": dict(world.traffic.messages)}


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def processes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("ranks")
    return on_ranks(request.param, all_sums, folder)


def test_processes_give_the_bits_of_threads(processes: list[dict[str, Any]]) -> None:
    ranks = len(processes)
    for name in quantized_allreduce.CODECS:
        got, got_owned = (
            [found[key] for found in processes] for key in (name, f"{name} to owners")
        )
        assert same(got_owned, threaded(ranks, name, to_owners=True))
        if name in FP8 or ranks == 2:
            assert same(got, threaded(ranks, name))
        else:  # in which order more than two are added up is gloo's to say
            for a, b in zip(got[0][FINITE], threaded(ranks, name)[0][FINITE], strict=True):
                assert error(a, b.double(), b.double().norm().clamp(min=1e-30)) < 0.01
    for name in FP8:
        assert same([found[f"{name} stored"] for found in processes], threaded_stored(ranks, name))
        assert same(
            [found[f"{name} stored to owners"] for found in processes],
            threaded_stored(ranks, name, to_owners=True),
        )


def test_weights_come_from_their_owners_bit_for_bit(processes: list[dict[str, Any]]) -> None:
    ranks = len(processes)
    for name in CODECS:
        want = [
            get_codec(name).encode(gradients(owner)[i].contiguous().float())
            for i, owner in enumerate(owner_of(ranks))
        ]
        assert all(same(found[f"{name} weights"], want) for found in processes), name


def test_all_ranks_count_alike(processes: list[dict[str, Any]]) -> None:
    assert all(found["messages"] == processes[0]["messages"] for found in processes)
    assert {*processes[0]["bytes"]} == {"gradients", "scales", "weights"}


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("name", quantized_allreduce.CODECS)
def test_all_ranks_hold_the_sum(name: str, ranks: int) -> None:
    every, owned = threaded(ranks, name), threaded(ranks, name, to_owners=True)
    assert all(same(ts, every[0]) for ts in every)
    units = {"fp32": 2**-24, "fp16": 2**-11, "bf16": 2**-9}
    limit = (
        units[name] * ranks if name in units else 2 * 2**-4
    )  # rounded by each addition, or twice
    for i, (want, owner) in enumerate(zip(exact(ranks), owner_of(ranks), strict=True)):
        added = torch.stack([gradients(rank)[i].double().norm() for rank in range(ranks)]).sum()
        if added.isfinite() and added > 1e-30:
            own = limit + (2**-9 if gradients(0)[i].dtype == torch.bfloat16 else 0)
            assert (
                error(every[0][i], want, added) <= own
                and error(owned[owner][i], want, added) <= own
            )


@pytest.mark.parametrize("name", FP8)
def test_the_error_does_not_grow_with_the_ranks(name: str) -> None:
    for draw in (
        lambda rank, g: torch.randn(4000, generator=g),
        lambda rank, g: torch.linspace(-1, 1, 4000),
    ):
        errors = []
        for ranks in (2, 8, 32):
            every = [[draw(rank, torch.Generator().manual_seed(rank))] for rank in range(ranks)]
            want = torch.stack([ts[0].double() for ts in every]).sum(0)
            summed(every, name)
            errors.append(error(every[0][0], want))
        assert max(errors) < 1.15 * errors[0] < 0.05


@pytest.mark.parametrize(("name", "to_owners"), [*itertools.product(FP8, (False, True))])
def test_how_messages_are_cut_changes_no_bit(
    name: str, to_owners: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = threaded(3, name, to_owners)
    for message in (29, 1000):
        monkeypatch.setattr(quantized_allreduce, "MESSAGE", message)
        assert same(threaded(3, name, to_owners), want)


@pytest.mark.parametrize("name", quantized_allreduce.CODECS)
def test_an_infinity_on_one_rank_is_seen_by_all(name: str) -> None:
    every, owned = threaded(4, name), threaded(4, name, to_owners=True)
    for i, owner in [*enumerate(owner_of(4))][BROKEN]:
        for got in (*(ts[i] for ts in every), owned[owner][i]):
            assert not got.isfinite().all() and (name not in FP8 or got.isnan().all())
    assert all(t.isfinite().all() for t in every[0][FINITE])


@pytest.mark.parametrize("name", FP8)
def test_a_sum_beyond_float32_is_not_finite(name: str) -> None:
    every = [[torch.full((10,), 3e38)] for _ in range(2)]
    summed(every, name)
    assert all(ts[0].isnan().all() for ts in every)


@pytest.mark.parametrize("name", FP8)
def test_an_owner_stores_what_all_ranks_would(name: str) -> None:
    every, owned = threaded_stored(3, name), threaded_stored(3, name, to_owners=True)
    assert all(same(entries, every[0]) for entries in every)
    sums = threaded(3, name, to_owners=True)
    for i, owner in [*enumerate(owner_of(3))][FINITE]:
        assert same(owned[owner][i], every[0][i])
        if gradients(0)[i].dtype == torch.float32:
            assert same(owned[owner][i], get_codec(name).encode(sums[owner][i].contiguous()))
    assert not any(every[0][i][1].isfinite() for i in (-1, -2)), "what is lost shows in the scale"


@pytest.mark.parametrize("name", FP8)
def test_storing_first_or_while_sending_is_the_same(name: str) -> None:
    for t, entry in zip(threaded(3, name)[0], threaded_stored(3, name)[0], strict=True):
        assert same(t, get_codec(name).decode(entry).to(t.dtype))


def test_one_rank_has_nothing_to_send() -> None:
    tensors, entries, world = (
        gradients(0),
        stored_gradients(0, get_codec("fp8")),
        World(traffic=Traffic()),
    )
    quantized_allreduce.sum_over_ranks(tensors, "fp8", world)
    quantized_allreduce.sum_to_owners(tensors, [0] * len(tensors), "fp8", world)
    quantized_allreduce.sum_stored(entries, get_codec("fp8"), world)
    quantized_allreduce.sum_stored_to_owners(entries, [0] * len(tensors), get_codec("fp8"), world)
    quantized_allreduce.gather_from_owners(entries, [0] * len(tensors), world)
    assert (
        same(tensors, gradients(0))
        and same(entries, stored_gradients(0, get_codec("fp8")))
        and str(world.traffic) == "nothing"
    )


@pytest.mark.parametrize("name", quantized_allreduce.CODECS)
def test_no_tensors_and_empty_ones(name: str) -> None:
    for count in (0, 2):
        every = [[torch.empty(0)] * count for _ in range(2)]
        summed(every, name)
        summed(every, name, [0] * count)


@pytest.mark.parametrize(
    ("name", "to_owners", "want", "scales"),
    [
        ("fp32", False, 2 * 3 / 4 * 4000, 0),
        ("bf16", False, 2 * 3 / 4 * 2000, 0),
        ("fp16", False, 2 * 3 / 4 * 2000, 0),
        ("fp8", False, 3 / 4 * 1000 + 3 * 250, 3 * 4 + 2 * 3 / 4 * 4),
        ("fp8_pow2", False, 3 / 4 * 1000 + 3 * 250, 3 * 4 + 2 * 3 / 4 * 4),
        ("fp32", True, 4000, 0),
        ("bf16", True, 2000, 0),
        ("fp8", True, 1000, 3 * 4),
    ],
)
def test_bytes_are_counted(name: str, to_owners: bool, want: float, scales: float) -> None:
    traffic = summed([[torch.ones(1000)] for _ in range(4)], name, [1] if to_owners else None)
    assert traffic.bytes == {"gradients": want, **({"scales": scales} if scales else {})}


def test_traffic_reads() -> None:
    traffic = summed([[torch.ones(500), torch.ones(500)] for _ in range(4)], "fp8")
    assert str(traffic) == "scales 36 B in 2 messages, gradients 1.5 KiB in 2 messages", (
        "those of all tensors together"
    )
    traffic.clear()
    assert str(traffic) == "nothing"


def test_codecs_that_are_refused() -> None:
    for name in ("fp8_block", "fp16_scaled", "int8"):
        with pytest.raises(
            ValueError,
            match=f"gradients are sent in fp32, bf16, fp16, fp8, fp8_pow2, not in '{name}'",
        ):
            quantized_allreduce.sum_over_ranks([], name, World())
    for name in ("fp8_block", "fp16_scaled", "bf16"):
        with pytest.raises(ValueError, match="use FP8 with one scale per tensor"):
            quantized_allreduce.sum_stored([], get_codec(name), World())


def test_the_tool_compares(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tool = runpy.run_path(str(Path(__file__).parents[2] / "tools" / "compare_comm.py"))
    monkeypatch.setattr(
        sys, "argv", ["compare_comm.py", "--ranks", "2", "16", "--elements", "3000"]
    )
    tool["main"]()
    printed = capsys.readouterr().out
    rows = {
        (words[0], " ".join(words[1:-2])): [float(word) for word in words[-2:]]
        for words in map(str.split, printed.splitlines())
        if words and "ranks" not in words
    }
    assert max(map(len, printed.splitlines())) <= 80
    assert (
        0.02 < rows["independent", "fp8"][0] < 0.05
        and rows["independent", "fp8"][1] < 1.1 * rows["independent", "fp8"][0]
    )
    assert (
        rows["independent", "fp8 ring"][1] > 1.5 * rows["independent", "fp8"][1]
        and rows["cancelling", "bf16"][1] < 0.05 < rows["cancelling", "fp8"][1]
    )
    assert rows["bytes", "sent fp8"][0] < 0.3 * rows["bytes", "sent fp32"][0]
    monkeypatch.setattr(sys, "argv", ["compare_comm.py", "--ranks", "3"])
    with pytest.raises(SystemExit, match="must be even"):
        tool["main"]()


SIZES = st.lists(st.integers(0, 50), max_size=8)


@settings(deadline=None)
@given(SIZES, st.integers(1, 5), st.integers(1, 60), st.data())
def test_every_element_is_in_one_share(
    sizes: list[int], ranks: int, message: int, data: st.DataObject
) -> None:
    owners = data.draw(
        st.lists(st.integers(0, ranks - 1), min_size=len(sizes), max_size=len(sizes))
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantized_allreduce, "MESSAGE", message)
        for rounds in ([*even_shares(sizes, ranks)], [*owned_shares(sizes, owners, ranks)]):
            found = [
                (s.tensor, e)
                for every in rounds
                for share in every
                for s in share
                for e in range(s.start, s.stop)
            ]
            assert sorted(found) == [(i, e) for i, count in enumerate(sizes) for e in range(count)]
            assert all(
                len(every) == ranks
                and sum(map(quantized_allreduce.count_elements, every)) <= max(message, ranks)
                for every in rounds
            )
            assert all(s.stop > s.start for every in rounds for share in every for s in share)
        assert all(
            owners[s.tensor] == rank
            for every in owned_shares(sizes, owners, ranks)
            for rank, share in enumerate(every)
            for s in share
        )
