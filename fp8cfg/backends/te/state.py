"""Transformer Engine state as plain tensors under native's names, instead of its pickled extra state.

A linear layer has, under delayed scaling, `fp8_scale` [3] and `fp8_amax_history` [length, 3] (columns: input, weight, grad_output),
which native reads too. A weight that is held quantized is `weight`, its codes, and beside it what they are multiplied by; where
Transformer Engine keeps a second copy for dgrad, that too.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fp8cfg.numerics.formats import E2M1, E4M3
from fp8cfg.numerics.fp8_weights import INSTEAD, FP8Weight, is_arithmetic
from fp8cfg.numerics.scaling import WEIGHT, Scaling
from fp8cfg.numerics.stored_state import fit_history

SCALE, HISTORY = "fp8_scale", "fp8_amax_history"
ROWS_SCALE_INV, ROWS_AMAX = "fp8_weight_rowwise_scale_inv", "fp8_weight_rowwise_amax"
_ROWS_AND_COLUMNS = {
    "weight": "_rowwise_data",
    ROWS_SCALE_INV: "_rowwise_scale_inv",
    "fp8_weight_columnwise": "_columnwise_data",
    "fp8_weight_columnwise_scale_inv": "_columnwise_scale_inv",
}
_FIELDS = {
    "Float8Tensor": {"weight": "_data", "fp8_weight_scale_inv": "_scale_inv"},
    "Float8BlockwiseQTensor": _ROWS_AND_COLUMNS,
    "MXFP8Tensor": _ROWS_AND_COLUMNS,
    "NVFP4Tensor": (
        _ROWS_AND_COLUMNS
        | {
            ROWS_AMAX: "_amax_rowwise",
            "fp8_weight_columnwise_amax": "_amax_columnwise",
        }
    ),
}
"""Classes of Transformer Engine's quantized tensors: our name -> the attribute that holds the bytes."""


_E2M1 = torch.tensor(
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0],
    dtype=torch.float32,
)
"""The values of its sixteen codes."""


Columns = Sequence[tuple[Any, int]]
"""Columns of Transformer Engine's buffers: the state that has `scale` [n] and `amax_history` [length, n], and which column."""


def columns_of(module: Any, gemm: int) -> Columns:
    """Input, weight and grad_output of product number `gemm` of a genuine Transformer Engine module. Its buffers have three
    columns for each product forward (input, weight, output) and two backward (grad_output, grad_input).
    """
    forward, backward = module.fp8_meta["scaling_fwd"], module.fp8_meta["scaling_bwd"]
    return [(forward, 3 * gemm), (forward, 3 * gemm + 1), (backward, 2 * gemm)]


def column_tensors(columns: Columns) -> dict[str, Tensor]:
    """`fp8_scale` [n] and `fp8_amax_history` [length, n] of the columns, copies."""
    scales, histories = [s.scale[i] for s, i in columns], [s.amax_history[:, i] for s, i in columns]
    return {SCALE: torch.stack(scales), HISTORY: torch.stack(histories, 1)}


@torch.no_grad()
def load_columns(columns: Columns, saved: Mapping[str, Tensor]) -> None:
    """Restore the result of `column_tensors`, or reset everything where `saved` has no state: those are new weights. A scale of 0
    is native's for "not set yet"; a history of another length is truncated or padded. Raises ValueError for other shapes.
    """
    if not columns:
        return
    own = column_tensors(columns)
    fresh = {SCALE: torch.ones_like(own[SCALE]), HISTORY: torch.zeros_like(own[HISTORY])}
    scale, history = (
        saved.get(name, fresh[name]).to(own[name].device) for name in (SCALE, HISTORY)
    )
    if scale.shape != own[SCALE].shape or history.shape[1:] != own[HISTORY].shape[1:]:
        raise ValueError(
            f"{SCALE} {list(scale.shape)} and {HISTORY} {list(history.shape)} are of another kind"
            " of layer"
        )
    history = fit_history(history, own[HISTORY])
    for n, (state, i) in enumerate(columns):
        state.scale[i] = torch.where(scale[n] == 0, 1.0, scale[n])
        state.amax_history[:, i] = history[:, n]


def is_quantized(weight: Tensor) -> bool:
    """Whether `weight` is a tensor class of Transformer Engine, which holds codes and scales."""
    return type(weight).__name__ in _FIELDS or _base(weight) in _FIELDS


def codes_of(tensor: Any) -> Tensor | None:
    """The bytes of one of Transformer Engine's quantized tensors; None of another, and of one that has its columns alone."""
    fields = _FIELDS.get(_base(tensor))
    return getattr(tensor, fields["weight"]) if fields else None


