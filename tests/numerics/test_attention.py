"""FP8 attention: against Transformer Engine's own emulation, and through training."""

from __future__ import annotations

import ast
import copy
import importlib.util
import types
import typing
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fp8cfg
from fp8cfg.backends import gemm_plan
from fp8cfg.backends.backend_choice import Hardware, choose
from fp8cfg.config.fp8 import FP8
from fp8cfg.layer_plan import plan
from fp8cfg.models.attention import CoreAttention
from fp8cfg.numerics import E4M3, E5M2, Format, Ran, Region, Scaling, decode, discard_amax, high_precision_state_dict, update_scales
from fp8cfg.numerics.attention import DOUT, DP, DQKV, OUT, PRODUCTS, QKV, FP8Attention, S
from fp8cfg.numerics.formats import cast
from fp8cfg.numerics.scaling import amax_of, floor_to_power_of_2, scale_from_amax
from fp8cfg.numerics.stored_form import stored_state_dict
from fp8cfg.report.coverage import coverage, planned
from fp8cfg.training.checkpoint import checkpoint as checkpoints
from fp8cfg.training.checkpoint import job_state
from fp8cfg.training.data import run_data
from tests.support.small import losses, small, steps
from tests.support.traced import trace_model

FP8_RUN, ATTENTION = "precision=bf16_fp8", "fp8.dot_product_attention=true"
DELAYED, CURRENT = Scaling(amax_history_len=4), Scaling("current")
RAN = [Ran("e4m3", "e4m3", "emulated")] * 2 + [Ran("e5m2", "e4m3", "emulated")] * 4
NAME = "layers.0.self_attention.core_attention"


def qkv(seed: int, dtype: torch.dtype = torch.float32, heads: int = 4, groups: int = 2, tokens: int = 48, width: int = 16) -> list[Tensor]:
    """q, k, v that want gradients, and the gradient of the output."""
    g = torch.Generator().manual_seed(seed)
    shapes = [(2, heads, tokens, width), (2, groups, tokens, width), (2, groups, tokens, width), (2, heads, tokens, width)]
    q, k, v, dy = (torch.randn(*shape, generator=g) * size for shape, size in zip(shapes, (1, 2, 0.7, 1e-3), strict=True))
    return [*(t.to(dtype).requires_grad_() for t in (q, k, v)), dy.to(dtype)]


def both_ways(attention: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, dy: Tensor) -> list[Tensor]:
    """The output and the three gradients."""
    y = attention(q, k, v)
    return [y, *torch.autograd.grad(y, (q, k, v), dy)]


def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


def ran(layer: FP8Attention) -> list[Ran | None]:
    return [decode(code) for code in layer.gemms_ran.tolist()]


def state(layer: FP8Attention) -> list[Tensor]:
    return [layer.fp8_scale, layer.fp8_amax_history]


# --- Transformer Engine's emulation, from the Python of its wheel
#
# Its functions and classes are read out of the source files, because the modules around them ask for triton and the compiled part
# when they are imported. What stands in for that part: a quantizer of torch casts, and the names that the code looks up.

FILES = {"backends.py": ("FP8EmulationFunc", "UnfusedDotProductAttention"), "softmax.py": ("FusedScaleMaskSoftmax",),
         "utils.py": ("combine_and_quantize", "combine_and_dequantize")}


@dataclass
class Float8Tensor:
    _data: Tensor
    scale_inv: Tensor
    dtype: torch.dtype

    @classmethod
    def make_like(cls, other: Float8Tensor, data: Tensor, dtype: torch.dtype) -> Float8Tensor:
        return cls(data, other.scale_inv, dtype)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        return (self._data.float() * self.scale_inv).to(dtype)


class Quantizer:
    """Quantizes with its `scale` (delayed scaling), or with the tensor's own; keeps the amax that it saw."""

    def __init__(self, fp8_dtype: Format, scale: Tensor | None = None, pow2: bool = False, device: str = "") -> None:
        self.dtype, self.scale, self.pow2, self.amax = fp8_dtype, scale, pow2, torch.zeros(())

    def __call__(self, t: Tensor) -> Float8Tensor:
        self.amax = amax_of(t)
        scale = scale_from_amax(self.amax, self.dtype) if self.scale is None else self.scale
        scale = floor_to_power_of_2(scale) if self.pow2 else scale
        return Float8Tensor(cast(t.float() * scale, self.dtype), scale.reciprocal(), t.dtype)


