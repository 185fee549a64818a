"""Checks of every module in a forward and backward pass: which tensor is the first bad one?

A tensor is bad if it has NaN or infinite values, or if FP8 cuts off its largest values. Hooks look
at each module in the order of execution:

    before a module     its inputs, then its parameters
    after a module      its outputs
    backward pass       the gradients of its outputs, then of its inputs

Each check waits for the device. So the checks are for a pass of their own, not for training.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fp8cfg.numerics import FP8Linear
from fp8cfg.numerics.amax import compute_amax_or_nan
from fp8cfg.numerics.fp8_weights import FP8Weight, GatheredWeight, unpack
from fp8cfg.numerics.gemm import DGRAD, FPROP, WGRAD
from fp8cfg.numerics.linear_operands import CONTRACTED
from fp8cfg.numerics.scaling import GRAD_OUTPUT, INPUT, WEIGHT
from fp8cfg.numerics.statistics import measure_tensor
from fp8cfg.numerics.weight_storage import NarrowWeight
from fp8cfg.optim.low_bit.columns import local

FORWARD, BACKWARD, GRADIENTS, SUMMED = range(4)
PHASES = ("forward", "backward", "gradients", "summed gradients")
MAX_LISTED = 100
"""Number of bad tensors that are listed. One NaN usually spreads to all later tensors."""


@dataclass(frozen=True)
class BadTensor:
    """A tensor with values that are not finite, or that do not fit its FP8 format.

    Attributes:
        module: Name of the module. "" is the model itself.
        tensor: input, output, grad_input, grad_output, loss, a parameter such as weight, or its
            gradient such as weight_grad. A number tells further inputs and outputs apart.
        phase: Index in PHASES.
        microbatch: Microbatch of the step, counted from 1. 0 for summed gradients.
        rank: The rank that found it.
        order: When it was found on this rank.
        shape: Shape of the tensor.
        dtype: Dtype of the tensor.
        nan: Number of NaN values.
        infinite: Number of infinite values.
        largest: The largest finite magnitude.
        format: FP8 format that the layer quantizes it to, "" without FP8.
        scale_min: The smallest FP8 scale, None if it has no known scale.
        scale_max: The largest FP8 scale. Equal to `scale_min` if one scale covers the tensor.
        range_used: The largest magnitude, as a multiple of what the scale can represent. None
            without a single scale.
    """

    module: str
    tensor: str
    phase: int
    microbatch: int
    rank: int
    order: int
    shape: list[int]
    dtype: str
    nan: int
    infinite: int
    largest: float
    format: str = ""
    scale_min: float | None = None
    scale_max: float | None = None
    range_used: float | None = None

    @property
    def is_finite(self) -> bool:
        """Whether all values are finite. The tensor is out of range then."""
        return not self.nan and not self.infinite

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


class ModuleChecks:
    """Finds bad tensors in the passes of a model.

    Args:
        model: The model, or the layers of this rank.
        rank: The rank.
        counts_calls: Whether the number of a module's calls is the number of the microbatch.
            Pipeline stages run microbatches in an order of their own. Otherwise set `microbatch`
            before each one.

    Attributes:
        microbatch: The current microbatch, counted from 1.
        bad: Bad tensors in the order in which they were found, at most MAX_LISTED of each kind.
        num_bad: Number of all bad tensors.
    """

    def __init__(self, model: nn.Module, rank: int, counts_calls: bool) -> None:
        self.microbatch = 1
        self.bad: list[BadTensor] = []
        self.num_bad = 0
        self._model = model
        self._rank = rank
        self._counts_calls = counts_calls
        self._calls = Counter[str]()
        self._order = 0
        self._listed = Counter[bool]()
        self._last_gradient: tuple[int, int] | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context manager for the passes to check."""
        handles = []
        for name, module in self._model.named_modules():
            pre_hook = partial(self._check_inputs, name)
            hook = partial(self._check_outputs, name)
            handles.append(module.register_forward_pre_hook(pre_hook, with_kwargs=True))
            handles.append(module.register_forward_hook(hook, with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def check_gradients(self, phase: int = GRADIENTS) -> None:
        """Checks the gradients of all parameters, the last layer first.

        Args:
            phase: GRADIENTS after a microbatch, SUMMED after the sum over the ranks.
        """
        microbatch = self.microbatch if phase == GRADIENTS else 0
        for name, parameter in reversed(list(self._model.named_parameters())):
            if parameter.grad is not None:
                module, _, leaf = name.rpartition(".")
                self._check(module, f"{leaf}_grad", phase, microbatch, parameter.grad)

    def check_loss(self, loss: Tensor) -> None:
        """Checks the loss of the current microbatch."""
        self._check("", "loss", FORWARD, self.microbatch, loss)

    # --------------------------------------------------------------------------------------------
    # Hooks

    def _check_inputs(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Forward pre-hook."""
        microbatch = self._microbatch_of_call(name)
        inputs = _float_tensors((args, kwargs))
        if not _in_backward():
            for number, t in enumerate(inputs):
                role = None
                if number == 0:
                    role = INPUT  # a linear layer quantizes its first input only
                tensor = _numbered_name("input", number)
                self._check(name, tensor, FORWARD, microbatch, t, module, role)
            for leaf, value in _parameter_values(module):
                role = None
                if leaf == "weight":
                    role = WEIGHT
                self._check(name, leaf, FORWARD, microbatch, value, module, role)
        for number, t in enumerate(inputs):
            if t.requires_grad:
                tensor = _numbered_name("grad_input", number)
                t.register_hook(partial(self._check_gradient, name, tensor, microbatch, None))

    def _check_outputs(
        self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any
    ) -> None:
        """Forward hook."""
        microbatch = self._microbatch_of_call(name)
        for number, t in enumerate(_float_tensors(output)):
            if not _in_backward():
                tensor = _numbered_name("output", number)
                self._check(name, tensor, FORWARD, microbatch, t)
            if t.requires_grad:
                tensor = _numbered_name("grad_output", number)
                t.register_hook(partial(self._check_gradient, name, tensor, microbatch, module))
        if not _in_backward():
            self._calls[name] += 1

    def _check_gradient(
        self, name: str, tensor: str, microbatch: int, module: nn.Module | None, gradient: Tensor
    ) -> None:
        """Hook of the gradient of an input or output."""
        role = None
        if module is not None:
            role = GRAD_OUTPUT
        count = len(self.bad)
        self._check(name, tensor, BACKWARD, microbatch, gradient, module, role)
        if len(self.bad) == count:
            self._last_gradient = None
            return
        # The output of one module is the input of the next one. The hooks of both run one after the
        # other. The module that computed the gradient is the second one, in its backward pass.
        address = gradient.data_ptr()
        is_same = self._last_gradient == (address, self._order - 1)
        if is_same and tensor.startswith("grad_input") and self.bad[-2].phase == BACKWARD:
            previous = self.bad.pop(-2)
            self.bad[-1] = replace(self.bad[-1], order=previous.order)
            self.num_bad -= 1
            self._listed[previous.is_finite] -= 1
        self._last_gradient = (address, self._order)

    def _microbatch_of_call(self, name: str) -> int:
        """Returns the microbatch of the current call of a module."""
        if not self._counts_calls:
            return self.microbatch
        return self._calls[name] + 1

    # --------------------------------------------------------------------------------------------
    # One tensor

    @torch.no_grad()
    def _check(
        self,
        name: str,
        tensor: str,
        phase: int,
        microbatch: int,
        t: Tensor,
        module: nn.Module | None = None,
        role: int | None = None,
    ) -> None:
        """Records `t` if it is bad.

        Args:
            name: Name of the module.
            tensor: Name of the tensor.
            phase: Index in PHASES.
            microbatch: The microbatch.
            t: The tensor.
            module: The module, if it quantizes the tensor.
            role: Role of the tensor in an FP8 layer.
        """
        self._order += 1
        values = _reducible(local(t))
        amax = compute_amax_or_nan(values).item()
        layer = None
        if isinstance(module, FP8Linear) and module.region.applies():
            layer = module
        is_finite = math.isfinite(amax)
        range_used = None
        if layer is not None and role is not None and is_finite:
            range_used = _range_used(layer, role, amax)
        if is_finite and (range_used is None or range_used <= 1):
            return
        bad_tensor = BadTensor(
            name,
            tensor,
            phase,
            microbatch,
            self._rank,
            self._order,
            list(values.shape),
            str(t.dtype).removeprefix("torch."),
            nan=0,
            infinite=0,
            largest=amax,
            range_used=range_used,
        )
        if not is_finite:
            finite = values.isfinite()
            nan = int(values.isnan().sum())
            infinite = values.numel() - int(finite.sum()) - nan
            # Attention masks have -inf on purpose.
            is_mask = phase == FORWARD and not t.requires_grad and not values.isposinf().any()
            if is_mask and not nan:
                return
            largest = compute_amax_or_nan(values.where(finite, 0.0)).item()
            bad_tensor = replace(bad_tensor, nan=nan, infinite=infinite, largest=largest)
        if layer is not None and role is not None:
            bad_tensor = _with_scale(bad_tensor, layer, role, values)
        self.num_bad += 1
        if self._listed[bad_tensor.is_finite] < MAX_LISTED:
            self._listed[bad_tensor.is_finite] += 1
            self.bad.append(bad_tensor)


def _range_used(layer: FP8Linear, role: int, amax: float) -> float | None:
    """Returns `amax` as a multiple of what the delayed scale of a tensor can represent.

    None if the tensor fits in any case: other scalings, and a first step, scale it by its own amax.
    """
    is_stored = role == WEIGHT and layer.is_encoded
    if layer.fp8_scale is None or is_stored or not _is_quantized(layer, role):
        return None
    scale = layer.fp8_scale[role].item()
    if scale == 0:
        return None  # before the first update: the tensor's own amax scales it
    return amax * scale / layer.scaling.format_of(role).reach or None


def _is_quantized(layer: FP8Linear, role: int) -> bool:
    """Whether a GEMM reads the tensors of `role` in FP8."""
    return any(
        (role, gemm) in CONTRACTED and not layer.high_precision[gemm]
        for gemm in (FPROP, DGRAD, WGRAD)
    )


def _with_scale(tensor: BadTensor, layer: FP8Linear, role: int, values: Tensor) -> BadTensor:
    """Adds format and scale of a tensor. Returns `tensor` if no GEMM reads the tensor in FP8."""
    stored = layer.weight_storage
    if role == WEIGHT and isinstance(stored, FP8Weight):
        # The scale that the weight was stored with. The scale of the next step may differ.
        scales = unpack(stored.scale_inv).reciprocal()
        scales = scales[scales.isfinite()]  # MXFP8 and NVFP4 have NaN scales for tiles with NaN
        name = layer.scaling.format_of(role).name
        if not scales.numel():
            return replace(tensor, format=name)
        scale_min, scale_max = scales.min().item(), scales.max().item()
        return replace(tensor, format=name, scale_min=scale_min, scale_max=scale_max)
    statistics = measure_tensor(tensor.module, layer, role, values)
    if statistics is None:
        return tensor
    smallest, largest = statistics.scale_min, statistics.scale_max
    if smallest is None or largest is None or not math.isfinite(smallest + largest):
        return replace(tensor, format=statistics.format)
    return replace(tensor, format=statistics.format, scale_min=smallest, scale_max=largest)


def _in_backward() -> bool:
    """Whether a backward pass runs. Activation checkpointing repeats forward passes in it."""
    return torch._C._current_graph_task_id() != -1


def _float_tensors(tree: Any) -> list[Tensor]:
    """Returns the float tensors in nested tuples, lists and dicts."""
    return [t for t in tree_leaves(tree) if isinstance(t, Tensor) and t.is_floating_point()]


def _numbered_name(name: str, number: int) -> str:
    """Returns "input", "input 2", "input 3", ..."""
    if number == 0:
        return name
    return f"{name} {number + 1}"


def _parameter_values(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields the parameters of a module by name, decoded if they are stored in FP8 or a codec."""
    for name, parameter in module.named_parameters(recurse=False):
        if isinstance(module, NarrowWeight) and name == "weight" and module.is_encoded:
            yield name, module.float32_weight()
        elif isinstance(parameter, GatheredWeight):
            yield name, parameter.weight_storage(parameter.codec).values(torch.float32)
        elif parameter.is_floating_point():
            yield name, parameter


def _reducible(t: Tensor) -> Tensor:
    """Returns an ordinary tensor that torch can reduce. float8 becomes float32."""
    if t.dtype.itemsize == 1:
        return t.float()
    return t
