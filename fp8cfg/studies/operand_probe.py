"""Probe: measures the operands of all linear layers of a model while it trains.

    probe = OperandProbe(layers, candidates)
    with probe:
        for step in range(steps):
            with probe.step(measured=step in chosen):
                ...                                   # forward, backward, optimizer step

Hooks measure one layer at a time and keep only numbers. They change no tensor and draw no random
numbers, so training has the same bits with and without them. Amaxes are recorded in every step, for
the scales of delayed scaling. GEMMs are measured in the first microbatch of a chosen step.
"""

from __future__ import annotations

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
        matrix: Returns its weight as [out, in].
        amaxes: Amaxes of its tensors.
        seed: Seed of stochastic rounding, another one for each layer.
    """

    def __init__(self, module: nn.Module, matrix: Callable[[Tensor], Tensor], seed: int) -> None:
        self.module = module
        self.matrix = matrix
        self.amaxes = AmaxSeries()
        self.seed = seed

    def weight(self) -> Tensor:
        """Returns the weight, [out, in]."""
        # Read anew each time: FSDP2 exchanges gathered and sharded weights.
        return self.matrix(self.module.get_parameter("weight").detach())


class OperandProbe:
    """Measures GEMMs under several scalings. See the module.

    Args:
        layers: Modules by name, with the function that returns their weight as [out, in].
        candidates: The scalings.

    Attributes:
        errors: For each layer and GEMM the errors under each candidate, one list for each measured
            step.
        measured: Numbers of the measured steps, from 1.
        layers: The layers by name.
        seconds: Time of each step, by whether it was measured.
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
        self.measured: list[int] = []
        self.seconds: dict[bool, list[float]] = {True: [], False: []}
        self._num_steps = 0
        self._is_measuring = False
        self._values: dict[tuple[str, int], Tensor] = {}
        self._seen_weights: set[str] = set()
        self._handles: list[Any] = []

    def __enter__(self) -> Self:
        for name, layer in self.layers.items():
            hook = partial(self._forward, name)
            # Before other hooks: an adapter adds its product to the output.
            self._handles.append(
                layer.module.register_forward_hook(hook, prepend=True, with_kwargs=True)
            )
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @contextmanager
    def step(self, measured: bool) -> Iterator[None]:
        """Context of one optimizer step.

        Args:
            measured: Whether to measure its GEMMs.
        """
        self._num_steps += 1
        self._is_measuring = measured
        began = time.perf_counter()
        # Compiled code would not call the hooks.
        with torch.compiler.set_stance("force_eager"):
            yield
        if measured:
            self._read()
            self.measured.append(self._num_steps)
        for layer in self.layers.values():
            layer.amaxes.end_step()
        self._is_measuring = False
        self._seen_weights.clear()
        self.seconds[measured].append(time.perf_counter() - began)

    def _read(self) -> None:
        """Waits for the device and reads the numbers of this step."""
        for (name, gemm), values in self._values.items():
            errors = [GemmError.read(gemm, row) for row in values.tolist()]
            self.errors.setdefault((name, gemm), []).append(errors)
        self._values.clear()

    # --------------------------------------------------------------------------------------------
    # Hooks

    @torch.no_grad()
    def _forward(self, name: str, module: nn.Module, args: Any, kwargs: Any, y: Tensor) -> None:
        """Forward hook of a layer."""
        if not y.requires_grad:  # an evaluation, or the first pass of reentrant checkpointing
            return
        layer = self.layers[name]
        x: Tensor = (*args, *kwargs.values())[0]
        with torch.autocast(x.device.type, enabled=False):
            tensor = x.detach().reshape(-1, x.shape[-1])
            input_amax = layer.amaxes.record(INPUT, tensor)
            if name not in self._seen_weights:
                self._seen_weights.add(name)
                layer.amaxes.record(WEIGHT, layer.weight())
            if self._is_measuring and (name, FPROP) not in self._values:
                tensors = {INPUT: tensor, WEIGHT: layer.weight()}
                self._measure(name, FPROP, tensors, {INPUT: input_amax})
        saved_input = None
        # In each microbatch: activation checkpointing must save the same tensors when it repeats
        # the forward pass.
        if self._is_measuring and module.get_parameter("weight").requires_grad:
            saved_input = save_input(x)
        y.register_hook(partial(self._backward, name, saved_input, x.requires_grad))

    @torch.no_grad()
    def _backward(
        self, name: str, saved_input: Any, has_input_grad: bool, grad_output: Tensor
    ) -> None:
        """Gradient hook of the output of a layer."""
        layer = self.layers[name]
        with torch.autocast(grad_output.device.type, enabled=False):
            tensor = grad_output.detach().reshape(-1, grad_output.shape[-1])
            amaxes = {GRAD_OUTPUT: layer.amaxes.record(GRAD_OUTPUT, tensor)}
            if not self._is_measuring:
                return
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
        """Measures a GEMM of this step. `amaxes` has those that are known."""
        if any(tensor.numel() == 0 for tensor in tensors.values()):
            return  # an expert that received no tokens
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
        ctx.save_for_backward(x)
        return empty.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, grad


@torch.enable_grad()
def save_input(x: Tensor) -> Any:
    """Saves the input of a layer until its backward pass. Read it from `.saved_tensors`.

    The layer saves the same tensor, so this takes no memory. Unlike a reference, it lets activation
    checkpointing drop the tensor and compute it again.
    """
    empty = torch.empty(0, dtype=torch.float32, device=x.device, requires_grad=True)
    return _SaveInput.apply(x, empty).grad_fn
