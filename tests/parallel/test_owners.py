"""Who owns what, and that owners who step what they own train to the bits of one optimizer that steps everything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fp8cfg.numerics.codecs import CODECS, EncodedTensor
from fp8cfg.optim.low_bit.adam import LowBitAdamW
from fp8cfg.optim.low_bit.columns import named_columns
from fp8cfg.parallel import quantized_allreduce
from fp8cfg.parallel.process_group import Traffic, World
from fp8cfg.parallel.sharding import balance_over_ranks
from fp8cfg.parallel.zero import sharded_bytes
from tests.support.ranks import on_ranks

O3 = named_columns("fp8", "fp16_scaled", "fp8", "fp8", "fp16_scaled")
O2 = named_columns("fp16_scaled", "none", "fp8", "fp8", "fp16_scaled", "stochastic")
PLAIN = named_columns(exp_avg="fp8", exp_avg_sq="fp16_scaled")


@settings(deadline=None)
@given(st.lists(st.integers(0, 10**9), max_size=40), st.integers(1, 9))
def test_loads_differ_by_at_most_the_largest(sizes: list[int], ranks: int) -> None:
    found = balance_over_ranks(sizes, ranks)
    held = [
        sum(size for size, owner in zip(sizes, found, strict=True) if owner == rank)
        for rank in range(ranks)
    ]
    assert (
        len(found) == len(sizes)
        and all(0 <= owner < ranks for owner in found)
        and sum(held) == sum(sizes)
    )
    assert max(held) - min(held) <= max(sizes, default=0)


@pytest.mark.parametrize(
    ("sizes", "ranks", "want"),
    [
        ([], 3, []),
        ([5], 3, [0]),
        ([1, 1, 1, 1], 2, [0, 1, 0, 1]),
        ([1, 9, 3, 3, 3], 2, [0, 0, 1, 1, 1]),
        ([4, 5, 6], 2, [1, 1, 0]),
        ([7, 7], 4, [0, 1]),
        ([2, 3], 1, [0, 0]),
    ],
)
def test_the_largest_first_to_the_least_loaded(
    sizes: list[int], ranks: int, want: list[int]
) -> None:
    assert balance_over_ranks(sizes, ranks) == want


def test_no_ranks() -> None:
    with pytest.raises(ValueError, match="0 ranks; at least 1 is needed"):
        balance_over_ranks([1], 0)


def test_sharded_bytes_are_those_of_the_chart() -> None:
    rows = [
        (O3, None),
        (O3, "fp8"),
        (O2, None),
        (O2, "fp8"),
        (PLAIN, None),
        (PLAIN, "bf16"),
        (PLAIN, "fp32"),
    ]
    assert [sharded_bytes(1000, c, grad and CODECS[grad]) for c, grad in rows] == [
        5000,
        6000,
        3000,
        4000,
        3000,
        5000,
        7000,
    ]


def named(seed: int = 0) -> list[tuple[str, nn.Parameter]]:
    g = torch.Generator().manual_seed(seed)
    shapes = {
        "embedding": (40, 16),
        "up": (64, 16),
        "norm": (16,),
        "down": (16, 64),
        "bias": (3,),
        "scalar": (1,),
    }
    return [
        (name, nn.Parameter(torch.randn(shape, generator=g) * 0.02))
        for name, shape in shapes.items()
    ]


def groups(params: list[tuple[str, nn.Parameter]]) -> list[dict[str, Any]]:
    columns = {"up": O3, "down": O2}
    return [
        {"params": [(n, p)], "columns": columns.get(n, PLAIN), "weight_decay": 0.1 * (p.dim() > 1)}
        for n, p in params
    ]


class Training:
    """Six parameters and their optimizer, of this rank's share where `owner_of` is given."""

    def __init__(self, world: World, owner_of: dict[str, int] | None) -> None:
        self.world, self.owner_of = World(world.rank, world.size, Traffic()), owner_of
        self.params = dict(named())
        every = groups([*self.params.items()])
        self.columns = {group["params"][0][0]: group["columns"] for group in every}
        owned = (
            None
            if owner_of is None
            else {name for name, rank in owner_of.items() if rank == world.rank}
        )
        self.optimizer = LowBitAdamW(every, lr=1e-2, seed=3, owned=owned)
        self.weights = {name: self.stored(name) for name in self.params}
        self.gather()

    def stored(self, name: str) -> EncodedTensor:
        p, columns = self.params[name], self.columns[name]
        if columns.weight == CODECS["fp32"]:
            return (p.detach(),)
        own = self.optimizer.state[p].get("weight")
        return own or columns.weight.zeros(p.shape, p.device)

    def gather(self) -> None:
        """Weights from their owners, as stored; what others own is then written into the working copies."""
        if self.owner_of is None:
            return
        quantized_allreduce.gather_from_owners(
            [*self.weights.values()], [*self.owner_of.values()], self.world
        )
        for name, p in self.params.items():
            if self.owner_of[name] != self.world.rank:
                p.detach().copy_(self.columns[name].weight.decode(self.weights[name]))

    def step(self, step: int, shard: str) -> None:
        rank = self.world.rank
        grads = {
            name: torch.randn(
                p.shape, generator=torch.Generator().manual_seed(1000 * step + 10 * rank + i)
            )
            * 1e-3
            + p.detach() * 0.1
            for i, (name, p) in enumerate(self.params.items())
        }
        narrow = {name: self.columns[name].grad.encode(grads.pop(name)) for name in ("up", "down")}
        if shard == "zero2":
            assert self.owner_of is not None
            quantized_allreduce.sum_to_owners(
                [*grads.values()], [self.owner_of[n] for n in grads], "fp32", self.world
            )
            quantized_allreduce.sum_stored_to_owners(
                [*narrow.values()], [self.owner_of[n] for n in narrow], CODECS["fp8"], self.world
            )
        else:
            quantized_allreduce.sum_over_ranks([*grads.values()], "fp32", self.world)
            quantized_allreduce.sum_stored([*narrow.values()], CODECS["fp8"], self.world)
        for name, p in self.params.items():
            if self.optimizer.owns(p):
                if name in narrow:
                    self.optimizer.stored_grads[p] = narrow[name]
                else:
                    p.grad = grads[name]
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.gather()

    def result(self) -> dict[str, Any]:
        weights = {
            f"{name} weight {i}": t
            for name, entry in self.weights.items()
            for i, t in enumerate(entry)
        }
        params = {name: p.detach() for name, p in self.params.items()}
        return {
            "weights": weights,
            "params": params,
            "state": self.optimizer.state_tensors(),
            "bytes": dict(self.world.traffic.bytes),
        }


