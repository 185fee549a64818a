"""Opening a file of the user's that may turn out to be something else. Loads no YAML."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

from fp8cfg.schema.errors import ConfigError


def open_regular(path: Path) -> BinaryIO:
    """The file `path`, to read. Raises OSError, and ConfigError, without waiting, for a folder, and for a pipe or a device."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise ConfigError(
            f"{path}: is {'a folder' if stat.S_ISDIR(mode) else 'no file'}; expected a file"
        )
    return open(descriptor, "rb")
