"""PEFT, where it is installed. It imports Transformer Engine wherever that is found, and its package without a GPU raises."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest


def peft(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module; the test is skipped without it."""
    if importlib.util.find_spec("peft") is None:
        pytest.skip("needs peft; tools/check_libraries.py has an environment with it")
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "transformer_engine" else found(name, *rest),
    )
    import peft

    return peft
