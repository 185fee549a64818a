"""FP8 for models that are not ours. The defects of Accelerate's converter, which facts about it list, are cases here."""

from __future__ import annotations

import copy
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8cfg
from fp8cfg.numerics import FP8Linear, fp8_linears
from tests.support.convert_models import (
    BACKENDS,
    FP8,
    REASONS,
    TOKENS,
    Block,
    Doubled,
    Model,
    loss_of,
    recipe,
)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_layer_that_can_is_converted_and_every_other_has_its_reason(backend: str) -> None:
    model = Model()
    plan = {p.name: p for p in fp8cfg.convert_model(model, recipe(backend=backend)).plan}
    assert {name: p.reason for name, p in plan.items() if not p.fp8} == REASONS
    assert sum(p.fp8 for p in plan.values()) == 8 and fp8cfg.has_fp8_layers(model)
    assert type(model.own) is Doubled and type(model.gate) is nn.Linear


def test_a_layer_that_was_compiled_by_itself_stays_and_a_compiled_model_does_not() -> None:
    model = Model()
    model.h[0].up.compile(), model.h[1].compile()
    plan = {p.name: p for p in fp8cfg.convert_model(model, recipe()).plan}
    assert (
        plan["h.0.up"].reason == "it is compiled already; compile it after the conversion"
        and plan["h.1.up"].fp8
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_parameters_flags_and_hooks_stay(backend: str) -> None:
    model = Model()
    up, calls = model.h[0].up, []
    up.register_forward_pre_hook(lambda m, args: calls.append(type(m)))
    up.register_full_backward_hook(lambda m, gin, gout: calls.append(type(m)))
    handle = up.register_forward_hook(lambda m, args, out: calls.append(type(m)))
    up.register_load_state_dict_pre_hook(lambda m, *rest: calls.append(type(m)))
    up.note = "mine"
    model.to(torch.bfloat16)
    parameters = dict(model.named_parameters())
    training = {name: m.training for name, m in model.named_modules()}
    fp8 = fp8cfg.convert_model(model, recipe(backend=backend))
    new = model.h[0].up
    assert new is not up and new.note == "mine"
    assert all(p is parameters[name] for name, p in model.named_parameters()) and len(
        parameters
    ) == len(dict(model.named_parameters()))
    assert model.lm_head.weight is model.embedding.weight and not model.h[1].up.weight.requires_grad
    assert {name: m.training for name, m in model.named_modules()} == training and {
        p.dtype for p in model.parameters()
    } == {torch.bfloat16}
    with fp8.autocast():
        loss_of(model).backward()
    assert calls == [type(new)] * 3
    assert model.h[1].up.weight.grad is None and model.h[0].up.weight.grad is not None
    handle.remove()
    model.load_state_dict(model.state_dict())
    assert calls == [type(new)] * 4
    fp8cfg.convert_back(model)
    loss_of(model)
    assert calls[4:] == [nn.Linear] and model.h[0].up.note == "mine"


@pytest.mark.parametrize("backend", BACKENDS)
def test_back_again_it_is_the_model_that_it_was(backend: str) -> None:
    model = Model()
    before, want = copy.deepcopy(model), loss_of(model)
    fp8cfg.convert_model(model, recipe(backend=backend))
    assert torch.equal(loss_of(model), want), "outside of the context nothing is in FP8"
    assert fp8cfg.convert_back(model) is model and not fp8cfg.has_fp8_layers(model)
    assert str(model) == str(before) and model.state_dict().keys() == before.state_dict().keys()
    assert torch.equal(loss_of(model), want) and model.lm_head.weight is model.embedding.weight
    assert (
        vars(model.h[0].up).keys() == vars(before.h[0].up).keys()
        and vars(model.gate).keys() == vars(before.gate).keys()
    )
    fp8cfg.convert_model(model, recipe(backend=backend))


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_root_itself(backend: str) -> None:
    root = nn.Linear(64, 64)
    fp8 = fp8cfg.convert_model(root, recipe(backend=backend))
    assert (
        fp8.model is not root
        and fp8.model.weight is root.weight
        and [p.name for p in fp8.plan] == ["model"]
    )
    with fp8.autocast():
        fp8.model(torch.randn(16, 64)).sum().backward()
    assert fp8.prove() == fp8cfg.coverage(fp8.model)
    back = fp8cfg.convert_back(fp8.model)
    assert type(back) is nn.Linear and back.weight is root.weight


def test_a_module_under_two_names_is_one_module() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
    model.append(model[0])
    fp8cfg.convert_model(model, recipe())
    assert isinstance(model[0], FP8Linear) and model[2] is model[0]


@pytest.mark.parametrize("name", ["layers", "h", "blocks", "block"])
@pytest.mark.parametrize(
    ("words", "kept"),
    [
        (("fp8.high_precision_at_start=1", "fp8.high_precision_at_end=2"), {0, 2, 3}),
        (("fp8.exclude=['*.2.*']",), {2}),
        (("fp8.include=['*.0.*','*.1.up']",), {2, 3}),
    ],
)
def test_layers_by_number_and_by_name_whatever_their_list_is_called(
    name: str, words: tuple[str, ...], kept: set[int]
) -> None:
    model = Model(name)
    fp8cfg.convert_model(model, recipe(*words))
    assert {i for i, block in enumerate(model.stack()) if not any(fp8_linears(block))} == kept


def test_a_recipe_for_few_layers_fits_a_model_of_many() -> None:
    model = nn.ModuleDict({"layers": nn.ModuleList(Block() for _ in range(8))})
    plan = fp8cfg.convert_model(
        model,
        recipe(
            "fp8.high_precision_at_start=1", "fp8.high_precision_at_end=1", "model.num_layers=3"
        ),
    ).plan
    assert sum(p.fp8 for p in plan) == 12
    deep = recipe(
        "fp8.high_precision_at_start=3", "fp8.high_precision_at_end=2", "model.num_layers=8"
    )
    with pytest.raises(fp8cfg.ConfigError, match=r"leave no layer of model\.num_layers=4 in FP8"):
        fp8cfg.convert_model(Model(), deep)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("fp8.exclude=['*.upp']",), "fp8.exclude=*.upp: matches no linear layer"),
        (("fp8.include=['gate']",), "fp8.enabled=true: none of 12 linear layers would run in FP8"),
        (
            ("fp8.dot_product_attention=true",),
            "fp8.dot_product_attention=true: has no effect on a custom model",
        ),
        (
            ("fp8.params=true",),
            "fp8.params=true: weights stored only in FP8 need an optimizer with master weights",
        ),
        (
            ("opt_level=O2", "storage.exp_avg=bf16"),
            "opt_level=O2: has no effect in convert_model, which keeps parameters and optimizer as they are; use "
            "fp8cfg.build(recipe, model=model)\nstorage.exp_avg=bf16: has no effect in convert_model, which",
        ),
        (("storage.weight=fp8",), "storage.weight=fp8: has no effect in convert_model"),
    ],
)
def test_what_is_refused_before_anything_is_replaced(words: tuple[str, ...], line: str) -> None:
    model = Model()
    before = str(model)
    with pytest.raises(fp8cfg.ConfigError) as e:
        fp8cfg.convert_model(model, recipe(*words))
    assert str(e.value).startswith(line) and str(model) == before


