"""Batches of a training run, addressed by one integer.

The cursor counts samples since the start of the run. Sample k belongs to epoch k // n and is sample permute(k % n) of
that epoch, where n is how many there are. Nothing else is state: any batch can be asked for at any time. (What has no length
is a stream: stream.py.)

Optimizer step s takes samples s*G to (s+1)*G, G the global batch size. Ranks share them out in contiguous pieces and each
rank cuts its piece into contiguous micro-batches, so the samples of a step, and their order when the pieces are put
together again, do not depend on how many ranks and micro-batches there are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fp8cfg.data.files import DataError
from fp8cfg.data.samples import IGNORED, Drawn, Origin, Samples, positive

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, eq=False)
class Batches:
    """The training samples of a run, in their order.

    tokenizer_sha256: of the file that made the tokens, where there was one. remark: the `data:` line of a run, with what was
    cut.
    """

    samples: Drawn
    seed: int
    global_batch_size: int
    tokenizer_sha256: str | None = None
    remark: str = ""

    def __post_init__(self) -> None:
        positive(global_batch_size=self.global_batch_size)

    @property
    def sha256(self) -> str:
        """The fingerprint of the samples."""
        return self.samples.sha256

    def batch(
        self, step: int, rank: int = 0, world: int = 1, micro: int = 0, num_micro: int = 1
    ) -> tuple[torch.Tensor, ...]:
        """Micro-batch `micro` of optimizer step `step` on one rank.

        Returns (tokens, targets), int64 [global_batch_size / (world * num_micro), seq_length]; targets are the tokens
        that follow. Where samples tell documents apart a third are their numbers, int32. DataError when the global batch does not
        divide, or a token is outside of the vocabulary.
        """
        pieces = world * num_micro
        if step < 0 or not 0 <= rank < world or not 0 <= micro < num_micro:
            raise DataError(
                f"no batch for step={step}, rank {rank} of {world}, micro-batch {micro} of"
                f" {num_micro}"
            )
        _divides(
            "global_batch_size",
            self.global_batch_size,
            pieces,
            f"{world} ranks x {num_micro} micro-batches",
        )
        size = self.global_batch_size // pieces
        return self.rows(step * self.global_batch_size + (rank * num_micro + micro) * size, size)

    def rows(self, cursor: int, count: int) -> tuple[torch.Tensor, ...]:
        """Samples cursor to cursor + count of the run, as `batch` returns them."""
        if cursor < 0 or count < 1:
            raise DataError(f"no {count} samples from cursor={cursor}")
        return _tensors(
            self.samples, self.samples.drawn(np.arange(cursor, cursor + count), self.seed)
        )

    def origins(self, step: int) -> list[Origin]:
        """Where the samples of optimizer step `step` begin, with their numbers since the start of the run as `sample`."""
        numbers = np.arange(step * self.global_batch_size, (step + 1) * self.global_batch_size)
        origins = self.samples.origins(self.samples.drawn(numbers, self.seed))
        return [
            {"sample": number, **origin}
            for number, origin in zip(numbers.tolist(), origins, strict=True)
        ]

    def target_count(self, step: int) -> int:
        """Targets of the whole global batch of optimizer step `step` that a loss is taken of."""
        first = step * self.global_batch_size
        places = self.samples.drawn(np.arange(first, first + self.global_batch_size), self.seed)
        return int((self.samples.read(places)[1] != IGNORED).sum())

    def state(self, step: int) -> dict[str, Any]:
        """What a checkpoint keeps after `step` optimizer steps; plain JSON values."""
        return {"samples_seen": step * self.global_batch_size, **self._identity()}

    def _identity(self) -> dict[str, Any]:
        """What does not change while a run goes on."""
        return {
            "seed": self.seed,
            "seq_length": self.samples.seq_length,
            "corpus_sha256": self.sha256,
            "tokenizer_sha256": self.tokenizer_sha256,
        }

    def resume(self, state: Mapping[str, Any]) -> int:
        """The step to go on with. DataError when the state belongs to other data, or falls inside a global batch."""
        for key, mine in self._identity().items():
            if state.get(key) != mine:
                raise DataError(
                    f"cannot resume: {key} is {mine!r}, the checkpoint has {state.get(key)!r};"
                    " restore it"
                )
        seen = state.get("samples_seen")
        if type(seen) is not int or seen < 0:
            raise DataError(
                f"cannot resume: samples_seen={seen!r} in the checkpoint is no count of samples"
            )
        step, inside = divmod(seen, self.global_batch_size)
        if inside:
            raise DataError(
                f"cannot resume: global_batch_size={self.global_batch_size} does not divide the"
                f" {seen} samples seen; use the one of the checkpoint or a divisor of it"
            )
        return step


def eval_batches(
    samples: Samples, batch_size: int, limit: int, rank: int = 0, world: int = 1
) -> Iterator[tuple[torch.Tensor, ...]]:
    """At most `limit` batches of samples that do not overlap, spread evenly over all of them; always the same ones.

    batch_size counts the samples of a batch on all ranks together; each gets its contiguous share,
    int64 [batch_size / world, seq_length]. Every batch is full, so every rank takes equally many steps, shapes never
    change, and the samples do not depend on `world`. DataError, before the first batch, when not one batch is there.
    """
    positive(batch_size=batch_size, limit=limit)
    if not 0 <= rank < world:
        raise DataError(f"no batches for rank {rank} of {world}")
    _divides("batch_size", batch_size, world, f"{world} ranks")
    available = len(samples)
    if available < batch_size:
        fitting = available // world * world
        smaller = f"trainer.global_batch_size={fitting}, " if fitting else ""
        raise DataError(
            f"the validation part has {available} samples of seq_length={samples.seq_length}, less"
            f" than one batch of {batch_size}: write {smaller}trainer.val_check_interval=0 to train"
            " without validation, a larger data.validation_fraction, or a smaller model.seq_length"
        )
    total = min(limit, available // batch_size) * batch_size
    places = samples.spread(total)
    places = places.reshape(-1, world, batch_size // world, *places.shape[1:])
    return (_tensors(samples, mine) for mine in places[:, rank])


def _tensors(samples: Drawn, places: np.ndarray) -> tuple[torch.Tensor, ...]:
    import torch

    return tuple(torch.from_numpy(part).contiguous() for part in samples.read(places))


def _divides(name: str, value: int, by: int, what: str) -> None:
    if value % by:
        raise DataError(
            f"{name}={value} is not divisible by {by} ({what}): use {max(by, value // by * by)}"
            " instead"
        )
