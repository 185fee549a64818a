"""Stand-ins of Transformer Engine and MS-AMP for the tests of their backends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fp8cfg.backends.msamp import rules as msamp_rules
from fp8cfg.backends.te import rules as te_rules
from tests.support import msamp_standin, te_standin, te_tex


@pytest.fixture
def te(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Transformer Engine as it would be on a GPU; the backend's gates, which test_te_keys.py tests, are open."""
    monkeypatch.setattr(te_rules, "_hardware_lacks", lambda precision, hardware: [])
    monkeypatch.setattr(te_rules, "unavailable", lambda: "")
    with te_standin.transformer_engine() as found:
        te_tex.CALLS.clear()
        yield found


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of MS-AMP's stand-in, which is importable."""
    with msamp_standin.msamp(tmp_path, monkeypatch) as folder:
        yield folder


@pytest.fixture
def anywhere(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in multiplies on a CPU, where the rules refuse MS-AMP."""
    monkeypatch.setattr(msamp_rules, "_hardware_lacks", lambda *_: [])
