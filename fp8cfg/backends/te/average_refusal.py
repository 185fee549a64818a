"""Refusal of weight averages (EMA) in weights that Transformer Engine holds quantized.

Its tensors dequantize for arithmetic and quantize what is written in place. A step of 1 - decay of the way is less than half a unit
of the format there: an average that torch's AveragedModel or another class keeps in them never moves, and nothing says so. The
weights of converted layers are told by their bytes, which detached tensors share; other tensors of the process stay as Transformer
Engine has them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from fp8cfg.backends.te.state import codes_of
from fp8cfg.numerics.weight_access import INSTEAD, is_arithmetic

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
