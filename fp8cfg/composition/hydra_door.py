"""Hydra composes: a complete recipe node, preset nodes laid over it, then values in their order.

The nodes are stored for the length of one composition and taken out again, so that fp8cfg can be used inside a Hydra
application and leaves nothing behind. Hydra reads no file here: every file has been read, bounded and checked before.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from fp8cfg.composition.choices import LEAVES
from fp8cfg.config.errors import ConfigError
from fp8cfg.config.files import CONF, read_yaml

_NAME = "fp8cfg_config"
_LOCK = threading.Lock()


def merge(nodes: dict[str, dict[str, Any]], chosen: dict[str, str], values: list[str]) -> dict[str, Any]:
    """The composed recipe as plain data.

    `nodes` holds a complete node for each group that is chosen, `chosen` their names, `values` Hydra overrides on full keys.
    """
    from hydra import compose, initialize
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    names = {group: chosen.get(group, "given_file") for group in nodes}
    words = [f"{group}={name}" for group, name in names.items()]
    with _LOCK, _stored(nodes, names), initialize(config_path=None, version_base="1.3"):
        try:
            container = OmegaConf.to_container(compose(_NAME, [*words, *values]), resolve=True)
        except (HydraException, OmegaConfBaseException) as e:
            raise ConfigError(str(e).strip().splitlines()[0]) from None
    assert isinstance(container, dict)
    return {str(k): v for k, v in container.items()}


@contextlib.contextmanager
def _stored(nodes: dict[str, dict[str, Any]], names: dict[str, str]) -> Iterator[None]:
    from hydra.core.config_store import ConfigStore
    from hydra.core.global_hydra import GlobalHydra

    store, running = ConfigStore.instance(), GlobalHydra.instance().hydra
    before = {key: store.repo.get(key) for key in (*nodes, f"{_NAME}.yaml")}
    for key in before:
        store.repo.pop(key, None)
    GlobalHydra.instance().clear()
    try:
        store.store(_NAME, read_yaml(CONF / "config.yaml"))
        for group, node in nodes.items():
            store.store(names[group], node, group=group, package=LEAVES[group][1] if group in LEAVES else "_global_")
        yield
    finally:
        for key, value in before.items():
            store.repo.pop(key, None)
            if value is not None:
                store.repo[key] = value
        GlobalHydra.instance().hydra = running
