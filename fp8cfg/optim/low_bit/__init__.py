"""Low-bit AdamW and Adam: weights, masters, gradients and moments in fewer than 32 bits."""

from __future__ import annotations