def te_attention(quantizers: list[Quantizer]) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Transformer Engine's emulated attention with quantizers in the order of our columns."""
    spec = importlib.util.find_spec("transformer_engine")
    if spec is None or spec.origin is None:
        pytest.skip("transformer-engine is not installed")
    in_its_order = [quantizers[column] for column in (QKV, OUT, S, DQKV, DOUT, DP)]
    current = types.SimpleNamespace(float8_current_scaling=lambda: quantizers[0].scale is None)
    found: dict[str, Any] = {
        **{name: getattr(typing, name) for name in ("Any", "Callable", "Dict", "List", "Optional", "Tuple", "Union")},
        "torch": torch, "F": F, "nn": nn, "os": mock.Mock(getenv=lambda *_: "0"), "nullcontext": nullcontext, "export": mock.Mock(),
        "is_in_onnx_export_mode": lambda: False, "no_torch_dynamo": lambda: lambda f: f, "InferenceParams": object,
        "QKVLayouts": ["bshd_bshd_bshd"], "attention_mask_func": lambda x, mask: x.masked_fill(mask, -10000.0),
        "Float8Tensor": Float8Tensor, "QuantizedTensorStorage": Float8Tensor, "Float8CurrentScalingQuantizer": Quantizer,
        **dict.fromkeys(("MXFP8Quantizer", "MXFP8Tensor", "MXFP8TensorStorage"), type("Absent", (), {})),
        "FP8GlobalStateManager": types.SimpleNamespace(get_fp8_recipe=lambda: current),
        "dpa_utils": types.SimpleNamespace(
            get_qkv_format=lambda *_: ("bshd", "bshd", "bshd"), get_attention_quantizers=lambda *_: in_its_order,
            get_full_mask=lambda *_, attn_mask_type, attention_mask, **__: (attn_mask_type, attention_mask, None, None))}
    for file, names in FILES.items():
        source = Path(spec.origin).parent.joinpath("pytorch/attention/dot_product_attention", file).read_text(encoding="utf-8")
        wanted = [node for node in ast.parse(source).body if getattr(node, "name", "") in names]
        exec(compile(ast.Module(wanted, []), file, "exec"), found)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        te = found["UnfusedDotProductAttention"](q.shape[-1] ** -0.5)
        mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)[None, None]
        with mock.patch("torch.cuda.current_device", return_value="cpu"):
            y = te({}, *(t.transpose(1, 2) for t in (q, k, v)), qkv_layout="bshd_bshd_bshd", attn_mask_type="arbitrary",
                   attention_mask=mask, fp8=True)
        return y.unflatten(-1, (q.shape[1], -1)).transpose(1, 2)

    return attend


def quantizers(scaling: Scaling, scales: Tensor | None = None) -> list[Quantizer]:
    formats = [scaling.forward] * 3 + [scaling.backward] * 3
    return [Quantizer(f, None if scales is None else scales[i], scaling.power_2_scales) for i, f in enumerate(formats)]


def assert_same_but_for_ties(ours: list[Tensor], theirs: list[Tensor]) -> None:
    """float32 sums of another order move a value across a rounding boundary now and then: less than one in a hundred."""
    for a, b in zip(ours, theirs, strict=True):
        assert ((a - b).abs() > 1e-5 * b.abs().max()).double().mean() < 0.01


@pytest.mark.parametrize("scaling", [CURRENT, Scaling("current", backward=E4M3), Scaling("current", power_2_scales=True)],
                         ids=["hybrid", "e4m3", "pow2"])
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (3, 1)])
def test_current_scaling_is_transformer_engines(scaling: Scaling, heads: int, groups: int) -> None:
    t = qkv(heads, heads=heads, groups=groups)
    assert_same_but_for_ties(both_ways(FP8Attention(scaling, Region(True)), *t), both_ways(te_attention(quantizers(scaling)), *t))


