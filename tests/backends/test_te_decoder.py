"""Whole decoder layers in te.TransformerLayer: the same as ours, in high precision and in FP8, and read back."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch

import fp8cfg
from fp8cfg.models.attention import rotary_tables
from fp8cfg.numerics.stored_state import stored_state_dict
from tests.support.te_decoder import BOTH, CURRENT, WHOLE, apart, convert, described, hooked, passed
from tests.support.te_small import converted, tokens, transformer
from tests.support.te_table import node


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"num_query_groups": 4},
        {"num_query_groups": 1, "head_dim": 32},
        {"layernorm_epsilon": 0.1},
        {"rotary_base": 20.0},
    ],
    ids=str,
)
def test_in_high_precision_it_is_our_layer(changed: dict[str, Any], te: Any) -> None:
    want = passed(transformer(**changed))
    model = convert(transformer(**changed), CURRENT)
    assert described(model) == WHOLE and apart(passed(model), want) < 2e-6


@pytest.mark.parametrize(
    ("given", "modules"),
    [
        (CURRENT, "te.LayerNormLinear, te.Linear, te.LayerNormMLP"),
        (CURRENT | BOTH, "te.LayerNormLinear, te.Linear"),
    ],
)
def test_so_are_its_parts_where_it_falls_back(given: dict[str, Any], modules: str, te: Any) -> None:
    want, model = passed(transformer()), transformer()
    hooked(model)
    assert described(convert(model, given))["layers.0"].startswith(
        modules + "; not te.TransformerLayer: "
    )
    assert apart(passed(model), want) < 2e-6


@pytest.mark.parametrize(
    "given", [{}, CURRENT, {"scaling": "block"}, CURRENT | {"params": True}], ids=str
)
def test_in_fp8_it_is_its_parts_but_for_the_rounding_of_attention(
    given: dict[str, Any], te: Any
) -> None:
    made, part = (copy.deepcopy(transformer()).to(torch.bfloat16) for _ in range(2))
    hooked(part)
    assert described(convert(made, given)) == WHOLE != described(convert(part, given))
    mine, theirs = passed(made, fp8=True), passed(part, fp8=True)
    assert 0 < apart(mine, theirs) < 0.03
    assert 0.01 < apart(mine, passed(transformer())) < 0.2, "of FP8"


def test_a_turn_of_more_than_a_circle_is_the_same_turn() -> None:
    cos, sin = rotary_tables(transformer(rotary_base=2.0).config, torch.arange(4096))
    angles = torch.atan2(sin, cos)
    assert torch.allclose(angles.cos(), cos, atol=3e-7) and torch.allclose(
        angles.sin(), sin, atol=3e-7
    )


@pytest.mark.parametrize("recompute", [False, True])
def test_angles_are_made_once_for_all_layers_of_a_pass(
    recompute: bool, te: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fp8cfg.backends.te import decoder

    model, made, plain = convert(transformer(), CURRENT), list[torch.Tensor](), torch.atan2
    model.recompute = recompute
    monkeypatch.setattr(torch, "atan2", lambda *args: made.append(args[0]) or plain(*args))
    assert len(described(model)) == len(model.layers) > 1
    batch = torch.zeros(1, 32, dtype=torch.int64)
    for passes in (1, 2):
        model(batch, batch).backward()
        assert len(made) == passes
    gc.collect()
    assert not decoder._ANGLES, "they go with the tables of their pass"


@pytest.mark.parametrize("params", [False, True])
def test_a_layer_keeps_its_own_hooks_names_and_ties_and_comes_back(params: bool, te: Any) -> None:
    model, called = transformer(), []
    model.layers[0].register_forward_hook(
        lambda module, args, out: called.append(type(module).__name__)
    )
    model.layers[1].mlp.linear_fc1.weight.requires_grad_(False)
    names, originals = list(stored_state_dict(model)), list(model.parameters())
    want = passed(model)
    model.zero_grad()
    convert(model, CURRENT | {"params": params})
    assert described(model) == WHOLE
    if not params:
        assert list(stored_state_dict(model)) == names and all(
            p is q for p, q in zip(originals, model.parameters(), strict=True)
        )
        assert apart(passed(model), want) < 2e-6 and called == [
            "TransformerLayer",
            "TEDecoderLayer",
        ]
        assert model.layers[1].mlp.linear_fc1.weight.grad is None
    back = fp8cfg.convert_back(model)
    assert {type(m).__name__ for m in back.modules()} == {
        type(m).__name__ for m in transformer().modules()
    } and list(back.state_dict()) == names
    back.float().zero_grad()
    assert (
        apart(passed(back), want) < (0.1 if params else 1e-9) and called[-1] == "TransformerLayer"
    )


def test_its_state_fits_its_parts(te: Any) -> None:
    from fp8cfg.backends.te import backend

    made, part = converted(node({})), transformer().to(torch.bfloat16)
    hooked(part)
    convert(part, {})
    for _ in range(2):
        with backend.autocast(made):
            made(tokens(), tokens()).backward()
    part.load_state_dict(stored_state_dict(made))
    for name, tensor in stored_state_dict(part).items():
        assert torch.equal(tensor, stored_state_dict(made)[name]), name
    scales = [t for n, t in stored_state_dict(part).items() if n.endswith("fp8_scale")]
    assert len(scales) == 8 and all((t != 1).all() for t in scales)


def test_frozen_layers_at_the_start_run_in_fp8(te: Any) -> None:
    from fp8cfg.backends.te import backend

    model = transformer().to(torch.bfloat16)
    model.embedding.requires_grad_(False), model.layers[0].requires_grad_(False)
    convert(model, {})
    assert (
        described(model)["layers.0"].startswith("te.LayerNormLinear, te.Linear; ")
        and described(model)["layers.1"] == "te.TransformerLayer"
    )
    with backend.autocast(model):
        model(tokens(), tokens()).backward()
    ran = backend.observed(model)
    assert (
        all(ran[name]["fprop"] for name in ran)
        and ran["layers.0.mlp.linear_fc1"]["wgrad"] is None
        and ran["layers.1.mlp.linear_fc1"]["wgrad"]
    )
    assert {n.partition(".")[0] for n, p in model.named_parameters() if p.grad is None} == {
        "embedding",
        "layers",
    }
