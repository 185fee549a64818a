"""Batches of a training run, addressed by step number.

Samples are numbered from the start of the run. With n samples per epoch, sample k is the sample
permute(k % n) of epoch k // n. There is no other state, so any batch can be read at any time. For
data without a length see stream.py.

Optimizer step s uses the samples s*G to (s+1)*G for a global batch size G. Each rank takes a
contiguous range and splits it into contiguous microbatches. So the samples of a step and their
order do not depend on the number of ranks and microbatches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fp8cfg.data.files import DataError
from fp8cfg.data.samples import IGNORED, Origin, Samples, SampleSource, positive

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, eq=False)
class Batches:
    """Training samples of a run, in order.

    Attributes:
        samples: The samples.
        seed: Seed of the order.
        global_batch_size: Samples per optimizer step on all ranks.
        tokenizer_sha256: Fingerprint of the tokenizer's file. None for bytes and token files.
        remark: The `data:` line of the run's header.
    """

    samples: SampleSource
    seed: int
    global_batch_size: int
    tokenizer_sha256: str | None = None
    remark: str = ""

    def __post_init__(self) -> None:
        positive(global_batch_size=self.global_batch_size)

    @property
    def sha256(self) -> str:
        """Fingerprint of the samples."""
        return self.samples.sha256

    def batch(
        self, step: int, rank: int = 0, world: int = 1, micro: int = 0, num_micro: int = 1
    ) -> tuple[torch.Tensor, ...]:
        """Returns one microbatch.

        Args:
            step: Optimizer step, from 0.
            rank: Data-parallel rank.
            world: Number of data-parallel ranks.
            micro: Number of the microbatch in the step, from 0.
            num_micro: Microbatches per step and rank.

        Returns:
            Tokens and targets, int64 [global_batch_size / (world * num_micro), seq_length]. Targets
            are the next tokens. If documents are separated, also their numbers, int32, same shape.

        Raises:
            DataError: The global batch does not divide, or a token is outside the vocabulary.
        """
        pieces = world * num_micro
        if step < 0 or not 0 <= rank < world or not 0 <= micro < num_micro:
            raise DataError(
                f"no batch for step={step}, rank {rank} of {world}, micro-batch {micro} of"
                f" {num_micro}"
            )
        _check_divisible(
            "global_batch_size",
            self.global_batch_size,
            pieces,
            f"{world} ranks x {num_micro} micro-batches",
        )
        size = self.global_batch_size // pieces
        # Rank-major order: microbatches of one rank are neighbors. See the module's docstring.
        piece = rank * num_micro + micro
        return self.rows(step * self.global_batch_size + piece * size, size)

    def rows(self, cursor: int, count: int) -> tuple[torch.Tensor, ...]:
        """Returns consecutive samples of the run.

        Args:
            cursor: Number of the first sample since the start of the run.
            count: Number of samples.

        Returns:
            As `batch`, with `count` rows.
        """
        if cursor < 0 or count < 1:
            raise DataError(f"no {count} samples from cursor={cursor}")
        places = self.samples.draw(np.arange(cursor, cursor + count), self.seed)
        return _tensors(self.samples, places)

    def origins(self, step: int) -> list[Origin]:
        """Returns the origin of each sample of a step, to find bad documents.

        Args:
            step: Optimizer step, from 0.

        Returns:
            One dictionary per sample. "sample" is its number since the start of the run.
        """
        numbers = np.arange(step * self.global_batch_size, (step + 1) * self.global_batch_size)
        origins = self.samples.origins(self.samples.draw(numbers, self.seed))
        return [
            {"sample": number, **origin}
            for number, origin in zip(numbers.tolist(), origins, strict=True)
        ]

    def target_count(self, step: int) -> int:
        """Returns the number of targets with a loss in the global batch of a step."""
        # Every rank reads the whole batch, so no collective is needed.
        first = step * self.global_batch_size
        places = self.samples.draw(np.arange(first, first + self.global_batch_size), self.seed)
        return int((self.samples.read(places)[1] != IGNORED).sum())

    def state(self, step: int) -> dict[str, Any]:
        """Returns the state for a checkpoint after `step` optimizer steps. JSON values only."""
        return {"samples_seen": step * self.global_batch_size, **self._identity()}

    def _identity(self) -> dict[str, Any]:
        """Returns the entries that must be equal in a resumed run."""
        return {
            "seed": self.seed,
            "seq_length": self.samples.seq_length,
            "corpus_sha256": self.sha256,
            "tokenizer_sha256": self.tokenizer_sha256,
        }

    def resume(self, state: Mapping[str, Any]) -> int:
        """Checks the state of a checkpoint and returns the next step.

        Args:
            state: The result of `state`, read from the checkpoint.

        Raises:
            DataError: The state is of other data, or the global batch size does not divide the
                number of samples seen.
        """
        for key, value in self._identity().items():
            if state.get(key) != value:
                raise DataError(
                    f"cannot resume: {key} is {value!r}, the checkpoint has {state.get(key)!r};"
                    " restore it"
                )
        num_samples = state.get("samples_seen")
        if type(num_samples) is not int or num_samples < 0:
            raise DataError(
                f"cannot resume: samples_seen={num_samples!r} in the checkpoint is not a count of"
                " samples"
            )
        # The state counts samples and not steps, so a resumed run may have another batch size.
        step, remainder = divmod(num_samples, self.global_batch_size)
        if remainder:
            raise DataError(
                f"cannot resume: global_batch_size={self.global_batch_size} does not divide the"
                f" {num_samples} samples seen; use the one of the checkpoint or a divisor of it"
            )
        return step


def eval_batches(
    samples: Samples, batch_size: int, limit: int, rank: int = 0, world: int = 1
) -> Iterator[tuple[torch.Tensor, ...]]:
    """Returns batches for an evaluation. They are the same in each call.

    Samples do not overlap and are spread evenly over the data. All batches are full: each rank runs
    the same number of steps, shapes are fixed, and the samples do not depend on `world`.

    Args:
        samples: The validation samples.
        batch_size: Samples per batch on all ranks.
        limit: Maximum number of batches.
        rank: Data-parallel rank.
        world: Number of data-parallel ranks.

    Returns:
        An iterator over this rank's batches, int64 [batch_size / world, seq_length] each.

    Raises:
        DataError: The data has less than one batch. Raised before the first batch.
    """
    positive(batch_size=batch_size, limit=limit)
    if not 0 <= rank < world:
        raise DataError(f"no batches for rank {rank} of {world}")
    _check_divisible("batch_size", batch_size, world, f"{world} ranks")
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
    # [batch, rank, sample]. A batch has the same samples for any `world`.
    places = places.reshape(-1, world, batch_size // world, *places.shape[1:])
    return (_tensors(samples, batch) for batch in places[:, rank])


def _tensors(samples: SampleSource, places: np.ndarray) -> tuple[torch.Tensor, ...]:
    """Reads samples and returns them as CPU tensors."""
    import torch  # inside: reading and preparing data works without torch

    return tuple(torch.from_numpy(part).contiguous() for part in samples.read(places))


def _check_divisible(name: str, value: int, divisor: int, reason: str) -> None:
    """Raises DataError unless `value` is a multiple of `divisor`."""
    if value % divisor:
        nearest = max(divisor, value // divisor * divisor)
        raise DataError(
            f"{name}={value} is not divisible by {divisor} ({reason}): use {nearest} instead"
        )
