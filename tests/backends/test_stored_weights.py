"""Weights held in the codec of storage.weight, whoever multiplies them."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import fp8cfg
from fp8cfg.backends import stored_weights
from fp8cfg.numerics.codecs import CODECS, get_codec
from fp8cfg.numerics.weight_storage import CodecLayer, scaled_codec_layers, store_in_codec
from tests.support.small import small, steps

TORCHAO = (
    "precision=bf16_fp8_current",
    "backend=torchao",
    "fp8={params: false, high_precision_at_start: 0, high_precision_at_end: 0}",
)
UNBLOCKED = [name for name, codec in CODECS.items() if not codec.block]


@pytest.mark.parametrize("name", UNBLOCKED)
def test_a_layer_of_another_library_reads_decoded_values(name: str) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(8, 4)
    plain = copy.deepcopy(linear)
    store_in_codec(linear, get_codec(name), torch.float32)
    linear.set_weight_grad_dtype(torch.float32)
    want = get_codec(name).decode(get_codec(name).encode(plain.weight.detach()))
    assert (
        isinstance(linear, CodecLayer)
        and type(linear).__name__ == "Linear"
        and torch.equal(linear.weight, want)
    )
    assert [n for n, _ in linear.named_parameters()] == ["weight", "bias"] and linear._parameters[
        "weight"
    ].dtype == CODECS[name].format.dtype
    x = torch.randn(3, 8)
    with torch.no_grad():
        plain.weight.copy_(want)
    for layer in (linear, plain):
        layer(x).square().sum().backward()
    stored = dict(linear.named_parameters())["weight"]
    assert stored.grad is not None and torch.equal(stored.grad, plain.weight.grad)


def test_its_state_reads_back_and_plain_weights_are_encoded() -> None:
    held, other = nn.Linear(8, 4, bias=False), nn.Linear(8, 4, bias=False)
    plain = copy.deepcopy(other)
    for layer in (held, other):
        store_in_codec(layer, get_codec("fp16_scaled"), torch.float32)
    held.load_state_dict(other.state_dict())
    assert torch.equal(held.weight, other.weight)
    with torch.no_grad():
        other.set_weight(torch.full((4, 8), 3.0))
    other.load_state_dict(plain.state_dict())
    assert torch.equal(held.weight, other.weight)


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a_model_that_is_moved_trains_on(level: str) -> None:
    """To a device of another name: its parameters keep their identity and get other tensors, as under Accelerate's prepare."""
    found = []
    for device in ("cpu", "cpu:0"):
        job = fp8cfg.build(small("precision=bf16_fp8", f"opt_level={level}"))
        job.model.to(device)
        found.append([step.loss for step in steps(job, 3)])
    assert found[0] == found[1]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_torchao_multiplies_weights_that_are_held_in_fp16(level: str) -> None:
    pytest.importorskip("torchao")
    job = fp8cfg.build(small(*TORCHAO, f"opt_level={level}"))
    layer = job.model.get_submodule("layers.0.mlp.linear_fc1")
    stored = dict(job.model.named_parameters())["layers.0.mlp.linear_fc1.weight"]
    assert (
        "orchao" in type(layer).__name__
        and stored.dtype == torch.float16
        and layer.weight.dtype == torch.bfloat16
    )
    found = [s.loss for s in steps(job, 4)]
    native = [
        s.loss
        for s in steps(fp8cfg.build(small(*TORCHAO, f"opt_level={level}", "backend=native")), 4)
    ]
    assert found[-1] < found[0] - 0.1 and found == pytest.approx(native, abs=0.01)
    high = sum(p.numel() for n, p in job.model.named_parameters() if p.dtype == torch.float16)
    assert high == sum(m.weight.numel() for m in job.model.modules() if isinstance(m, nn.Linear))


def held_linear() -> nn.Linear:
    torch.manual_seed(0)
    linear = nn.Linear(8, 4, bias=False)
    store_in_codec(linear, get_codec("fp16_scaled"), torch.float32)
    return linear


COPIES = {
    "copied": copy.deepcopy,
    "pickled": lambda layer: pickle.loads(pickle.dumps(layer)),
    "cast": lambda layer: layer.bfloat16(),
}


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_and_a_cast_keep_the_bits_and_the_dtype_of_the_gradient(how: str) -> None:
    linear = held_linear()
    want, stored = linear.weight.detach(), linear.codec_tensors
    other = COPIES[how](linear)
    assert (
        type(other) is type(linear)
        and isinstance(other, CodecLayer)
        and torch.equal(other.weight, want)
    )
    assert [t.dtype for t in other.codec_tensors] == [t.dtype for t in stored] and (
        other.parameter is linear.parameter
    ) == (how == "cast")
    other(torch.full((1, 8), 1e-9)).sum().backward()
    assert other.parameter.grad.dtype == torch.float32 and (other.parameter.grad == 1e-9).all(), (
        "float16 has no 1e-9"
    )


