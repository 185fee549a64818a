"""FP8 for models that are not ours. The defects of Accelerate's converter, which facts about it list, are cases here."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
import subprocess
import sys
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8cfg
from fp8cfg.backends import backend_registry
from fp8cfg.config.recipe import Recipe
from fp8cfg.numerics import FP8Linear, fp8_linears

BACKENDS = ["native", pytest.param("torchao", marks=pytest.mark.skipif(bool(backend_registry.rules("torchao").unavailable()), reason="torchao is not installed"))]
WORDS = ("precision=bf16_fp8_current", "fp8.params=false", "fp8.high_precision_at_start=0", "fp8.high_precision_at_end=0",
         "trainer.accelerator=cpu")
DELAYED = ("precision=bf16_fp8", "fp8.params=false", "fp8.amax_history_len=4")
FP8 = {"e4m3xe4m3", "e5m2xe4m3"}


def recipe(*words: str, backend: str = "native") -> Recipe:
    return fp8cfg.compose([*WORDS, f"backend={backend}", *words])


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    """A tied, partly frozen model whose first linear layer is an odd one."""

    def __init__(self, name: str = "h") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.name = nn.Linear(64, 10), name
        self.embedding = nn.Embedding(48, 64)
        self.add_module(name, nn.ModuleList(Block() for _ in range(4)))
        self.own, self.norm = Doubled(64, 64), nn.LayerNorm(64)
        self.attention = nn.MultiheadAttention(64, 4, batch_first=True, add_zero_attn=True)
        self.lm_head = nn.Linear(64, 48, bias=False)
        self.lm_head.weight = self.embedding.weight
        self.stack()[1].requires_grad_(False)
        self.stack()[2].eval()

    def stack(self) -> Any:
        return getattr(self, self.name)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.embedding(tokens)
        for block in self.stack():
            x = block(x)
        x = self.own(self.norm(x + self.attention(x, x, x)[0]))
        x = x + self.gate(x).mean()
        logits = self.lm_head(x)
        return logits if targets is None else nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


TOKENS = torch.arange(64).reshape(2, 32) % 48


def loss_of(model: nn.Module) -> Tensor:
    return model(TOKENS, TOKENS)


REASONS = {
    "gate": "out_features=10 is not a multiple of 16", "own": "Doubled has a forward of its own", "lm_head": "fp8.output_layer=false",
    "attention.out_proj": "nn.MultiheadAttention multiplies its weight itself",
}


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
    assert plan["h.0.up"].reason == "it is compiled by itself; compile it after" and plan["h.1.up"].fp8


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
    assert all(p is parameters[name] for name, p in model.named_parameters()) and len(parameters) == len(dict(model.named_parameters()))
    assert model.lm_head.weight is model.embedding.weight and not model.h[1].up.weight.requires_grad
    assert {name: m.training for name, m in model.named_modules()} == training and {p.dtype for p in model.parameters()} == {torch.bfloat16}
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
    assert vars(model.h[0].up).keys() == vars(before.h[0].up).keys() and vars(model.gate).keys() == vars(before.gate).keys()
    fp8cfg.convert_model(model, recipe(backend=backend))


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_root_itself(backend: str) -> None:
    root = nn.Linear(64, 64)
    fp8 = fp8cfg.convert_model(root, recipe(backend=backend))
    assert fp8.model is not root and fp8.model.weight is root.weight and [p.name for p in fp8.plan] == ["model"]
    with fp8.autocast():
        fp8.model(torch.randn(16, 64)).sum().backward()
    fp8.prove()
    back = fp8cfg.convert_back(fp8.model)
    assert type(back) is nn.Linear and back.weight is root.weight


def test_a_module_under_two_names_is_one_module() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
    model.append(model[0])
    fp8cfg.convert_model(model, recipe())
    assert isinstance(model[0], FP8Linear) and model[2] is model[0]


@pytest.mark.parametrize("name", ["layers", "h", "blocks", "block"])
@pytest.mark.parametrize(("words", "kept"), [
    (("fp8.high_precision_at_start=1", "fp8.high_precision_at_end=2"), {0, 2, 3}), (("fp8.exclude=['*.2.*']",), {2}), (("fp8.include=['*.0.*','*.1.up']",), {2, 3}),
])
def test_layers_by_number_and_by_name_whatever_their_list_is_called(name: str, words: tuple[str, ...], kept: set[int]) -> None:
    model = Model(name)
    fp8cfg.convert_model(model, recipe(*words))
    assert {i for i, block in enumerate(model.stack()) if not any(fp8_linears(block))} == kept


def test_a_recipe_for_few_layers_fits_a_model_of_many() -> None:
    model = nn.ModuleDict({"layers": nn.ModuleList(Block() for _ in range(8))})
    plan = fp8cfg.convert_model(model, recipe("fp8.high_precision_at_start=1", "fp8.high_precision_at_end=1", "model.num_layers=3")).plan
    assert sum(p.fp8 for p in plan) == 12
    deep = recipe("fp8.high_precision_at_start=3", "fp8.high_precision_at_end=2", "model.num_layers=8")
    with pytest.raises(fp8cfg.ConfigError, match=r"leave no layer of model\.num_layers=4 in FP8"):
        fp8cfg.convert_model(Model(), deep)


@pytest.mark.parametrize(("words", "line"), [
    (("fp8.exclude=['*.upp']",), "fp8.exclude=*.upp: matches no linear layer"),
    (("fp8.include=['gate']",), "fp8.enabled=True: none of 12 linear layers would run in FP8"),
    (("fp8.dot_product_attention=true",), "fp8.dot_product_attention=True: has no effect on a model of your own"),
    (("fp8.params=true",), "fp8.params=True: weights in FP8 alone need an optimizer with masters"),
    (("opt_level=O2", "storage.exp_avg=bf16"), "opt_level=O2: has no effect in convert_model, which leaves parameters and optimizer as they are; write "
     "fp8cfg.build(recipe, model=model)\nstorage.exp_avg=bf16: has no effect in convert_model, which"),
    (("storage.weight=fp8",), "storage.weight=fp8: has no effect in convert_model"),
])
def test_what_is_refused_before_anything_is_replaced(words: tuple[str, ...], line: str) -> None:
    model = Model()
    before = str(model)
    with pytest.raises(fp8cfg.ConfigError) as e:
        fp8cfg.convert_model(model, recipe(*words))
    assert str(e.value).startswith(line) and str(model) == before


@pytest.mark.parametrize(("model", "words", "line"), [
    (nn.Sequential(nn.Linear(64, 64)), ("fp8.high_precision_at_start=1",),
     "fp8.high_precision_at_start=1: has no effect, the model has no list of like layers; write fp8.high_precision_at_start=0"),
    (nn.Sequential(nn.ReLU()), (), "fp8.enabled=True: none of 0 linear layers"), ("model", (), "expected a torch.nn.Module, got str"),
    (nn.Sequential(nn.Linear(64, 10)), (), "fp8.enabled=True: none of 1 linear layers would run in FP8 (out_features=10"),
])
def test_models_that_cannot_be(model: Any, words: tuple[str, ...], line: str) -> None:
    with pytest.raises(fp8cfg.ConfigError) as e:
        fp8cfg.convert_model(model, recipe(*words))
    assert str(e.value).startswith(line)


def test_other_mistakes() -> None:
    with pytest.raises(fp8cfg.ConfigError, match="expected a Recipe, got dict"):
        fp8cfg.convert_model(Model(), {"fp8": True})  # type: ignore[arg-type]
    with pytest.raises(fp8cfg.ConfigError) as e:
        fp8cfg.apply_fp8_autowrap("model", None)  # type: ignore[arg-type]
    assert e.value.problems == ["expected a Recipe, got NoneType; compose(['precision=bf16_fp8']) gives one", "expected a torch.nn.Module, got str"]
    with pytest.raises(fp8cfg.ConfigError, match=r"precision\.compute=bf16 runs no FP8; write precision=bf16_fp8"):
        fp8cfg.convert_model(Model(), fp8cfg.compose(["precision=bf16"]))
    model = Model()
    fp8cfg.convert_model(model, recipe())
    for again in (fp8cfg.convert_model, lambda m, r: fp8cfg.build(r, model=m)):
        with pytest.raises(fp8cfg.ConfigError, match="the model has FP8 layers already"):
            again(model, recipe())


@pytest.mark.parametrize("layer", [
    nn.utils.parametrizations.weight_norm(nn.Linear(64, 64)), nn.LazyLinear(64), nn.Linear(64, 64).to(torch.float8_e4m3fn), nn.Linear(64, 64)])
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
    assert {kind for name, p in found.products.items() if name.startswith("h.0.") for kind in p.values()} <= FP8
    assert "h.*.up " in str(found) and "FLOPs of all weights" in str(found) and "own" in str(fp8)
    assert max(map(len, str(found).splitlines())) <= 80
    strange = fp8cfg.coverage(nn.Sequential(nn.Linear(64, 64), Doubled(64, 64)))
    assert [p.reason for p in strange.linears] == ["not converted", "Doubled is not watched"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_loop_that_never_enters_the_context_is_found_out(backend: str) -> None:
    model = Model()
    fp8 = fp8cfg.convert_model(model, recipe(backend=backend))
    with pytest.raises(fp8cfg.NotFP8Error, match="a backward pass, and no layer multiplied in FP8"):
        loss_of(model).backward()
    with pytest.raises(fp8cfg.NotFP8Error, match="no layer multiplied in FP8") as e:
        fp8.prove()
    assert e.value.exit_code == 3
    with fp8.autocast():
        loss_of(model).backward()
    fp8.prove()
    fp8.fp8.min_coverage = 0.99
    with pytest.raises(fp8cfg.NotFP8Error, match=r"fp8\.min_coverage=0\.99: \d\d\.\d% of the FLOPs of all weights ran in FP8"):
        fp8.prove()


@pytest.mark.parametrize("backend", BACKENDS)
def test_autowrap_runs_training_in_fp8_and_evaluation_not(backend: str) -> None:
    model, r = Model(), recipe(backend=backend)
    plain = copy.deepcopy(model)
    fp8cfg.convert_model(model, r)
    assert fp8cfg.apply_fp8_autowrap(model, r) is model
    assert not torch.equal(loss_of(model), loss_of(plain))
    model.eval(), plain.eval()
    assert torch.equal(loss_of(model), loss_of(plain))
    assert inspect.signature(model.forward) == inspect.signature(plain.forward)
    late = recipe("fp8.use_autocast_during_eval=true", backend=backend)
    model.forward = MethodType(fp8cfg.contextual_fp8_autocast(plain.forward, late), model)
    assert not torch.equal(loss_of(model), loss_of(plain))


def test_autowrap_of_a_forward_that_was_wrapped_keeps_its_arguments() -> None:
    """As Accelerate's hooks leave it; a Trainer picks the columns of its data by them."""
    model = Model()
    fp8cfg.convert_model(model, recipe())
    forward = model.forward
    model.forward = functools.update_wrapper(functools.partial(lambda module, *args: forward(*args), model), forward)
    fp8cfg.apply_fp8_autowrap(model, recipe())
    assert [*inspect.signature(model.forward).parameters] == ["tokens", "targets"] and loss_of(model).isfinite()