def trained(world: World) -> dict[str, Any]:
    sizes = [p.numel() for _, p in named()]
    owner_of = dict(zip(dict(named()), balance_over_ranks(sizes, world.size), strict=True))
    found = {}
    for shard in ("none", "zero1", "zero2"):
        training = Training(world, None if shard == "none" else owner_of)
        for step in range(4):
            training.step(step, shard)
        found[shard] = training.result()
    return found


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        x.dtype == b[k].dtype
        and torch.equal(x.view(-1).view(torch.uint8), b[k].view(-1).view(torch.uint8))
        for k, x in a.items()
    )


def test_owners_train_to_the_bits_of_one_optimizer(tmp_path: Path) -> None:
    first, second = on_ranks(2, trained, tmp_path)
    whole = first["none"]
    assert equal(whole["state"], second["none"]["state"]) and equal(
        whole["params"], second["none"]["params"]
    )
    assert not equal(whole["params"], {name: p.detach() for name, p in named()})
    for shard in ("zero1", "zero2"):
        states = [found[shard]["state"] for found in (first, second)]
        assert all(states) and not states[0].keys() & states[1].keys(), "each rank keeps its own"
        assert equal({**states[0], **states[1]}, whole["state"])
        for found in (first, second):
            assert equal(found[shard]["weights"], whole["weights"]) and equal(
                found[shard]["params"], whole["params"]
            )
    sent = {
        shard: first[shard]["bytes"]["gradients"] + second[shard]["bytes"]["gradients"]
        for shard in first
    }
    assert sent["zero2"] * 2 == sent["zero1"] == sent["none"]
