"""Traffic: the bytes and messages that a rank has sent.

Bytes are those that leave a rank where every byte goes to the network once for each rank that needs it, or round a ring:
2 (N - 1) / N of the data of an all-reduce over N ranks, N - 1 times the data of an all-gather, and of an all-to-all what is for
others. A switch that adds up or copies sends less.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from fp8cfg.schema.tables import size

Kind = Literal["gradients", "scales", "weights", "keys and values", "activations", "stage outputs"]


@dataclass
class Traffic:
    """Bytes that this rank has sent, and messages, since it was made or cleared."""

    bytes: dict[Kind, int] = field(default_factory=dict)
    messages: dict[Kind, int] = field(default_factory=dict)

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
        return (
            ", ".join(
                f"{kind} {size(count)} in {counts[kind]}" for kind, count in self.bytes.items()
            )
            or "nothing"
        )


def on_ring(data: Tensor, ranks: int) -> int:
    """The bytes that one of `ranks` sends in an all-reduce of `data`."""
    return 2 * (ranks - 1) * data.nbytes // ranks
