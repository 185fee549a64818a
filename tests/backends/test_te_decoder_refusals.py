"""Decoder layers that te.TransformerLayer does not take, with the reason, and a library that builds another layer than asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fp8cfg
from fp8cfg.backends.protocol import BackendError
from fp8cfg.models.transformer import Transformer
from fp8cfg.numerics import Region
from fp8cfg.planning.layer_plan import transformer_config
from tests.support.te_decoder import BOTH, CURRENT, convert, described, hooked
from tests.support.te_small import planned, transformer
from tests.support.te_table import node


@pytest.mark.parametrize("recipe", ["llama_tiny", "llama_1b", "llama_8b", "llama_70b"])
@pytest.mark.parametrize(
    "precision", ["bf16_fp8", "bf16_fp8_current", "bf16_fp8_block", "bf16_mxfp8", "bf16_nvfp4"]
)
def test_llama_recipes_have_it_in_every_layer_that_is_in_fp8(
    recipe: str, precision: str, te: Any
) -> None:
    found = fp8cfg.compose(
        [
            f"recipe={recipe}",
            f"precision={precision}",
            "model.num_layers=3",
            "fp8={high_precision_at_start: 1, high_precision_at_end: 1}",
            "trainer.strategy.pipeline_model_parallel_size=1",
            "trainer.strategy.virtual_pipeline_model_parallel_size=null",
        ]
    )
    fp8 = found.fp8.model_copy(update={"params": False})
    with torch.device("meta"):
        model = Transformer(transformer_config(found))
    from fp8cfg.backends.te import backend

    backend.convert(model, fp8, planned(fp8, model), Region(), "scaled_mm")
    assert described(model) == {"layers.1": "te.TransformerLayer"}


def eps(model: Transformer) -> None:
    model.layers[0].input_layernorm.eps = 1e-3


def bias(model: Transformer) -> None:
    model.layers[0].self_attention.linear_proj.bias = nn.Parameter(torch.zeros(64))


def shared(model: Transformer) -> None:
    model.layers[0].mlp.linear_fc2.weight = model.layers[1].mlp.linear_fc2.weight


def attention(model: Transformer) -> None:
    class Mine(type(model.layers[0].self_attention.core_attention)):
        pass

    model.layers[0].self_attention.core_attention = Mine()


def forward(model: Transformer) -> None:
    model.layers[0].pre_mlp_layernorm.forward = model.layers[0].pre_mlp_layernorm.forward


def own_forward(model: Transformer) -> None:
    model.layers[0].forward = model.layers[0].forward


def compiled(model: Transformer) -> None:
    model.layers[0].compile()


def frozen_norm(model: Transformer) -> None:
    model.layers[0].pre_mlp_layernorm.requires_grad_(False)


def backward_hook(model: Transformer) -> None:
    model.layers[0].self_attention.register_full_backward_pre_hook(lambda *_: None)


@pytest.mark.parametrize(
    ("given", "change", "reason"),
    [
        ({"exclude": ("*.linear_fc2",)}, None, "mlp.linear_fc2 stays in high precision"),
        (
            {"include": ("layers.0.mlp.*",)},
            None,
            "self_attention.linear_qkv stays in high precision",
        ),
        (
            {"dot_product_attention": True},
            None,
            "its FP8 attention would also output FP8, as under fp8.multi_head_attention",
        ),
        (CURRENT | BOTH, None, "te.LayerNormMLP has no backward pass in high precision"),
        (CURRENT, eps, "its norms differ in eps"),
        (CURRENT, bias, "self_attention.linear_proj has a bias"),
        (
            CURRENT | {"params": True},
            shared,
            "mlp.linear_fc2 shares its weight, which then stays in high precision",
        ),
        (CURRENT, attention, "self_attention.core_attention is a Mine"),
        (CURRENT, hooked, "mlp has hooks or its own forward"),
        (CURRENT, forward, "pre_mlp_layernorm has hooks or its own forward"),
        (CURRENT, backward_hook, "self_attention has hooks or its own forward"),
        (CURRENT, own_forward, "it has its own forward"),
        (CURRENT, compiled, "it has its own forward"),
        (
            CURRENT,
            frozen_norm,
            "pre_mlp_layernorm is frozen, and te.LayerNormMLP fails if its input needs no gradient either",
        ),
    ],
)
def test_what_stands_in_its_way_is_said(
    given: dict[str, Any], change: Callable[[Transformer], None] | None, reason: str, te: Any
) -> None:
    model = transformer()
    if change:
        change(model)
    text = described(convert(model, given))["layers.0"]
    assert text.endswith(f"; not te.TransformerLayer: {reason}")
    linear = next(m for m in model.layers[0].modules() if type(m).__name__ == "TELinear")
    assert reason in repr(linear)


def test_a_layer_that_is_the_model_itself_has_no_place_to_be_replaced_in(te: Any) -> None:
    from fp8cfg.backends.gemm_plan import PlannedLinear
    from fp8cfg.backends.te import backend

    layer, kinds = transformer().layers[0], (("e4m3", "e4m3"),) * 3
    plan = [
        PlannedLinear(n, m.in_features, m.out_features, kinds)
        for n, m in layer.named_modules()
        if isinstance(m, nn.Linear)
    ]
    backend.convert(layer, node(CURRENT), plan, Region(), "scaled_mm")
    assert described(layer) == {
        "": "te.LayerNormLinear, te.Linear, te.LayerNormMLP; not te.TransformerLayer: it is the model itself"
    }


def test_a_size_of_heads_that_fast_attention_lacks_stands_in_its_way(te: Any) -> None:
    model = convert(transformer(head_dim=12, num_attention_heads=4, num_query_groups=4), CURRENT)
    assert described(model)["layers.1"].endswith(
        "head_dim=12 is not a multiple of 8, as fast attention needs"
    )


@pytest.mark.parametrize(
    ("field", "value", "line"),
    [
        (
            "self_attention.qkv_weight_interleaved",
            False,
            "TransformerLayer.self_attention.qkv_weight_interleaved: the recipe says True, the library has False",
        ),
        (
            "self_attention.rotary_pos_interleaved",
            True,
            "self_attention.rotary_pos_interleaved: the recipe says False, the library has True",
        ),
        (
            "self_attn_mask_type",
            "no_mask",
            "self_attn_mask_type: the recipe says causal, the library has no_mask",
        ),
        ("hidden_dropout", 0.1, "hidden_dropout: the recipe says 0.0, the library has 0.1"),
        (
            "self_attention.core_attention.unfused_attention.attention_dropout.p",
            0.1,
            "attention_dropout.p: the recipe says 0.0, the library has 0.1",
        ),
        (
            "attn_input_format",
            "sbhd",
            "attn_input_format: the recipe says bshd, the library has sbhd",
        ),
        ("softcap", 30.0, "softcap: the recipe says 0.0, the library has 30.0"),
        (
            "layernorm_mlp.activation",
            "gelu",
            "LayerNormMLP.activation: the recipe says swiglu, the library has gelu",
        ),
        (
            "self_attention.layernorm_qkv.eps",
            1e-3,
            "LayerNormLinear.eps: the recipe says 1e-05, the library has 0.001",
        ),
        (
            "self_attention.layernorm_qkv.zero_centered_gamma",
            True,
            "LayerNormLinear.zero_centered_gamma: the recipe says False, the library has True",
        ),
        (
            "self_attention.proj.parallel_mode",
            "row",
            "Linear.parallel_mode: the recipe says None, the library has row",
        ),
        (
            "layernorm_mlp.fc1_weight",
            nn.Parameter(torch.zeros(128, 64)),
            "LayerNormMLP.fc1_weight: the recipe says (256, 64), the library has (128, 64)",
        ),
    ],
)
def test_a_library_that_builds_another_layer_is_found(
    field: str, value: Any, line: str, te: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    genuine = te.TransformerLayer

    def other(*sizes: Any, **options: Any) -> Any:
        made = genuine(*sizes, **options)
        owner, _, name = field.rpartition(".")
        owner = made.get_submodule(owner)
        owner._parameters[name] = (
            value if isinstance(value, nn.Parameter) else vars(owner).update({name: value}) or None
        )
        if owner._parameters[name] is None:
            del owner._parameters[name]
        return made

    monkeypatch.setattr(te, "TransformerLayer", other)
    with pytest.raises(BackendError) as e:
        convert(transformer(), CURRENT)
    assert str(e.value).endswith(line)
