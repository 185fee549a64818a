"""FP8 attention: te.DotProductAttention in the place of `core_attention`, where fp8.dot_product_attention asks for it.

Its arithmetic is cuDNN's, which no CPU has: this file has been tested for what it asks of Transformer Engine, not for numbers.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from fp8cfg.backends.any_model.module_swap import replaced
from fp8cfg.backends.gemm_plan import ATTENTION_GEMMS, Kinds, plan_attention
from fp8cfg.backends.protocol import same
from fp8cfg.backends.te.layers import (
    TEMLP,
    Engine,
    Parameters,
    TELinear,
    TENorm,
    entered,
    listened,
    own_forward,
)
from fp8cfg.backends.te.rules import attention_misfit
from fp8cfg.backends.te.state import HISTORY, SCALE, load_columns, refuse_averages
from fp8cfg.numerics.stored_state import in_stored_form
from fp8cfg.schema.fp8 import FP8

_LACKS = object()


class Maker:
    """Builder of the engines of one conversion. Weights are stored quantized where `fp8_params`, except those of `shared`, and
    stand for weights in `dtype`. `kept` are the norms that stay as they are.
    """

    def __init__(
        self,
        te: Any,
        recipe: Any,
        fp8_params: bool,
        shared: set[nn.Parameter],
        dtype: torch.dtype,
        kept: Collection[nn.Module] = (),
    ) -> None:
        self.te, self.recipe, self.fp8_params, self.shared, self.dtype, self.kept = (
            te,
            recipe,
            fp8_params,
            shared,
            dtype,
            kept,
        )

    def __call__(
        self,
        kind: str,
        linears: Sequence[TELinear],
        sizes: tuple[int, int],
        parameters: Parameters,
        bias: bool = False,
        **options: Any,
    ) -> None:
        """The engine of `linears`, of the Transformer Engine class `kind`."""
        module = self.built(kind, linears, sizes, bias=bias, **options)
        self.engine(module, linears, parameters, options, bias)

    def built(
        self, kind: str, linears: Sequence[TELinear], sizes: tuple[int, ...], **options: Any
    ) -> Any:
        """A module of the Transformer Engine class `kind` that fits the weights of `linears`; it allocates no memory of its own."""
        dtype = self.dtype if self._quantizes(linears) else linears[0].weight.dtype
        with self._init(linears):
            return getattr(self.te, kind)(*sizes, params_dtype=dtype, device="meta", **options)

    def engine(
        self,
        module: Any,
        linears: Sequence[TELinear],
        parameters: Parameters,
        options: Mapping[str, Any],
        bias: bool = False,
    ) -> None:
        """The engine of `linears` that `module` is, whose state is made now. Raises BackendError where it has other Parameters or
        other `options` than those asked for."""
        shapes = {
            name: tuple(getattr(owner, attribute).shape)
            for name, (owner, attribute) in parameters.items()
        }
        theirs = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
        same(type(module).__name__, shapes, theirs)
        check(
            module,
            {"use_bias": bias, "parallel_mode": None, "zero_centered_gamma": False, **options},
            optional=("parallel_mode", "zero_centered_gamma"),
        )
        quantized = self._quantizes(linears)
        if (
            self.recipe.delayed() and not quantized
        ):  # made now, so that a state dict always has scales and histories
            with self._init(linears):
                module.fp8_meta |= {"recipe": self.recipe, "num_gemms": len(linears)}
                module.init_fp8_meta_tensors(self.recipe)
        for n, linear in enumerate(linears):
            if quantized:
                linear.weight = _quantized(
                    linear.weight, module.quantizers["scaling_fwd"][3 * n + 1], self.dtype
                )
                refuse_averages(linear)
        Engine(module, self.recipe, linears, parameters)

    def _quantizes(self, linears: Sequence[TELinear]) -> bool:
        return self.fp8_params and not any(linear.weight in self.shared for linear in linears)

    def _init(self, linears: Sequence[TELinear]) -> Any:
        """The context in which modules of `linears` are made, or what it was called before 2.9."""
        model_init = getattr(self.te, "quantized_model_init", None) or self.te.fp8_model_init
        return model_init(enabled=self._quantizes(linears), recipe=self.recipe)


def check(module: Any, wanted: Mapping[str, Any], optional: Collection[str] = ()) -> None:
    """Raise BackendError where a field of `module`, such as "self_attention.qkv_format", is not as `wanted`. It may lack one that
    is `optional`."""
    found = {
        name: functools.reduce(lambda at, part: getattr(at, part, _LACKS), name.split("."), module)
        for name in wanted
    }
    same(
        type(module).__name__,
        {n: v for n, v in wanted.items() if n not in optional or found[n] is not _LACKS},
        {n: v for n, v in found.items() if v is not _LACKS},
    )


def _quantized(weight: nn.Parameter, quantizer: Any, dtype: torch.dtype) -> nn.Parameter:
    """`weight` as Transformer Engine's quantized Parameter, made as its `reset_parameters` does, with the values of `weight`
    rounded once."""
    quantizer.set_usage(rowwise=True, columnwise=True)
    quantizer.internal = False
    made = nn.Parameter(quantizer(weight.detach().to(dtype)), requires_grad=weight.requires_grad)
    if (recorded := getattr(quantizer, "amax", None)) is not None:
        recorded.zero_()  # of values that were rounded twice
    made.quantize_(weight.detach())  # type: ignore[attr-defined]
    return made


PRODUCTS = 3
"""As many as Transformer Engine's attention counts: it keeps three columns for each forward and two backward."""


