"""Write guard: notices that someone else has written to a parameter whose value an optimizer keeps elsewhere too."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn


class WriteGuard:
    """The versions of `params`, torch's counts of writes to them, as an optimizer left them. Its next step would silently undo a
    write of another's. `names` is what the error calls them, `since` what they were written after."""

    def __init__(self, names: Mapping[nn.Parameter, str], since: str, params: Iterable[nn.Parameter] = ()) -> None:
        self._names, self._since = names, since
        self._versions = {p: p._version for p in params}

    def watch(self, p: nn.Parameter) -> None:
        """Take in one more parameter."""
        self._versions[p] = p._version

    def remember(self) -> None:
        """Take the parameters for written by the optimizer."""
        self._versions = {p: p._version for p in self._versions}

    def check(self) -> None:
        """Raise RuntimeError if one was written since then."""
        written = [self._names[p] for p, version in self._versions.items() if p._version != version]
        if written:
            raise RuntimeError(
                f"{len(written)} parameters, {written[0]} among them, were written after {self._since}; "
                "load weights before building the optimizer, or load the optimizer's state after them"
            )