@pytest.mark.parametrize("margin", [0, 2])
def test_delayed_scaling_is_transformer_engines_step_by_step(margin: int) -> None:
    scaling = Scaling(amax_history_len=8, margin=margin, first_step="te")
    layer = FP8Attention(scaling, Region(True))
    for step in range(4):
        theirs, t = quantizers(scaling, layer.fp8_scale.clone()), qkv(step)
        with torch.no_grad():
            t[3] *= 1e4  # or the scale 1 of the first step flushes the gradients
        assert_same_but_for_ties(both_ways(layer, *t), both_ways(te_attention(theirs), *t))
        amaxes = torch.stack([q.amax for q in theirs])
        torch.testing.assert_close(layer.fp8_amax_history[0], amaxes, rtol=0.02, atol=0)
        update_scales([layer])
        assert (layer.fp8_amax_history[-1] > 0).all() and not layer.fp8_amax_history[0].any()
    top = torch.tensor([E4M3.max] * 3 + [E5M2.max] * 3) / 2**margin
    assert torch.equal(layer.fp8_scale, top / layer.fp8_amax_history.amax(0))


def test_in_bfloat16_it_is_as_near_to_its_float32_self_as_transformer_engines() -> None:
    """What differs is that its emulation rounds to bfloat16 between any two operations, ours only what a product returns."""
    wide, narrow = qkv(0), qkv(0, torch.bfloat16)
    with torch.no_grad():
        for a, b in zip(wide, narrow, strict=True):
            a.copy_(b)
    want = both_ways(FP8Attention(CURRENT, Region(True)), *wide)
    ours, theirs = both_ways(FP8Attention(CURRENT, Region(True)), *narrow), both_ways(te_attention(quantizers(CURRENT)), *narrow)
    for w, a, b in zip(want, ours, theirs, strict=True):
        assert a.dtype == torch.bfloat16 and (a - w).norm() < 1.2 * (b - w).norm()


# --- the module


