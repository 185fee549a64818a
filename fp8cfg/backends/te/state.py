"""Transformer Engine state as plain tensors with native's names, instead of a pickled extra state.

A linear layer under delayed scaling has two tensors, which the native backend reads too. Their
columns are input, weight and grad_output.

    fp8_scale            float32 [3]
    fp8_amax_history     float32 [length, 3]

A quantized weight has its codes in `weight`, and its scales in tensors named `fp8_weight...`. Some
classes of Transformer Engine keep a second, columnwise copy of the weight for dgrad. It is saved
too, because block scales depend on the direction.
"""

from __future__ import annotations

import math
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
"""For each class of quantized tensors: our names of its tensors, and its attributes."""

_E2M1_VALUES = torch.tensor(
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0],
    dtype=torch.float32,
)
"""Values of the sixteen E2M1 codes."""

Columns = Sequence[tuple[Any, int]]
"""Columns of Transformer Engine's state of delayed scaling.

Each one is a state object with `scale` [n] and `amax_history` [length, n], and a column index.
"""


def columns_of(module: Any, gemm: int) -> Columns:
    """Returns the columns of input, weight and grad_output of one linear layer.

    A module has three forward columns per layer (input, weight, output), and two backward columns
    (grad_output, grad_input).

    Args:
        module: The Transformer Engine module.
        gemm: Index of the layer in the module.
    """
    forward = module.fp8_meta["scaling_fwd"]
    backward = module.fp8_meta["scaling_bwd"]
    return [(forward, 3 * gemm), (forward, 3 * gemm + 1), (backward, 2 * gemm)]


def column_tensors(columns: Columns) -> dict[str, Tensor]:
    """Returns copies of n columns: `fp8_scale` [n] and `fp8_amax_history` [length, n], float32."""
    scales = [state.scale[index] for state, index in columns]
    histories = [state.amax_history[:, index] for state, index in columns]
    return {SCALE: torch.stack(scales), HISTORY: torch.stack(histories, 1)}


@torch.no_grad()
def load_columns(columns: Columns, saved: Mapping[str, Tensor]) -> None:
    """Loads the tensors of `column_tensors`. A history of another length is truncated or padded.

    Args:
        columns: Columns of a layer. Nothing happens without any.
        saved: `fp8_scale` and `fp8_amax_history`. Missing tensors mean new weights: scales become 1
            and histories 0.

    Raises:
        ValueError: The tensors have another number of columns.
    """
    if not columns:
        return
    current = column_tensors(columns)
    scale = saved.get(SCALE, torch.ones_like(current[SCALE]))
    history = saved.get(HISTORY, torch.zeros_like(current[HISTORY]))
    scale = scale.to(current[SCALE].device)
    history = history.to(current[HISTORY].device)
    if scale.shape != current[SCALE].shape or history.shape[1:] != current[HISTORY].shape[1:]:
        raise ValueError(
            f"{SCALE} {list(scale.shape)} and {HISTORY} {list(history.shape)} are of another kind"
            " of layer"
        )
    history = fit_history(history, current[HISTORY])
    for n, (state, index) in enumerate(columns):
        # The native backend saves 0 for a scale that was not set yet.
        state.scale[index] = torch.where(scale[n] == 0, 1.0, scale[n])
        state.amax_history[:, index] = history[:, n]


def is_quantized(weight: Tensor) -> bool:
    """Whether a weight is a quantized tensor of Transformer Engine, with codes and scales."""
    return _quantized_class(weight) != ""


def codes_of(tensor: Any) -> Tensor | None:
    """Returns the rowwise codes of a quantized tensor.

    Returns None for other tensors, and for quantized tensors with columnwise codes only.
    """
    fields = _FIELDS.get(_quantized_class(tensor))
    if fields is None:
        return None
    codes: Tensor | None = getattr(tensor, fields["weight"])
    return codes


def quantized_tensors(weight: Any) -> dict[str, Tensor]:
    """Returns the codes and scales of a quantized weight, by our names, without copies.

    `weight` [out, in] has the dtype float8_e4m3fn. NVFP4 has two codes per byte: uint8
    [out, in / 2].
    """
    tensors = {}
    for name, field in _FIELDS[_quantized_class(weight)].items():
        tensor = getattr(weight, field, None)
        if tensor is not None:
            tensors[name] = tensor.detach()
    if tensors["weight"].shape == weight.shape:
        tensors["weight"] = tensors["weight"].view(torch.float8_e4m3fn)
    if _quantized_class(weight) == "Float8Tensor":
        tensors["fp8_weight_scale_inv"] = tensors["fp8_weight_scale_inv"].reshape(())
    return tensors


@torch.no_grad()
def load_quantized(weight: Any, saved: Mapping[str, Tensor]) -> None:
    """Loads a quantized weight, in place.

    Args:
        weight: A quantized weight [out, in].
        saved: The tensors of `quantized_tensors`, loaded bit for bit. A `weight` [out, in] in
            float32, bfloat16 or float16 is quantized.

    Raises:
        ValueError: The tensors belong to another scaling or shape.
    """
    saved_weight = saved["weight"]
    saved_forms = {name: (tensor.shape, tensor.dtype) for name, tensor in saved.items()}
    current_forms = {}
    for name, tensor in quantized_tensors(weight).items():
        current_forms[name] = (tensor.shape, tensor.dtype)
    is_high_precision = saved_weight.dtype in (torch.float32, torch.bfloat16, torch.float16)
    if saved_forms == current_forms:
        _copy_quantized(weight, saved)
    elif saved_weight.shape == weight.shape and is_high_precision:
        weight.quantize_(saved_weight.to(weight.device))
    else:
        raise ValueError(
            f"a weight {saved_weight.dtype} {list(saved_weight.shape)} with {sorted(saved)} is of"
            " another scaling"
        )