def test_autowrap_of_a_copy_and_back_again() -> None:
    model = Model()
    fp8cfg.convert_model(model, recipe())
    fp8cfg.apply_fp8_autowrap(model, recipe())
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.embedding.weight.mul_(2)
    assert not torch.equal(loss_of(other), loss_of(model)), "a copy runs itself"
    fp8cfg.convert_back(model)
    assert "forward" not in vars(model) and fp8cfg.has_fp8_layers(other)
    loss_of(model)


def test_autowrap_is_not_lost_by_pickling() -> None:
    model = Model()
    fp8cfg.convert_model(model, recipe())
    assert isinstance(pickle.loads(pickle.dumps(model)).h[0].up, FP8Linear)
    fp8cfg.apply_fp8_autowrap(model, recipe())
    with pytest.raises((AttributeError, pickle.PicklingError), match="contextual_fp8_autocast"):
        pickle.dumps(model)


def test_autowrap_needs_converted_layers_and_their_recipe() -> None:
    model = Model()
    with pytest.raises(fp8cfg.ConfigError, match=r"has no layers that fp8cfg\.convert_model"):
        fp8cfg.apply_fp8_autowrap(model, recipe())
    fp8cfg.convert_model(model, recipe())
    with pytest.raises(fp8cfg.ConfigError, match=r"fp8\.format=e4m3: the model's layers were converted with hybrid"):
        fp8cfg.apply_fp8_autowrap(model, recipe("fp8.format=e4m3"))
    fp8cfg.apply_fp8_autowrap(model, recipe())
    with pytest.raises(fp8cfg.ConfigError, match="enters FP8 by itself already"):
        fp8cfg.apply_fp8_autowrap(model, recipe())