@pytest.mark.parametrize("scaling", [DELAYED, CURRENT], ids=["delayed", "current"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_it_is_attention(scaling: Scaling, dtype: torch.dtype) -> None:
    layer, t = FP8Attention(scaling, Region(True)), qkv(1, dtype)
    for got, want in zip(both_ways(layer, *t), both_ways(exact, *t), strict=True):
        assert got.dtype == dtype and 0.01 < (got - want).norm() / want.norm() < 0.2
    assert ran(layer) == RAN


def test_outside_the_region_it_is_torchs() -> None:
    layer, t = FP8Attention(DELAYED, Region(True)), qkv(2)
    both_ways(layer, *t)
    before = [x.clone() for x in state(layer)]
    with layer.region.entered(False):
        for got, want in zip(both_ways(layer, *t), both_ways(exact, *t), strict=True):
            assert torch.equal(got, want)
    assert ran(layer) == [None] * 6 and all(map(torch.equal, state(layer), before))


def test_autocast_decides_the_dtype() -> None:
    layer, t = FP8Attention(CURRENT, Region(True)), qkv(3)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(*t[:3])
    y.backward(t[3].bfloat16())
    assert y.dtype == torch.bfloat16 and t[0].grad.dtype == torch.float32 and ran(layer) == RAN


def test_without_gradients_nothing_is_recorded_in_the_history() -> None:
    layer = FP8Attention(DELAYED, Region(True))
    with torch.no_grad():
        y = layer(*qkv(4)[:3])
    assert not layer.fp8_amax_history.any() and torch.equal(y, layer(*qkv(4)[:3])) and layer.fp8_amax_history[0, :3].all()


def test_microbatches_and_recomputation_leave_one_maximum() -> None:
    once, twice, again = (FP8Attention(DELAYED, Region(True)) for _ in range(3))
    for layer in (once, twice, again):
        layer.fp8_scale.copy_(torch.tensor([60.0, 300, 100, 1e5, 1e6, 2e5]))
    first, second = qkv(5), qkv(6)
    both_ways(once, *(torch.cat([a, b]) for a, b in zip(first, second, strict=True)))
    for t in (first, second):
        both_ways(twice, *t)
        both_ways(lambda *a: checkpoint(again, *a, use_reentrant=False), *t)
    assert torch.equal(once.fp8_amax_history, twice.fp8_amax_history) and torch.equal(twice.fp8_amax_history, again.fp8_amax_history)
    discard_amax([once])
    assert not once.fp8_amax_history.any()


def test_scales_move_at_their_interval_with_those_of_linear_layers() -> None:
    layer = FP8Attention(Scaling(amax_history_len=1, interval=2), Region(True))
    seen = []
    for step in range(1, 5):
        t = qkv(7)
        both_ways(layer, *(t[0] * step, *t[1:]))
        update_scales([layer], step=step)
        seen.append(layer.fp8_scale[QKV].item())
    assert seen[0] > seen[1] == seen[2] > seen[3]


def test_state_is_never_cast_and_travels() -> None:
    layer = FP8Attention(DELAYED, Region(True))
    both_ways(layer, *qkv(8))
    update_scales([layer])
    half = copy.deepcopy(layer).bfloat16()
    assert all(map(torch.equal, state(half), state(layer))) and half.region is not layer.region
    other = FP8Attention(DELAYED, Region(True))
    other.load_state_dict(stored_state_dict(layer))
    assert all(map(torch.equal, both_ways(other, *qkv(9)), both_ways(layer, *qkv(9))))
    assert high_precision_state_dict(stored_state_dict(layer)) == layer.state_dict() == {}
    other.load_state_dict({})  # new weights: what was seen is forgotten
    assert not any(t.any() for t in state(other))
    CoreAttention().load_state_dict(layer.state_dict())
    assert FP8Attention(CURRENT, Region()).state_dict() == {}


@pytest.mark.parametrize("scaling", [Scaling("block"), Scaling("mxfp8"), Scaling("nvfp4"), Scaling("current", granularity="row")])
def test_scalings_with_many_scales_are_refused(scaling: Scaling) -> None:
    with pytest.raises(ValueError, match="one scale a tensor"):
        FP8Attention(scaling, Region())


@pytest.mark.parametrize(("scaling", "backend"), [(DELAYED, "aot_eager"), (CURRENT, "aot_eager"), pytest.param(CURRENT, "inductor", marks=pytest.mark.slow)],
                         ids=["delayed-aot_eager", "current-aot_eager", "current-inductor"])
def test_compiled_it_agrees_with_eager(scaling: Scaling, backend: str) -> None:
    """Traced in one graph, forward and backward. Inductor's code takes a minute to compile, and under current scaling it holds the
    scales too."""
    results = []
    for compiled in (False, True):
        layer = FP8Attention(scaling, Region(True))
        forward = torch.compile(layer, fullgraph=True, backend=backend) if compiled else layer
        found = []
        for step in range(3):
            found += both_ways(forward, *qkv(step))
            update_scales([layer])
        assert ran(layer) == RAN
        results.append([*found, *(state(layer) if scaling is DELAYED else ())])
    for a, b in zip(*results, strict=True):
        assert (a - b).norm() <= 0.01 * a.norm()


# --- the recipe


def test_the_products_have_the_names_of_the_plan() -> None:
    assert PRODUCTS == gemm_plan.ATTENTION_GEMMS


@pytest.mark.parametrize(("fp8", "reasons"), [
    ({}, ["scaled dot product"] * 3),
    ({"dot_product_attention": True}, [""] * 3),
    ({"dot_product_attention": True, "high_precision_at_start": 1, "high_precision_at_end": 1},
     ["fp8.high_precision_at_start=1", "", "fp8.high_precision_at_end=1"]),
    ({"dot_product_attention": True, "exclude": ("*",), "format": "e4m3"}, [""] * 3)])  # fmt: skip
def test_the_plan(fp8: dict[str, Any], reasons: list[str]) -> None:
    plans = gemm_plan.plan_attention(FP8(enabled=True, **fp8), 3)
    assert [p.name for p in plans] == [f"layers.{i}.self_attention.core_attention" for i in range(3)]
    assert [p.reason for p in plans] == reasons and [p.fp8_share for p in plans] == [0.0 if r else 1.0 for r in reasons]
    gradient = "e4m3" if fp8.get("format") else "e5m2"
    assert plans[1].gemms == ((None,) * 6 if reasons[1] else (("e4m3", "e4m3"),) * 2 + ((gradient, "e4m3"),) * 4)


TABLE = """\
   linear layers                        FLOPs  fprop     dgrad     wgrad
4  layers.*.self_attention.linear_qkv   15.1%  e4m3xe4m3 e5m2xe4m3 e5m2xe4m3
4  layers.*.self_attention.linear_proj   7.5%  e4m3xe4m3 e5m2xe4m3 e5m2xe4m3
4  layers.*.mlp.linear_fc1              45.2%  e4m3xe4m3 e5m2xe4m3 e5m2xe4m3
4  layers.*.mlp.linear_fc2              22.6%  e4m3xe4m3 e5m2xe4m3 e5m2xe4m3
1  output_layer                          2.0%  bf16: fp8.output_layer=false
4  attention                             7.5%  e4m3xe4m3 e5m2xe4m3
FP8: 16 of 17 linear layers, attention in 4 of 4, 98.0% of matmul FLOPs"""


def test_the_table_of_coverage() -> None:
    recipe = fp8cfg.compose(["recipe=llama_tiny", FP8_RUN, ATTENTION])
    assert str(planned(recipe, plan(recipe))) == TABLE
    recipe.fp8.high_precision_at_start = 1
    lines = str(planned(recipe, plan(recipe))).splitlines()
    assert lines[-4:] == ["1  attention                             1.9%  bf16:",
                          "                                               fp8.high_precision_at_start=1",
                          "3  attention                             5.7%  e4m3xe4m3 e5m2xe4m3",
                          "FP8: 12 of 17 linear layers, attention in 3 of 4, 73.5% of matmul FLOPs"]  # fmt: skip


ENDS = ("fp8.high_precision_at_start=1", "model.num_layers=3")


@pytest.mark.parametrize(("words", "traced"), [
    ((FP8_RUN,), False), ((FP8_RUN, "fp8.high_precision_at_end=1"), False), (("precision=bf16_fp8_current", "model.num_layers=4"), False),
    ((FP8_RUN, "fp8.format=e4m3"), False), ((FP8_RUN, "model.recompute_granularity=full"), False),
    (("precision=fp16_fp8", "precision.initial_loss_scale=1024"), False),
    # Each of these keys, in two graphs.
    pytest.param((FP8_RUN, *ENDS, "fp8.high_precision_at_end=1", "fp8.format=e4m3", "model.recompute_granularity=full"), True, marks=pytest.mark.slow),
    pytest.param(("precision=fp16_fp8_current", "precision.initial_loss_scale=1024", *ENDS, "fp8.high_precision_at_end=1"), True, marks=pytest.mark.slow)])  # fmt: skip
def test_what_ran_is_what_was_planned(words: tuple[str, ...], traced: bool) -> None:
    job = fp8cfg.build(small(*words, ATTENTION))
    if traced:
        trace_model(job)
    list(steps(job, 1))
    assert job.prove().data() == planned(job.recipe, job.plan).data()
    found = {name: kinds for name, kinds in coverage(job.model).products.items() if name.endswith("core_attention")}
    assert len(found) == sum(p.fp8_share for p in gemm_plan.plan_attention(job.recipe.fp8, job.recipe.model.num_layers)) > 0
    assert all(list(kinds) == list(PRODUCTS) for kinds in found.values())


def test_attention_that_does_not_run_in_fp8_stops_the_run() -> None:
    job = fp8cfg.build(small(FP8_RUN, ATTENTION))
    job.model.get_submodule("layers.0.self_attention").core_attention = CoreAttention()
    list(steps(job, 1))
    with pytest.raises(fp8cfg.NotFP8Error, match=f"{NAME} p: planned e4m3 x e4m3, ran high precision.* and 3 more"):
        job.prove()


def test_scales_of_attention_move_with_the_optimizer() -> None:
    job = fp8cfg.build(small(FP8_RUN, ATTENTION))
    layer = job.model.get_submodule(NAME)
    assert layer.fp8_amax_history.shape == (1024, 6) and not layer.fp8_scale.any()
    list(steps(job, 2))
    assert layer.fp8_scale.all() and layer.fp8_amax_history[-2:].all() and not layer.fp8_amax_history[:-2].any()


def test_training_learns_as_without() -> None:
    with_it, without, high = (losses(*w, count=6) for w in ((FP8_RUN, ATTENTION), (FP8_RUN,), ("precision=bf16",)))
    assert with_it == pytest.approx(without, rel=0.01) and with_it == pytest.approx(high, rel=0.01) and with_it != without


@pytest.mark.parametrize("words", [(), ("fp8.interval=3",), ("fp8.first_step=te",), ("model.recompute_granularity=full",)])
def test_a_resumed_run_goes_on_bit_for_bit(words: tuple[str, ...], tmp_path: Path) -> None:
    words = (FP8_RUN, ATTENTION, *words)
    whole, first, job = (fp8cfg.build(small(*words)) for _ in range(3))
    want = [s.loss for s in steps(whole, 6)][3:]
    list(steps(first, 3))
    tensors, json = job_state.collect(first, run_data(first.recipe)[0], 3)
    assert f"{NAME}.fp8_amax_history" in tensors["fp8"] and not any(".fp8_" in name for name in tensors["model"])
    loaded = checkpoints.load(checkpoints.save(tmp_path, 3, tensors, json, keep=1))
    assert job_state.restore(job, *loaded, run_data(job.recipe)[0]) == 3
    assert [s.loss for s in steps(job, 3, first=3)] == want
    for (name, a), b in zip(stored_state_dict(job.model).items(), stored_state_dict(whole.model).values(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize(("start", "change"), [
    ((ATTENTION,), "fp8.dot_product_attention=false"), ((), ATTENTION), ((ATTENTION,), "fp8.amax_history_len=4"), ((ATTENTION,), "fp8.margin=1")])  # fmt: skip
def test_an_allowed_change_resumes(start: tuple[str, ...], change: str) -> None:
    before = fp8cfg.build(small(FP8_RUN, *start))
    list(steps(before, 2))
    job = fp8cfg.build(fp8cfg.compose([change], base=before.recipe))
    assert job_state.restore(job, *job_state.collect(before, run_data(before.recipe)[0], 2), run_data(job.recipe)[0]) == 2
    if change == "fp8.amax_history_len=4":
        assert torch.equal(job.model.get_submodule(NAME).fp8_amax_history, before.model.get_submodule(NAME).fp8_amax_history[[0, -3, -2, -1]])
    assert [s.loss for s in steps(job, 2, first=2)] == pytest.approx([s.loss for s in steps(before, 2, first=2)], rel=0.02)


@pytest.mark.parametrize(("words", "line"), [
    (("precision=bf16_mxfp8", ATTENTION), "fp8.dot_product_attention=True: the native backend has none under fp8.scaling=mxfp8, where cuDNN "
     "quantizes the softmax by rules of its own; drop it, or write fp8.scaling=current"),
    (("precision=bf16_nvfp4", ATTENTION), "fp8.dot_product_attention=True: nvfp4 scaling has no FP8 attention (TE NVFP4BlockScaling)"),
    (("precision=bf16_fp8_current", "fp8={granularity: row, high_precision_at_start: 0, high_precision_at_end: 0}", ATTENTION),
     "fp8.dot_product_attention=True: needs fp8.granularity=tensor, not row (TE Float8CurrentScaling)"),
    ((FP8_RUN, ATTENTION, "fp8.multi_head_attention=true"),
     "fp8.multi_head_attention=True: needs FP8 outputs of the projections: backend=te; drop it")])  # fmt: skip
def test_what_cannot_run_is_refused_by_name(words: tuple[str, ...], line: str) -> None:
    with pytest.raises(fp8cfg.ConfigError) as e:
        fp8cfg.build(small(*words))
    assert e.value.problems == [line]


def test_a_gpu_emulates_it_where_asked() -> None:
    hopper = Hardware("cuda", (9, 0), (12, 9))
    precision = small(FP8_RUN, ATTENTION).precision
    with pytest.raises(fp8cfg.ConfigError, match=r"fp8\.dot_product_attention=True: the native backend has it by emulation alone"):
        choose(precision, hopper)
    precision.fp8.emulate = True
    assert choose(precision, hopper).product == "emulate"
