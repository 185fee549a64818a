"""1x1 convolutions and nn.MultiheadAttention: converted as linear layers, held against torch's own modules, saved and loaded as these,
and put back."""

from __future__ import annotations

import copy
import functools
import itertools
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8cfg
from fp8cfg.numerics.stored_state import stored_state_dict
from tests.support.convert_models import BACKENDS, DELAYED, recipe
from tests.support.small import small

ALL = "fp8.output_layer=true"


class Net(nn.Module):
    """One convolution of each kind: pointwise, with a stride, of one dimension, of 3 x 3, in groups, and too narrow."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(3, 32, 3, padding=1)
        self.point, self.norm = nn.Conv2d(32, 64, 1), nn.BatchNorm2d(64)
        self.strided, self.grouped = (
            nn.Conv2d(64, 32, 1, stride=(2, 1), bias=False),
            nn.Conv2d(32, 32, 1, groups=2),
        )
        self.narrow, self.sequence = nn.Conv2d(32, 24, 1), nn.Conv1d(32, 48, 1)
        self.head = nn.Linear(48, 10)

    def forward(self, x: Tensor) -> Tensor:
        y = self.strided(torch.relu(self.norm(self.point(self.stem(x)))))
        y = self.grouped(y) + nn.functional.pad(self.narrow(y), (0, 0, 0, 0, 0, 8))
        return self.head(self.sequence(y.view(len(y), 32, -1)).mean(-1))


IMAGES, LABELS = (
    torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(1)),
    torch.arange(8),
)


def loss(model: Any) -> Tensor:
    return nn.functional.cross_entropy(model(IMAGES).float(), LABELS)


@functools.cache
def planned(backend: str = "native") -> dict[str, str]:
    return {
        p.name: "" if p.fp8 else p.reason
        for p in fp8cfg.convert_model(Net(), recipe(backend=backend)).plan
    }


@pytest.mark.parametrize("backend", BACKENDS)
def test_pointwise_convolutions_are_converted(backend: str) -> None:
    """Those that nn.Linear could be, and no other; each that is a convolution of kernel 1 is planned, with a reason."""
    assert {name for name, why in planned(backend).items() if not why} == {
        "point",
        "strided",
        "sequence",
    }
    assert (
        set(planned(backend)) == {"point", "strided", "narrow", "sequence", "head"}
        and "16" in planned(backend)["narrow"]
    )
    model, plain = Net(), Net()
    parameters, text = dict(model.named_parameters()), str(model)
    fp8 = fp8cfg.convert_model(model, recipe(backend=backend))
    assert (
        dict(model.named_parameters()) == parameters
        and type(model.narrow) is nn.Conv2d
        and model.point.out_channels == 64
    )
    with fp8.autocast():
        loss(model).backward()
    fp8.prove()
    loss(plain).backward()
    for name, p in model.named_parameters():
        want = plain.get_parameter(name).grad
        assert p.grad is not None and want is not None and torch.isfinite(p.grad).all()
        if name.endswith("weight"):  # the gradient of a bias in front of a norm is 0
            assert p.grad.flatten() == pytest.approx(
                want.flatten(), abs=0.3 * float(want.abs().max())
            )
    found = fp8cfg.coverage(model)
    rows = {p.name: p.rows for p in found.linears}
    assert rows == {
        "point": 8 * 64,
        "strided": 8 * 32,
        "narrow": 8 * 32,
        "sequence": 8 * 32,
        "head": 8,
    }
    assert {p.name for p in found.other_weights} == {"stem", "grouped"} and found.layers_in_fp8 == 3
    back = fp8cfg.convert_back(model)
    assert str(back) == text and all(
        p is parameters[name] and p.shape == plain.get_parameter(name).shape
        for name, p in back.named_parameters()
    )
    assert vars(back.point).keys() == vars(plain.point).keys()
    assert back.point.weight.grad.shape == (64, 32, 1, 1)
    plain.load_state_dict(back.state_dict(), strict=True)
    assert torch.equal(back(IMAGES), plain(IMAGES))


@pytest.mark.parametrize(
    ("conv", "shape"),
    [
        (nn.Conv2d(32, 64, 1), (2, 32, 4, 6)),
        (nn.Conv2d(32, 64, 1, bias=False), (32, 4, 6)),
        (nn.Conv2d(32, 64, 1, stride=(2, 3)), (2, 32, 5, 7)),
        (nn.Conv1d(32, 64, 1, stride=2, padding="valid"), (2, 32, 9)),
        (nn.Conv3d(32, 16, 1, dilation=2, padding="same"), (2, 32, 2, 3, 4)),
        (nn.Conv1d(32, 16, 1, padding_mode="circular"), (32, 16)),
    ],
    ids=str,
)
def test_a_pointwise_convolution_is_the_linear_layer(
    conv: nn.Module, shape: tuple[int, ...]
) -> None:
    """Outside of FP8 torch's own values and memory format; in FP8 those of the linear layer with the same weight, bit for bit, output
    and gradients; two-dimensional ones channels last too."""
    made = fp8cfg.convert_model(copy.deepcopy(conv), recipe(ALL))
    linear = nn.Linear(conv.in_channels, conv.out_channels, bias=conv.bias is not None)  # type: ignore[arg-type]
    linear.load_state_dict(
        {"weight": conv.weight.flatten(1), **({"bias": conv.bias} if conv.bias is not None else {})}
    )  # type: ignore[operator, dict-item]
    beside = fp8cfg.convert_model(linear, recipe(ALL))
    n = len(conv.kernel_size)  # type: ignore[arg-type]
    for x in [
        torch.randn(*shape),
        *([torch.randn(*shape).to(memory_format=torch.channels_last)] if len(shape) == 4 else []),
    ]:
        want, own = conv(x), made.model(x)
        assert (
            torch.allclose(own, want, atol=1e-5)
            and own.shape == want.shape
            and own.stride() == want.stride()
        )
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        steps = (..., *(slice(None, None, s) for s in conv.stride))  # type: ignore[union-attr]
        with made.autocast():
            got = made.model(a)
        with beside.autocast():
            ref = beside.model(b[steps].movedim(-n - 1, -1)).movedim(-1, -n - 1)
        assert torch.equal(got, ref) and not torch.allclose(got, want, atol=1e-5)
        got.square().sum().backward()
        ref.square().sum().backward()
        assert torch.equal(a.grad, b.grad) and torch.equal(
            made.model.weight.grad, beside.model.weight.grad
        )
        assert conv.bias is None or torch.allclose(
            made.model.bias.grad, beside.model.bias.grad, rtol=1e-5, atol=1e-4
        )


def test_weights_of_convolutions_load_both_ways() -> None:
    """Also into a copy, after pickling, and through views of `state_dict()`."""
    model, plain = Net(), Net()
    fp8cfg.convert_model(model, recipe(*DELAYED))
    shapes = {name: t.shape for name, t in plain.state_dict().items()}
    state = model.state_dict()
    assert {name: t.shape for name, t in state.items()} == shapes
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        new = {name: t + 1 for name, t in plain.state_dict().items()}
        other.load_state_dict(new, strict=True)
        plain.load_state_dict(other.state_dict(), strict=True)
        assert all(torch.equal(t, new[name]) for name, t in plain.state_dict().items())
        assert torch.allclose(other.eval()(IMAGES), plain.eval()(IMAGES), atol=1e-3)
    with torch.no_grad():
        state["point.weight"].zero_()
    assert not model.point.weight.any()
    with pytest.raises(RuntimeError, match=r"size mismatch for point\.weight"):
        model.load_state_dict({**state, "point.weight": torch.zeros(64, 32, 3, 3)})


@pytest.mark.parametrize(
    "words",
    [
        ("fp8.params=true",),
        ("fp8.params=false", "opt_level=O2"),
        ("storage.weight=fp8", "fp8.params=false"),
    ],
    ids=["float8", "O2", "codec"],
)
@pytest.mark.parametrize("make", [Net, lambda: Attention()], ids=["convolutions", "attention"])
def test_a_job_saves_and_loads_them_as_the_plain_model(make: Any, words: tuple[str, ...]) -> None:
    job = fp8cfg.build(
        small(
            "precision=bf16_fp8_current",
            *words,
            "fp8={high_precision_at_start: 0, high_precision_at_end: 0}",
            "optim.lr_decay_style=constant",
            "optim.warmup_steps=0",
            "optim.lr=1e-2",
        ),
        model=make(),
    )
    average, losses = fp8cfg.averaged(job, decay=0.0), []
    for _ in range(6):
        with job.autocast():
            one = loss(job.model)
            job.backward(one)
        job.optimizer.step()
        job.optimizer.zero_grad()
        losses.append(one.item())
    assert losses[-1] < losses[0] - 0.1
    average.update()
    plain, weights = make(), job.model.state_dict()
    plain.load_state_dict(weights, strict=True)
    average.model.load_state_dict(make().state_dict(), strict=True)
    again = fp8cfg.build(job.recipe, model=make())
    again.model.load_state_dict(weights, strict=True)
    again.load_state_dict(job.state_dict())
    codes = stored_state_dict(job.model)
    assert all(
        torch.equal(t.float(), codes[k].float()) for k, t in stored_state_dict(again.model).items()
    )
    back = fp8cfg.convert_back(job.model)
    assert {n: p.shape for n, p in back.named_parameters()} == {
        n: p.shape for n, p in make().named_parameters()
    }


def test_excluded_convolutions_stay_and_are_listed() -> None:
    model = Net()
    fp8 = fp8cfg.convert_model(model, recipe("fp8.exclude=['point']"))
    assert type(model.point) is nn.Conv2d and type(model.strided) is not nn.Conv2d
    with fp8.autocast():
        loss(model).backward()
    found = {p.name: p for p in fp8cfg.coverage(model).linears}
    assert (
        found["point"].reason == "fp8.exclude point"
        and found["point"].rows == 512
        and not found["point"].fp8
    )
    assert "point" not in {p.name for p in fp8cfg.coverage(model).other_weights}
    assert fp8cfg.build(small(), model=Net()).model.point.weight.dim() == 4  # nothing runs in FP8


class Attention(nn.Module):
    """Self-attention over rows of pixels."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.attention, self.head = (
            nn.Linear(24, 32),
            nn.MultiheadAttention(32, 4, batch_first=True),
            nn.Linear(32, 10),
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x.transpose(1, 2).flatten(2))
        return self.head((y + self.attention(y, y, y, need_weights=False)[0]).mean(1))


