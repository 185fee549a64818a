"""Whole decoder layers in te.TransformerLayer: the same as ours, read back, and left alone where something stands in the way."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import fp8cfg
from fp8cfg.backends.protocol import BackendError
from fp8cfg.layer_plan import transformer_config
from fp8cfg.models.rotary import rotary_tables
from fp8cfg.models.transformer import Transformer
from fp8cfg.numerics import Region
from fp8cfg.numerics.stored_form import stored_state_dict
from tests.support import te_standin
from tests.support.te_small import converted, planned, tokens, transformer
from tests.support.te_table import node

CURRENT = {"scaling": "current"}
BOTH = {"override_linear_precision": {"dgrad": True, "wgrad": True}}
WHOLE = {"layers.0": "te.TransformerLayer", "layers.1": "te.TransformerLayer"}


@pytest.fixture
def te() -> Iterator[Any]:
    with te_standin.transformer_engine() as found:
        yield found


def described(model: nn.Module) -> dict[str, str]:
    from fp8cfg.backends.te import decoder as te_decoder

    return te_decoder.described(model)


def convert(model: Transformer, given: dict[str, Any]) -> Transformer:
    from fp8cfg.backends.te import backend as te

    te.convert(model, node(given), planned(node(given), model), Region(), "scaled_mm")
    return model


def passed(model: nn.Module, fp8: bool = False) -> dict[str, torch.Tensor]:
    """What one layer makes of random numbers, and the gradients that come of it."""
    from fp8cfg.backends.te import backend as te

    g = torch.Generator().manual_seed(1)
    layer, dtype = model.layers[0], model.embedding.weight.dtype
    x = torch.randn(2, 32, 64, generator=g).to(dtype).requires_grad_()
    with te.autocast(model, fp8):
        y = layer(x, *rotary_tables(model.config, torch.arange(32)))
        y.backward(torch.randn(y.shape, generator=g).to(dtype))
    return {"y": y.detach(), "x": x.grad, **{n: p.grad for n, p in layer.named_parameters()}}


def apart(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """The largest relative difference of two passes."""
    assert mine.keys() == theirs.keys()
    return max(((mine[n] - t).float().norm() / t.float().norm()).item() for n, t in theirs.items())


def hooked(model: Transformer) -> None:
    model.layers[0].mlp.register_forward_hook(lambda *_: None)


@pytest.mark.parametrize("changed", [{}, {"num_query_groups": 4}, {"num_query_groups": 1, "head_dim": 32}, {"layernorm_epsilon": 0.1}, {"rotary_base": 20.0}],
                         ids=str)
def test_in_high_precision_it_is_our_layer(changed: dict[str, Any], te: Any) -> None:
    want = passed(transformer(**changed))
    model = convert(transformer(**changed), CURRENT)
    assert described(model) == WHOLE and apart(passed(model), want) < 2e-6


@pytest.mark.parametrize(("given", "modules"), [(CURRENT, "te.LayerNormLinear, te.Linear, te.LayerNormMLP"), (CURRENT | BOTH, "te.LayerNormLinear, te.Linear")])
def test_so_are_its_parts_where_it_falls_back(given: dict[str, Any], modules: str, te: Any) -> None:
    want, model = passed(transformer()), transformer()
    hooked(model)
    assert described(convert(model, given))["layers.0"].startswith(modules + "; not te.TransformerLayer: ")
    assert apart(passed(model), want) < 2e-6


@pytest.mark.parametrize("given", [{}, CURRENT, {"scaling": "block"}, CURRENT | {"params": True}], ids=str)
def test_in_fp8_it_is_its_parts_but_for_the_rounding_of_attention(given: dict[str, Any], te: Any) -> None:
    made, part = (copy.deepcopy(transformer()).to(torch.bfloat16) for _ in range(2))
    hooked(part)
    assert described(convert(made, given)) == WHOLE != described(convert(part, given))
    mine, theirs = passed(made, fp8=True), passed(part, fp8=True)
    assert 0 < apart(mine, theirs) < 0.03
    assert 0.01 < apart(mine, passed(transformer())) < 0.2, "of FP8"


def test_a_turn_of_more_than_a_circle_is_the_same_turn() -> None:
    cos, sin = rotary_tables(transformer(rotary_base=2.0).config, torch.arange(4096))
    angles = torch.atan2(sin, cos)
    assert torch.allclose(angles.cos(), cos, atol=3e-7) and torch.allclose(angles.sin(), sin, atol=3e-7)


@pytest.mark.parametrize("recompute", [False, True])
def test_angles_are_made_once_for_all_layers_of_a_pass(recompute: bool, te: Any, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize("recipe", ["llama_tiny", "llama_1b", "llama_8b", "llama_70b"])
@pytest.mark.parametrize("precision", ["bf16_fp8", "bf16_fp8_current", "bf16_fp8_block", "bf16_mxfp8", "bf16_nvfp4"])
def test_llama_recipes_have_it_in_every_layer_that_is_in_fp8(recipe: str, precision: str, te: Any) -> None:
    found = fp8cfg.compose([f"recipe={recipe}", f"precision={precision}", "model.num_layers=3", "fp8={high_precision_at_start: 1, high_precision_at_end: 1}",
                            "trainer.strategy.pipeline_model_parallel_size=1", "trainer.strategy.virtual_pipeline_model_parallel_size=null"])
    fp8 = found.fp8.model_copy(update={"params": False})
    with torch.device("meta"):
        model = Transformer(transformer_config(found))
    from fp8cfg.backends.te import backend as backend

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
        ({"include": ("layers.0.mlp.*",)}, None, "self_attention.linear_qkv stays in high precision"),
        ({"dot_product_attention": True}, None, "its attention in FP8 would hand its output on in FP8 too, which is fp8.multi_head_attention"),
        (CURRENT | BOTH, None, "its MLP knows no backward pass in high precision"),
        (CURRENT, eps, "its norms differ in eps"), (CURRENT, bias, "self_attention.linear_proj has a bias"),
        (CURRENT | {"params": True}, shared, "mlp.linear_fc2 shares its weight, which is not held in FP8 then"),
        (CURRENT, attention, "self_attention.core_attention is a Mine"), (CURRENT, hooked, "mlp has hooks or a forward of its own"),
        (CURRENT, forward, "pre_mlp_layernorm has hooks or a forward of its own"), (CURRENT, backward_hook, "self_attention has hooks or a forward of its own"),
        (CURRENT, own_forward, "it has a forward of its own"), (CURRENT, compiled, "it has a forward of its own"), (CURRENT, frozen_norm, "pre_mlp_layernorm is frozen, and its MLP fails where its input needs no gradient either"),
    ],
)
def test_what_stands_in_its_way_is_said(given: dict[str, Any], change: Callable[[Transformer], None] | None, reason: str, te: Any) -> None:
    model = transformer()
    if change:
        change(model)
    text = described(convert(model, given))["layers.0"]
    assert text.endswith(f"; not te.TransformerLayer: {reason}")
    linear = next(m for m in model.layers[0].modules() if type(m).__name__ == "TELinear")
    assert reason in repr(linear)


def test_a_layer_that_is_the_model_itself_has_no_place_to_be_replaced_in(te: Any) -> None:
    from fp8cfg.backends.gemm_plan import PlannedLinear
    from fp8cfg.backends.te import backend as backend

    layer, kinds = transformer().layers[0], (("e4m3", "e4m3"),) * 3
    plan = [PlannedLinear(n, m.in_features, m.out_features, kinds) for n, m in layer.named_modules() if isinstance(m, nn.Linear)]
    backend.convert(layer, node(CURRENT), plan, Region(), "scaled_mm")
    assert described(layer) == {"": "te.LayerNormLinear, te.Linear, te.LayerNormMLP; not te.TransformerLayer: it is the model itself"}


def test_a_size_of_heads_that_fast_attention_lacks_stands_in_its_way(te: Any) -> None:
    model = convert(transformer(head_dim=12, num_attention_heads=4, num_query_groups=4), CURRENT)
    assert described(model)["layers.1"].endswith("head_dim=12 is not a multiple of 8, which its fast attention wants")


@pytest.mark.parametrize(
    ("field", "value", "line"),
    [
        ("self_attention.qkv_weight_interleaved", False, "TransformerLayer.self_attention.qkv_weight_interleaved: the recipe says True, the library has False"),
        ("self_attention.rotary_pos_interleaved", True, "self_attention.rotary_pos_interleaved: the recipe says False, the library has True"),
        ("self_attn_mask_type", "no_mask", "self_attn_mask_type: the recipe says causal, the library has no_mask"),
        ("hidden_dropout", 0.1, "hidden_dropout: the recipe says 0.0, the library has 0.1"),
        ("self_attention.core_attention.unfused_attention.attention_dropout.p", 0.1, "attention_dropout.p: the recipe says 0.0, the library has 0.1"),
        ("attn_input_format", "sbhd", "attn_input_format: the recipe says bshd, the library has sbhd"), ("softcap", 30.0, "softcap: the recipe says 0.0, the library has 30.0"),
        ("layernorm_mlp.activation", "gelu", "LayerNormMLP.activation: the recipe says swiglu, the library has gelu"),
        ("self_attention.layernorm_qkv.eps", 1e-3, "LayerNormLinear.eps: the recipe says 1e-05, the library has 0.001"),
        ("self_attention.layernorm_qkv.zero_centered_gamma", True, "LayerNormLinear.zero_centered_gamma: the recipe says False, the library has True"),
        ("self_attention.proj.parallel_mode", "row", "Linear.parallel_mode: the recipe says None, the library has row"),
        ("layernorm_mlp.fc1_weight", nn.Parameter(torch.zeros(128, 64)), "LayerNormMLP.fc1_weight: the recipe says (256, 64), the library has (128, 64)"),
    ],
)
def test_a_library_that_builds_another_layer_is_found(field: str, value: Any, line: str, te: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    genuine = te.TransformerLayer

    def other(*sizes: Any, **options: Any) -> Any:
        made = genuine(*sizes, **options)
        owner, _, name = field.rpartition(".")
        owner = made.get_submodule(owner)
        owner._parameters[name] = value if isinstance(value, nn.Parameter) else vars(owner).update({name: value}) or None
        if owner._parameters[name] is None:
            del owner._parameters[name]
        return made

    monkeypatch.setattr(te, "TransformerLayer", other)
    with pytest.raises(BackendError) as e:
        convert(transformer(), CURRENT)
    assert str(e.value).endswith(line)


@pytest.mark.parametrize("params", [False, True])
def test_a_layer_keeps_its_own_hooks_names_and_ties_and_comes_back(params: bool, te: Any) -> None:
    model, called = transformer(), []
    model.layers[0].register_forward_hook(lambda module, args, out: called.append(type(module).__name__))
    model.layers[1].mlp.linear_fc1.weight.requires_grad_(False)
    names, originals = list(stored_state_dict(model)), list(model.parameters())
    want = passed(model)
    model.zero_grad()
    convert(model, CURRENT | {"params": params})
    assert described(model) == WHOLE
    if not params:
        assert list(stored_state_dict(model)) == names and all(p is q for p, q in zip(originals, model.parameters(), strict=True))
        assert apart(passed(model), want) < 2e-6 and called == ["TransformerLayer", "TEDecoderLayer"]
        assert model.layers[1].mlp.linear_fc1.weight.grad is None
    back = fp8cfg.convert_back(model)
    assert {type(m).__name__ for m in back.modules()} == {type(m).__name__ for m in transformer().modules()} and list(back.state_dict()) == names
    back.float().zero_grad()
    assert apart(passed(back), want) < (0.1 if params else 1e-9) and called[-1] == "TransformerLayer"


def test_its_state_fits_its_parts(te: Any) -> None:
    from fp8cfg.backends.te import backend as backend

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
    from fp8cfg.backends.te import backend as backend

    model = transformer().to(torch.bfloat16)
    model.embedding.requires_grad_(False), model.layers[0].requires_grad_(False)
    convert(model, {})
    assert described(model)["layers.0"].startswith("te.LayerNormLinear, te.Linear; ") and described(model)["layers.1"] == "te.TransformerLayer"
    with backend.autocast(model):
        model(tokens(), tokens()).backward()
    ran = backend.observed(model)
    assert all(ran[name]["fprop"] for name in ran) and ran["layers.0.mlp.linear_fc1"]["wgrad"] is None and ran["layers.1.mlp.linear_fc1"]["wgrad"]
    assert {n.partition(".")[0] for n, p in model.named_parameters() if p.grad is None} == {"embedding", "layers"}