class Kept(nn.Module):
    """Layers that torch knows, and that are called by other ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.a, self.b, self.way = nn.Linear(64, 64), nn.Linear(64, 64), way
        self.kept = {"list": [self.a], "method": self.a.forward}

    def forward(self, x: Tensor) -> Tensor:
        by = {"list": lambda: self.kept["list"][0](x), "weight": lambda: nn.functional.linear(x, self.a.weight, self.a.bias), "name": lambda: self.get_submodule("a")(x)}
        return self.b(by[self.way]())


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_layer_that_is_kept_in_a_list_is_found_out(backend: str) -> None:
    model = Kept("list")
    fp8 = fp8cfg.convert_model(model, recipe("fp8.output_layer=true", backend=backend))
    with fp8.autocast(), pytest.raises(fp8cfg.NotFP8Error, match="a: the model calls the layer that an FP8 one has taken the place of"):
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
    with pytest.raises(fp8cfg.NotFP8Error, match=r"fp8\.min_coverage=0\.6: 50\.0% of the linear layers' FLOPs ran in FP8"):
        fp8.prove()


def test_autowrap_finds_out_a_stand_in_that_never_enters(monkeypatch: pytest.MonkeyPatch) -> None:
    from contextlib import nullcontext

    from fp8cfg.backends.native import backend as native

    model = Model()
    fp8cfg.convert_model(model, recipe())
    fp8cfg.apply_fp8_autowrap(model, recipe())
    monkeypatch.setattr(native, "autocast", lambda model, enabled=True: nullcontext())
    with pytest.raises(fp8cfg.NotFP8Error, match="a backward pass, and no layer multiplied in FP8"):
        loss_of(model).backward()
    with pytest.raises(fp8cfg.NotFP8Error, match="no layer multiplied in FP8"):
        loss_of(model)


def test_delayed_scaling_rolls_in_a_loop_of_ones_own() -> None:
    """With `step` after the optimizer, and with autowrap alone, the scales are those that a job's optimizer leaves."""
    def scales(model: nn.Module) -> list[Tensor]:
        return [t for layer in fp8_linears(model) for t in (layer.fp8_scale, layer.fp8_amax_history)]

    r = fp8cfg.compose([*DELAYED, "backend=native"])
    stepped, wrapped = Model(), Model()
    fp8 = fp8cfg.convert_model(stepped, r)
    fp8cfg.convert_model(wrapped, r)
    fp8cfg.apply_fp8_autowrap(wrapped, r)
    unset = scales(stepped)[0].clone()
    for _ in range(3):
        with fp8.autocast():
            loss_of(stepped).backward()
        loss_of(wrapped).backward()
        fp8.step()
    assert not torch.equal(unset, scales(stepped)[0])
    wrapped(TOKENS)  # which rolls the third pass, and records its own
    for ours, theirs in zip(fp8_linears(stepped), fp8_linears(wrapped), strict=True):
        assert torch.equal(ours.fp8_scale, theirs.fp8_scale) and torch.equal(ours.fp8_amax_history[1:], theirs.fp8_amax_history[1:])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("compute", ["bf16", "fp32"])
