"""Opens files of the user that may turn out to be something else. Loads no YAML."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

from fp8cfg.schema.errors import ConfigError


def open_regular(path: Path) -> BinaryIO:
    """Opens a file to read.

    Raises:
        OSError: It cannot be opened.
        ConfigError: It is a folder, a pipe or a device.
    """
    # Without O_NONBLOCK opening a pipe would wait for a writer. Windows has no such flag.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return open(descriptor, "rb")
    os.close(descriptor)
    kind = "a folder" if stat.S_ISDIR(mode) else "no file"
    raise ConfigError(f"{path}: is {kind}; expected a file")
