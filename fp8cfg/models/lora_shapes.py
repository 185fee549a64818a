"""Projections: the linear layers that adapters stand beside, by transformers' names, computed without torch.

Hugging Face keeps q, k, v and gate, up apart, and so does PEFT: each has an adapter of its own. Here they are rows of one layer,
with as many adapters as it has projections (NeMo's CanonicalLoRA).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from fp8cfg.models.config import GATED, TransformerConfig
from fp8cfg.models.shapes import linear_layers


class Projection(NamedTuple):
    """One projection: the linear layer `module` whose outputs it is, or some of them, its `name` at Hugging Face, and its sizes."""

    module: str
    name: str
    in_features: int
    out_features: int

    @property
    def names(self) -> tuple[str, str]:
        """What it is called in full: by our layer, and by its own name in the place of that."""
        parent, _, _ = self.module.rpartition(".")
        return self.module, f"{parent}.{self.name}".lstrip(".")


@functools.cache
def projections(config: TransformerConfig) -> tuple[Projection, ...]:
    """Every projection, in the order of the forward pass; those of one layer in the order of its rows."""
    parts: dict[str, list[tuple[str, int]]] = {
        "linear_qkv": [
            ("q_proj", config.query_size),
            ("k_proj", config.key_size),
            ("v_proj", config.key_size),
        ],
        "linear_fc1": (
            [("gate_proj", config.ffn_hidden_size), ("up_proj", config.ffn_hidden_size)]
            if config.activation in GATED
            else [("up_proj", config.ffn_hidden_size)]
        ),
    }
    whole = {"linear_proj": "o_proj", "linear_fc2": "down_proj", "output_layer": "lm_head"}
    found = []
    for layer in linear_layers(config):
        leaf = layer.name.rpartition(".")[2]
        of_layer = parts.get(leaf) or [(whole[leaf], layer.out_features)]
        found += [Projection(layer.name, name, layer.in_features, size) for name, size in of_layer]
    return tuple(found)


@functools.cache
def targeted(config: TransformerConfig, patterns: tuple[str, ...]) -> tuple[Projection, ...]:
    """The projections that one of `patterns` names, in full or from one of its dots on."""
    return tuple(p for p in projections(config) if any(matches(p, pattern) for pattern in patterns))


def matches(projection: Projection, pattern: str) -> bool:
    """Whether `pattern` names that projection, or the layer that it is part of."""
    return any(
        fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}") for name in projection.names
    )


def adapter_parameters(found: Sequence[Projection], rank: int) -> int:
    """Elements of A and B of all of them."""
    return sum(rank * (p.in_features + p.out_features) for p in found)
