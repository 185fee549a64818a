"""Checkpoints: tensors in safetensors, the rest in JSON, under a manifest with the sha256 of every file."""

from __future__ import annotations
