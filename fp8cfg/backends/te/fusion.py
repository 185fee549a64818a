"""Layer fusion: norms, products and attention in one Transformer Engine module, where the model's Transformer layers allow it.

A whole layer becomes te.TransformerLayer, which decoder.py makes. Where something stands in its way, `input_layernorm` with
`linear_qkv` becomes te.LayerNormLinear, and `pre_mlp_layernorm` with the whole gated MLP te.LayerNormMLP. The norm's output is
quantized as it is computed, and so is SwiGLU's, which is where Transformer Engine's speed is. Other norms, those with zero-centered
weights and other activations are not fused: te.Linear and te.LayerNorm or te.RMSNorm compute those layers. Nothing is under
selective recomputation: a fused module keeps the norm's output.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from fp8cfg.backends.module_swap import replaced
from fp8cfg.backends.te import decoder as te_decoder
from fp8cfg.backends.te.build import Maker
from fp8cfg.backends.te.engine import listened
from fp8cfg.backends.te.layers import TEMLP, TELinear, TENorm


def fuse(model: nn.Module, make: Maker) -> None:
    """Give one engine, in place, to what can be fused in the Transformer layers of `model`, whose linear layers are TELinear.
    te.LayerNormMLP knows no backward pass in high precision (backward_override), and fails on a frozen norm whose input needs no
    gradient (it asks the bias that RMSNorm lacks); then the norm goes with `linear_fc1` alone."""
    from fp8cfg.models.layers import TransformerLayer

    whole_mlp = getattr(make.recipe, "backward_override", None) is None
    for name, layer in list(model.named_modules()):
        if type(layer) is TransformerLayer:
            at = f"{name}." if name else ""
            obstacle = te_decoder.obstacle(layer, make) if name else "it is the model itself"
            if not obstacle:
                te_decoder.convert(model, name, layer, make)
                continue
            for linear in layer.modules():
                if isinstance(linear, TELinear):
                    linear.obstacle = obstacle
            if (
                layer.placement == "post" or layer.selective
            ):  # no norm stands before a product, or it is computed again
                continue
            _fuse_norm(f"{at}input_layernorm", model, layer.self_attention.linear_qkv, make)
            if (
                whole_mlp
                and layer.config.activation == "swiglu"
                and layer.pre_mlp_layernorm.weight.requires_grad
            ):
                _fuse_mlp(at, model, layer, make)
            else:
                _fuse_norm(f"{at}pre_mlp_layernorm", model, layer.mlp.linear_fc1, make)


def _fuse_norm(name: str, model: nn.Module, linear: Any, make: Maker) -> None:
    """The norm called `name` and the layer behind it."""
    norm: Any = model.get_submodule(name)
    if norm not in make.kept and _fusable(norm, linear):
        held = TENorm(norm, None)
        make(
            "LayerNormLinear",
            [linear],
            (linear.in_features, linear.out_features),
            {"layer_norm_weight": (held, "weight"), "weight": (linear, "weight")},
            eps=norm.eps,
            normalization="RMSNorm",
        )
        replaced(model, name, held)


def _fuse_mlp(at: str, model: nn.Module, layer: Any, make: Maker) -> None:
    fc1, fc2, norm = layer.mlp.linear_fc1, layer.mlp.linear_fc2, layer.pre_mlp_layernorm
    if norm not in make.kept and _fusable(norm, fc1, fc2):
        held = TENorm(norm, None)
        make(
            "LayerNormMLP",
            [fc1, fc2],
            (fc1.in_features, fc2.in_features),
            {
                "layer_norm_weight": (held, "weight"),
                "fc1_weight": (fc1, "weight"),
                "fc2_weight": (fc2, "weight"),
            },
            eps=norm.eps,
            normalization="RMSNorm",
            activation="swiglu",
        )
        replaced(model, f"{at}pre_mlp_layernorm", held)
        replaced(model, f"{at}mlp", TEMLP(layer.mlp, fc1, fc2))


def _fusable(norm: Any, *linears: nn.Module) -> bool:
    """Whether one module can compute all of them: all in FP8, and no hook observes what passes between them."""
    if norm.kind != "RMSNorm" or norm.zero_centered:
        return False
    return all(isinstance(m, TELinear) and m.bias is None for m in linears) and not any(
        map(listened, (norm, *linears))
    )
