"""Write guard: detects writes by others to a parameter whose value an optimizer also keeps elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn


class WriteGuard:
    """The versions of `params`, torch's counts of writes to them, after the optimizer's last write. The next step of the optimizer
    would silently undo any later write. `names` is what the error calls them, `since` the event after which they were written.
    """

    def __init__(
        self, names: Mapping[nn.Parameter, str], since: str, params: Iterable[nn.Parameter] = ()
    ) -> None:
        self._names, self._since = names, since
        self._versions = {p: p._version for p in params}

    def watch(self, p: nn.Parameter) -> None:
        """Add a parameter to those that are guarded."""
        self._versions[p] = p._version

    def remember(self) -> None:
        """Record the current versions as written by the optimizer."""
        self._versions = {p: p._version for p in self._versions}

    def check(self) -> None:
        """Raise RuntimeError if a parameter was written to since `remember`."""
        written = [self._names[p] for p, version in self._versions.items() if p._version != version]
        if written:
            raise RuntimeError(
                f"{len(written)} parameters, {written[0]} among them, were written after"
                f" {self._since}; load weights before building the optimizer, or load the"
                " optimizer's state after them"
            )