def chosen_kernel() -> str:
    """The kernel that Transformer Engine chose last for an attention of its own: "flash", "fused" (cuDNN) or "unfused"; empty where
    none has run. It keeps the choice in a variable of a module, private in 2.20, and says it elsewhere in debug logs alone.
    """
    chosen = getattr(sys.modules.get(_CHOOSING), "_attention_backends", {})
    return next(
        (kind for kind in ("flash", "fused", "unfused") if chosen.get(f"use_{kind}_attention")), ""
    )


_CHOOSING = "transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention"


class TEAttention(nn.Module):
    """softmax(q kᵀ / √head_dim) v, causal: q [B, heads, T, head_dim], k and v [B, G, T, head_dim], out as q.

    `ran` holds the kinds of the operands of each product that ran in FP8, None for high precision. The state of delayed scaling,
    which S and dP have under current scaling too, is saved in Transformer Engine's own order of columns, forward and backward.
    """

    def __init__(self, plain: nn.Module, module: Any, recipe: Any) -> None:
        super().__init__()
        self._beside = (plain, module, recipe)
        self.ran: dict[str, Kinds] = dict.fromkeys(ATTENTION_GEMMS)
        self.train(plain.training)

    @property
    def plain(self) -> nn.Module:
        """The high-precision attention that this module replaced."""
        return self._beside[0]

    @property
    def recipe(self) -> Any:
        """Transformer Engine's recipe."""
        return self._beside[2]

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        module = self._beside[1]
        y: Tensor = module(
            *(t.transpose(1, 2).contiguous() for t in (q, k, v))
        )  # [B, T, heads * head_dim]
        self._record(module, y)
        return y.view(q.shape[0], q.shape[2], q.shape[1], q.shape[3]).transpose(1, 2)

    def _record(self, module: Any, y: Tensor) -> None:
        ran = module.fp8 and module.fp8_meta["recipe"].fp8_dpa
        if ran or (
            torch.is_grad_enabled() and self.training
        ):  # an evaluation in high precision says nothing of training
            self.ran.update(
                dict.fromkeys(ATTENTION_GEMMS[:2], _kinds(module, "fwd", "fwd") if ran else None)
            )
        if y.requires_grad:
            backward = _kinds(module, "bwd", "fwd") if ran else None
            y.register_hook(partial(_note, self.ran, backward))

    def _states(self) -> list[Any]:
        """The buffers of delayed scaling, forward and backward; none under MXFP8."""
        meta = self._beside[1].fp8_meta
        return [
            meta[key]
            for key in ("scaling_fwd", "scaling_bwd")
            if hasattr(meta.get(key), "amax_history")
        ]

    def forward_histories(self) -> list[Tensor]:
        """The amax histories that a forward pass writes to."""
        return [state.amax_history for state in self._states()[:1]]

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if in_stored_form() and (states := self._states()):
            destination[prefix + SCALE] = torch.cat([state.scale for state in states])
            destination[prefix + HISTORY] = torch.cat([state.amax_history for state in states], 1)

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *rest: Any) -> None:
        saved = {
            name: state_dict.pop(prefix + name)
            for name in (SCALE, HISTORY)
            if prefix + name in state_dict
        }
        columns = [(state, i) for state in self._states() for i in range(state.scale.numel())]
        try:
            load_columns(columns, saved)
        except ValueError as e:
            rest[-1].append(f"{prefix[:-1]}: {e}")
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def extra_repr(self) -> str:
        return f"te.{type(self._beside[1]).__name__}, {type(self.recipe).__name__}"


