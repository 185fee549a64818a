"""Load of a model layer by layer, so that beside it no more than one layer of a checkpoint is in memory."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import nn

from fp8cfg.training.checkpoint.loaded import Tensors


def load_by_layer(model: nn.Module, tensors: Tensors, left_out: Collection[str] = ()) -> None:
    """Load the groups model and fp8 of a checkpoint into `model`, on one rank; what is `left_out` stays as it is. Raises
    RuntimeError for missing and unexpected names and for other shapes, as torch does."""
    saved = {
        name: group
        for group in (tensors["model"], tensors.get("fp8", {}))
        for name in group
        if ":" not in name
    }
    missing, unexpected = list[str](), set(saved)
    for prefix, part in _parts(model):
        names = [
            name for name in saved if name.startswith(prefix) and (prefix or name in _own(part))
        ]
        # The dict of what is read is nobody's after the call: two layers are never there at once.
        wrong = part.load_state_dict(
            {name.removeprefix(prefix): saved[name][name] for name in names}, strict=False
        )
        missing += [prefix + name for name in wrong.missing_keys if prefix or name in _own(part)]
        unexpected -= {
            name for name in names if name.removeprefix(prefix) not in wrong.unexpected_keys
        }
    missing = [name for name in missing if name not in left_out]
    if missing or unexpected:
        problem, names = ("missing", missing) if missing else ("unexpected", sorted(unexpected))
        raise RuntimeError(f"{len(names)} tensors are {problem}, the first is {names[0]}")


def _parts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The parts of `model` that are loaded one after the other, with the beginning of their names: each layer of a list by itself,
    and the tensors that the model has beside its parts."""
    for name, child in model.named_children():
        if isinstance(child, nn.ModuleList):
            yield from ((f"{name}.{number}.", layer) for number, layer in child.named_children())
        else:
            yield f"{name}.", child
    yield "", model  # last: hooks of the model itself see all of it


def _own(module: nn.Module) -> set[str]:
    return {
        name
        for name, _ in (
            *module.named_parameters(recurse=False),
            *module.named_buffers(recurse=False),
        )
    }
