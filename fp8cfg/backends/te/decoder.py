"""Decoder layers computed by te.TransformerLayer, which fuses more than single layers can."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from fp8cfg.backends.any_model.module_swap import replace_module
from fp8cfg.backends.te.attention import TEAttention
from fp8cfg.backends.te.engine_builder import EngineBuilder, check_fields
from fp8cfg.backends.te.layers import TEMLP, TELinear, TENorm, has_custom_forward, is_observed

_LINEARS = (
    "self_attention.linear_qkv",
    "self_attention.linear_proj",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
)
"""Names of the linear layers in a decoder layer."""
_DEFAULT_FIELDS = (
    "normalization",
    "layernorm_zero_centered_gamma",
    "layernorm_placement",
    "qk_layernorm",
    "activation",
    "position_embedding_type",
    "rotary_percent",
    "sliding_window",
    "query_pre_attn_scalar",
    "attn_logit_softcapping",
)
"""Fields of TransformerConfig that must have their defaults, as in Llama.

te.TransformerLayer has no soft caps and no norms after attention and MLP. It has other variants of
the rest, but this backend does not use them.
"""


class TEDecoderLayer(nn.Module):
    """Transformer layer computed by te.TransformerLayer, from x [batch, tokens, hidden] to the same.

    It takes over the children of the replaced layer with their Parameters. These are `TELinear`,
    `TENorm` and `TEMLP`, but their forward methods are not called.

    Args:
        plain: The replaced layer.
        module: The te.TransformerLayer.
    """

    takes_mask = False

    def __init__(self, plain: nn.Module, module: Any) -> None:
        super().__init__()
        for name, child in plain.named_children():
            self.add_module(name, child)
        # In a tuple, because torch would register the modules themselves as submodules.
        self._unregistered = (plain, module)
        self.train(plain.training)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Runs the layer with the rotary tables cos and sin, float32 [tokens, head_dim / 2]."""
        module = self._unregistered[1]
        y: Tensor = module(x, rotary_pos_emb=rotary_angles(cos, sin))
        return y

    @property
    def plain(self) -> nn.Module:
        """The replaced layer. It has the same children."""
        return self._unregistered[0]

    def extra_repr(self) -> str:
        return "te.TransformerLayer"


_ANGLES = WeakTensorKeyDictionary()
"""Angles by their cosines. An entry is dropped with its cosines."""


def rotary_angles(cos: Tensor, sin: Tensor) -> Tensor:
    """Returns the angles of rotary tables, for Transformer Engine's rotary kernel.

    All layers of a pass have the same tables, so the angles are computed once.

    Args:
        cos: float32 [tokens, head_dim / 2].
        sin: float32 [tokens, head_dim / 2].

    Returns:
        float32 [tokens, 1, 1, head_dim], the same angles for both halves of the channels.
    """
    if cos not in _ANGLES:
        angles = torch.atan2(sin, cos)
        _ANGLES[cos] = torch.cat([angles, angles], -1)[:, None, None]
    cached: Tensor = _ANGLES[cos]
    return cached


def obstacle(layer: Any, builder: EngineBuilder) -> str:
    """Returns why te.TransformerLayer cannot compute a decoder layer, or "".

    Args:
        layer: A TransformerLayer of fp8cfg.models. Its FP8 layers are TELinear already.
        builder: The builder of the conversion.
    """
    return (
        _config_obstacle(layer)
        or _linear_obstacle(layer, builder)
        or _attention_obstacle(layer)
        or _norm_obstacle(layer, builder)
        or _hook_obstacle(layer)
    )


def _config_obstacle(layer: Any) -> str:
    from fp8cfg.models.config import TransformerConfig

    if layer.selective:
        return (
            "model.recompute_granularity=selective recomputes norms and activation functions"
            " without the rest"
        )
    for name in _DEFAULT_FIELDS:
        value = getattr(layer.config, name)
        if value != getattr(TransformerConfig, name):
            return f"it is not used with model.{name}={value}"
    return ""


def _linear_obstacle(layer: Any, builder: EngineBuilder) -> str:
    for name in _LINEARS:
        linear = layer.get_submodule(name)
        if not isinstance(linear, TELinear):
            return f"{name} stays in high precision"
        if linear.bias is not None:
            return f"{name} has a bias"
        if builder.fp8_params and linear.weight in builder.shared:
            return f"{name} shares its weight, which then stays in high precision"
    if getattr(builder.recipe, "backward_override", None):
        return "te.LayerNormMLP has no backward pass in high precision"
    return ""


def _attention_obstacle(layer: Any) -> str:
    from fp8cfg.models.attention import CoreAttention

    attention = layer.self_attention
    if isinstance(attention.core_attention, TEAttention):
        return "its FP8 attention would also output FP8, as under fp8.multi_head_attention"
    if type(attention.core_attention) is not CoreAttention:
        return f"self_attention.core_attention is a {type(attention.core_attention).__name__}"
    if attention.head_dim % 8:
        return f"head_dim={attention.head_dim} is not a multiple of 8, as fast attention needs"
    if layer.packed:
        return "it is not used with attention masks between documents"
    return ""