def test_a_job_around_a_model_of_ones_own(backend: str, compute: str) -> None:
    model = Model().bfloat16()
    weights = {name: p.detach().float() for name, p in model.named_parameters()}
    r = recipe(f"precision.compute={compute}", "optim.warmup_steps=0", "optim.lr=0.01", backend=backend)
    job = fp8cfg.build(r, model=model)
    assert job.model is model and job.foreign and {p.dtype for p in model.parameters()} == {getattr(torch, {"bf16": "bfloat16", "fp32": "float32"}[compute])}
    assert all(torch.equal(job.optimizer.masters[p], weights[name]) for name, p in model.named_parameters() if p.requires_grad)
    losses = []
    for step in range(4):
        with job.autocast():
            loss = model(TOKENS, TOKENS)
            job.backward(loss)
        job.schedule.apply(job.optimizer, step)
        job.optimizer.step()
        job.optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] and model.lm_head.weight is model.embedding.weight
    frozen = f"{model.name}.1.up.weight"
    assert torch.equal(dict(model.named_parameters())[frozen].float(), weights[frozen])
    seen = job.prove()
    assert {p.name: p.reason for p in seen.linears if not p.fp8} == REASONS and "FLOPs of all weights" in str(seen)


def test_a_job_holds_weights_in_fp8_alone_and_gives_them_back() -> None:
    model = Model()
    job = fp8cfg.build(recipe("fp8.params=true"), model=model)
    assert model.h[0].up.parameter.dtype == torch.float8_e4m3fn and model.h[0].up.weight.dtype == torch.bfloat16
    with job.autocast():
        job.backward(model(TOKENS, TOKENS))
    job.optimizer.step()
    values = model.h[0].up.dequantized_weight(torch.bfloat16)
    fp8cfg.convert_back(model)
    assert torch.equal(model.h[0].up.weight, values) and not model.h[1].up.weight.requires_grad
    loss_of(model)


