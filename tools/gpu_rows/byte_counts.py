"""Counts of bytes that differ between what two implementations make of the same tensors, by what they are."""

from __future__ import annotations

import torch
from torch import Tensor


class ByteCounts:
    """Bytes of tensors that were compared and those that differ, and where the first of these was seen."""

    def __init__(self) -> None:
        self._counts: dict[str, list[int]] = {}
        self._first = ""

    def compare(self, what: str, ours: Tensor | None, theirs: Tensor | None, where: str) -> None:
        """Count the bytes of `ours` and `theirs`, as `what` they are. Two NaN are equal: those that hardware makes have no sign.
        Raises ArithmeticError where they are not of one shape and dtype."""
        if (
            ours is None
            or theirs is None
            or ours.shape != theirs.shape
            or ours.dtype != theirs.dtype
        ):
            found = [None if t is None else (*t.shape, t.dtype) for t in (ours, theirs)]
            raise ArithmeticError(f"{what} of {where} are {found[0]}, not {found[1]}")
        a, b = (t.detach().cpu().reshape(-1) for t in (ours, theirs))
        wrong = (a.view(torch.uint8) != b.view(torch.uint8)).view(-1, a.itemsize)
        if a.is_floating_point():
            wrong &= ~(a.float().isnan() & b.float().isnan())[:, None]
        count, differing = self._counts.setdefault(what, [0, 0]), int(wrong.sum())
        count[0] += differing
        count[1] += wrong.numel()
        if differing and not self._first:
            self._first = f"; the first are {what} of {where}"

    def verdict(self) -> str:
        """The counts in one line. Raises ArithmeticError, with the same words, where bytes differ."""
        text = (
            ", ".join(
                f"{wrong} of {every} bytes of {what}"
                for what, (wrong, every) in self._counts.items()
            )
            + " differ"
        )
        if self._first:
            raise ArithmeticError(text + self._first)
        return text