@pytest.mark.parametrize("backend", BACKENDS)
def test_multihead_attention_is_converted(backend: str) -> None:
    model = Attention()
    names, text = dict(model.named_parameters()), str(model)
    fp8 = fp8cfg.convert_model(model, recipe(backend=backend))
    assert {p.name for p in fp8.plan if p.fp8} == {
        "attention.in_proj",
        "attention.out_proj",
    } and dict(model.named_parameters()) == names
    with fp8.autocast():
        loss(model).backward()
    fp8.prove()
    found = fp8cfg.coverage(model)
    assert {p.name: p.rows for p in found.linears if p.fp8} == {
        "attention.in_proj": 64,
        "attention.out_proj": 64,
    } and not found.other_weights
    plain = Attention()
    loss(plain).backward()
    want = plain.attention.in_proj_weight.grad
    assert model.attention.in_proj_weight.grad.flatten() == pytest.approx(
        want.flatten(), abs=0.2 * float(want.abs().max())
    )
    assert list(model.state_dict()) == list(plain.state_dict())
    weights = {name: t * 2 for name, t in plain.state_dict().items()}
    model.load_state_dict(weights, strict=True, assign=True)
    plain.load_state_dict(weights, strict=True)
    other = copy.deepcopy(model)
    with torch.no_grad():
        assert torch.allclose(model(IMAGES), plain(IMAGES), atol=1e-5) and torch.allclose(
            other(IMAGES), plain(IMAGES), atol=1e-5
        )
    back = fp8cfg.convert_back(model)
    assert (
        str(back) == text
        and "forward" not in vars(back.attention)
        and torch.equal(back(IMAGES), plain(IMAGES))
    )


