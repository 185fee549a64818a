"""The low-bit optimizers: against torch's AdamW and Adam, MS-AMP's documented update and torchao; resume, memory, compiled bits."""

from __future__ import annotations

import copy
import functools
import json
import math
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fp8cfg.numerics import codecs
from fp8cfg.numerics.codecs import NAMES, Codec, codec
from fp8cfg.numerics.formats import E4M3, E5M2
from fp8cfg.optim.low_bit import tensor_groups
from fp8cfg.optim.low_bit.columns import Columns, named_columns
from fp8cfg.optim.low_bit.optimizer import LowBitAdam, LowBitAdamW, LowBitOptimizer

ROWS = {
    "fp32": named_columns(),
    "O1": named_columns("fp16_scaled", "none", "fp8_pow2"),
    "O2": named_columns("fp16_scaled", "none", "fp8_pow2", "fp8_pow2", "fp16_scaled"),
    "O3": named_columns("fp8_pow2", "fp16_scaled", "fp8_pow2", "fp8_pow2", "fp16_scaled"),
    "O2 exact": named_columns("fp16_scaled", "none", "fp8", "fp8", "fp16_scaled"),
    "O2 stochastic": named_columns("fp16_scaled", "none", "fp8_pow2", "fp8_pow2", "fp16_scaled", "stochastic"),
    "Megatron": named_columns("bf16", "fp32", "fp32", "bf16", "bf16"),
    "bf16 stochastic": named_columns("bf16", "none", "bf16", "bf16", "bf16", "stochastic"),
    "blocks": named_columns("fp8_block", "fp16_scaled", "fp8_block", "fp8_block", "fp8_block", "stochastic"),
    "block moments": named_columns(exp_avg="fp8_block", exp_avg_sq="fp8_block"),
    "expanded moments": named_columns(exp_avg="fp8_expand", exp_avg_sq="fp8_expand"),
}
BETAS = (0.9, 0.95)
DTYPES = {"bf16": torch.bfloat16}


class MSAMP:
    """LBAdamW and LBAdamWBase of MS-AMP as documented, one tensor: `o2` stores moments in e4m3 and fp16. Without
    its traps, and with the scale's exponent in double precision."""

    def __init__(self, w: torch.Tensor, o2: bool, lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
        self.o2, self.hyper, self.t = o2, (lr, *betas, eps, weight_decay), 0
        self.m, self.v = (torch.zeros_like(w), 1.0), (torch.zeros_like(w), 1.0)
        self.w = cast(w, torch.float16)

    def step(self, grad: torch.Tensor) -> None:
        lr, b1, b2, eps, wd = self.hyper
        self.t += 1
        g = real(cast(grad, torch.float8_e4m3fn))
        p = real(self.w) * (1 - lr * wd)
        m, v = b1 * real(self.m) + (1 - b1) * g, b2 * real(self.v) + (1 - b2) * g * g
        root = v.double().sqrt().float()
        p = p - lr / (1 - b1**self.t) * (m / (root / math.sqrt(1 - b2**self.t) + eps))
        self.w = cast(p, torch.float16)
        self.m, self.v = (cast(m, torch.float8_e4m3fn), cast(v, torch.float16)) if self.o2 else ((m, 1.0), (v, 1.0))


def cast(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, float]:
    amax = x.abs().max().item()
    scale = 2.0 ** math.floor(math.log2(torch.finfo(dtype).max / amax)) if amax > 0 else 1.0
    return (x * scale).to(dtype), 1 / scale


def real(stored: tuple[torch.Tensor, float]) -> torch.Tensor:
    return stored[0].float() * stored[1]


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def parameters(c: Columns, *shapes: tuple[int, ...], seed: int = 0, dtype: torch.dtype | None = None) -> dict[str, nn.Parameter]:
    dtype = dtype or DTYPES.get(str(c.weight), torch.float32)
    return {f"p{i}": nn.Parameter(normal(*s, seed=seed + i, scale=0.02).to(dtype)) for i, s in enumerate(shapes)}


def build(c: Columns, params: dict[str, nn.Parameter], cls: type[LowBitOptimizer] = LowBitAdamW, **options: Any) -> LowBitOptimizer:
    return cls(params.items(), columns=c, **{"lr": 1e-3, "betas": BETAS, "weight_decay": 0.1, **options})


def train(optimizer: LowBitOptimizer, params: dict[str, nn.Parameter], steps: range, scale: float = 1e-3) -> None:
    for step in steps:
        for i, p in enumerate(params.values()):
            p.grad = normal(*p.shape, seed=1000 * step + i, scale=scale).to(p.dtype)
        optimizer.step()
        optimizer.zero_grad()


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.detach().contiguous().view(-1).view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.dtype.itemsize])