@pytest.mark.parametrize(
    ("model", "words", "line"),
    [
        (
            nn.Sequential(nn.Linear(64, 64)),
            ("fp8.high_precision_at_start=1",),
            "fp8.high_precision_at_start=1: has no effect, the model has no list of like layers; set fp8.high_precision_at_start=0",
        ),
        (nn.Sequential(nn.ReLU()), (), "fp8.enabled=true: none of 0 linear layers"),
        ("model", (), "expected a torch.nn.Module, got str"),
        (
            nn.Sequential(nn.Linear(64, 10)),
            (),
            "fp8.enabled=true: none of 1 linear layers would run in FP8 (out_features=10",
        ),
    ],
)
def test_models_that_cannot_be(model: Any, words: tuple[str, ...], line: str) -> None:
    with pytest.raises(fp8cfg.ConfigError) as e:
        fp8cfg.convert_model(model, recipe(*words))
    assert str(e.value).startswith(line)


def test_other_mistakes() -> None:
    with pytest.raises(fp8cfg.ConfigError, match="expected a Recipe, got dict"):
        fp8cfg.convert_model(Model(), {"fp8": True})  # type: ignore[arg-type]
    with pytest.raises(fp8cfg.ConfigError) as e:
        fp8cfg.apply_fp8_autowrap("model", None)  # type: ignore[arg-type]
    assert e.value.problems == [
        "expected a Recipe, got NoneType; compose(['precision=bf16_fp8']) gives one",
        "expected a torch.nn.Module, got str",
    ]
    with pytest.raises(
        fp8cfg.ConfigError, match=r"precision\.compute=bf16 runs no FP8; set precision=bf16_fp8"
    ):
        fp8cfg.convert_model(Model(), fp8cfg.compose(["precision=bf16"]))
    model = Model()
    fp8cfg.convert_model(model, recipe())
    for again in (fp8cfg.convert_model, lambda m, r: fp8cfg.build(r, model=m)):
        with pytest.raises(fp8cfg.ConfigError, match="the model has FP8 layers already"):
            again(model, recipe())