@pytest.mark.parametrize(
    ("batch_first", "bias", "masked", "weights"),
    [
        *itertools.product(
            (True, False), (True, False), ("", "bool", "float", "heads"), (True, False)
        )
    ],
)
def test_the_forward_is_torchs(batch_first: bool, bias: bool, masked: str, weights: bool) -> None:
    """Outside of FP8: output, weights of heads and gradients of nn.MultiheadAttention, over its own input and others, masked or not."""
    torch.manual_seed(0)
    plain = nn.MultiheadAttention(32, 4, bias=bias, batch_first=batch_first)
    fp8 = fp8cfg.convert_model(copy.deepcopy(plain), recipe(ALL))
    made: Any = fp8.model
    x, other = torch.randn(3, 6, 32), torch.randn(3, 6, 32)
    causal = torch.ones(6, 6, dtype=torch.bool).triu(1)
    mask = {"": None, "bool": causal, "float": torch.randn(6, 6), "heads": torch.randn(12, 6, 6)}[
        masked
    ]
    padding = (
        None if masked == "heads" else torch.arange(6).expand(3, 6) > torch.tensor([[5], [3], [4]])
    )
    if masked == "float" and padding is not None:
        padding = torch.zeros(3, 6).masked_fill(padding, -1e4)
    lanes = [t if batch_first else t.transpose(0, 1) for t in (x, other, other * 2)]
    for q, k, v in ((lanes[0],) * 3, (lanes[0], lanes[1], lanes[1]), lanes):
        ran = []
        for attention in (plain, made):
            with fp8.autocast(enabled=False):
                y, heads = attention(
                    q,
                    k,
                    v,
                    key_padding_mask=padding,
                    need_weights=weights,
                    attn_mask=mask,
                    average_attn_weights=masked == "bool",
                )
                ran.append(
                    (
                        y,
                        heads,
                        *torch.autograd.grad(
                            y.square().sum(), [attention.in_proj_weight, attention.out_proj.weight]
                        ),
                    )
                )
        for got, want in zip(*ran, strict=True):
            assert got is want is None or torch.allclose(got, want, atol=2e-4, rtol=1e-4)
    y = [
        attention(x[0], x[0], x[0], attn_mask=causal, is_causal=True, need_weights=False)[0]
        for attention in (plain, made)
    ]
    assert torch.allclose(*y, atol=1e-5) and y[0].shape == y[1].shape
    with pytest.raises(RuntimeError, match="attn_mask"):
        made(x, x, x, is_causal=True)


