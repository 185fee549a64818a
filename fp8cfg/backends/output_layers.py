"""Output layers of a user model, by their role: the linear layers that make logits, which fp8.output_layer=false keeps out of FP8.

Nothing runs at conversion, so the role is read from what the model says of itself, the surer signs first: what transformers'
get_output_embeddings returns, the names of Megatron and transformers, a weight that an embedding shares; then the names that other
libraries give to layers outside of the stack (x-transformers to_logits, timm head, torchvision heads.head, diffusers proj_out_2);
and at last the width of the last layer after the stack, where that is the vocabulary's or the labels'.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping

from torch import nn

SURE = ("output_layer", "lm_head")
"""Names of output layers wherever they stand (Megatron's, transformers')."""
_CONTAINERS = re.compile(r"(head|heads|classifier|cls)$")
_NAMES = re.compile(
    r"(to_logits|logits|head|heads|classifier|unembed|unembedding|embed_out|score|qa_outputs"
    r"|logit_proj|final_proj|generator|proj_out(_\d+)?)$"
)
_VAGUE = re.compile(r"(out|output|fc|decoder|proj_out|projection|out_proj)$")
"""Names of output layers that other layers have too: believed where in and out differ and no layer comes after."""
_SIZES = (
    "vocab_size",
    "n_vocab",
    "num_tokens",
    "padded_vocab_size",
    "num_classes",
    "num_labels",
    "n_classes",
    "output_size",
)
_BASE = ".base_layer"
"""PEFT's name of the layer that an adapter is added to."""


def output_layers(
    model: nn.Module, linears: Mapping[str, nn.Linear], stacks: Collection[str]
) -> list[str]:
    """Names of the output layers among `linears`; `stacks` are the names of the lists of Transformer layers."""
    signs = (_asked, _sure, _tied)
    if found := {name for sign in signs for name in sign(model, linears)}:
        return [name for name in linears if name in found]
    outside = [
        name for name in linears if not any(not at or name.startswith(f"{at}.") for at in stacks)
    ]
    order = list(linears)
    inside = [order.index(name) for name in linears if name not in outside]
    after = [name for name in outside if order.index(name) > max(inside, default=-1)]
    return _named(linears, outside, after) or _wide(model, linears, after)


def _asked(model: nn.Module, linears: Mapping[str, nn.Linear]) -> Iterator[str]:
    for module in model.modules():
        if callable(ask := getattr(type(module), "get_output_embeddings", None)):
            try:
                own = ask(module)
            except (
                NotImplementedError,
                AttributeError,
            ):  # transformers raises these for a base model, which has no head
                continue
            own = getattr(own, "base_layer", own)
            yield from (name for name, m in linears.items() if m is own)


def _sure(model: nn.Module, linears: Mapping[str, nn.Linear]) -> Iterator[str]:
    return (name for name in linears if _leaf(name) in SURE)


def _tied(model: nn.Module, linears: Mapping[str, nn.Linear]) -> Iterator[str]:
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    return (name for name, m in linears.items() if id(m._parameters.get("weight")) in tables)


def _named(linears: Mapping[str, nn.Linear], outside: list[str], after: list[str]) -> list[str]:
    found = [
        name
        for name in outside
        if _NAMES.match(_leaf(name)) or any(map(_CONTAINERS.match, name.split(".")[:-1]))
    ]
    if found:  # of a head of several layers the last, and those beside it that are as wide
        return [
            name for name in found if linears[name].out_features == linears[found[-1]].out_features
        ]
    last = after[-1:]
    return [
        name
        for name in last
        if _VAGUE.match(_leaf(name)) and linears[name].in_features != linears[name].out_features
    ]


def _wide(model: nn.Module, linears: Mapping[str, nn.Linear], after: list[str]) -> list[str]:
    """The last of `after` that is as wide as the vocabulary (the largest embedding) or the labels, by the model or its config."""
    sizes = {
        max((m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)), default=0)
    }
    for module in model.modules():
        for owner in (vars(module), vars(module).get("config")):
            sizes |= {size for key in _SIZES if isinstance(size := _get(owner, key), int)}
    return [
        name
        for name in after
        if linears[name].out_features in sizes and linears[name].in_features not in sizes
    ][-1:]


def _get(owner: object, key: str) -> object:
    return owner.get(key) if isinstance(owner, Mapping) else getattr(owner, key, None)


def _leaf(name: str) -> str:
    return name.removesuffix(_BASE).rpartition(".")[2]
