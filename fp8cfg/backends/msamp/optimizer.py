"""Adapts MS-AMP's LBAdamW and LBAdam to the training loop: loss scale, clipping, skipped steps.

    step       unscale gradients -> norm and finite check -> clip -> MS-AMP's step

MS-AMP's step also updates the scales of its layers. An FP8 gradient is unscaled and clipped through
its scale only. Its codes saturate, so only its amax shows an infinity.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fp8cfg.backends.protocol import BackendError

if TYPE_CHECKING:
    from fp8cfg.optim import LossScaler
    from fp8cfg.optim.state_dict import FP8State

MOMENTS = ("exp_avg", "exp_avg_sq")


class MSAMPOptimizer(torch.optim.Optimizer):
    """Adapts an optimizer of MS-AMP to the attributes of `MixedPrecisionOptimizer`.

    Args:
        model: The model. Its trained parameters are ScalingParameters or float32.
        build: Creates MS-AMP's optimizer from parameter groups.
        weight_decay: Weight decay of matrices. Vectors have none.
        clip_grad: Largest norm of the gradients. 0 does not clip.
        loss_scaler: The fp16 loss scale, or None.

    Raises:
        BackendError: A parameter of torch is not float32. MS-AMP would never update it.
    """

    fp8_state: FP8State | None = None
    can_defer: bool = False
    deferred: None = None

    def __init__(
        self,
        model: nn.Module,
        build: Callable[[list[dict[str, Any]]], Any],
        weight_decay: float,
        clip_grad: float,
        loss_scaler: LossScaler | None,
    ) -> None:
        self._scaling_tensor = import_module("msamp.common.tensor").ScalingTensor
        self._clip = import_module("msamp.nn").clip_grad_norm_
        self.names: dict[Any, str] = {
            p: name for name, p in model.named_parameters() if p.requires_grad
        }
        self._check_dtypes()
        matrices = [p for p in self.names if len(p.shape) > 1]
        vectors = [p for p in self.names if len(p.shape) <= 1]
        groups = []
        if matrices:
            groups.append({"params": matrices, "weight_decay": weight_decay})
        if vectors:
            groups.append({"params": vectors, "weight_decay": 0.0})
        self.inner = build(groups)
        super().__init__(self.inner.param_groups, {})
        self.clip_grad = clip_grad
        self.loss_scaler = loss_scaler
        self.grad_norm = 0.0
        self.steps = 0
        self.compiled = False
        self.masters: dict[Any, Tensor] = {}
        self.on_step: list[Callable[[], None]] = []
        self.on_skip: list[Callable[[], None]] = []
        # MS-AMP creates the state in the first step. A checkpoint needs it before.
        for p in self.names:
            self.inner.state[p] = {"step": 0, **self._initial_moments(p)}

    def _check_dtypes(self) -> None:
        """Raises BackendError for parameters that MS-AMP would ignore."""
        errors = []
        for p, name in self.names.items():
            if not isinstance(p, self._scaling_tensor) and p.dtype != torch.float32:
                errors.append(
                    f"{name} is {p.dtype}: MS-AMP never updates it, only its own parameters and"
                    " float32 ones"
                )
        if errors:
            raise BackendError("; ".join(errors))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group to MS-AMP's own list of groups, because its step reads that list."""
        self.param_groups.append(param_group)

    @torch.no_grad()
    def step(self, closure: None = None) -> bool:  # type: ignore[override]
        """Updates the parameters. Returns False if gradients are infinite: the step is skipped."""
        if closure is not None:
            raise TypeError("step takes no closure: the loss may be scaled")
        gradients = [p.grad for p in self.names if p.grad is not None]
        if self.loss_scaler is not None:
            for gradient in gradients:
                gradient.mul_(1.0 / self.loss_scaler.scale)
        norm = self._clip(list(self.names), self.clip_grad)
        # Codes of FP8 gradients saturate, so the norm can be finite when an amax is not.
        amaxes = []
        for gradient in gradients:
            if isinstance(gradient, self._scaling_tensor):
                amaxes.append(gradient.meta.amax[0])
        # One copy for all. Each single copy would wait for the device.
        values = torch.stack([norm, *amaxes]).cpu()
        self.grad_norm = values[0].item()
        is_finite = bool(values.isfinite().all())
        if self.loss_scaler is not None:
            self.loss_scaler.update(found_inf=not is_finite)
        if is_finite:
            self.inner.step()
            self.steps += 1
        for hook in self.on_step if is_finite else self.on_skip:
            hook()
        return is_finite

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Removes all gradients."""
        for p in self.names:
            p.grad = None

    def storing(self, add: bool = False) -> AbstractContextManager[None]:
        """Returns a context that does nothing, because MS-AMP always stores gradients."""
        return nullcontext()

    def write_parameters(self) -> None:
        """Does nothing, because there are no masters."""

    def state_tensors(self) -> dict[str, Tensor]:
        """Returns the moments by name, without copies.

        The names are `<parameter>.exp_avg` and `<parameter>.exp_avg_sq`. A moment with a scale also
        has `<parameter>.exp_avg.scale_inv`, and FP8 codes have the dtype float8_e4m3fn.
        """
        tensors: dict[str, Tensor] = {}
        for p, name in self.names.items():
            for moment in MOMENTS:
                state = self.inner.state[p][moment]
                if not isinstance(state, self._scaling_tensor):
                    tensors[f"{name}.{moment}"] = state
                    continue
                value = state.value
                if value.dtype == torch.uint8:
                    value = value.view(torch.float8_e4m3fn)
                tensors[f"{name}.{moment}"] = value
                tensors[f"{name}.{moment}.scale_inv"] = state.meta.scale_inv
        return tensors

    def state_json(self) -> dict[str, Any]:
        """Returns the rest of the state for JSON. The schedule saves the learning rate."""
        step_counts = {}
        for p, name in self.names.items():
            step_counts[name] = int(self.inner.state[p]["step"])
        loss_scale = None
        if self.loss_scaler is not None:
            loss_scale = self.loss_scaler.state()
        return {
            "optimizer": type(self.inner).__name__,
            "state": step_counts,
            "steps": self.steps,
            "loss_scale": loss_scale,
        }

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, Tensor], json: Mapping[str, Any]) -> None:
        """Loads the state from `state_tensors` and `state_json`.

        Raises:
            ValueError: The state belongs to another optimizer, or names, shapes or dtypes differ.
                Nothing was changed.
        """
        from fp8cfg.optim.loss_scale import check_loss_scale
        from fp8cfg.optim.state_dict import check_json, check_tensors

        own_tensors = self.state_tensors()
        check_json(json, self.state_json())
        check_loss_scale(self.loss_scaler, json["loss_scale"])
        check_tensors(tensors, own_tensors)
        for name, tensor in own_tensors.items():
            tensor.copy_(tensors[name])
        for p, name in self.names.items():
            state = self.inner.state[p]
            state["step"] = int(json["state"][name])
            for moment in MOMENTS:
                # MS-AMP reads both, and only the inverse is saved.
                if isinstance(state[moment], self._scaling_tensor):
                    meta = state[moment].meta
                    meta.scale = meta.scale_inv.reciprocal()
        self.steps = int(json["steps"])
        if self.loss_scaler is not None:
            self.loss_scaler.load_state(json["loss_scale"])

    def state_dict(self) -> dict[str, Any]:
        """Returns the state by name, not in torch's layout.

        It has `state_tensors`, `state_json`, the hyperparameters of the groups, and the FP8 state
        of a job's model.
        """
        from fp8cfg.optim.state_dict import fp8_entry

        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.param_groups]
        state = {
            "tensors": self.state_tensors(),
            "json": self.state_json(),
            "param_groups": groups,
        }
        return state | fp8_entry(self.fp8_state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the state that `state_dict` returned. Raises ValueError like `load_state`."""
        if self.fp8_state is not None and "fp8" in state_dict:
            self.fp8_state.load_state_dict(state_dict["fp8"])
        self.load_state(state_dict["tensors"], state_dict["json"])
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update(saved)

    def _initial_moments(self, p: Any) -> dict[str, Any]:
        """Returns zero moments for a parameter, in the form that MS-AMP's first step creates."""
        qtypes = import_module("msamp.common.dtype").Dtypes.dtype_to_qtype
        dtypes = (self.inner.exp_avg_dtype, self.inner.exp_avg_sq_dtype)
        moments = {}
        for moment, dtype in zip(MOMENTS, dtypes, strict=True):
            zeros: Any = torch.zeros(p.shape, dtype=torch.float32, device=p.device)
            if dtype != torch.float32:
                zeros = zeros.cast(qtypes[dtype])
            moments[moment] = zeros
        return moments