@pytest.mark.parametrize(
    "layer",
    [
        nn.utils.parametrizations.weight_norm(nn.Linear(64, 64)),
        nn.LazyLinear(64),
        nn.Linear(64, 64).to(torch.float8_e4m3fn),
        nn.Linear(64, 64),
    ],
)
def test_layers_that_are_linear_in_name(layer: nn.Linear) -> None:
    if type(layer) is nn.Linear and layer.weight.dtype == torch.float32:
        layer.register_buffer("mask", torch.ones(64))
    model = nn.Sequential(layer, nn.Linear(64, 64))
    plan = fp8cfg.convert_model(model, recipe()).plan
    assert model[0] is layer and [p.fp8 for p in plan] == [False, True] and plan[0].reason


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_table_says_what_ran_and_why_not(backend: str) -> None:
    model = Model()
    fp8 = fp8cfg.convert_model(model, recipe(backend=backend))
    assert fp8cfg.coverage(model).share == 0.0
    with fp8.autocast():
        loss_of(model).backward()
    found = fp8cfg.coverage(model)
    assert {p.name: p.reason for p in found.linears if not p.fp8} == REASONS
    assert {
        kind for name, p in found.products.items() if name.startswith("h.0.") for kind in p.values()
    } <= FP8
    assert "h.*.up " in str(found) and "FLOPs of all weights" in str(found) and "own" in str(fp8)
    assert max(map(len, str(found).splitlines())) <= 80
    strange = fp8cfg.coverage(nn.Sequential(nn.Linear(64, 64), Doubled(64, 64)))
    assert [p.reason for p in strange.linears] == ["not converted", "Doubled is not watched"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_loop_that_never_enters_the_context_is_found_out(backend: str) -> None:
    model = Model()
    fp8 = fp8cfg.convert_model(model, recipe(backend=backend))
    with pytest.raises(fp8cfg.NotFP8Error, match="no layer ran in FP8 before this backward pass"):
        loss_of(model).backward()
    with pytest.raises(fp8cfg.NotFP8Error, match="no layer ran in FP8") as e:
        fp8.prove()
    assert e.value.exit_code == 3
    with fp8.autocast():
        loss_of(model).backward()
    fp8.prove()
    fp8.fp8.min_coverage = 0.99
    with pytest.raises(
        fp8cfg.NotFP8Error,
        match=r"fp8\.min_coverage=0\.99: \d\d\.\d% of the FLOPs of all weights ran in FP8",
    ):
        fp8.prove()


class Kept(nn.Module):
    """Layers that torch knows, and that are called by other ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.a, self.b, self.way = nn.Linear(64, 64), nn.Linear(64, 64), way
        self.kept = {"list": [self.a], "method": self.a.forward}

    def forward(self, x: Tensor) -> Tensor:
        by = {
            "list": lambda: self.kept["list"][0](x),
            "weight": lambda: nn.functional.linear(x, self.a.weight, self.a.bias),
            "name": lambda: self.get_submodule("a")(x),
        }
        return self.b(by[self.way]())


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_layer_that_is_kept_in_a_list_is_found_out(backend: str) -> None:
    model = Kept("list")
    fp8 = fp8cfg.convert_model(model, recipe("fp8.output_layer=true", backend=backend))
    with (
        fp8.autocast(),
        pytest.raises(
            fp8cfg.NotFP8Error,
            match="a: the model calls the layer that an FP8 layer has replaced",
        ),
    ):
        model(torch.randn(16, 64))
    fp8cfg.convert_back(model)
    model.way = "name"
    model(torch.randn(16, 64))


def test_a_weight_that_is_read_beside_its_layer_is_in_the_table_as_what_it_is() -> None:
    model = Kept("weight")
    fp8 = fp8cfg.convert_model(model, recipe("fp8.output_layer=true", "fp8.min_coverage=0.6"))
    with fp8.autocast():
        model(torch.randn(16, 64)).sum().backward()
    assert "a              50.0%  high precision: did not multiply" in str(fp8cfg.coverage(model))
    with pytest.raises(
        fp8cfg.NotFP8Error,
        match=r"fp8\.min_coverage=0\.6: 50\.0% of the linear layers' FLOPs ran in FP8",
    ):
        fp8.prove()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_transformers_model(backend: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    model = transformers.LlamaForCausalLM(config)
    plain = copy.deepcopy(model)
    fp8 = fp8cfg.convert_model(model, recipe("fp8.high_precision_at_start=1", backend=backend))
    assert sum(p.fp8 for p in fp8.plan) == 14 and {p.reason for p in fp8.plan if not p.fp8} == {
        "fp8.high_precision_at_start=1",
        "fp8.output_layer=false",
    }
    assert model.lm_head.weight is model.model.embed_tokens.weight
    with fp8.autocast():
        model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    fp8.prove()
    fp8cfg.convert_back(model)
    assert torch.equal(model(TOKENS).logits, plain(TOKENS).logits)


def test_libraries_layers_are_known_without_loading_them() -> None:
    foreign = type(
        "Linear", (nn.Module,), {"__module__": "transformer_engine.pytorch.module.linear"}
    )
    assert fp8cfg.has_transformer_engine_layers(nn.Sequential(foreign())) and fp8cfg.has_fp8_layers(
        nn.Sequential(foreign())
    )
    assert not fp8cfg.has_transformer_engine_layers(Model()) and not fp8cfg.has_fp8_layers(Model())
    script = "import sys, torch, fp8cfg; assert not fp8cfg.has_fp8_layers(torch.nn.Linear(2, 2)); assert not {'torchao', 'transformer_engine'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_inputs_that_are_no_floats_are_an_error_as_in_nn_linear(
    dtype: torch.dtype, enabled: bool
) -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    x = torch.ones(32, 64).to(dtype)
    with pytest.raises(RuntimeError):
        model(x)
    fp8 = fp8cfg.convert_model(model, recipe("fp8.output_layer=true"))
    with fp8.autocast(enabled), pytest.raises(RuntimeError, match="expected a float dtype"):
        model(x)
