"""Shape cache: operators on meta tensors, each run once for each of its inputs' shapes, strides, dtypes and numbers.

Most operators find out the shape of their output in Python, which is most of a fake step; the layers of a model ask the same again. An
output that shares no memory with an input is made anew, as large as the first; views are not remembered, since what they share matters.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Form = tuple[torch.Size, tuple[int, ...], torch.dtype]
MADE, WRITTEN = "made", "written"


class ShapeCache:
    """Runs operators of torch, or remembers what came of them."""

    def __init__(self) -> None:
        self._kinds: dict[Any, str | None] = {}
        self._found: dict[Any, Any] = {}

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What `func` gives for these arguments."""
        kind = (
            self._kinds.get(func)
            if func in self._kinds
            else self._kinds.setdefault(func, _kind(func))
        )
        if kind is None:
            return func(*args, **kwargs)
        try:
            key = _key(func, args, kwargs)
        except _Numbers:
            return func(*args, **kwargs)
        if key not in self._found:
            result = func(*args, **kwargs)
            remembered = (
                _outputs(result)
                if kind == MADE
                else _written(result, args)
                if _key(func, args, kwargs) == key
                else None
            )
            if remembered is not None:
                self._found[key] = remembered
            return result
        found = self._found[key]
        if kind == WRITTEN:
            return args[0] if found == "first" else None
        return _made(found) if type(found[0]) is torch.Size else tuple(map(_made, found))


def _kind(func: Any) -> str | None:
    """Whether all outputs of `func` are new tensors, or it writes into its arguments and leaves their shapes; None for others."""
    schema = func._schema
    if (
        func.namespace != "aten"
        or torch.Tag.inplace_view in func.tags
        or not any("Tensor" in str(a.type) for a in schema.arguments)
    ):
        return None
    if all(one.alias_info is None for one in (*schema.arguments, *schema.returns)):
        return MADE
    writes = all(
        one.alias_info is None or one.alias_info.is_write
        for one in (*schema.arguments, *schema.returns)
    )
    return (
        WRITTEN
        if writes and not any(a.kwarg_only and a.alias_info for a in schema.arguments)
        else None
    )


class _Numbers(Exception):
    """A tensor that has numbers, on which an output's shape can depend."""


def _key(func: Any, args: Any, kwargs: Any) -> tuple[Any, ...]:
    return func, *map(_form, args), *((name, _form(value)) for name, value in kwargs.items())


def _form(value: Any) -> Any:
    """What of an argument can make a difference."""
    if isinstance(value, Tensor):
        if not value.is_meta:
            raise _Numbers
        return value.shape, value.stride(), value.dtype
    if isinstance(value, (list, tuple)):
        return tuple(map(_form, value))
    return type(value), value  # 1, 1.0 and True are equal


def _outputs(result: Any) -> tuple[Any, ...] | None:
    """The forms of the tensor, or of the tensors, that came out."""
    if isinstance(result, Tensor) and result.is_meta:
        return _form(result)  # type: ignore[no-any-return]
    if (
        isinstance(result, (list, tuple))
        and result
        and all(isinstance(one, Tensor) and one.is_meta for one in result)
    ):
        return tuple(map(_form, result))
    return None


def _written(result: Any, args: Any) -> str | None:
    return "first" if result is args[0] else "nothing" if result is None else None


def _made(form: Form) -> Tensor:
    shape, stride, dtype = form
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta")