def quantized_tensors(weight: Any) -> dict[str, Tensor]:
    """The bytes of a quantized weight by our names; E4M3 codes of full size as float8, so that `weight` reads as what it is."""
    found = {name: getattr(weight, field, None) for name, field in _FIELDS[_base(weight)].items()}
    plain = {name: t.detach() for name, t in found.items() if t is not None}
    if plain["weight"].shape == weight.shape:  # nvfp4 has two codes in a byte
        plain["weight"] = plain["weight"].view(torch.float8_e4m3fn)
    if _base(weight) == "Float8Tensor":
        plain["fp8_weight_scale_inv"] = plain["fp8_weight_scale_inv"].reshape(())
    return plain


@torch.no_grad()
def load_quantized(weight: Any, saved: Mapping[str, Tensor]) -> None:
    """Put into a quantized weight what `quantized_tensors` gave, bit for bit, or quantize a `weight` in high precision. Raises
    ValueError where neither fits."""
    own, given = quantized_tensors(weight), saved["weight"]
    forms = [{name: (t.shape, t.dtype) for name, t in tensors.items()} for tensors in (saved, own)]
    if forms[0] == forms[1]:
        for name, field in _FIELDS[_base(weight)].items():
            if name in saved:
                held = getattr(weight, field)
                held.copy_(
                    saved[name].view(torch.uint8) if held.dtype == torch.uint8 else saved[name]
                )
        if _base(weight) == "Float8Tensor":
            weight._transpose, weight._transpose_invalid = None, True  # of the codes before
    elif given.shape == weight.shape and given.dtype in (
        torch.float32,
        torch.bfloat16,
        torch.float16,
    ):
        weight.quantize_(given.to(weight.device))
    else:
        raise ValueError(
            f"a weight {given.dtype} {list(given.shape)} with {sorted(saved)} is of another scaling"
        )


def as_native(codes: Tensor, scale_inv: Tensor, amax: Tensor | None, scaling: Scaling) -> FP8Weight:
    """The `weight` that `quantized_tensors` gave, with the scales of its rows and nvfp4's amax, as native stores it. Transformer
    Engine pads scales, has those of 1x128 blocks transposed, and two E2M1 codes in a byte, the first in its low bits.
    """
    if amax is not None:
        pairs = torch.stack([codes & 15, codes >> 4], -1).flatten(1)
        codes, scale_inv = (
            _E2M1.to(E4M3.dtype).view(torch.uint8)[pairs.int()].view(E4M3.dtype),
            scale_inv.view(E4M3.dtype),
        )
        amax = amax.reshape(()).float() / (E2M1.max * E4M3.max)
    (rows, columns), tile = codes.shape, scaling.tile(WEIGHT, 1)
    assert tile is not None, "one scale for the whole is stored as native stores it"
    if scaling.layout.scale == "float32":
        scale_inv, rows = scale_inv if tile[0] > 1 else scale_inv.T, -(-rows // tile[0])
    return FP8Weight(codes, scale_inv[:rows, : -(-columns // tile[1])], global_scale_inv=amax)


def _base(weight: Tensor) -> str:
    """The name of the quantized class that `weight` is one of; a Parameter keeps the class of its tensor."""
    return next((cls.__name__ for cls in type(weight).__mro__ if cls.__name__ in _FIELDS), "")


_LAYERS: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def refuse_averages(layer: nn.Module) -> None:
    """Let arithmetic with the weight of `layer`, one of Transformer Engine's quantized tensors, and `copy_` of values in high
    precision to it raise RuntimeError. `quantize_`, `dequantize` and copies of quantized tensors go on.
    """
    _LAYERS.add(layer)
    cls: Any = type(layer._parameters["weight"])
    dispatch = cls.__torch_dispatch__.__func__
    if hasattr(dispatch, "refuses"):  # the class is one for the whole process
        return

    def refusing(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        read = (
            _tensors(args)
            if is_arithmetic(name)
            else args[:1]
            if name == "copy_" and codes_of(args[1]) is None
            else ()
        )
        if any(map(_is_held, read)):
            raise RuntimeError(
                f"{name}: this weight is stored in FP8 by Transformer Engine, and a small step"
                f" rounds back to where it began; {INSTEAD}"
            )
        return dispatch(cls, func, types, args, kwargs)

    refusing.refuses = True  # type: ignore[attr-defined]
    cls.__torch_dispatch__ = classmethod(refusing)


def _tensors(args: Any) -> Iterator[Tensor]:
    for arg in args:
        yield from (
            _tensors(arg)
            if isinstance(arg, list | tuple)
            else [arg]
            if isinstance(arg, Tensor)
            else []
        )


def _is_held(tensor: Tensor) -> bool:
    codes = codes_of(tensor)
    if codes is None:
        return False
    own = (codes_of(layer._parameters["weight"]) for layer in list(_LAYERS))
    return any(data is not None and data.data_ptr() == codes.data_ptr() for data in own)
