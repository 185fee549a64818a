"""JSON of a run folder, which may be damaged or come from somebody else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fp8cfg.config.errors import ConfigError

MAX_BYTES = 1 << 20
"""A larger file is not one of ours."""


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises ConfigError where there is none."""
    if not path.is_file():  # a pipe would be waited for
        raise ConfigError(f"{path}: {'is no file' if path.exists() else 'is not there'}")
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(f"{path}: larger than {MAX_BYTES // 1024} KB")
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as e:
        raise e if isinstance(e, ConfigError) else ConfigError(f"{path}: cannot be read ({e})") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: not a JSON object")
    return data
