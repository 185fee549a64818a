"""Decoder layer fusion: a whole layer of this project's Transformer as one te.TransformerLayer, where that computes the same.

Besides the products and norms that fusion.py fuses, it takes over attention in high precision: Transformer Engine then chooses
among the kernels of cuDNN, flash-attn and its own instead of torch's, and rotates q and k in one kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from fp8cfg.backends.module_swap import replaced
from fp8cfg.backends.te.attention import TEAttention
from fp8cfg.backends.te.build import Maker, check
from fp8cfg.backends.te.engine import listened, own_forward
from fp8cfg.backends.te.layers import TEMLP, TELinear, TENorm


class TEDecoderLayer(nn.Module):
    """A Transformer layer that te.TransformerLayer computes: x [B, T, D], cos and sin float32 [T, head_dim / 2], out as x.

    Its modules are those of the layer whose place it took, fused as fusion.py fuses them: they hold the Parameters.
    """

    takes_mask = False

    def __init__(self, plain: nn.Module, module: Any) -> None:
        super().__init__()
        for name, child in plain.named_children():
            self.add_module(name, child)
        self._beside = (plain, module)
        self.train(plain.training)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y: Tensor = self._beside[1](x, rotary_pos_emb=rotary_angles(cos, sin))
        return y

    @property
    def plain(self) -> nn.Module:
        """The original layer; it has the same modules."""
        return self._beside[0]

    def extra_repr(self) -> str:
        return "te.TransformerLayer"


_ANGLES = WeakTensorKeyDictionary()  # by their cosines, with which they go


def rotary_angles(cos: Tensor, sin: Tensor) -> Tensor:
    """Angles float32 [T, 1, 1, head_dim] of rotary tables [T, head_dim / 2], of which the kernel takes cosine and sine, for either
    half of the channels: made once for all layers that are given the same tables, and for their recomputation.
    """
    if cos not in _ANGLES:
        angles = torch.atan2(sin, cos)
        _ANGLES[cos] = torch.cat([angles, angles], -1)[:, None, None]
    found: Tensor = _ANGLES[cos]
    return found


LLAMAS = (
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
"""Fields of TransformerConfig in which a layer must be Llama's: te.TransformerLayer has no soft caps and no norms after attention
and MLP, and the rest of what it has is not used here."""


def obstacle(layer: Any, make: Maker) -> str:
    """Why te.TransformerLayer cannot take `layer`, a TransformerLayer of fp8cfg.models whose linear layers are TELinear where they
    multiply in FP8; empty where it can."""
    from fp8cfg.models.attention import CoreAttention
    from fp8cfg.models.config import TransformerConfig

    if layer.selective:
        return (
            "model.recompute_granularity=selective, which computes norms and activation functions"
            " again by themselves"
        )
    for name in LLAMAS:
        if (value := getattr(layer.config, name)) != getattr(TransformerConfig, name):
            return f"model.{name}={value}, for which it is not used"
    attention = layer.self_attention
    for name, linear in _linears(layer).items():
        if not isinstance(linear, TELinear):
            return f"{name} stays in high precision"
        if linear.bias is not None:
            return f"{name} has a bias"
        if make.fp8_params and linear.weight in make.shared:
            return f"{name} shares its weight, which is not held in FP8 then"
    if getattr(make.recipe, "backward_override", None):
        return "its MLP knows no backward pass in high precision"
    if isinstance(attention.core_attention, TEAttention):
        return (
            "its attention in FP8 would hand its output on in FP8 too, which is"
            " fp8.multi_head_attention"
        )
    if type(attention.core_attention) is not CoreAttention:
        return f"self_attention.core_attention is a {type(attention.core_attention).__name__}"
    if attention.head_dim % 8:
        return (
            f"head_dim={attention.head_dim} is not a multiple of 8, which its fast attention wants"
        )
    if layer.packed:
        return "documents are told apart, for which it is not used"
    if kept := [
        n for n in ("input_layernorm", "pre_mlp_layernorm") if getattr(layer, n) in make.kept
    ]:
        return f"fp8.exclude leaves {kept[0]} as it is"
    if layer.input_layernorm.eps != layer.pre_mlp_layernorm.eps:
        return "its norms differ in eps"
    if not layer.pre_mlp_layernorm.weight.requires_grad:
        return (
            "pre_mlp_layernorm is frozen, and its MLP fails where its input needs no gradient"
            " either"
        )
    if own_forward(layer):
        return "it has a forward of its own"
    heard = [name for name, module in layer.named_modules() if name and listened(module)]
    return f"{heard[0]} has hooks or a forward of its own" if heard else ""


def _linears(layer: Any) -> dict[str, Any]:
    return {
        name: layer.get_submodule(name)
        for name in (
            "self_attention.linear_qkv",
            "self_attention.linear_proj",
            "mlp.linear_fc1",
            "mlp.linear_fc2",
        )
    }


def convert(model: nn.Module, name: str, layer: Any, make: Maker) -> None:
    """Put te.TransformerLayer in the place of `layer`, which is called `name` in `model` and has no `obstacle`."""
    qkv, proj, fc1, fc2 = linears = list(_linears(layer).values())
    attention, norms = (
        layer.self_attention,
        [TENorm(n, None) for n in (layer.input_layernorm, layer.pre_mlp_layernorm)],
    )
    heads, eps = attention.num_query_groups * attention.heads_per_group, layer.input_layernorm.eps
    module = make.built(
        "TransformerLayer",
        linears,
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
    wanted = {
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
    check(module, wanted, optional=("softcap",))  # which 2.8 has not
    normed = {"eps": eps, "normalization": "RMSNorm"}
    make.engine(
        module.self_attention.layernorm_qkv,
        [qkv],
        {"layer_norm_weight": (norms[0], "weight"), "weight": (qkv, "weight")},
        normed,
    )
    make.engine(module.self_attention.proj, [proj], {"weight": (proj, "weight")}, {})
    make.engine(
        module.layernorm_mlp,
        [fc1, fc2],
        {
            "layer_norm_weight": (norms[1], "weight"),
            "fc1_weight": (fc1, "weight"),
            "fc2_weight": (fc2, "weight"),
        },
        normed | {"activation": "swiglu"},
    )
    for part, new in (
        ("input_layernorm", norms[0]),
        ("pre_mlp_layernorm", norms[1]),
        ("mlp", TEMLP(layer.mlp, fc1, fc2)),
    ):
        replaced(layer, part, new)
    replaced(model, name, TEDecoderLayer(layer, module))


def described(model: nn.Module) -> dict[str, str]:
    """For each decoder layer of `model` with products in FP8, by name: the Transformer Engine modules that compute it, and the
    reason where te.TransformerLayer does not.
    """
    from fp8cfg.models.layers import TransformerLayer

    found = {}
    for name, layer in model.named_modules():
        linears = [module for module in layer.modules() if isinstance(module, TELinear)]
        if isinstance(layer, TEDecoderLayer):
            found[name] = "te.TransformerLayer"
        elif type(layer) is TransformerLayer and linears:
            kinds = dict.fromkeys(
                f"te.{type(linear.place[0].module).__name__}" for linear in linears
            )
            found[name] = f"{', '.join(kinds)}; not te.TransformerLayer: {linears[0].obstacle}"
    return found
