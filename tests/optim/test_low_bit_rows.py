"""Small tensors stepped as rows: the bits of the eager step, whatever is together, and state that is still each parameter's."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest
import torch
from safetensors.torch import load
from torch import nn

from fp8cfg.numerics.codecs import Stored
from fp8cfg.optim.low_bit import rows as rows
from fp8cfg.optim.low_bit.optimizer import Columns, LowBitAdam, LowBitAdamW, LowBitOptimizer
from fp8cfg.training.checkpoint import tensor_file
from tests.optim.test_low_bit import ROWS, build, equal, everything, normal, parameters, train

SHAPES = (*[(16, 128)] * 5, *[(24, 128)] * 2, (5, 77), (5, 77), (3,), (3,), ())
pytestmark = pytest.mark.slow


def in_rows(optimizer: LowBitOptimizer) -> list[int]:
    """How many parameters are together, of each rows."""
    return [len(some.params) for made, _ in optimizer._together.values() for some in made]


@pytest.mark.parametrize(("row", "cls"), [("O1", LowBitAdamW), ("O2", LowBitAdamW), ("O3", LowBitAdam), ("O2 exact", LowBitAdamW),
                                          ("Megatron", LowBitAdamW), ("O2 stochastic", LowBitAdam), ("fp32", LowBitAdamW)])
def test_rows_have_the_bits_of_eager_code(row: str, cls: type[LowBitOptimizer], monkeypatch: pytest.MonkeyPatch) -> None:
    """At most four of the first shape together. In the third step one of them has no gradient, and from then on another count."""
    monkeypatch.setattr(rows, "TOGETHER", 4 * 16 * 128 + 5)
    found = []
    for compiled in (False, True):
        p = parameters(ROWS[row], *SHAPES, dtype=torch.bfloat16 if row == "O2" else None)
        optimizer = build(ROWS[row], p, cls, compiled=compiled)
        train(optimizer, p, range(2))
        train(optimizer, {k: v for k, v in p.items() if k != "p1"}, range(2, 3))
        train(optimizer, p, range(3, 5))
        found.append(everything(optimizer, p))
        assert in_rows(optimizer) == ([4, 2, 2] if compiled else [])
    assert equal(*found)


def test_stored_gradients_are_rows_that_a_step_takes_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once there are rows. Sums of two backward passes too; another's tensors in their place are put together as before; what is
    forgotten is freed."""
    seen: list[torch.dtype] = []

    def together(stored: list[Stored]) -> Stored:
        seen.append(stored[0][0].dtype)
        return put_together(stored)

    put_together, found = rows.together, []
    monkeypatch.setattr(rows, "together", together)
    for compiled in (False, True):
        p = parameters(ROWS["O2"], *[(16, 128)] * 3)
        optimizer = build(ROWS["O2"], p, compiled=compiled)
        train(optimizer, p, range(2))
        with optimizer.storing(add=True):
            for microbatch in range(2):
                torch.stack([(q.float() * normal(16, 128, seed=9 + microbatch + i)).sum() for i, q in enumerate(p.values())]).sum().backward()
        seen.clear()
        optimizer.step()
        assert seen == []
        optimizer.zero_grad()
        assert all(some._grads is None for some in optimizer._rows_of.values())
        for i, q in enumerate(p.values()):
            optimizer.stored_grads[q] = ROWS["O2"].grad.encode(normal(16, 128, seed=20 + i))
        optimizer.step()
        assert seen == ([torch.float8_e4m3fn] if compiled else [])
        found.append(everything(optimizer, p))
    assert equal(*found)


def test_state_is_written_and_read_as_each_parameter_s(tmp_path: Any) -> None:
    """State of an eager run is loaded into rows, and that of rows into another optimizer, from files."""
    c, p = ROWS["O3"], parameters(ROWS["O3"], *SHAPES)
    eager = build(c, p)
    train(eager, p, range(2))
    again = parameters(c, *SHAPES)
    compiled = build(c, again, compiled=True)
    train(compiled, again, range(1))  # makes rows
    for optimizer, params in ((compiled, again), (build(c, third := parameters(c, *SHAPES)), third)):
        tensor_file.write(tmp_path / "state.safetensors", eager.state_tensors())
        optimizer.load_state(load((tmp_path / "state.safetensors").read_bytes()), json.loads(json.dumps(eager.state_json())))
        train(eager, p, range(2, 4))
        train(optimizer, params, range(2, 4))
        assert equal(everything(eager, p), everything(optimizer, params))
        eager, p = optimizer, params
        train(eager, p, range(2))
    assert in_rows(compiled) == [5, 2, 2]


def write(c: Columns, kept: Stored, value: torch.Tensor) -> None:
    c.weight.store(value, kept)


@pytest.mark.parametrize("row", ["O2", "O3"])
def test_weights_that_others_keep(row: str) -> None:
    """Weights in tensors of a layer's under O2, and written from masters under O3; half of all state is another rank's."""
    found = []
    for compiled in (False, True):
        c, p = ROWS[row], {f"p{i}": nn.Parameter(normal(24, 128, seed=i, scale=0.02).to(ROWS[row].weight.format.dtype)) for i in range(6)}
        kept: dict[nn.Parameter, Stored] = {q: (q.detach(), torch.ones(())) for q in p.values()}
        held = {q: partial(kept.__getitem__, q) for q in p.values()}
        writers = {q: partial(write, c, kept[q]) for q in p.values()} if row == "O3" else {}
        optimizer = build(c, p, compiled=compiled, held=held, writers=writers, owned={"p0", "p2", "p3", "p5"})
        for step in range(3):
            for i, q in enumerate(p.values()):
                q.grad_dtype = torch.float32
                q.grad = normal(24, 128, seed=100 * step + i, scale=1e-3)
            optimizer.step()
            optimizer.zero_grad()
        found.append({**everything(optimizer, p), **{f"{i}.scale": kept[q][1] for i, q in enumerate(p.values())}})
        assert in_rows(optimizer) == ([4] if compiled else [])
    assert equal(*found)


def test_large_tensors_and_blocks_stay_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "SMALL", 24 * 128 - 1)
    for row, expected in (("O2", [5, 2]), ("block moments", [])):
        p = parameters(ROWS[row], *SHAPES)
        optimizer = build(ROWS[row], p, compiled=True)
        train(optimizer, p, range(1))
        assert in_rows(optimizer) == expected
