"""Values on the fake GPU: what eager code asks of it is computed by torch's CPU kernels, in the very memory of its CUDA tensors.

    with computed():
        job = fp8cfg.build(recipe)        # on "cuda", and its losses are losses
    compute_values()                      # or from here on, in this process

The fake GPU is asked for every operation of ATen on CUDA tensors first, so that its checks, its launches, the layout and the dtype
of its results are those of a GPU. Its values are then written by the same operation on CPU tensors that share the memory. What has
no CPU kernel, or one of other results, stands in value_attention.py, value_handlers.py and value_products.py; Triton's kernels in
triton_values.py. Memory that is allocated and not written holds NaN.

Eager code alone: torch.compile runs what it is given as it is. Outside of the block values are not computed, not even to print a
tensor, which may take forever: a test reads what it compares inside. Random numbers are other ones than a GPU's: a CPU generator
draws them, seeded anew from the state of the CUDA generator, which moves as on a GPU, so that what is drawn again is the same.
Collectives, which the fake libraries copy, move nothing above 4 MiB. What differs from a GPU are last bits: the order of sums, exp
and the like.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.nn.attention.bias import CausalBias
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from tools.fake_gpu import triton_launches, value_attention, value_handlers, value_products
from tools.fake_gpu.host_memory import in_host_memory, nothing_in, on_host, seeded, sent
from tools.fake_gpu.recorder import is_fake

HANDLERS = value_attention.HANDLERS | value_handlers.HANDLERS | value_products.HANDLERS
"""What computes an operation on CPU tensors in the place of its CPU kernel, by name and overload."""
LEFT = {
    "record_stream",
    "set_",
    "resize_",
    "resize_as_",
    "_resize_output_",
    "_pin_memory",
    "is_pinned",
    "_local_scalar_dense",
}
"""Operations that move small numbers alone, or none."""
_Op = Any  # torch has no types of operators that mypy could follow


@functools.cache
def _kind(op: _Op) -> str:
    """How `op` is computed."""
    name, returns = op._schema.name.partition("::")[2], op._schema.returns
    if op.namespace in ("fp8cfg", "fsdp"):
        return "body"
    registered = functools.partial(torch._C._dispatch_has_kernel_for_dispatch_key, op.name())
    if registered("CompositeImplicitAutograd") and not registered("CUDA"):
        return "composite"  # below autograd they come here whole, and some of what they return as a view is a copy
    views = any(r.alias_info is not None and not r.alias_info.is_write for r in returns)
    if op.namespace != "aten" or name in LEFT or views or torch.Tag.inplace_view in op.tags:
        return "left"
    if "empty" in name.split("_"):
        return "allocation"
    return (
        "of any size"
        if {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output} & set(op.tags)
        else "computed"
    )


class Computed(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode of one thread, and of autograd's threads that work for it."""

    def __torch_dispatch__(
        self, op: _Op, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
            return op(
                *args, **kwargs
            )  # torch asks this mode before its own of tensors without memory
        if any(t.__torch_dispatch__ is not Tensor.__torch_dispatch__ for t in types):
            return NotImplemented  # a subclass takes itself apart
        leaves = tree_leaves((args, kwargs))
        if not any(
            x.is_cuda if isinstance(x, Tensor) else isinstance(x, torch.device) and x.type == "cuda"
            for x in leaves
        ):
            return op(*args, **kwargs)
        kind = _kind(op)
        if kind == "body":  # is made of operations and of Triton's kernels
            with self:
                return _body(op)(*args, **kwargs)
        if kind == "composite":
            with self:
                return op.decompose(*args, **kwargs)
        if kind == "left":
            return op(*args, **kwargs)
        if kind == "allocation":
            return nothing_in(op(*args, **kwargs))
        with ExitStack() as random:
            if torch.Tag.nondeterministic_seeded in op.tags:
                random.enter_context(seeded(leaves))
            masks = op._schema.name == "aten::index" and any(
                x.dtype in (torch.bool, torch.uint8) for x in tree_leaves(args[1]) if x is not None
            )
            if kind == "of any size" and (op._schema.name != "aten::index" or masks):
                device = next(x.device for x in leaves if isinstance(x, Tensor) and x.is_cuda)
                return tree_map(
                    lambda x: sent(x, device) if isinstance(x, Tensor) else x,
                    _compute(op, args, kwargs),
                )
            return _asked_and_computed(op, args, kwargs)


def _asked_and_computed(op: _Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the fake GPU returns of `op`, with its values. What the operation writes into is computed from what it held before:
    copies and memsets are real, and would be done twice."""
    written = [t for t in tree_leaves(_written(op, args, kwargs)) if isinstance(t, Tensor)]
    before = [in_host_memory(t).clone() for t in written]
    found = op(*args, **kwargs)
    for t, held in zip(written, before, strict=True):
        if t.shape == held.shape:
            in_host_memory(t).copy_(held)
    made = _compute(op, args, kwargs)
    if len(op._schema.returns) == 1:
        return _with_values(op, 0, found, made)
    several = [
        _with_values(op, i, *pair)
        for i, pair in enumerate(zip(found or (), made or (), strict=True))
    ]
    return tuple(several) if several else found


def _compute(op: _Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given, named = tree_map(on_host, args), tree_map(on_host, kwargs)
    if "pin_memory" in named:
        named["pin_memory"] = None
    if "generator" in named:
        named["generator"] = None
    compute = HANDLERS.get(str(op)) or op
    try:
        with torch.no_grad():
            return compute(*given, **named)
    except NotImplementedError as e:
        raise NotImplementedError(
            f"{op}: no values, write a handler of it (tools/fake_gpu/value_handlers.py): {e}"
        ) from e


def _with_values(op: _Op, i: int, found: Any, made: Any) -> Any:
    """Return number `i` of `op`, `found` on the fake GPU, with the values that were `made`; None leaves what is there."""
    info = op._schema.returns[i].alias_info
    if info is not None and info.is_write:
        return found
    if isinstance(found, (list, tuple)):
        return type(found)(_with_values(op, i, *pair) for pair in zip(found, made, strict=True))
    if not isinstance(found, Tensor):
        return made
    if made is not None:
        if made.shape != found.shape or made.dtype != found.dtype:
            raise TypeError(
                f"{op}: {tuple(found.shape)} {found.dtype} on the fake GPU, {tuple(made.shape)} {made.dtype} computed"
            )
        in_host_memory(found).copy_(made)
    return found


def _written(op: _Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    of = op._schema.arguments
    names = {a.name for a in of if a.alias_info is not None and a.alias_info.is_write}
    return [x for a, x in zip(of, args, strict=False) if a.name in names] + [
        x for name, x in kwargs.items() if name in names
    ]


_FSDP: dict[str, Any] = {  # of torch 2.15: one in C++, and one that does nothing on a GPU
    "chunk_cat_mixed_dtype": lambda several, *of, out: _fsdp_collectives.chunk_cat(
        [t.to(out.dtype) for t in several], *of, out=out
    ),
    "record_grad_output_stream": lambda *_: None,
}


def _body(op: _Op) -> Any:
    """What the operator `op` of fp8cfg, or of torch's FSDP2, runs of CUDA tensors: Python."""
    if op.namespace == "fsdp":
        name = op._schema.name.partition("::")[2]
        if name in _FSDP:
            return _FSDP[name]
        return getattr(
            _fsdp_collectives, {"all_gather_copy_in": "all_gather_copy_in_cuda"}.get(name, name)
        )
    of = torch._library.custom_ops.OPDEFS[op._schema.name]
    return of._backend_fns.get("cuda", of._init_fn)


@contextmanager
def computed() -> Iterator[None]:
    """Values in this block, also in the threads that are started in it."""
    if not is_fake():
        raise RuntimeError(
            "values are computed on the fake GPU alone: source env.sh of tools/fake_gpu/setup.sh"
        )
    torch.compiler.set_stance("force_eager")
    with ExitStack() as stack:
        # A new thread has no modes, and torch leaves all of them to print a tensor.
        for owner, name in ((threading.Thread, "run"), (torch._tensor_str, "_str_intern")):
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, _in_mode(getattr(owner, name)))
        stack.callback(setattr, CausalBias, "__new__", CausalBias.__new__)
        CausalBias.__new__ = lambda cls, *_: _in_no_mode(Tensor.__new__, cls)  # type: ignore[method-assign] # it is a tensor anew
        stack.callback(torch.compiler.set_stance, "default")
        stack.enter_context(triton_launches.computed())
        stack.enter_context(Computed())  # type: ignore[no-untyped-call]
        yield


def _in_no_mode(function: Callable[..., Any], *args: Any) -> Any:
    with _disable_current_modes():
        return function(*args)


def _in_mode(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        with Computed():  # type: ignore[no-untyped-call]
            return function(*args, **kwargs)

    return called


_process = ExitStack()


def compute_values() -> None:
    """From here on, in this process, values are computed."""
    _process.enter_context(computed())
