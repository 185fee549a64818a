"""Conversion to Transformer Engine's modules and back: names, ties, freezing, copies, norms, anyone's model, attention and the context's entry points."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn

import fp8cfg
from fp8cfg.backends.gemm_plan import plan_differences
from fp8cfg.numerics import Region
from fp8cfg.numerics.stored_state import stored_state_dict
from tests.support import te_tex
from tests.support.small import small
from tests.support.te_cases import CURRENT, DELAYED, backend, grads, restore
from tests.support.te_small import converted, planned, tokens, transformer
from tests.support.te_table import node


@pytest.mark.parametrize("params", [False, True])
def test_conversion_keeps_names_ties_and_freezing_and_goes_back(params: bool, te: Any) -> None:
    plain = transformer(tie_embeddings=True)
    plain.layers[0].mlp.linear_fc2.weight.requires_grad_(False)
    before = dict(plain.named_parameters())
    fp8 = node({"params": params, "output_layer": True, "scaling": "current"})
    backend().convert(plain, fp8, planned(fp8, plain), Region(), "scaled_mm")
    after = dict(plain.named_parameters())
    assert list(after) == list(before) and plain.output_layer.weight is plain.embedding.weight
    assert not after["layers.0.mlp.linear_fc2.weight"].requires_grad
    quantized = [n for n, p in after.items() if p is not before[n]]
    assert len(quantized) == (8 if params else 0)
    # The frozen weight is quantized once, and never written.
    assert len(backend().writers(plain)) == (7 if params else 0)
    restore(plain)
    assert (
        type(plain.layers[0].mlp).__name__ == "MLP"
        and type(plain.layers[1].input_layernorm).__name__ == "RMSNorm"
    )
    assert {type(m) for n, m in plain.named_modules() if "linear" in n} == {nn.Linear}
    for name, p in plain.named_parameters():
        assert torch.allclose(
            p.float(),
            before[name],
            atol=2e-4 if name in quantized else 0,
            rtol=0.07 if name in quantized else 0,
        ), name
    assert not plain.layers[0].mlp.linear_fc2.weight.requires_grad and list(
        dict(plain.named_parameters())
    ) == list(before)


def test_a_layer_whose_autocast_is_never_entered_is_found(te: Any) -> None:
    fp8 = node({"scaling": "current"})
    model = converted(fp8)
    loss = model(tokens(), tokens())
    loss.backward()
    lines = plan_differences(planned(fp8, model), backend().observed(model))
    assert (
        len([line for line in lines if "planned e4m3 x e4m3, ran high precision" in line]) == 8
        and len(lines) == 24
    )
    assert {c.split(" ", 1)[1] for c in te_tex.CALLS} == {"high precision x high precision"}
    with backend().autocast(model):
        model(tokens(), tokens())
    assert len(plan_differences(planned(fp8, model), backend().observed(model))) == 16, (
        "no backward pass, no dgrad and wgrad"
    )
    with backend().autocast(model):
        model(tokens(), tokens()).backward()
    assert plan_differences(planned(fp8, model), backend().observed(model)) == []
    backend().forget_observed(model)
    assert len(plan_differences(planned(fp8, model), backend().observed(model))) == 24


@pytest.mark.parametrize("scaling", ["delayed", "current"])
def test_a_copy_of_a_model_is_a_model_of_its_own(scaling: str, te: Any) -> None:
    import copy

    model = converted(node({"scaling": scaling, "params": True}))
    other = copy.deepcopy(model)
    with backend().autocast(model):
        want = model(tokens(), tokens())
        want.backward()
    with backend().autocast(other):
        got = other(tokens(), tokens())
        got.backward()
    assert got == want and all(torch.equal(g, grads(other)[n]) for n, g in grads(model).items())
    assert not {id(p) for p in model.parameters()} & {id(p) for p in other.parameters()}
    with torch.no_grad():
        other.layers[0].mlp.linear_fc1.set_weight(torch.zeros(256, 64))
    with backend().autocast(model):
        assert model(tokens(), tokens()) == want or scaling == "delayed", "scales have moved"


@pytest.mark.parametrize("entry", ["autocast", "fp8_autocast"])
@pytest.mark.parametrize("reduce_amax", [True, False])
def test_the_entry_point_that_is_there_gets_recipe_and_group(
    entry: str, reduce_amax: bool, te: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fp8cfg.backends.te import layers

    given: list[dict[str, Any]] = []
    genuine, signature = te.autocast, inspect.signature(getattr(te, entry))

    def recorded(**arguments: Any) -> Any:
        given.append(signature.bind(**arguments).arguments)
        return genuine(
            enabled=arguments["enabled"],
            recipe=arguments.get("recipe", arguments.get("fp8_recipe")),
        )

    model = converted(node({"reduce_amax": reduce_amax}))
    monkeypatch.delattr(te, "autocast")
    monkeypatch.setattr(te, entry, recorded, raising=False)
    if entry == "fp8_autocast":
        monkeypatch.delattr(te, "__getattr__")  # mocks whatever a package of the stand-in lacks
    monkeypatch.setattr(layers.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(type(layers.dist.group), "WORLD", property(lambda self: "world"))
    with backend().autocast(model):
        pass
    group = "amax_reduction_group" if entry == "autocast" else "fp8_group"
    assert given[0][group] == ("world" if reduce_amax else None) and given[0]["enabled"]


def test_norms_are_transformer_engines_where_it_has_them(te: Any) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList(
                [
                    nn.LayerNorm(32),
                    nn.RMSNorm(32, eps=1e-6),
                    nn.LayerNorm(32, bias=False),
                    nn.RMSNorm(32),
                    nn.LayerNorm(32, elementwise_affine=False),
                ]
            )
            self.linear = nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for norm in self.norms:
                x = norm(x)
            y: torch.Tensor = self.linear(x)
            return y

    from fp8cfg.backends.gemm_plan import PlannedLinear

    torch.manual_seed(0)
    model, x = Model(), torch.randn(16, 32)
    want = model(x)
    want.pow(2).sum().backward()
    gradients = grads(model)
    model.zero_grad()
    names = list(stored_state_dict(model))
    kinds = ("e4m3", "e4m3")
    backend().convert(
        model,
        node({"scaling": "current"}),
        [PlannedLinear("linear", 32, 32, (kinds, kinds, kinds))],
        Region(),
        "scaled_mm",
    )
    assert [type(n).__name__ for n in model.norms] == [
        "TENorm",
        "TENorm",
        "LayerNorm",
        "RMSNorm",
        "LayerNorm",
    ]
    assert list(stored_state_dict(model)) == names
    got = model(x)  # outside of the autocast: high precision
    got.pow(2).sum().backward()
    assert torch.allclose(got, want, atol=1e-5) and all(
        torch.allclose(g, grads(model)[n], atol=1e-3) for n, g in gradients.items()
    )
    with backend().autocast(model):
        assert 0 < (model(x) - want).abs().max() < 0.5
    restore(model)
    assert torch.equal(model(x), want)


class Odd(nn.Module):
    """Somebody's model: a gate that does not fit, biases, a frozen weight."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate, self.q, self.out = (
            nn.LayerNorm(64),
            nn.Linear(64, 10),
            nn.Linear(64, 64),
            nn.Linear(64, 64),
        )
        self.q.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.out(torch.relu(self.q(self.norm(x)))) + self.gate(x).sum(
            -1, keepdim=True
        )
        return y


