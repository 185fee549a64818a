"""ZeRO-1 and ZeRO-2 (arXiv 1910.02054): optimizer state split over data-parallel ranks, each tensor whole on one owner.

    zero1   every rank has all gradients, steps its own parameters, and hands round the weights as they are stored
    zero2   a gradient is summed on the rank that owns its parameter, and there alone

Weights, moments and masters are those of the unsharded optimizer, bit for bit, given the same summed gradients.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fp8cfg.numerics import FP8Linear, fp8_linears
from fp8cfg.numerics.codecs import Stored, codec
from fp8cfg.numerics.fp8_state_dict import WEIGHT_BUFFERS
from fp8cfg.numerics.scaling import WEIGHT
from fp8cfg.numerics.weight_access import plain
from fp8cfg.optim.low_bit.columns import Columns
from fp8cfg.optim.low_bit.state import STORED
from fp8cfg.optim.low_bit.training import LowBitTraining
from fp8cfg.training.distributed.owners import owners, sharded_bytes
from fp8cfg.training.distributed.quantized_allreduce import gather_from_owners
from fp8cfg.training.distributed.world import World


def owner_of(names: Mapping[str, tuple[int, Columns, str]], shard: str, ranks: int) -> dict[str, int]:
    """The rank that owns each parameter, from its elements, its columns and its weight_grad column by name."""
    sizes = [sharded_bytes(count, columns, codec(gradient) if shard == "zero2" else None)
             for count, columns, gradient in names.values()]
    return dict(zip(names, owners(sizes, ranks), strict=True))


def attach(optimizer: LowBitTraining, model: nn.Module, owner: Mapping[str, int], shard: str, world: World) -> None:
    """Hook ZeRO into `optimizer`: each step ends by gathering all weights from their owners, and its norm is the global one."""
    layers = {layer.parameter: layer for layer in fp8_linears(model)}

    @torch.no_grad()
    def hand_round() -> None:
        entries = [(entry, owner[name]) for p, name in optimizer.names.items() for entry in _written(p, optimizer, layers.get(p))]
        gather_from_owners([entry for entry, _ in entries], [rank for _, rank in entries], world, world.traffic)
        histories = [layer.fp8_amax_history for layer in layers.values() if layer.fp8_params and layer.fp8_amax_history is not None]
        if histories:  # the amax of a weight, which its owner recorded as it wrote it
            amaxes = world.largest(torch.stack([history[0, WEIGHT] for history in histories]))
            for history, amax in zip(histories, amaxes, strict=True):
                history[0, WEIGHT] = amax

    optimizer.on_written.append(hand_round)
    if shard == "zero2":
        optimizer.sum_norms = world.sum


def _written(p: nn.Parameter, optimizer: LowBitTraining, layer: FP8Linear | None) -> list[Stored]:
    """The tensors that a step writes for `p`."""
    if p in optimizer.held:
        return [optimizer.held[p]()]
    if layer is None or not layer.fp8_params:
        return [(p.detach(),)]
    beside = (getattr(layer, name) for name in WEIGHT_BUFFERS)
    return [(plain(p),), *((t,) for t in beside if t is not None)]


@torch.no_grad()
def full_state(optimizer: LowBitTraining, owner: Mapping[str, int], world: World) -> dict[str, Tensor]:
    """The state of all parameters, on the first rank; a parameter at a time goes over the wire. All ranks call it."""
    found: dict[str, Tensor] = {}
    for group in optimizer.param_groups:
        for p in group["params"]:
            name, state = optimizer.names[p], optimizer.state[p]
            kept: dict[str, Stored] = {
                column: state[column] if optimizer.owns(p) else getattr(group["columns"], column).zeros(p.shape, p.device)
                for column in STORED if column in state["codecs"]}
            gather_from_owners(list(kept.values()), [owner[name]] * len(kept), world, world.traffic)
            if world.first:
                found |= {f"{name}.{column}{suffix}": t for column, stored in kept.items()
                          for suffix, t in zip(("", ".scale_inv"), stored, strict=False)}
    return found