def _norm_obstacle(layer: Any, builder: EngineBuilder) -> str:
    for name in ("input_layernorm", "pre_mlp_layernorm"):
        if getattr(layer, name) in builder.kept:
            return f"fp8.exclude keeps {name} as it is"
    # te.TransformerLayer has one argument for both.
    if layer.input_layernorm.eps != layer.pre_mlp_layernorm.eps:
        return "its norms differ in eps"
    if not layer.pre_mlp_layernorm.weight.requires_grad:
        # See `fuse` in backend.py.
        return (
            "pre_mlp_layernorm is frozen, and te.LayerNormMLP fails if its input needs no gradient"
            " either"
        )
    return ""


def _hook_obstacle(layer: Any) -> str:
    if has_custom_forward(layer):
        return "it has its own forward"
    for name, module in layer.named_modules():
        if name and is_observed(module):
            return f"{name} has hooks or its own forward"
    return ""


def convert_decoder(model: nn.Module, name: str, layer: Any, builder: EngineBuilder) -> None:
    """Replaces a decoder layer by one that te.TransformerLayer computes, in place.

    Args:
        model: The model.
        name: Name of the layer. It must not have an `obstacle`.
        layer: The layer.
        builder: The builder of the conversion.

    Raises:
        BackendError: The module has other fields or Parameters than requested.
    """
    qkv, proj, fc1, fc2 = [layer.get_submodule(linear_name) for linear_name in _LINEARS]
    attention = layer.self_attention
    heads = attention.num_query_groups * attention.heads_per_group
    eps = layer.input_layernorm.eps
    module = builder.build_module(
        "TransformerLayer",
        [qkv, proj, fc1, fc2],
        (qkv.in_features, fc2.in_features, heads),
        num_gqa_groups=attention.num_query_groups,
        layernorm_epsilon=eps,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        kv_channels=attention.head_dim,
        self_attn_mask_type="causal",
        attn_input_format="bshd",
        fuse_qkv_params=True,
        normalization="RMSNorm",
        bias=False,
        activation="swiglu",
    )
    expected = {
        "self_attn_mask_type": "causal",
        "window_size": None,
        "attn_input_format": "bshd",
        "layer_type": "encoder",
        "hidden_dropout": 0.0,
        "drop_path": None,
        "output_layernorm": False,
        "apply_residual_connection_post_layernorm": False,
        "parallel_attention_mlp": False,
        "self_attention.num_attention_heads_per_partition": heads,
        "self_attention.num_gqa_groups_per_partition": attention.num_query_groups,
        "self_attention.hidden_size_per_attention_head": attention.head_dim,
        "self_attention.qkv_weight_interleaved": True,
        "self_attention.qkv_format": "bshd",
        "self_attention.input_layernorm": True,
        "softmax_type": "vanilla",
        "self_attention.rotary_pos_interleaved": False,
        "self_attention.q_norm": None,
        "self_attention.k_norm": None,
        "self_attention.core_attention.unfused_attention.attention_dropout.p": 0.0,
        "softcap": 0.0,
    }
    check_fields(module, expected, optional=("softcap",))  # version 2.8 has no softcap
    input_norm = TENorm(layer.input_layernorm, None)
    mlp_norm = TENorm(layer.pre_mlp_layernorm, None)
    norm_options = {"eps": eps, "normalization": "RMSNorm"}
    builder.attach_engine(
        module.self_attention.layernorm_qkv,
        [qkv],
        {"layer_norm_weight": (input_norm, "weight"), "weight": (qkv, "weight")},
        norm_options,
    )
    builder.attach_engine(module.self_attention.proj, [proj], {"weight": (proj, "weight")}, {})
    builder.attach_engine(
        module.layernorm_mlp,
        [fc1, fc2],
        {
            "layer_norm_weight": (mlp_norm, "weight"),
            "fc1_weight": (fc1, "weight"),
            "fc2_weight": (fc2, "weight"),
        },
        norm_options | {"activation": "swiglu"},
    )
    replace_module(layer, "input_layernorm", input_norm)
    replace_module(layer, "pre_mlp_layernorm", mlp_norm)
    replace_module(layer, "mlp", TEMLP(layer.mlp, fc1, fc2))
    replace_module(model, name, TEDecoderLayer(layer, module))


def describe_decoder_layers(model: nn.Module) -> dict[str, str]:
    """Returns the Transformer Engine modules of each decoder layer with FP8 GEMMs, by name.

    The text includes the reason if te.TransformerLayer does not compute the layer.
    """
    from fp8cfg.models.transformer import TransformerLayer

    descriptions = {}
    for name, layer in model.named_modules():
        if isinstance(layer, TEDecoderLayer):
            descriptions[name] = "te.TransformerLayer"
        elif type(layer) is TransformerLayer:
            linears = [module for module in layer.modules() if isinstance(module, TELinear)]
            if not linears:
                continue
            kinds = dict.fromkeys(type(linear.engine.module).__name__ for linear in linears)
            modules = ", ".join(f"te.{kind}" for kind in kinds)
            descriptions[name] = f"{modules}; not te.TransformerLayer: {linears[0].obstacle}"
    return descriptions