@pytest.mark.parametrize("words", [DELAYED, CURRENT], ids=["delayed", "current"])
def test_anyones_model_is_converted_proved_and_given_back(words: tuple[str, ...], te: Any) -> None:
    from fp8cfg.conversion.convert import convert_back, convert_model

    model, called = Odd(), []
    model.q.register_forward_hook(lambda module, args, out: called.append(type(module).__name__))
    x, parameters = torch.randn(16, 64, requires_grad=True), list(model.parameters())
    want = model(x)
    conversion = convert_model(
        model, fp8cfg.compose(["recipe=llama_tiny", *words, "fp8.params=false"])
    )
    assert [p.reason for p in conversion.plan] == [
        "out_features=10 is not a multiple of 16",
        "",
        "",
    ]
    with conversion.autocast():
        got = model(x)
        got.sum().backward()
    assert (
        0 < (got - want).abs().max() < 0.5
        and model.q.weight.grad is None
        and model.out.bias.grad is not None
    )
    conversion.prove()
    conversion.step()
    assert called == ["Linear", "TELinear"]
    back = convert_back(model)
    assert torch.equal(back(x), want) and all(
        p is q for p, q in zip(parameters, back.parameters(), strict=True)
    )


@pytest.mark.parametrize("scaling", ["delayed", "current"])
def test_attention_is_asked_for_as_the_recipe_says(
    scaling: str, te: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = node(
        {
            "scaling": scaling,
            "dot_product_attention": True,
            "high_precision_at_start": 1,
            "amax_history_len": 8 if scaling == "delayed" else 1024,
            "margin": 2 if scaling == "delayed" else 0,
        }
    )
    model = converted(given)
    first, second = (layer.self_attention.core_attention for layer in model.layers)
    assert type(first).__name__ == "CoreAttention" and type(second).__name__ == "TEAttention"
    module = second.te_module
    assert (
        module.qkv_format,
        module.attn_mask_type,
        module.attention_dropout if hasattr(module, "attention_dropout") else 0.0,
    ) == ("bshd", "causal", 0.0)
    dpa = module.fp8_meta["recipe"]
    assert dpa.fp8_dpa and dpa.delayed(), (
        "S and dP are scaled by the past under current scaling too"
    )
    assert (dpa.margin, dpa.amax_history_len) == ((2, 8) if scaling == "delayed" else (0, 1))
    state = stored_state_dict(model)
    name = "layers.1.self_attention.core_attention."
    columns = 15 if scaling == "delayed" else 5
    assert state[name + "fp8_scale"].shape == (columns,) and state[
        name + "fp8_amax_history"
    ].shape == (dpa.amax_history_len, columns)
    state = {n: t.clone() for n, t in state.items()}
    state[name + "fp8_scale"] = torch.arange(1.0, columns + 1)
    model.load_state_dict(state)
    assert torch.equal(stored_state_dict(model)[name + "fp8_scale"], torch.arange(1.0, columns + 1))

    def products(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:  # cuDNN's, in high precision
        module.fp8 = te.FP8GlobalStateManager.is_fp8_enabled()
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return (
            nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            .transpose(1, 2)
            .flatten(2)
        )

    monkeypatch.setattr(module, "forward", products)
    plain = transformer().to(torch.bfloat16)
    assert torch.allclose(model(tokens(), tokens()), plain(tokens(), tokens()), atol=1e-2)
    seen = backend().observed(model)[name[:-1]]
    assert set(seen.values()) == {None}, "no autocast, no FP8"
    with backend().autocast(model):
        model(tokens(), tokens()).backward()
    seen = backend().observed(model)[name[:-1]]
    assert [seen[g] for g in ("p", "o", "ds", "dq")] == [("e4m3", "e4m3")] * 2 + [
        ("e5m2", "e4m3")
    ] * 2
    with torch.no_grad():
        model.eval()(tokens())
    assert backend().observed(model)[name[:-1]] == seen, (
        "an evaluation in high precision says nothing of training"
    )
    restore(model)
    assert type(model.layers[1].self_attention.core_attention).__name__ == "CoreAttention"


def test_norms_that_are_excluded_stay(te: Any) -> None:
    """Alone, in front of a fused product, and in a Transformer layer, which is not fused then; products are in FP8 all the same."""
    from fp8cfg.planning.layer_plan import plan_layers

    def names(*patterns: str) -> dict[str, str]:
        model = converted(node({"exclude": patterns}))
        return {n: type(m).__name__ for n, m in model.named_modules() if n.endswith("layernorm")}

    assert set(names().values()) == {"TENorm"}
    first = names("layers.0.input_layernorm", "final_layernorm")
    assert {n for n, kind in first.items() if kind == "RMSNorm"} == {
        "layers.0.input_layernorm",
        "final_layernorm",
    }
    assert set(names("*layernorm").values()) == {"RMSNorm"}
    logits, ran = [], []
    for patterns in ((), ("*layernorm",)):
        model = converted(node({"exclude": patterns}))
        with backend().autocast(model):
            logits.append(model(tokens()).float())
        ran.append(sum(gemms["fprop"] is not None for gemms in backend().observed(model).values()))
    assert ran == [8, 8] and (logits[0] - logits[1]).norm() < 0.05 * logits[0].norm()
    recipe = small(
        "precision=bf16_fp8", "backend=te", "fp8.first_step=te", "fp8.exclude=['*layernorm']"
    )
    assert all(p.fp8 for p in plan_layers(recipe, "te")[:-1])
    with pytest.raises(
        fp8cfg.ConfigError, match=r"fp8\.exclude=\*layernorm: matches no linear layer"
    ):
        plan_layers(recipe, "native")


@pytest.mark.parametrize("words", [DELAYED, CURRENT], ids=["delayed", "current"])
def test_a_frozen_weight_is_stored_in_fp8_and_never_written(
    words: tuple[str, ...], te: Any
) -> None:
    """No optimizer keeps a master of it, so no writer may want one."""
    recipe = fp8cfg.compose(["recipe=llama_tiny", *words, "fp8.params=true"])
    job = fp8cfg.build(recipe, model=Odd())
    frozen, trained = job.model.q, job.model.out
    assert frozen.fp8_params and trained.fp8_params
    before = [layer.dequantized_weight(torch.float32) for layer in (frozen, trained)]
    with job.autocast():
        job.model(torch.randn(16, 64)).sum().backward()
    assert job.optimizer.step()
    after = [layer.dequantized_weight(torch.float32) for layer in (frozen, trained)]
    assert torch.equal(before[0], after[0])
    assert not torch.equal(before[1], after[1])
