"""Optimizers, learning-rate schedule and loss scaling.

The package itself loads no torch. The optimizer is in `fp8cfg.optim.mixed_precision`, its parameter groups in
`fp8cfg.optim.mixed_precision`.
"""

from __future__ import annotations

from fp8cfg.optim.loss_scale import LossScaler
from fp8cfg.optim.lr_schedule import Schedule

__all__ = ["LossScaler", "Schedule"]
