"""Training-loop interface of MS-AMP's LBAdamW and LBAdam: loss scale, clipping, skipped steps, state by name.

    step       unscale -> norm, finite? -> clip -> MS-AMP's step, which moves the scales of its layers too

A gradient in FP8 is unscaled and clipped by its scale alone. Its bytes saturate, so that an infinity shows in its amax.
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
    """The counterpart of `MixedPrecisionOptimizer`, with the same attributes, around the optimizer of MS-AMP that `build` makes
    from parameter groups: matrices with `weight_decay`, vectors without. Raises BackendError for a parameter of torch's that is
    not float32: MS-AMP would never update it.
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
        self._scaling = import_module("msamp.common.tensor").ScalingTensor
        self._clip = import_module("msamp.nn").clip_grad_norm_
        self.names: dict[Any, str] = {
            p: name for name, p in model.named_parameters() if p.requires_grad
        }
        wrong = [
            f"{name} is {p.dtype}: MS-AMP never updates it, only its own parameters and float32 ones"
            for p, name in self.names.items()
            if not isinstance(p, self._scaling) and p.dtype != torch.float32
        ]
        if wrong:
            raise BackendError("; ".join(wrong))
        decayed = (
            [p for p in self.names if len(p.shape) > 1],
            [p for p in self.names if len(p.shape) <= 1],
        )
        groups = [
            {"params": params, "weight_decay": w}
            for params, w in zip(decayed, (weight_decay, 0.0), strict=True)
            if params
        ]
        self.inner = build(groups)
        super().__init__(self.inner.param_groups, {})
        self.clip_grad, self.loss_scaler = clip_grad, loss_scaler
        self.grad_norm, self.steps, self.compiled = 0.0, 0, False
        self.masters: dict[Any, Tensor] = {}
        self.on_step: list[Callable[[], None]] = []
        self.on_skip: list[Callable[[], None]] = []
        for p in self.names:
            self.inner.state[p] = {"step": 0, **self._fresh(p)}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to MS-AMP's own list of groups, whose values the step uses."""
        self.param_groups.append(param_group)

    @torch.no_grad()
    def step(self, closure: None = None) -> bool:  # type: ignore[override]
        """One update; False where it was skipped because gradients are not finite."""
        if closure is not None:
            raise TypeError("step takes no closure: the loss may be scaled")
        grads = [p.grad for p in self.names if p.grad is not None]
        if self.loss_scaler is not None:
            for grad in grads:
                grad.mul_(1.0 / self.loss_scaler.scale)
        norm = self._clip(list(self.names), self.clip_grad)
        amaxes = [grad.meta.amax[0] for grad in grads if isinstance(grad, self._scaling)]
        read = torch.stack(
            [norm, *amaxes]
        ).cpu()  # together: each by itself would wait for the device
        self.grad_norm, finite = read[0].item(), bool(read.isfinite().all())
        if self.loss_scaler is not None:
            self.loss_scaler.update(found_inf=not finite)
        if finite:
            self.inner.step()
            self.steps += 1
        for hook in self.on_step if finite else self.on_skip:
            hook()
        return finite

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients."""
        for p in self.names:
            p.grad = None

    def storing(self, add: bool = False) -> AbstractContextManager[None]:
        """Context manager for a backward pass; does nothing, since MS-AMP stores gradients in every one."""
        return nullcontext()

    def write_parameters(self) -> None:
        """Does nothing: there are no masters."""

    def state_tensors(self) -> dict[str, Tensor]:
        """The state itself, no copies: `<parameter>.exp_avg`, `<parameter>.exp_avg.scale_inv`, and so on for exp_avg_sq."""
        found: dict[str, Tensor] = {}
        for p, name in self.names.items():
            for moment in MOMENTS:
                kept = self.inner.state[p][moment]
                if isinstance(kept, self._scaling):
                    value = (
                        kept.value.view(torch.float8_e4m3fn)
                        if kept.value.dtype == torch.uint8
                        else kept.value
                    )
                    found |= {
                        f"{name}.{moment}": value,
                        f"{name}.{moment}.scale_inv": kept.meta.scale_inv,
                    }
                else:
                    found[f"{name}.{moment}"] = kept
        return found

    def state_json(self) -> dict[str, Any]:
        """The rest of the state, for JSON. The learning rate is a schedule's."""
        counts = {name: int(self.inner.state[p]["step"]) for p, name in self.names.items()}
        scale = None if self.loss_scaler is None else self.loss_scaler.state()
        return {
            "optimizer": type(self.inner).__name__,
            "state": counts,
            "steps": self.steps,
            "loss_scale": scale,
        }

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, Tensor], json: Mapping[str, Any]) -> None:
        """Copy in what `state_tensors` and `state_json` gave. Raises ValueError, before anything is changed, for another
        optimizer, missing and unexpected names, other shapes and dtypes."""
        from fp8cfg.optim.state_dict import check_names, check_tensors

        mine = self.state_tensors()
        if json.get("optimizer") != type(self.inner).__name__:
            raise ValueError(
                f"the saved state is of {json.get('optimizer')}, this optimizer is"
                f" {type(self.inner).__name__}"
            )
        if (json["loss_scale"] is None) != (self.loss_scaler is None):
            raise ValueError(
                "optimizer state: the loss must be scaled by both the saved run and this one, or by"
                " neither"
            )
        check_names("parameters", json["state"].keys(), set(self.names.values()))
        check_tensors(tensors, mine)
        for name, tensor in mine.items():
            tensor.copy_(tensors[name])
        for p, name in self.names.items():
            state = self.inner.state[p]
            state["step"] = int(json["state"][name])
            for kept in (
                state[moment] for moment in MOMENTS if isinstance(state[moment], self._scaling)
            ):
                kept.meta.scale = kept.meta.scale_inv.reciprocal()
        self.steps = int(json["steps"])
        if self.loss_scaler is not None:
            self.loss_scaler.load_state(json["loss_scale"])

    def state_dict(self) -> dict[str, Any]:
        """`state_tensors`, `state_json` and the hyperparameters of the groups, and the FP8 state of a job's model; by name, so
        not torch's own layout."""
        from fp8cfg.optim.state_dict import carried

        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.param_groups]
        return {
            "tensors": self.state_tensors(),
            "json": self.state_json(),
            "param_groups": groups,
        } | carried(self.fp8_state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The inverse of `state_dict`; raises ValueError as `load_state` does."""
        if self.fp8_state is not None and "fp8" in state_dict:
            self.fp8_state.load_state_dict(state_dict["fp8"])
        self.load_state(state_dict["tensors"], state_dict["json"])
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update(saved)

    def _fresh(self, p: Any) -> dict[str, Any]:
        """The moments of `p` before its first step, as MS-AMP makes them then."""
        qtypes = import_module("msamp.common.dtype").Dtypes.dtype_to_qtype
        dtypes = (self.inner.exp_avg_dtype, self.inner.exp_avg_sq_dtype)
        zeros: Any = [torch.zeros(p.shape, dtype=torch.float32, device=p.device) for _ in MOMENTS]
        return {
            moment: zero if dtype == torch.float32 else zero.cast(qtypes[dtype])
            for moment, zero, dtype in zip(MOMENTS, zeros, dtypes, strict=True)
        }
