"""A folder that the ranks of a file's runs share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds checkpoints that runs on other layouts go on from."""
    return tmp_path_factory.mktemp("ranks")
