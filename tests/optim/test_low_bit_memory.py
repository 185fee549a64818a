"""Tensor groups of a low-bit optimizer: bytes of the chart, no copy of a group, the same bits compiled and in pieces."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fp8cfg.numerics import codecs
from fp8cfg.optim.low_bit import adam_step, gradients
from fp8cfg.optim.low_bit.adam import LowBitAdam, LowBitAdamW, LowBitOptimizer
from fp8cfg.optim.low_bit.adam_step import compiled_code, launch_groups
from fp8cfg.optim.low_bit.adam_update import ROW
from tests.support.low_bit import ROWS, bits, build, equal, everything, normal, parameters, train

BYTES = {
    "fp32": 12,
    "O1": 10,
    "O2": 5,
    "O3": 6,
    "Megatron": 10,
    "bf16 stochastic": 6,
    "block moments": 4 + 2 * (1 + 1 / 32),
}


@pytest.mark.parametrize(("row", "expected"), BYTES.items())
def test_bytes_of_the_chart(row: str, expected: float) -> None:
    """Persistent bytes of a parameter beside its gradient, which is one more byte under O1 to O3; and the scales."""
    p = parameters(ROWS[row], (256, 128))
    stored = build(ROWS[row], p).state_tensors()
    weight = {} if "p0.weight" in stored else {"p0": p["p0"]}
    scales = 4 * sum(t.dim() == 0 for t in stored.values())
    assert sum(t.nbytes for t in {**stored, **weight}.values()) - scales == expected * 256 * 128
    assert scales <= 16


SHAPES = ((33, 256), (33, 256), (5, 77), (), (128,), (0, 3))


@pytest.mark.parametrize("row", ROWS)
def test_pieces_make_no_difference(row: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for chunk in (1 << 16, 1024, 128):
        monkeypatch.setattr(codecs, "CHUNK", chunk)
        p = parameters(ROWS[row], *SHAPES)
        optimizer = build(ROWS[row], p)
        train(optimizer, p, range(3))
        found.append(everything(optimizer, p))
    assert equal(found[0], found[1]) and equal(found[0], found[2])


@pytest.mark.parametrize(
    ("row", "cls", "backend"),
    [
        ("O2", LowBitAdamW, "inductor"),
        ("O3", LowBitAdam, "aot_eager"),
        ("bf16 stochastic", LowBitAdamW, "inductor"),
        ("block moments", LowBitAdamW, "inductor"),
        ("expanded moments", LowBitAdamW, "inductor"),
    ],
)
def test_compiled_bits_are_the_eager_ones(
    row: str, cls: type[LowBitOptimizer], backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One graph a kernel: neither another length nor another step compiles again. O2 has copies in bf16; under O3 three tensors of
    other sizes are taken together, and the fourth alone. Inductor's code for every codec is in tests/numerics/test_codecs.py."""
    compiles, found = torch.compile, []
    if several := row == "O3":
        monkeypatch.setattr(adam_step, "tensors_per_launch", lambda device: 3)
    if backend != "inductor":
        monkeypatch.setattr(
            torch, "compile", lambda run, options, **more: compiles(run, backend=backend, **more)
        )
    for compiled in (False, True):
        p = parameters(
            ROWS[row],
            (16, 128),
            (16, 128),
            (24, 128),
            (5, 77),
            (3,),
            (),
            dtype=torch.bfloat16 if row == "O2" else None,
        )
        optimizer = build(ROWS[row], p, cls, compiled=compiled)
        compiled_code.cache_clear()
        torch._dynamo.utils.counters.clear()
        train(optimizer, p, range(4))
        kernels = (3 if ROWS[row].per_tensor else 1) if compiled else 0
        assert compiled_code.cache_info().currsize == kernels
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == kernels + 2 * (
            several and compiled
        )
        found.append(everything(optimizer, p))
    assert equal(*found)