def test_attention_over_other_inputs_is_in_high_precision_and_says_so() -> None:
    """nn.Transformer, whose decoder attends to the memory; and where a projection cannot be a layer."""
    torch.manual_seed(0)
    model = nn.Transformer(32, 2, 1, 1, 64, dropout=0.0, batch_first=True)
    fp8 = fp8cfg.convert_model(model, recipe(ALL))
    with fp8.autocast():
        model(torch.randn(2, 16, 32), torch.randn(2, 16, 32)).square().sum().backward()
    fp8.prove()
    found = {p.name: p for p in fp8cfg.coverage(model).linears}
    cross = found.pop("decoder.layers.0.multihead_attn.in_proj")
    assert (
        cross.reason.startswith("query, key and value differ")
        and not cross.fp8
        and cross.rows == 32
        and len(found) == 9
        and all(p.fp8 for p in found.values())
    )
    odd = nn.ModuleDict(
        {
            "linear": nn.Linear(32, 32),
            "wide": nn.MultiheadAttention(32, 2, kdim=16),
            "zero": nn.MultiheadAttention(32, 2, add_zero_attn=True),
        }
    )
    assert {p.name: p.fp8 for p in fp8cfg.convert_model(odd, recipe(ALL)).plan} == {
        "linear": True,
        "wide.out_proj": False,
        "zero.out_proj": False,
    }


def test_an_encoder_evaluates_with_a_padding_mask() -> None:
    """Without torch's fast path, which would multiply the weights past their layers, and its nested tensors."""
    torch.manual_seed(0)
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True), 2
    )
    plain, x = copy.deepcopy(model), torch.randn(2, 16, 32)
    padding = torch.arange(16) > torch.tensor([[15], [9]])
    fp8 = fp8cfg.convert_model(model, recipe(ALL))
    for module in (model.eval(), plain.train()):
        module.requires_grad_(module is plain)
    with torch.no_grad():
        want = plain(x, src_key_padding_mask=padding)
        assert torch.allclose(model(x, src_key_padding_mask=padding), want, atol=1e-5)
        with fp8.autocast():
            assert not torch.allclose(model(x, src_key_padding_mask=padding), want, atol=1e-4)
    assert not model.use_nested_tensor and fp8cfg.convert_back(model).use_nested_tensor