def misfits(model: nn.Module, fp8: FP8) -> list[str]:
    """The settings of `model` that FP8 attention does not support, a line each; those of the GPU where there is one to ask."""
    if not fp8.dot_product_attention:
        return []
    if any(getattr(module, "window", None) for module in model.modules()):
        return [
            "fp8.dot_product_attention=true: not with model.sliding_window under backend=te, whose"
            " FP8 attention has windows only on new GPUs; set backend=native"
        ]
    if not torch.cuda.is_available():
        return []
    capability = torch.cuda.get_device_capability()
    sizes = {
        int(module.head_dim)  # type: ignore[arg-type]
        for module in model.modules()
        if hasattr(module, "core_attention")
    }
    return [line for size in sorted(sizes) if (line := attention_misfit(size, capability))]


def convert(model: nn.Module, fp8: FP8, te: Any, recipe: Any) -> None:
    """Replace each `core_attention` that is to run in FP8 by Transformer Engine's."""
    found = [
        name.rpartition(".")[0]
        for name, _ in model.named_modules()
        if name.endswith(".core_attention")
    ]
    for name, planned in zip(found, plan_attention(fp8, len(found)), strict=True):
        if any(planned.gemms):
            replaced(
                model, f"{name}.core_attention", _converted(model.get_submodule(name), te, recipe)
            )


def _converted(attention: Any, te: Any, recipe: Any) -> TEAttention:
    """`attention.core_attention`, the attention of one layer of the model, as Transformer Engine's. Its state is made now, as its
    first pass would make it."""
    heads, scale = (
        attention.num_query_groups * attention.heads_per_group,
        attention.core_attention.scale,
    )
    module = te.DotProductAttention(
        heads,
        attention.head_dim,
        num_gqa_groups=attention.num_query_groups,
        attention_dropout=0.0,
        qkv_format="bshd",
        attn_mask_type="causal",
        **({} if scale is None else {"softmax_scale": scale}),
    )
    check(
        module,
        {
            "num_attention_heads": heads,
            "hidden_size_per_attention_head_k": attention.head_dim,
            "num_gqa_groups": attention.num_query_groups,
            "qkv_format": "bshd",
            "attn_mask_type": "causal",
            "unfused_attention.attention_dropout.p": 0.0,
        },
    )
    with torch.no_grad(), entered(te, True, recipe):  # no gradients: leaving it moves no scales
        module.init_fp8_metadata(num_gemms=PRODUCTS)
    return TEAttention(attention.core_attention, module, recipe)


def _kinds(module: Any, first: str, second: str) -> Kinds:
    kinds = [
        str(module.quantizers[f"scaling_{side}"][0].dtype.name)[-4:].lower()
        for side in (first, second)
    ]
    return kinds[0], kinds[1]


def _note(ran: dict[str, Kinds], kinds: Kinds, gradient: Tensor) -> None:
    ran.update(dict.fromkeys(ATTENTION_GEMMS[2:], kinds))


class TEDecoderLayer(nn.Module):
    """A Transformer layer that te.TransformerLayer computes: x [B, T, D], cos and sin float32 [T, head_dim / 2], out as x.

    Its modules are those of the layer whose place it took, fused as backend.py fuses them: they hold the Parameters.
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
        return "it has its own forward"
    heard = [name for name, module in layer.named_modules() if name and listened(module)]
    return f"{heard[0]} has hooks or its own forward" if heard else ""


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


def convert_decoder(model: nn.Module, name: str, layer: Any, make: Maker) -> None:
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
    from fp8cfg.models.transformer import TransformerLayer

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
