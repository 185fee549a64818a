"""Checkpoints: safetensors files, JSON state, and a manifest with the sha256 of every file."""

from __future__ import annotations