def everything(optimizer: LowBitOptimizer, params: dict[str, nn.Parameter]) -> dict[str, torch.Tensor]:
    return {k: bits(t).clone() for k, t in {**params, **optimizer.state_tensors()}.items()}


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


# float32 throughout is torch's optimizer. The order of operations is MS-AMP's: torch's is lerp for the first moment, and MKL's
# square root where it is not fused. So the bits of one step differ in the last place, and after 200 steps this much.

@pytest.mark.parametrize(("mine", "theirs"), [(LowBitAdamW, torch.optim.AdamW), (LowBitAdam, torch.optim.Adam)])
@pytest.mark.parametrize("kernel", [{"fused": True}, {"foreach": True}, {"foreach": False, "fused": False}], ids=["fused", "foreach", "single"])
def test_float32_is_torchs(mine: type[LowBitOptimizer], theirs: Any, kernel: dict) -> None:
    a, b = parameters(ROWS["fp32"], (100, 130), (77,)), parameters(ROWS["fp32"], (100, 130), (77,))
    ours, reference = build(ROWS["fp32"], a, mine), theirs([*b.values()], lr=1e-3, betas=BETAS, weight_decay=0.1, **kernel)
    for step in range(200):
        for x, y in zip(a.values(), b.values(), strict=True):
            x.grad = y.grad = normal(*x.shape, seed=step, scale=1e-3)
        ours.step()
        reference.step()
    for x, y in zip(a.values(), b.values(), strict=True):
        for u, v in ((x, y), *((ours.state[x][k][0], reference.state[y][k]) for k in ("exp_avg", "exp_avg_sq"))):
            assert (u - v).abs().max() <= 5e-7 * v.abs().max()


def test_first_moments_of_float32_are_torchs_to_the_bit() -> None:
    a, b = parameters(ROWS["fp32"], (100, 130)), parameters(ROWS["fp32"], (100, 130))
    ours, reference = build(ROWS["fp32"], a), torch.optim.AdamW([*b.values()], lr=1e-3, betas=BETAS, weight_decay=0.1, fused=True)
    a["p0"].grad = b["p0"].grad = normal(100, 130)
    ours.step()
    reference.step()
    for moment in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(ours.state[a["p0"]][moment][0], reference.state[b["p0"]][moment])


# MS-AMP.

@pytest.mark.parametrize("level", ["O1", "O2"])
def test_msamp_bits(level: str) -> None:
    """64 x 128, 50 steps, FP8 gradients: weights, moments and scales equal in every bit."""
    w = normal(64, 128, scale=0.02)
    p = {"w": nn.Parameter(w.clone())}
    ours, theirs = build(ROWS[level], p, eps=1e-8), MSAMP(w, level == "O2", 1e-3, BETAS, 1e-8, 0.1)
    for step in range(50):
        g = normal(64, 128, seed=step, scale=1e-3)
        p["w"].grad = g.clone()
        ours.step()
        ours.zero_grad()
        theirs.step(g)
        state = ours.state[p["w"]]
        for (data, *scale), (expected, expected_scale) in ((state["weight"], theirs.w), (state["exp_avg"], theirs.m), (state["exp_avg_sq"], theirs.v)):
            assert torch.equal(bits(data), bits(expected)) and all(s.item() == expected_scale for s in scale)