@pytest.mark.parametrize("name", ["fp8", "fp8_pow2", "fp8_block"])
def test_gradients_are_stored_and_their_norms_taken_as_in_pieces(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, but for the compiler. The last tensor is taken in pieces."""
    monkeypatch.setattr(torch, "compile", lambda run, **_: run)
    monkeypatch.setattr(gradients, "tensors_per_launch", lambda device: 2)
    monkeypatch.setattr(gradients, "is_compiled_on", lambda device: True)
    compiled_code.cache_clear()
    codec = codecs.get_codec(name)
    values = [
        normal(*shape, seed=i) for i, shape in enumerate([(64, 128), (5, 256), (3, 4096), (3,)])
    ]
    params = {nn.Parameter(x.bfloat16()): f"p{i}" for i, x in enumerate(values)}
    of = gradients.StoredGradients(params, lambda p, what: pytest.fail("nearest"))
    of.codecs.update(dict.fromkeys(params, codec))
    for p in params:
        p.grad = p.detach().clone()
    of.store_all()
    stored = [of.stored[p] for p in params]
    assert all(
        torch.equal(bits(a), bits(b))
        for x, s in zip(values, stored, strict=True)
        for a, b in zip(s, codec.encode(x.bfloat16().float()), strict=True)
    )
    assert [gradients.has_compiled_norm(codec, each) for each in stored] == [True] * 3 + [False]
    found = gradients.norms([codec] * 4, stored)
    torch.testing.assert_close(
        found, [codec.decode(each).norm() for each in stored], rtol=1e-6, atol=0
    )
    compiled_code.cache_clear()


def test_scales_of_whole_tensors_are_made_for_all_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of amaxes of rows, where these divide a tensor; a value that is not finite shows in each of them. A skipped step writes none."""
    monkeypatch.setattr(torch, "compile", lambda run, **_: run)
    compiled_code.cache_clear()
    found = []
    for compiled in (False, True):
        p = parameters(ROWS["O3"], (64, 128), (16, 128), (3, 4096))
        optimizer = build(ROWS["O3"], p, LowBitAdamW, compiled=compiled)
        train(optimizer, p, range(2))
        state, optimizer.deferred = (
            everything(optimizer, p),
            SimpleNamespace(skip=torch.tensor(True)),
        )
        train(optimizer, p, range(2, 3))
        assert equal(state, everything(optimizer, p))
        optimizer.deferred = None
        p["p1"].grad = torch.full((16, 128), torch.nan)
        optimizer.step()
        found.append(everything(optimizer, p))
    compiled_code.cache_clear()
    assert equal(*found)


@pytest.mark.parametrize(("row", "lengths"), [("O3", [3]), ("blocks", [1, 1, 1])])
def test_blocks_are_stored_a_tensor_at_a_time(
    row: str, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, but for the compiler, which would take 262,144 elements a program for reductions that it combines there."""
    taken, found = list[int](), []

    def compile(run: Callable[..., None], options: dict[str, Any], **_: Any) -> Callable[..., None]:
        def recorded(several: Sequence[Any], *args: Any) -> None:
            if stores:
                taken.append(len(several))
            return run(several, *args)

        stores = run.__code__.co_name.startswith("store_several")
        assert not stores or options["combo_kernels_pointwise_only"]
        return recorded

    monkeypatch.setattr(torch, "compile", compile)
    monkeypatch.setattr(adam_step, "tensors_per_launch", lambda device: 3)
    compiled_code.cache_clear()
    for compiled in (False, True):
        p = parameters(ROWS[row], (16, 128), (24, 128), (40, 128))
        optimizer = build(ROWS[row], p, LowBitAdamW, compiled=compiled)
        train(optimizer, p, range(1))
        found.append(everything(optimizer, p))
    compiled_code.cache_clear()
    assert taken == lengths and equal(*found)


def test_launches_take_tensors_of_one_kind() -> None:
    assert list(launch_groups("aabacaabc", 4)) == [[0, 1, 3, 5], [6], [2, 7], [4, 8]]
    assert list(launch_groups([], 4)) == []


class LiveBytes(TorchDispatchMode):
    """The most bytes that tensors made under it held at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.peak = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def storages(tree: Any) -> dict[int, torch.UntypedStorage]:
            return {
                t.untyped_storage().data_ptr(): t.untyped_storage()
                for t in torch.utils._pytree.tree_leaves(tree)
                if isinstance(t, torch.Tensor)
            }

        known = storages((args, kwargs))
        out = func(*args, **(kwargs or {}))
        for pointer, storage in storages(out).items():
            if pointer not in known:
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._gone, storage.nbytes())
        return out

    def _gone(self, nbytes: int) -> None:
        self.now -= nbytes


@pytest.mark.parametrize("row", ROWS)
def test_a_step_makes_no_copy_of_a_group(row: str) -> None:
    """Temporaries are some twenty float32 pieces, whatever the group: here 40 MiB of float32 in two tensors."""
    p = parameters(ROWS[row], (5 << 20,), (5 << 20,))
    optimizer = build(ROWS[row], p)
    grads = {k: normal(*v.shape).to(v.dtype) for k, v in p.items()}
    peaks = []
    for count in (1, 2):
        for name in list(p)[:count]:
            p[name].grad = grads[name]
        if optimizer.param_groups[0]["columns"].grad is not None:
            optimizer.store_grads()  # what they leave behind is the stored gradient, no temporary
        with LiveBytes() as live:
            optimizer.step()
        optimizer.zero_grad()
        peaks.append(live.peak)
    assert peaks[1] < 1.05 * peaks[0] < 24 * 4 * codecs.CHUNK


@pytest.mark.slow
@pytest.mark.parametrize("row", ["O2", "block moments"])
def test_compiled_code_makes_no_float32_copy(row: str) -> None:
    from torch._inductor.utils import fresh_cache, run_and_get_code

    compiled_code.cache_clear()
    p = parameters(ROWS[row], (256, 128))
    optimizer = build(ROWS[row], p, compiled=True)
    p["p0"].grad = normal(256, 128)
    if ROWS[row].grad is not None:
        optimizer.store_grads()
    torch._dynamo.reset()
    with fresh_cache():
        _, code = run_and_get_code(functools.partial(optimizer.step))
    made = [line for text in code for line in text.splitlines() if "= empty_strided_cpu(" in line]
    whole = [
        line
        for line in made
        if "empty_strided_cpu((s" in line
        and ("128" in line or row == "O2")
        and f"// {ROW}" not in line
    ]
    assert code and not whole, whole
