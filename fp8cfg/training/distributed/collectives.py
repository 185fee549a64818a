"""Collectives (max, sum, exchange, gather) run by real processes or by ranks simulated in one, with the bytes that they send.

The steps of a rank are a generator that yields each message and receives the result of its collective. It runs over
torch.distributed and, for a list of ranks, in one process. Float8 is sent as bytes, since gloo refuses it and NCCL would add it up
in FP8.

    max         all-reduce MAX of float32
    sum         all-reduce SUM in the dtype of the data
    exchange    all-to-all: `counts[r]` bytes to rank r; back come counts[rank] bytes from every rank, in their order
    gather      all-gather: as many bytes from every rank, back in their order
    send        to one other rank, by whoever counts it
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fp8cfg.report.tables import size

Kind = Literal["gradients", "scales", "weights", "keys and values", "activations", "stage outputs"]
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name until torch >= 2.13 is required


class Message(NamedTuple):
    """What one rank hands to a collective. The data is flat, and the collective may write to it."""

    how: Literal["max", "sum", "exchange", "gather", "send"]
    data: Tensor
    kind: Kind
    counts: tuple[int, ...] = ()


Steps = Generator[Message, Tensor, None]
"""The steps of one rank. All ranks send messages of the same kinds and sizes in the same order."""


@dataclass
class Traffic:
    """Bytes that this rank has sent, and messages, since it was made or cleared.

    Bytes are those that leave a rank where every byte goes to the network once for each rank that needs it, or round a ring:
    2 (N - 1) / N of the data of an all-reduce over N ranks, N - 1 times the data of an all-gather, and of an all-to-all what is
    for others. A switch that adds up or copies sends less.
    """

    bytes: dict[Kind, int] = field(default_factory=dict)
    messages: dict[Kind, int] = field(default_factory=dict)

    def count(self, message: Message, rank: int, ranks: int) -> None:
        """Add a message that `rank` of `ranks` sends."""
        self.add(message.kind, _sent(message, rank, ranks))

    def add(self, kind: Kind, sent: int, messages: int = 1) -> None:
        """Add so many bytes of a kind, in so many messages."""
        self.bytes[kind] = self.bytes.get(kind, 0) + sent
        self.messages[kind] = self.messages.get(kind, 0) + messages

    def clear(self) -> None:
        """Start again from 0."""
        self.bytes.clear()
        self.messages.clear()

    def __str__(self) -> str:
        """As in `gradients 1.5 MiB in 2 messages, scales 128 B in 1 message`."""
        counts = {kind: f"{n} message{'' if n == 1 else 's'}" for kind, n in self.messages.items()}
        return ", ".join(f"{kind} {size(count)} in {counts[kind]}" for kind, count in self.bytes.items()) or "nothing"


def _sent(message: Message, rank: int, ranks: int) -> int:
    data = message.data.nbytes
    if message.how == "exchange":
        return data - message.counts[rank]
    if message.how == "gather":
        return (ranks - 1) * data
    if message.how == "send":
        return data
    return 2 * (ranks - 1) * data // ranks


@torch.no_grad()
def run_collectives(steps: Steps, rank: int, ranks: int, traffic: Traffic, group: dist.ProcessGroup | None = None) -> None:
    """Run this rank's side over `group`, by default the default process group, which has `ranks` of them."""
    message = _next_message(steps)
    while message is not None:
        traffic.count(message, rank, ranks)
        message = _next_message(steps, _collective(message, rank, ranks, group))


@torch.no_grad()
def simulate(sides: Sequence[Steps], traffic: Traffic | None = None) -> None:
    """Run the sides of all ranks in this process. `traffic` counts what the first rank would send."""
    messages = [_next_message(steps) for steps in sides]
    while said := [message for message in messages if message is not None]:
        if traffic is not None:
            traffic.count(said[0], 0, len(sides))
        messages = [_next_message(steps, reply) for steps, reply in zip(sides, _results(said), strict=True)]


def _next_message(steps: Steps, reply: Tensor | None = None) -> Message | None:
    """The next message, None at the end."""
    try:
        return next(steps) if reply is None else steps.send(reply)
    except StopIteration:
        return None


def _collective(message: Message, rank: int, ranks: int, group: dist.ProcessGroup | None) -> Tensor:
    data = message.data
    if message.how in ("max", "sum"):
        dist.all_reduce(data, dist.ReduceOp.MAX if message.how == "max" else dist.ReduceOp.SUM, group=group)
        return data
    if message.how == "gather":
        back = data.new_empty(ranks * data.numel())
        all_gather(back, data, group=group)
        return back
    mine = message.counts[rank]
    back = data.new_empty(ranks * mine)
    dist.all_to_all_single(back, data, [mine] * ranks, list(message.counts), group=group)
    return back


def _results(messages: Sequence[Message]) -> list[Tensor]:
    """What each rank gets back. Sums are in the order of the ranks; over more than two processes their order is the backend's."""
    how, data = messages[0].how, [message.data for message in messages]
    if how == "exchange":
        parts = [torch.split(message.data, list(message.counts)) for message in messages]
        return [torch.cat(for_one) for for_one in zip(*parts, strict=True)]
    if how == "gather":
        every = torch.cat(data)
    elif how == "max":
        every = torch.stack(data).amax(0)
    else:
        every = reduce(torch.add, data)
    return [every.clone() for _ in messages]