def linear_steps(cls: type[torch.optim.Optimizer] | type[LowBitOptimizer], c: Columns | None, steps: int = 4) -> tuple[nn.Linear, torch.optim.Optimizer]:
    """MS-AMP's test_adamw: seed 1000, x randn(4, 4), Linear(4, 4), weight decay and learning rate 1e-3, loss = sum."""
    torch.manual_seed(1000)
    x, linear = torch.randn(4, 4), nn.Linear(4, 4)
    options = {} if c is None else {"columns": c}
    optimizer = cls(linear.named_parameters(), lr=1e-3, weight_decay=1e-3, **options)
    for _ in range(steps):
        linear(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return linear, optimizer


@pytest.mark.parametrize(("exp_avg", "exp_avg_sq"), [("fp8_pow2", "fp8_pow2"), ("fp8_pow2", "fp16_scaled"), ("fp16_scaled", "fp8_pow2"),
                                                     ("fp16_scaled", "fp16_scaled"), ("fp32", "fp32"), ("fp8", "fp8_block")])
@pytest.mark.parametrize(("mine", "theirs"), [(LowBitAdamW, torch.optim.AdamW), (LowBitAdam, torch.optim.Adam)])
def test_msamp_four_steps_of_a_linear(mine: type[LowBitOptimizer], theirs: Any, exp_avg: str, exp_avg_sq: str) -> None:
    ours, _ = linear_steps(mine, named_columns("fp16_scaled", "none", "fp8_pow2", exp_avg, exp_avg_sq))
    reference, _ = linear_steps(theirs, None)
    assert torch.allclose(ours.weight, reference.weight, rtol=0, atol=3e-4)


def test_msamp_resumed_weights_are_equal() -> None:
    five, _ = linear_steps(LowBitAdamW, ROWS["O2"], 5)
    _, optimizer = linear_steps(LowBitAdamW, ROWS["O2"], 4)
    state = optimizer.state_dict()
    torch.manual_seed(1000)
    x, resumed = torch.randn(4, 4), nn.Linear(4, 4)
    again = LowBitAdamW(resumed.named_parameters(), columns=ROWS["O2"])
    again.load_state_dict(state)
    resumed(x).sum().backward()
    again.step()
    assert torch.equal(resumed.weight, five.weight) and again.param_groups[0]["weight_decay"] == 1e-3


def test_msamp_weights_of_o3_are_those_of_o2_in_fp8() -> None:
    w = normal(64, 128, scale=0.02)
    two, three = {"w": nn.Parameter(w.clone())}, {"w": nn.Parameter(w.clone())}
    o2, o3 = build(ROWS["O2"], two), build(ROWS["O3"], three)
    for o, p in ((o2, two), (o3, three)):
        train(o, p, range(1))
    half = o2.state[two["w"]]["weight"]
    assert torch.equal(bits(half[0]), bits(o3.state[three["w"]]["master"][0]))
    data, scale_inv = NAMES["fp8_pow2"].encode(NAMES["fp16_scaled"].decode(half))
    assert torch.equal(bits(data), bits(o3.state[three["w"]]["weight"][0])) and scale_inv == o3.state[three["w"]]["weight"][1]
    assert torch.equal(three["w"], NAMES["fp8_pow2"].decode((data, scale_inv)))


BYTES = {"fp32": 12, "O1": 10, "O2": 5, "O3": 6, "Megatron": 10, "bf16 stochastic": 6, "block moments": 4 + 2 * (1 + 1 / 32)}


@pytest.mark.parametrize(("row", "expected"), BYTES.items())
def test_bytes_of_the_chart(row: str, expected: float) -> None:
    """Persistent bytes of a parameter beside its gradient, which is one more byte under O1 to O3; and the scales."""
    p = parameters(ROWS[row], (256, 128))
    stored = build(ROWS[row], p).state_tensors()
    weight = {} if "p0.weight" in stored else {"p0": p["p0"]}
    scales = 4 * sum(t.dim() == 0 for t in stored.values())
    assert sum(t.nbytes for t in {**stored, **weight}.values()) - scales == expected * 256 * 128
    assert scales <= 16


# Traps of MS-AMP that are arithmetic; 2 and 7 are in test_codecs.py.

@pytest.mark.parametrize("row", ["O1", "O2", "O3", "blocks"])
def test_trap_tiny_gradients(row: str) -> None:
    """1: gradients of 1e-16 gave second moments an infinite scale, and weights NaN at the next step."""
    p = parameters(ROWS[row], (16, 128))
    optimizer = build(ROWS[row], p)
    train(optimizer, p, range(3), scale=1e-16)
    train(optimizer, p, range(3, 5), scale=1e-20)
    assert all(torch.isfinite(t.float()).all() for t in (*p.values(), *optimizer.state_tensors().values()))


def test_trap_l2_decay_reaches_the_stored_moments() -> None:
    """3: the stored moments of LBAdam did not contain the decay, here half of them."""
    w = normal(64, 128)
    mine, theirs = {"w": nn.Parameter(w.clone())}, nn.Parameter(w.clone())
    ours, reference = build(ROWS["O2"], mine, LowBitAdam, weight_decay=0.5), torch.optim.Adam([theirs], lr=1e-3, betas=BETAS, weight_decay=0.5)
    for step in range(20):
        mine["w"].grad = theirs.grad = normal(64, 128, seed=step)
        ours.step()
        reference.step()
        ours.zero_grad()
    for moment in ("exp_avg", "exp_avg_sq"):
        m, true = getattr(ROWS["O2"], moment).decode(ours.state[mine["w"]][moment]), reference.state[theirs][moment]
        assert (m - true).norm() / true.norm() < 0.08


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("row", ROWS)
def test_trap_parameters_of_every_dtype_move(row: str, dtype: torch.dtype) -> None:
    """4: bf16 and fp16 parameters were never updated. Here some become copies of what is stored."""
    p = {"w": nn.Parameter(normal(16, 128).to(dtype)), "b": nn.Parameter(normal(16, seed=1).to(dtype))}
    before = {name: v.detach().clone() for name, v in p.items()}
    optimizer = build(ROWS[row], p, lr=0.1)
    train(optimizer, p, range(3))
    assert all(0.1 < (p[name].float() - before[name].float()).abs().mean() < 0.4 and p[name].dtype == dtype for name in p)


def test_trap_weights_stay_tied_and_frozen_ones_frozen() -> None:
    """5: a tied weight is one parameter and one state; a frozen one has none, and is not moved."""
    model = nn.ModuleDict({"embed": nn.Embedding(8, 4), "head": nn.Linear(4, 8, bias=False), "frozen": nn.Linear(4, 4)})
    model["head"].weight = model["embed"].weight
    model["frozen"].requires_grad_(False)
    frozen = model["frozen"].weight.clone()
    optimizer = LowBitAdamW([(n, p) for n, p in model.named_parameters() if p.requires_grad], columns=ROWS["O2"])
    model["frozen"](model["head"](model["embed"](torch.arange(8)))[:, :4]).sum().backward()
    optimizer.step()
    assert list(optimizer.names.values()) == ["embed.weight"] and model["head"].weight is model["embed"].weight
    assert torch.equal(frozen, model["frozen"].weight) and not model["frozen"].weight.requires_grad


def test_trap_adamw_is_no_adam() -> None:
    """6: since torch 2.7 AdamW is a subclass of Adam, and MS-AMP takes it for one."""
    assert not issubclass(LowBitAdamW, LowBitAdam) and not issubclass(LowBitAdam, LowBitAdamW)


# Formats of the moments: 200 steps, a log-normal size of gradients for each element, beside float32 moments.

def update_error(exp_avg: Codec, exp_avg_sq: Codec) -> float:
    size = torch.exp(normal(64, 256, seed=7, scale=1.5)) * 1e-4
    runs = []
    for c in (Columns(), Columns(exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)):
        p = {"w": nn.Parameter(torch.zeros(64, 256))}
        optimizer = LowBitAdamW(p.items(), columns=c, lr=1.0, betas=(0.9, 0.999), weight_decay=0.0)
        for step in range(200):
            before = p["w"].detach().clone()
            p["w"].grad = normal(64, 256, seed=step) * size
            optimizer.step()
        runs.append(p["w"].detach() - before)
    return ((runs[1] - runs[0]).norm() / runs[0].norm()).item()


@pytest.mark.parametrize(("exp_avg", "exp_avg_sq", "low", "high"), [
    (codec("fp8_pow2"), codec("fp16_scaled"), 0.05, 0.07), (codec("fp8"), codec("fp16_scaled"), 0.05, 0.07), (codec("bf16"), codec("bf16"), 0.005, 0.01),
    (codec("fp8_pow2", fp8=E5M2), codec("fp16_scaled"), 0.1, 0.12), (codec("fp8_block"), codec("fp16_scaled"), 0.05, 0.06),
    (codec("fp8_block"), codec("fp8_block", second_moment=True), 0.1, 0.2),
    (codec("fp8_pow2"), codec("fp8_pow2"), 50.0, math.inf), (codec("fp8_block"), codec("fp8_block"), 10.0, math.inf)],
    ids=["O2", "exact", "bf16", "e5m2", "block+fp16", "blocks", "per-tensor second moment", "linear block second moment"])
def test_error_of_an_update(exp_avg: Codec, exp_avg_sq: Codec, low: float, high: float) -> None:
    assert low < update_error(exp_avg, exp_avg_sq) < high


@pytest.mark.parametrize(("exp_avg_sq", "diverges"), [("fp16_scaled", False), ("bf16", False), ("fp8_block", False), ("fp8", True), ("fp8_pow2", True)])
def test_second_moments_in_fp8_under_one_scale_diverge(exp_avg_sq: str, diverges: bool) -> None:
    """A token that is not in the batch has gradient 0, and moves by lr m / eps where its second moment was rounded to 0."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(64, 16), nn.Linear(16, 64, bias=False))
    optimizer = LowBitAdamW(model.named_parameters(), columns=named_columns(exp_avg="fp8_pow2", exp_avg_sq=exp_avg_sq), lr=1e-2, betas=(0.9, 0.999))
    for _ in range(100):
        x = torch.multinomial(torch.arange(1, 65.0) ** -1.5, 64, True)
        loss = nn.functional.cross_entropy(model(x), (7 * x + 3) % 64)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not loss < 1e6 if diverges else loss < 0.5


def stuck(c: Codec, beta: float, noise: float) -> float:
    """The error of first moments, relative to what they should be, after 300 steps of gradients of 1 and then as many of `noise`."""
    exact, stored = torch.zeros(4096), c.zeros(torch.Size([4096]), torch.device("cpu"))
    for step in range(600):
        g = 1.0 + normal(4096, seed=step, scale=noise) if noise else torch.full((4096,), 1.0 if step < 300 else 0.0)
        exact = beta * exact + (1 - beta) * g
        stored = c.encode(beta * c.decode(stored) + (1 - beta) * g)
    return ((c.decode(stored) - exact).abs().mean() / exact.abs().mean().clamp(min=0.02)).item()


@pytest.mark.parametrize(("name", "beta", "low", "high"), [
    ("fp8_pow2", 0.9, 0.0, 0.1), ("fp8_pow2", 0.95, 10.0, 100.0), ("fp8_pow2", 0.98, 10.0, 100.0), ("fp8", 0.95, 0.0, 0.1), ("fp8", 0.98, 0.0, 0.1),
    ("fp8_block", 0.98, 0.0, 0.1), ("bf16", 0.98, 0.0, 0.1)])
def test_averages_under_a_power_of_two_freeze(name: str, beta: float, low: float, high: float) -> None:
    """With gradients gone: an exact scale follows the amax down, a power of two stands still."""
    assert low <= stuck(codec(name), beta, 0.0) <= high


def test_noise_does_not_free_a_power_of_two() -> None:
    assert stuck(codec("fp8_pow2"), 0.98, 0.1) > 5 * stuck(codec("fp8"), 0.98, 0.1)


# Pieces, memory, compiled code.

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


@pytest.mark.parametrize(("row", "cls", "backend"), [
    ("O2", LowBitAdamW, "inductor"), ("O3", LowBitAdam, "aot_eager"), ("bf16 stochastic", LowBitAdamW, "inductor"),
    ("block moments", LowBitAdamW, "inductor"), ("expanded moments", LowBitAdamW, "inductor")])
def test_compiled_bits_are_the_eager_ones(row: str, cls: type[LowBitOptimizer], backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One graph a kernel: neither another length nor another step compiles again. O2 has copies in bf16. Inductor's code for every
    codec is in tests/numerics/test_codecs.py."""
    compiles, found = torch.compile, []
    if backend != "inductor":
        monkeypatch.setattr(torch, "compile", lambda run, options, **more: compiles(run, backend=backend, **more))
    for compiled in (False, True):
        p = parameters(ROWS[row], (16, 128), (16, 128), (24, 128), (5, 77), (3,), (), dtype=torch.bfloat16 if row == "O2" else None)
        optimizer = build(ROWS[row], p, cls, compiled=compiled)
        tensor_groups._compiled.cache_clear()
        torch._dynamo.utils.counters.clear()
        train(optimizer, p, range(4))
        kernels = (2 if ROWS[row].per_tensor else 1) if compiled else 0
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == tensor_groups._compiled.cache_info().currsize == kernels
        found.append(everything(optimizer, p))
    assert equal(*found)


class LiveBytes(TorchDispatchMode):
    """The most bytes that tensors made under it held at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.peak = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def storages(tree: Any) -> dict[int, torch.UntypedStorage]:
            return {t.untyped_storage().data_ptr(): t.untyped_storage() for t in torch.utils._pytree.tree_leaves(tree) if isinstance(t, torch.Tensor)}
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

    tensor_groups._compiled.cache_clear()
    p = parameters(ROWS[row], (256, 128))
    optimizer = build(ROWS[row], p, compiled=True)
    p["p0"].grad = normal(256, 128)
    if ROWS[row].grad is not None:
        optimizer.store_grads()
    torch._dynamo.reset()
    with fresh_cache():
        _, code = run_and_get_code(functools.partial(optimizer.step))
    made = [line for text in code for line in text.splitlines() if "= empty_strided_cpu(" in line]
    whole = [line for line in made if "empty_strided_cpu((s" in line and ("128" in line or row == "O2")]
    assert code and not whole, whole


# State.

@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("cls", [LowBitAdamW, LowBitAdam])
def test_resumes_bit_for_bit(row: str, cls: type[LowBitOptimizer]) -> None:
    c, shapes = ROWS[row], ((9, 128), (50,))
    p = parameters(c, *shapes)
    optimizer = build(c, p, cls, seed=5)
    train(optimizer, p, range(3))
    tensors, rest, weights = save(optimizer.state_tensors()), json.dumps(optimizer.state_json()), {k: v.detach().clone() for k, v in p.items()}
    train(optimizer, p, range(3, 6))

    again = parameters(c, *shapes, seed=50)
    with torch.no_grad():
        for k, v in again.items():
            v.copy_(weights[k])
    resumed = build(c, again, cls)
    resumed.load_state(load(tensors), json.loads(rest))
    assert resumed.seed == 5 and all(torch.equal(again[k], weights[k]) for k in again)
    train(resumed, again, range(3, 6))
    assert equal(everything(optimizer, p), everything(resumed, again))
    assert resumed.state_json() == optimizer.state_json()


def test_state_names() -> None:
    p = parameters(ROWS["O3"], (4, 128))
    assert {k: (v.dtype, tuple(v.shape)) for k, v in build(ROWS["O3"], p).state_tensors().items()} == {
        "p0.master": (torch.float16, (4, 128)), "p0.master.scale_inv": (torch.float32, ()),
        "p0.weight": (E4M3.dtype, (4, 128)), "p0.weight.scale_inv": (torch.float32, ()),
        "p0.exp_avg": (E4M3.dtype, (4, 128)), "p0.exp_avg.scale_inv": (torch.float32, ()),
        "p0.exp_avg_sq": (torch.float16, (4, 128)), "p0.exp_avg_sq.scale_inv": (torch.float32, ())}
    assert set(build(ROWS["fp32"], p).state_tensors()) == {"p0.exp_avg", "p0.exp_avg_sq"}
    assert build(ROWS["O2"], p).state_json() == {"optimizer": "LowBitAdamW", "seed": 0, "state": {
        "p0": {"step": 0, "codecs": {"weight": "fp16 pow2", "exp_avg": "e4m3 pow2", "exp_avg_sq": "fp16 pow2"}}}}


def test_what_load_refuses_and_that_nothing_changes() -> None:
    p = parameters(ROWS["O2"], (4, 128))
    optimizer = build(ROWS["O2"], p)
    train(optimizer, p, range(2))
    tensors, rest = {k: v.clone() for k, v in optimizer.state_tensors().items()}, optimizer.state_json()
    before = everything(optimizer, p)
    cut = {k: v for k, v in tensors.items() if k != "p0.exp_avg.scale_inv"}
    wide = {**tensors, "p0.exp_avg": tensors["p0.exp_avg"].float()}
    entry = rest["state"]["p0"]
    for t, j, words in (
        (cut, rest, "1 tensors missing, among them p0.exp_avg.scale_inv"),
        (wide, rest, r"p0.exp_avg is torch.float32 \[4, 128\], expected torch.float8_e4m3fn"),
        (tensors, {**rest, "optimizer": "LowBitAdam"}, "of LowBitAdam, this optimizer is LowBitAdamW"),
        (tensors, {**rest, "state": {"q": entry}}, "1 parameters missing, among them p0"),
        (tensors, {**rest, "state": {"p0": {**entry, "codecs": {**entry["codecs"], "exp_avg": "e4m3 exact"}}}}, "exp_avg e4m3 exact, .*expected"),
        (tensors, {"state": {}}, "the JSON has"),
    ):
        with pytest.raises(ValueError, match=words):
            optimizer.load_state(t, j)
    assert equal(before, everything(optimizer, p))


def test_weights_written_by_others_are_noticed() -> None:
    p = parameters(ROWS["Megatron"], (4, 128))
    optimizer = build(ROWS["Megatron"], p)
    with torch.no_grad():
        p["p0"].zero_()
    with pytest.raises(RuntimeError, match="1 parameters, p0 among them, were written after the optimizer had stored their values"):
        optimizer.step()
    plain = parameters(ROWS["fp32"], (4, 128))
    optimizer = build(ROWS["fp32"], plain)
    with torch.no_grad():
        plain["p0"].zero_()
    optimizer.step()


def test_originals_are_what_masters_start_from() -> None:
    original = normal(4, 128)
    p = {"w": nn.Parameter(original.bfloat16())}
    optimizer = build(ROWS["Megatron"], p, originals={p["w"]: original})
    assert torch.equal(optimizer.state_tensors()["w.master"], original)


# Gradients and groups.

def test_gradients_are_stored_once_and_freed() -> None:
    p = parameters(ROWS["O2"], (4, 128))
    optimizer = build(ROWS["O2"], p)
    p["p0"].grad = normal(4, 128)
    optimizer.store_grads()
    data, scale_inv = optimizer.stored_grads[p["p0"]]
    assert p["p0"].grad is None and data.dtype == E4M3.dtype and scale_inv.item() == NAMES["fp8_pow2"].encode(normal(4, 128))[1].item()
    before = p["p0"].detach().clone()
    optimizer.step()
    assert not torch.equal(before, p["p0"]) and optimizer.state[p["p0"]]["step"] == 1
    p["p0"].grad = normal(4, 128)
    optimizer.store_grads()  # a step has read what was stored, so this takes its place
    p["p0"].grad = normal(4, 128)
    with pytest.raises(RuntimeError, match="the gradient of p0 was stored before a backward pass"):
        optimizer.step()
    optimizer.zero_grad()
    assert not optimizer.stored_grads and p["p0"].grad is None


def test_gradients_scale_by_their_scale() -> None:
    """Unscaling and clipping touch four bytes."""
    found = []
    for divide in (False, True):
        p = parameters(ROWS["O2"], (4, 128))
        optimizer = build(ROWS["O2"], p)
        p["p0"].grad = normal(4, 128) * (2.0**16 if divide else 1.0)
        optimizer.store_grads()
        if divide:
            optimizer.stored_grads[p["p0"]][1].div_(2.0**16)
        optimizer.step()
        found.append(everything(optimizer, p))
    assert equal(*found)


def test_groups_have_their_own_columns_and_hyperparameters() -> None:
    w, b = nn.Parameter(normal(4, 128)), nn.Parameter(normal(4))
    groups = [{"params": [("w", w)], "weight_decay": 0.1, "columns": ROWS["O2"]}, {"params": [("b", b)], "lr": 0.0}]
    optimizer = LowBitAdamW(groups, lr=1e-2)
    start = b.detach().clone()
    train(optimizer, {"w": w, "b": b}, range(2))
    assert {k for k in optimizer.state_tensors() if k[0] == "b"} == {"b.exp_avg", "b.exp_avg_sq"} and torch.equal(b, start)
    assert optimizer.state[w]["exp_avg"][0].dtype == E4M3.dtype
    optimizer.add_param_group({"params": [("c", nn.Parameter(torch.ones(3)))]})
    assert "c.exp_avg" in optimizer.state_tensors()


def test_parameters_without_gradient_wait() -> None:
    p = parameters(ROWS["O2"], (4, 128), (4, 128))
    optimizer = build(ROWS["O2"], p)
    for step in range(3):
        p["p0"].grad = normal(4, 128, seed=step)
        p["p1"].grad = normal(4, 128, seed=step) if step == 2 else None
        optimizer.step()
        optimizer.zero_grad()
    assert [optimizer.state[v]["step"] for v in p.values()] == [3, 1]
    assert optimizer.step(lambda: 3.5) == 3.5


def test_seeds_and_names_choose_the_random_numbers() -> None:
    c, found = ROWS["bf16 stochastic"], []
    for name, seed in (("a", 0), ("a", 0), ("b", 0), ("a", 1)):
        p = {name: nn.Parameter(normal(4, 128).bfloat16())}
        train(build(c, p, seed=seed), p, range(2))
        found.append(bits(p[name]))
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2]) and not torch.equal(found[0], found[3])


def test_stochastic_rounding_carries_small_updates() -> None:
    """100 steps of Adam at lr 1e-6 move a weight of 1 by 1e-4, a fortieth of half a unit of bf16."""
    moved = {}
    for row in ("bf16 stochastic", "bf16 nearest"):
        c = replace_weight(ROWS["bf16 stochastic"], row.split()[1])
        p = {"w": nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))}
        optimizer = LowBitAdamW(p.items(), columns=c, lr=1e-6)
        for _ in range(100):
            p["w"].grad = torch.full((4096,), -1.0, dtype=torch.bfloat16)
            optimizer.step()
        moved[row] = (p["w"].float() - 1).mean().item()
    assert moved["bf16 nearest"] == 0.0 and moved["bf16 stochastic"] == pytest.approx(1e-4, rel=0.2)


def replace_weight(c: Columns, rounding: Any) -> Columns:
    return c._replace(weight=replace(c.weight, rounding=rounding))


@pytest.mark.parametrize(("params", "options", "words"), [
    ([("w", nn.Parameter(torch.zeros(2)))], {"lr": -1.0}, "lr=-1.0 must not be negative"),
    ([("w", nn.Parameter(torch.zeros(2)))], {"eps": math.nan}, "eps=nan must not be negative"),
    ([("w", nn.Parameter(torch.zeros(2)))], {"betas": (0.9, 1.0)}, r"betas=\(0.9, 1.0\) must lie in \[0, 1\)"),
    ([nn.Parameter(torch.zeros(2))], {}, "state is kept by name"),
    ([("w", nn.Parameter(torch.zeros(2))), ("w", nn.Parameter(torch.zeros(2)))], {}, "two parameters are named w"),
    ([("w", nn.Parameter(torch.zeros(2, 3).t()))], {}, "w is not contiguous"),
    ([("w", nn.Parameter(torch.zeros(2).to(E4M3.dtype)))], {}, "w is torch.float8_e4m3fn; parameters are float32"),
])
def test_what_is_refused(params: Any, options: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        LowBitAdamW(params, **options)


@pytest.mark.slow
def test_torchaos_adamw_fp8() -> None:
    """AdamWFp8 stores both moments as E4M3 in blocks of 256. Its first moment is a lerp, so some codes differ, by one."""
    optim = pytest.importorskip("torchao.optim")
    blocks, w = Codec(E4M3, "exact", block=256), normal(64, 128, scale=0.02)
    ours, theirs = {"w": nn.Parameter(w.clone())}, nn.Parameter(w.clone())
    a, b = build(Columns(exp_avg=blocks, exp_avg_sq=blocks), ours), optim.AdamWFp8([theirs], lr=1e-3, betas=BETAS, weight_decay=0.1)
    for step in range(10):
        ours["w"].grad = theirs.grad = normal(64, 128, seed=step, scale=1e-3)
        a.step()
        b.step()
    for moment in ("exp_avg", "exp_avg_sq"):
        (data, scale), other = a.state[ours["w"]][moment], b.state[theirs][moment]
        assert (bits(data) != bits(other.codes)).float().mean() < 1e-3 and torch.allclose(scale, other.scale, rtol=1e-5)
    assert (ours["w"] - theirs).abs().max() < 5e-5


def test_nothing_is_left_to_pickle(tmp_path: Path) -> None:
    """`state_dict` goes through torch.save and back without code, weights_only."""
    p = parameters(ROWS["O2"], (4, 128))
    optimizer = build(ROWS["O2"], p)
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    optimizer.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    with pytest.raises(TypeError, match="an optimizer cannot be copied or pickled"):
        torch.save(optimizer, tmp_path / "whole.pt")
    with pytest.raises(TypeError, match="an optimizer cannot be copied or pickled"):
        copy.deepcopy(optimizer)


def test_a_state_with_other_groups_changes_nothing() -> None:
    p = parameters(ROWS["O2"], (4, 128))
    optimizer = build(ROWS["O2"], p)
    state, mine = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(optimizer.state_tensors())
    state["tensors"]["p0.exp_avg.scale_inv"].fill_(7.0)
    with pytest.raises(ValueError, match="2 parameter groups, expected 1"):
        optimizer.load_state_dict({**state, "param_groups": state["param_groups"] * 2})
    assert all(torch.equal(t, mine[name]) for name, t in optimizer.state_tensors().items())
    optimizer.load_state_dict({**state, "param_groups": [{"lr": 0.5, "betas": (0.5, 0.5), "eps": 1.0, "weight_decay": 0.0}]})
    assert optimizer.param_groups[0]["lr"] == 0.5 and optimizer.state_tensors()["p0.exp_avg.scale_inv"] == 7.0


def test_gradients_add_up_in_their_codec_where_storage_accumulate_is_stored() -> None:
    """storage.accumulate=stored: each sum is rounded again, as MS-AMP does; wide rounds once."""
    p, fp8 = nn.Parameter(torch.zeros(64)), codec("fp8")
    parts = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    optimizer = LowBitAdamW([("p", p)], columns=named_columns(weight_grad="fp8"))
    want = torch.zeros(64)
    for part in parts:
        with optimizer.storing(add=True):
            (p * part).sum().backward()
        assert p.grad is None
        want = fp8.decode(fp8.encode(want + part))
    assert torch.equal(fp8.decode(optimizer.stored_grads[p]), want)
    assert not torch.equal(want, fp8.decode(fp8.encode(parts.sum(0))))
    with pytest.raises(RuntimeError, match="stored before a backward pass"), optimizer.storing():
        (p * 1.0).sum().backward()
