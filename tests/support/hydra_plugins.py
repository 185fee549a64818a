"""Hydra's plugins: the choices of its own groups, which depend on what is installed."""

from __future__ import annotations

import functools


@functools.cache
def offered(group: str) -> str:
    """The choices of `hydra/launcher` or `hydra/sweeper`, as an answer lists them."""
    from hydra.core.config_store import ConfigStore
    from hydra.core.plugins import Plugins

    Plugins.instance()
    found = ConfigStore.instance().list(
        group
    )  # with groups below it, such as a sampler of a sweeper
    return ", ".join(sorted(name.removesuffix(".yaml") for name in found if name.endswith(".yaml")))
