"""Low-bit weights: parameters stored in fewer bits than their gradient has, and the routing of that gradient.

A copied Parameter, or another one in its place, has forgotten the dtype of its gradient, and `model.bfloat16()` would cast codes
and round scales.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fp8cfg.numerics.stored_form import StoredWeight, in_stored_form, persistent
from fp8cfg.numerics.weight_access import as_read, codes, plain

SCALE_INV = "fp8_weight_scale_inv"
"""The buffer of a layer's weight that is stored in float8, or in a codec with a scale: what its codes are multiplied by."""


class NarrowWeight(StoredWeight):
    """Base class of a layer whose weight, while `held`, is stored in float8 or in a codec and stands for one in `read_as`. `kept`
    names the buffers that the stored form of its state has; no buffer is ever cast.
    """

    kept: ClassVar[tuple[str, ...]]
    read_as: torch.dtype
    weight_grad_dtype: torch.dtype
    _gradient_of_weight: Tensor
    _detached: Tensor

    @property
    def held(self) -> bool:
        """Whether the weight has to be decoded before it is multiplied."""
        raise NotImplementedError

    @property
    def parameter(self) -> nn.Parameter:
        """The weight as it is stored."""
        parameter = self._parameters["weight"]
        assert parameter is not None
        return parameter

    @property
    def scaled(self) -> bool:
        """Whether what is stored means nothing without a scale."""
        return self._buffers.get(SCALE_INV) is not None

    @property
    def weight(self) -> Tensor:
        """The weight [out, in] as it reads; decoded anew, and not to be written to, where it is `scaled`."""
        if self._parameters.get("weight") is None:
            raise AttributeError(f"{type(self).__name__} has no weight yet")
        if not self.scaled:
            return self.parameter
        with torch.enable_grad():
            return as_read(self.decoded_weight(), self.parameter)

    def decoded_weight(self) -> Tensor:
        """The weight [out, in] in `read_as`, with a gradient for its Parameter."""
        raise NotImplementedError

    def float32_weight(self) -> Tensor:
        """The weight [out, in] as it is stored, decoded, without gradient."""
        raise NotImplementedError

    def _store(self, data: Tensor, requires_grad: bool) -> None:
        """Make `data` the stored weight; buffers are registered before."""
        self._parameters["weight"] = (
            codes(data, requires_grad) if self.scaled else nn.Parameter(data, requires_grad)
        )

    def set_weight_grad_dtype(self, dtype: torch.dtype) -> None:
        """Compute and accumulate the gradient of a weight that is held in float8 or in a codec in `dtype`. That of any other
        weight is computed in the weight's own dtype, and accumulates in its `grad_dtype`."""
        if self.held:
            self.weight_grad_dtype = dtype
            self._prepare_gradient()

    def receiver_and_stored(self) -> tuple[Tensor, Tensor]:
        """The tensor that receives the gradient of a low-bit weight from autograd, and the stored values without gradient."""
        weight = self.parameter
        if torch.compiler.is_compiling() and self._stands_in:
            if weight.requires_grad:
                return self._gradient_of_weight, self._detached
            return (
                self._detached.new_zeros((), dtype=self.weight_grad_dtype).expand(weight.shape),
                self._detached,
            )
        return weight, plain(weight)

    @property
    def _stands_in(self) -> bool:
        """Whether compiled code gets other tensors in the place of the Parameter: of a dtype that is not its gradient's, or codes,
        whose class AOTAutograd does not take."""
        return self.scaled or self.parameter.dtype.itemsize < self.weight_grad_dtype.itemsize

    def _prepare_gradient(self) -> None:
        """Lets a weight that is stored in fewer bits have a wide gradient. Eager autograd only has to be told the dtype. Compiled
        code ignores it and rounds the gradient to the dtype of the weight in between, so there a stand-in of the same shape, of
        one element, receives the gradient and hands it over. Seen with torch 2.13; can go with the first torch whose AOTAutograd
        respects the dtype.
        """
        if not self.held:
            return
        weight = self.parameter
        # made here: what compiled code detaches itself gets a gradient of nothing, and hooks run
        if self._stands_in:
            self._detached = plain(weight)
        if not weight.requires_grad:
            return
        if weight.grad_dtype != self.weight_grad_dtype:
            weight.grad_dtype = self.weight_grad_dtype
        if weight.dtype == self.weight_grad_dtype and not self.scaled:
            return
        receiver = (
            torch.zeros((), dtype=self.weight_grad_dtype, device=weight.device)
            .expand(weight.shape)
            .requires_grad_()
        )

        def hand_over(receiver: Tensor) -> None:
            assert receiver.grad is not None, "the hook runs after accumulation"
            new, receiver.grad = receiver.grad.to(weight.grad_dtype), None
            weight.grad = new if weight.grad is None else weight.grad.add_(new)
            for hook in (
                weight._post_accumulate_grad_hooks or {}
            ).values():  # which autograd would have called
                hook(weight)

        receiver.register_post_accumulate_grad_hook(hand_over)
        self._gradient_of_weight = receiver

    def _remember_grad_dtype(self) -> None:
        if self.held and self.parameter.grad_dtype is not None:
            self.weight_grad_dtype = self.parameter.grad_dtype

    def __getstate__(self) -> dict[str, Any]:
        self._remember_grad_dtype()
        return {
            name: value
            for name, value in self.__dict__.items()
            if name not in ("_gradient_of_weight", "_detached")
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._prepare_gradient()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Moves the stored tensors between devices and never casts them."""
        self._remember_grad_dtype()
        fixed = set(map(id, self._buffers.values()))
        if self.held:
            fixed |= {id(self.parameter), id(self.parameter.grad)}

        def move(t: Tensor) -> Tensor:
            if id(t) not in fixed:
                return fn(t)
            new = fn(plain(t))
            return new if new.dtype == t.dtype else plain(t).to(new.device)

        super()._apply(move, recurse)
        self._prepare_gradient()
        return self

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        with persistent(self, self.kept, in_stored_form()):
            super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.scaled and in_stored_form():
            destination[prefix + "weight"] = self.parameter if keep_vars else plain(self.parameter)
        elif self.scaled:
            destination[prefix + "weight"] = self.saved(plain(self.decoded_weight()))

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *rest: Any) -> None:
        self._remember_grad_dtype()
        with persistent(self, [name for name in self.kept if prefix + name in state_dict]):
            super()._load_from_state_dict(state_dict, prefix, *rest)
        if (
            self.scaled and type(self.parameter) is nn.Parameter
        ):  # load_state_dict(assign=True) brings a new Parameter
            self._store(self.parameter.data, self.parameter.requires_grad)
        self._prepare_gradient()