def test_compiled_code_does_not_round_the_gradient_to_the_dtype_of_the_weight() -> None:
    linear = held_linear()
    compiled = torch.compile(linear, backend="aot_eager", fullgraph=True)
    for count in (1, 2):
        compiled(torch.full((1, 8), 1e-9)).sum().backward()
        assert torch.equal(linear.parameter.grad, torch.full((4, 8), count * 1e-9))


def test_a_weight_that_needs_no_codec_stays_tied_and_what_was_held_comes_back() -> None:
    embedding, linear = nn.Embedding(4, 8), nn.Linear(8, 4, bias=False)
    linear.weight = embedding.weight
    store_in_codec(linear, get_codec("fp32"), torch.bfloat16)
    assert linear.parameter is embedding.weight and linear.weight.dtype == torch.bfloat16
    model = nn.Sequential(embedding, linear, held_linear())
    names, want = list(nn.Linear(8, 4).__dict__), model[2].weight.detach()
    stored_weights.cast_embeddings(model, torch.bfloat16)
    stored_weights.restore_weights(model, torch.float32)
    assert [type(m) for m in model] == [nn.Embedding, nn.Linear, nn.Linear] and list(
        model.state_dict()
    ) == ["0.weight", "1.weight", "2.weight"]
    assert (
        linear.weight is embedding.weight
        and torch.equal(model[2].weight, want)
        and list(vars(model[2])) == names
    )
    assert embedding(torch.zeros(1, dtype=torch.int64)).dtype == torch.float32


@pytest.mark.parametrize("backend", ["native", "torchao"])
def test_tied_weights_stay_tied_under_a_level(backend: str) -> None:
    if backend == "torchao":
        pytest.importorskip("torchao")
    words = (*TORCHAO, f"backend={backend}", "opt_level=O2")
    job = fp8cfg.build(
        small(*words, "model.share_embeddings_and_output_weights=true", "fp8.output_layer=true")
    )
    assert job.model.output_layer._parameters["weight"] is job.model.embedding.weight
    found = [s.loss for s in steps(job, 4)]
    assert found[-1] < found[0] - 0.05

    torch.manual_seed(0)
    model = nn.ModuleDict(
        {
            "layers": nn.ModuleList(
                [nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))]
            )
        }
    )
    first, second, third = model["layers"][0]
    second.weight = first.weight
    built = fp8cfg.build(fp8cfg.compose(["recipe=llama_tiny", *words]), model=model)
    first, second, third = model["layers"][0]
    tied = first._parameters["weight"]
    assert (
        second._parameters["weight"] is tied and third._parameters["weight"].dtype == torch.float16
    )
    before = tied.detach().clone()
    with built.autocast():
        built.backward(model["layers"][0](torch.randn(32, 64).bfloat16()).float().square().mean())
    built.optimizer.step()
    assert not torch.equal(tied, before) and second._parameters["weight"] is tied


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("backend", ["native", "torchao"])
def test_a_model_under_a_level_comes_back_decoded(backend: str, tied: bool) -> None:
    if backend == "torchao":
        pytest.importorskip("torchao")
    words = (
        *TORCHAO,
        f"backend={backend}",
        "opt_level=O2",
        f"model.share_embeddings_and_output_weights={tied}",
        f"fp8.output_layer={tied}",
    )
    job = fp8cfg.build(small(*words))
    list(steps(job, 1))
    want = {
        p: layer.codec.decode(layer.codec_tensors)
        for p, layer in scaled_codec_layers(job.model).items()
    }
    held = {name: want[p] for name, p in job.model.named_parameters() if p in want}
    model = fp8cfg.convert_back(job.model)
    back = dict(model.named_parameters())
    assert len(held) == 9 - tied and all(
        torch.equal(back[name], weight) for name, weight in held.items()
    )
    assert {type(m) for n, m in model.named_modules() if "linear" in n or n == "output_layer"} == {
        nn.Linear
    } and {p.dtype for p in back.values()} == {torch.float32}
    assert (model.output_layer.weight is model.embedding.weight) == tied
    tokens = torch.arange(64).reshape(2, 32)
    model(tokens, tokens).backward()


@pytest.mark.parametrize("backend", ["native", "torchao"])
def test_a_model_under_a_level_is_pickled(backend: str) -> None:
    if backend == "torchao":
        pytest.importorskip("torchao")
    model = fp8cfg.build(small(*TORCHAO, f"backend={backend}", "opt_level=O2")).model
    tokens = torch.arange(64).reshape(2, 32)
    assert torch.equal(pickle.loads(pickle.dumps(model))(tokens, tokens), model(tokens, tokens))


def test_torchao_refuses_weights_in_fp8_by_name() -> None:
    with pytest.raises(
        fp8cfg.ConfigError,
        match="opt_level=O3: torchao does not multiply weights that are stored in FP8",
    ):
        words = [word.replace("params: false, ", "") for word in TORCHAO]
        fp8cfg.build(small(*words, "opt_level=O3"))
