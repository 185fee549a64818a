"""Probe: measures the GEMMs of all linear layers of a model during training.

    probe = OperandProbe(layers, candidates)
    with probe:
        for step in range(steps):
            with probe.step(measured=step in chosen):
                ...                                   # forward, backward, optimizer step

Hooks measure one layer at a time and keep only numbers. They change no tensor and draw no numbers
from torch's generators, so training has the same bits with and without them. Amaxes are recorded in
every step, because delayed scaling needs a history. GEMMs are measured in the first microbatch of a
chosen step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fp8cfg.numerics.gemm import DGRAD, FPROP, WGRAD
from fp8cfg.numerics.scaling import GRAD_OUTPUT, INPUT, WEIGHT
from fp8cfg.studies.operand_errors import (
    ROLES,
    AmaxSeries,
    Candidate,
    GemmError,
    make_sample,
    measure_gemm,
)


class ProbedLayer:
    """A linear layer under measurement.

    Attributes:
        module: The module. Its first argument is the input [..., in].
        matrix: Converts its weight to [out, in]. Conv1D of GPT-2 stores [in, out].
        amaxes: Amaxes of its tensors.
        seed: Seed of stochastic rounding, different for each layer.
    """

    def __init__(self, module: nn.Module, matrix: Callable[[Tensor], Tensor], seed: int) -> None:
        self.module = module
        self.matrix = matrix
        self.amaxes = AmaxSeries()
        self.seed = seed

    def weight(self) -> Tensor:
        """Returns the weight, [out, in]."""
        # Read it in each pass: FSDP2 swaps the parameter between its gathered and sharded form.
        return self.matrix(self.module.get_parameter("weight").detach())


class OperandProbe:
    """Measures GEMMs under several scalings. See the module.

    Args:
        layers: Modules by name, each with a function from its weight to [out, in].
        candidates: The scalings.

    Attributes:
        errors: By layer and GEMM, a list for each measured step with the errors under each
            candidate. Steps with infinite gradients are left out.
        overflowed: Layers and GEMMs left out in a step, with infinities or NaN in an operand.
        measured: Numbers of the measured steps, from 1.
        layers: The layers by name.
        seconds: Seconds of each step. The key tells measured steps from others.
    """

    def __init__(
        self,
        layers: Mapping[str, tuple[nn.Module, Callable[[Tensor], Tensor]]],
        candidates: Sequence[Candidate],
    ) -> None:
        self.candidates = candidates
        self.layers = {
            name: ProbedLayer(module, matrix, seed)
            for seed, (name, (module, matrix)) in enumerate(layers.items())
        }
        self.errors: dict[tuple[str, int], list[list[GemmError]]] = {}
        self.overflowed: set[tuple[str, int]] = set()
        self.measured: list[int] = []
        self.seconds: dict[bool, list[float]] = {True: [], False: []}
        self._num_steps = 0
        self._is_measuring = False
        self._values: dict[tuple[str, int], Tensor] = {}
        self._seen_weights: set[str] = set()
        self._handles: list[Any] = []

    def __enter__(self) -> Self:
        """Registers the hooks."""
        for name, layer in self.layers.items():
            hook = partial(self._forward, name)
            # Before other hooks, because a LoRA hook adds the adapter's product to the output.
            self._handles.append(
                layer.module.register_forward_hook(hook, prepend=True, with_kwargs=True)
            )
        return self

    def __exit__(self, *_: object) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @contextmanager
    def step(self, measured: bool) -> Iterator[None]:
        """Context of one optimizer step, with all of its microbatches.

        Args:
            measured: Whether to measure the GEMMs of this step.
        """
        self._num_steps += 1
        self._is_measuring = measured
        began = time.perf_counter()
        # Compiled code would not call the hooks.
        with torch.compiler.set_stance("force_eager"):
            yield
        # At the end of the step: reading waits for the device.
        if measured:
            self._read()
            self.measured.append(self._num_steps)
        for layer in self.layers.values():
            layer.amaxes.end_step()
        self._is_measuring = False
        self._seen_weights.clear()
        self.seconds[measured].append(time.perf_counter() - began)

    def _read(self) -> None:
        """Copies the measurements of this step to the host."""
        for (name, gemm), values in self._values.items():
            rows = values.tolist()
            # A loss scale that is still too large, as in the first steps of fp16. All candidates
            # have the same operands.
            if math.isnan(rows[0][0]):
                self.overflowed.add((name, gemm))
                continue
            errors = [GemmError.read(gemm, row) for row in rows]
            self.errors.setdefault((name, gemm), []).append(errors)
        self._values.clear()

    # --------------------------------------------------------------------------------------------
    # Hooks

    @torch.no_grad()
    def _forward(self, name: str, module: nn.Module, args: Any, kwargs: Any, y: Tensor) -> None:
        """Forward hook of a layer: records amaxes, measures fprop and prepares the backward hook.

        Args:
            name: Name of the layer.
            module: The layer.
            args: Positional arguments of its forward pass.
            kwargs: Keyword arguments of its forward pass.
            y: Its output, [..., out].
        """
        if not y.requires_grad:  # an evaluation, or the first pass of reentrant checkpointing
            return
        layer = self.layers[name]
        x: Tensor = (*args, *kwargs.values())[0]
        # Under autocast the products of a measurement would be rounded to bf16.
        with torch.autocast(x.device.type, enabled=False):
            tensor = x.detach().reshape(-1, x.shape[-1])
            input_amax = layer.amaxes.record(INPUT, tensor)
            # The weight is constant within a step: once is enough.
            if name not in self._seen_weights:
                self._seen_weights.add(name)
                layer.amaxes.record(WEIGHT, layer.weight())
            if self._is_measuring and (name, FPROP) not in self._values:
                tensors = {INPUT: tensor, WEIGHT: layer.weight()}
                self._measure(name, FPROP, tensors, {INPUT: input_amax})
        saved_input = None
        # In all microbatches, although wgrad is measured only in the first: activation
        # checkpointing compares the saved tensors of both forward passes. A frozen weight has no
        # wgrad.
        if self._is_measuring and module.get_parameter("weight").requires_grad:
            saved_input = save_input(x)
        y.register_hook(partial(self._backward, name, saved_input, x.requires_grad))

    @torch.no_grad()
    def _backward(
        self, name: str, saved_input: Any, has_input_grad: bool, grad_output: Tensor
    ) -> None:
        """Gradient hook of a layer's output: records its amax and measures dgrad and wgrad.

        Args:
            name: Name of the layer.
            saved_input: See `save_input`. None if wgrad is not measured.
            has_input_grad: Whether the layer has a dgrad. The first layer may have none.
            grad_output: Gradient of the output, [..., out].
        """
        layer = self.layers[name]
        with torch.autocast(grad_output.device.type, enabled=False):
            tensor = grad_output.detach().reshape(-1, grad_output.shape[-1])
            amaxes = {GRAD_OUTPUT: layer.amaxes.record(GRAD_OUTPUT, tensor)}
            if not self._is_measuring:
                return
            # Only the first microbatch: later ones find the values of this step.
            if has_input_grad and (name, DGRAD) not in self._values:
                tensors = {GRAD_OUTPUT: tensor, WEIGHT: layer.weight()}
                self._measure(name, DGRAD, tensors, amaxes)
            if saved_input is not None and (name, WGRAD) not in self._values:
                (x,) = saved_input.saved_tensors
                tensors = {GRAD_OUTPUT: tensor, INPUT: x.detach().reshape(-1, x.shape[-1])}
                self._measure(name, WGRAD, tensors, amaxes)

    def _measure(
        self, name: str, gemm: int, tensors: Mapping[int, Tensor], amaxes: Mapping[int, Tensor]
    ) -> None:
        """Measures a GEMM of this step.

        Args:
            name: Name of the layer.
            gemm: FPROP, DGRAD or WGRAD.
            tensors: Both operands by role, as stored.
            amaxes: Known amaxes by role. The others are computed.
        """
        if any(tensor.numel() == 0 for tensor in tensors.values()):
            return  # an expert without tokens
        layer = self.layers[name]
        samples = [
            make_sample(
                role,
                gemm,
                tensors[role],
                layer.amaxes,
                self.candidates,
                amaxes.get(role),
                number=len(self.measured),
                seed=layer.seed,
            )
            for role in ROLES[gemm]
        ]
        self._values[name, gemm] = measure_gemm(gemm, samples[0], samples[1], self.candidates)


class _SaveInput(torch.autograd.Function):
    """Saves a tensor like an operation that needs it in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, empty: Tensor) -> Tensor:
        """Saves `x`. `empty` requires a gradient, so that the result has a graph node."""
        ctx.save_for_backward(x)
        return empty.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        """Returns no gradient for `x`. Never called: nothing uses the result."""
        return None, grad


@torch.enable_grad()
def save_input(x: Tensor) -> Any:
    """Saves the input of a layer until its backward pass.

    The layer saves the same tensor, so this takes no memory. Unlike a Python reference, it lets
    activation checkpointing drop the tensor and compute it again.

    Args:
        x: The input.

    Returns:
        A graph node. Read the tensor from its `saved_tensors`.
    """
    # Autograd creates a node only if an input requires a gradient. `x` may require none.
    empty = torch.empty(0, dtype=torch.float32, device=x.device, requires_grad=True)
    return _SaveInput.apply(x, empty).grad_fn
