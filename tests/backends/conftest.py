"""Transformer Engine's stand-in for the tests of its backend."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from fp8cfg.backends.te import rules as te_rules
from tests.support import te_standin, te_tex


@pytest.fixture
def te(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Transformer Engine as it would be on a GPU; the backend's gates, which test_te_keys.py tests, are open."""
    monkeypatch.setattr(te_rules, "_hardware_lacks", lambda precision, hardware: [])
    monkeypatch.setattr(te_rules, "unavailable", lambda: "")
    with te_standin.transformer_engine() as found:
        te_tex.CALLS.clear()
        yield found
