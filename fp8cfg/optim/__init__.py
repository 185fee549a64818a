"""Optimizers, learning-rate schedule and loss scaling.

The package itself does not import torch. The optimizers are in `fp8cfg.optim.mixed_precision` and
`fp8cfg.optim.low_bit`.
"""

from __future__ import annotations

from fp8cfg.optim.loss_scale import LossScaler
from fp8cfg.optim.lr_schedule import Schedule

__all__ = ["LossScaler", "Schedule"]