def _copy_quantized(weight: Any, saved: Mapping[str, Tensor]) -> None:
    """Copies codes and scales into a quantized weight."""
    class_name = _quantized_class(weight)
    for name, field in _FIELDS[class_name].items():
        if name not in saved:
            continue
        source = saved[name]
        target = getattr(weight, field)
        if target.dtype == torch.uint8:
            source = source.view(torch.uint8)
        target.copy_(source)
    if class_name == "Float8Tensor":
        # The cached transpose belongs to the previous codes.
        weight._transpose = None
        weight._transpose_invalid = True


def as_native(codes: Tensor, scale_inv: Tensor, amax: Tensor | None, scaling: Scaling) -> FP8Weight:
    """Converts a saved weight of Transformer Engine to the native storage.

    Args:
        codes: `weight` from `quantized_tensors`.
        scale_inv: Its rowwise scales. Transformer Engine pads them to multiples of 4 or 128.
        amax: float32 [1], the amax of an NVFP4 weight. None for other scalings.
        scaling: Scaling of the weight. It has one scale per tile.

    Returns:
        The codes as float8 [out, in], with scales that match.
    """
    if amax is not None:
        # Two E2M1 codes per byte, the first in the low bits. Native stores E2M1 values as E4M3.
        pairs = torch.stack([codes & 15, codes >> 4], -1).flatten(1)
        e4m3_codes = _E2M1_VALUES.to(E4M3.dtype).view(torch.uint8)
        codes = e4m3_codes[pairs.int()].view(E4M3.dtype)
        scale_inv = scale_inv.view(E4M3.dtype)
        amax = amax.reshape(()).float() / (E2M1.max * E4M3.max)
    tile = scaling.tile(WEIGHT, 1)
    assert tile is not None, "one scale for the whole is stored as native stores it"
    tile_rows, tile_columns = tile
    num_rows, num_columns = codes.shape
    num_scale_rows = num_rows
    if scaling.layout.scale == "float32":
        # Block scaling: Transformer Engine stores the scales of 1x128 blocks transposed.
        if tile_rows == 1:
            scale_inv = scale_inv.T
        num_scale_rows = math.ceil(num_rows / tile_rows)
    num_scale_columns = math.ceil(num_columns / tile_columns)
    return FP8Weight(codes, scale_inv[:num_scale_rows, :num_scale_columns], global_scale_inv=amax)


def _quantized_class(tensor: Tensor) -> str:
    """Returns the quantized class that a tensor is an instance of, or "".

    Searches base classes, because a Parameter has a subclass of its tensor's class.
    """
    for cls in type(tensor).__mro__:
        if cls.__name__ in _FIELDS:
            return cls.__name__
    return ""


_LAYERS_WITH_WEIGHTS: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Layers with quantized weights that reject arithmetic."""


def refuse_averages(layer: nn.Module) -> None:
    """Makes arithmetic with the quantized weight of `layer` raise RuntimeError.

    A moving average in 8 bits would stop moving, because small changes round back. `copy_` from a
    high-precision tensor raises too. `quantize_`, `dequantize` and copies of quantized tensors
    work.
    """
    _LAYERS_WITH_WEIGHTS.add(layer)
    cls: Any = type(layer._parameters["weight"])
    dispatch = cls.__torch_dispatch__.__func__
    # The patch is on the class, for the whole process.
    if hasattr(dispatch, "refuses_averages"):
        return

    def refusing(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        operands: list[Tensor] = []
        if is_arithmetic(name):
            operands = list(_tensors(args))
        elif name == "copy_" and codes_of(args[1]) is None:
            operands = [args[0]]
        if any(_is_layer_weight(operand) for operand in operands):
            raise RuntimeError(
                f"{name}: this weight is stored in FP8 by Transformer Engine, and a small step"
                f" rounds back to where it began; {INSTEAD}"
            )
        return dispatch(cls, func, types, args, kwargs)

    refusing.refuses_averages = True  # type: ignore[attr-defined]
    cls.__torch_dispatch__ = classmethod(refusing)


def _tensors(args: Any) -> Iterator[Tensor]:
    """Yields the tensors in arguments and in nested lists and tuples."""
    for arg in args:
        if isinstance(arg, list | tuple):
            yield from _tensors(arg)
        elif isinstance(arg, Tensor):
            yield arg


def _is_layer_weight(tensor: Tensor) -> bool:
    """Whether a tensor has the memory of a layer's quantized weight.

    Operations create new wrappers around the same codes, so objects cannot be compared.
    """
    codes = codes_of(tensor)
    if codes is None:
        return False
    for layer in list(_LAYERS_WITH_WEIGHTS):
        layer_codes = codes_of(layer._parameters["weight"])
        if layer_codes is not None and layer_codes.data_ptr() == codes.data_ptr():
            return True
    return False