def of_gpt2() -> nn.Module:
    return transformers_lm("GPT2", n_layer=2, n_embd=64, n_head=4, n_positions=32)


def of_llama() -> nn.Module:
    return transformers_lm("Llama", hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                           tie_word_embeddings=True)


def transformers_lm(name: str, **shape: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")

    class LM(nn.Module):
        """Of transformers, with a linear layer more."""

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.lm = getattr(transformers, f"{name}ForCausalLM" if name == "Llama" else f"{name}LMHeadModel")(
                getattr(transformers, f"{name}Config")(vocab_size=64, bos_token_id=0, eos_token_id=0, **shape))
            self.extra = nn.Linear(64, 64)

        def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
            x = self.lm.base_model(tokens).last_hidden_state
            return nn.functional.cross_entropy(self.lm.lm_head(x + self.extra(x)).float().flatten(0, 1), targets.flatten())

    return LM()


class Convolutions(nn.Module):
    """A convolution, a weight that is read without its layer's forward, and a linear layer that is parametrized."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.conv, self.norm, self.up = nn.Embedding(48, 64), nn.Conv1d(64, 64, 3, padding=1), nn.RMSNorm(64), nn.Linear(64, 64)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(64, 64))
        self.scale = nn.Parameter(torch.ones(64))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.norm(self.embedding(tokens)) * self.scale
        x = self.normed(x + self.up(torch.relu(self.conv(x.mT).mT)))
        return nn.functional.cross_entropy((x @ self.embedding.weight.T).float().flatten(0, 1), targets.flatten())


@pytest.mark.filterwarnings("ignore:only .* ran in FP8:RuntimeWarning")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("words", ["opt_level=O1", "opt_level=O2", "opt_level=O3", "storage.weight=fp32", "storage.master_weight=none storage.rounding=stochastic"])
@pytest.mark.parametrize("model", [Model, of_gpt2, of_llama, Convolutions])
def test_a_level_trains_models_with_any_kind_of_weight(model: Any, words: str, backend: str) -> None:
    if backend == "torchao" and words == "opt_level=O3":
        pytest.skip("torchao holds no weights in FP8")
    job = fp8cfg.build(recipe(*words.split(), "optim.warmup_steps=0", "optim.lr=0.003", backend=backend), model=model())
    columns, losses = job.prepared.columns, []
    assert columns.keys() == dict(job.model.named_parameters()).keys()
    linear = {f"{p.name}.weight" for p in job.plan}
    apart = {name: p for name, p in job.model.named_parameters() if name not in linear}
    assert {p.dtype for p in apart.values()} == {torch.bfloat16} and {columns[name]["master_weight"] for name in apart} == {"fp32"}
    for step in range(4):
        with job.autocast():
            loss = job.model(TOKENS, TOKENS)
        job.backward(loss)
        job.schedule.apply(job.optimizer, step)
        job.optimizer.step()
        job.optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_layers_that_only_hold_their_weights_multiply_nothing_in_fp8() -> None:
    r = fp8cfg.compose(["precision=bf16", "opt_level=O2"])
    job = fp8cfg.build(r, model=Model())
    assert isinstance(job.model.h[0].up, FP8Linear) and not fp8cfg.has_fp8_layers(job.model)
    with pytest.raises(fp8cfg.ConfigError, match="the model has FP8 layers already"):
        fp8cfg.build(r, model=job.model)


@pytest.mark.parametrize("words", [("opt_level=O1",), ("opt_level=O2",), ("opt_level=O2", "fp8.output_layer=true"), ("storage.weight=fp16",),
                                   ("storage.weight=fp16_scaled", "storage.master_weight=fp32")], ids=" ".join)
@pytest.mark.parametrize("backend", BACKENDS)
def test_after_a_level_weights_come_back_decoded(backend: str, words: tuple[str, ...]) -> None:
    model = Model()
    before, keys = copy.deepcopy(model), list(model.state_dict())
    job = fp8cfg.build(recipe(*words, backend=backend), model=model)
    with job.autocast():
        job.backward(model(TOKENS, TOKENS))
    job.optimizer.step()
    layers = {name: layer for name, layer in model.named_modules() if getattr(layer, "codec", None) and name != "lm_head"}
    want = {name: layer.codec.decode(layer.in_codec) for name, layer in layers.items()}
    frozen = {name: p.requires_grad for name, p in model.named_parameters()}
    assert len(want) >= 8 and fp8cfg.convert_back(model) is model
    wide = model.embedding.weight.dtype
    assert wide == torch.bfloat16 and {p.dtype for p in model.parameters()} == {wide}
    assert str(model) == str(before) and list(model.state_dict()) == keys and type(model.own) is Doubled
    assert all(torch.equal(model.get_submodule(name).weight, weight.to(wide)) for name, weight in want.items())
    assert {name: p.requires_grad for name, p in model.named_parameters()} == frozen and model.lm_head.weight is model.embedding.weight
    loss_of(model).backward()
    fp8cfg.convert_model(model, recipe(backend=backend))


def test_a_job_that_does_not_run_in_fp8_is_found_out() -> None:
    job = fp8cfg.build(recipe(), model=Model())
    job.backward(job.model(TOKENS, TOKENS))
    with pytest.raises(fp8cfg.NotFP8Error, match="no layer multiplied in FP8"):
        job.prove()
    fp8cfg.build(fp8cfg.compose(["precision=bf16"]), model=Model()).prove()
    assert isinstance(fp8cfg.build(recipe(), model=nn.Linear(64, 64)).model[0], FP8Linear)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_transformers_model(backend: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
                                      num_key_value_heads=2, tie_word_embeddings=True)
    model = transformers.LlamaForCausalLM(config)
    plain = copy.deepcopy(model)
    fp8 = fp8cfg.convert_model(model, recipe("fp8.high_precision_at_start=1", backend=backend))
    assert sum(p.fp8 for p in fp8.plan) == 14 and {p.reason for p in fp8.plan if not p.fp8} == {"fp8.high_precision_at_start=1", "fp8.output_layer=false"}
    assert model.lm_head.weight is model.model.embed_tokens.weight
    with fp8.autocast():
        model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    fp8.prove()
    fp8cfg.convert_back(model)
    assert torch.equal(model(TOKENS).logits, plain(TOKENS).logits)


def test_libraries_layers_are_known_without_loading_them() -> None:
    foreign = type("Linear", (nn.Module,), {"__module__": "transformer_engine.pytorch.module.linear"})
    assert fp8cfg.has_transformer_engine_layers(nn.Sequential(foreign())) and fp8cfg.has_fp8_layers(nn.Sequential(foreign()))
    assert not fp8cfg.has_transformer_engine_layers(Model()) and not fp8cfg.has_fp8_layers(Model())
    script = "import sys, torch, fp8cfg; assert not fp8cfg.has_fp8_layers(torch.nn.Linear(2, 2)); assert not {'torchao', 'transformer_engine'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)
