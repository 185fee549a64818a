"""New folder of an export: written beside its place, and whole or not there."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fp8cfg.config.errors import ConfigError, NotWritable


def refuse_what_is_there(out: Path) -> None:
    """Raise ConfigError where `out` is anything but an empty folder."""
    try:
        empty = not os.path.lexists(out) or (out.is_dir() and not any(out.iterdir()))
    except OSError as e:
        raise ConfigError(f"{str(out)[:60]}: cannot be looked at ({e.strerror})") from None
    if not empty:
        raise ConfigError(f"{out}: exists already; name a new folder")


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder that is `out` at the end of the block, and gone where that fails: half an export would be taken for a whole one.
    Raises NotWritable."""
    from safetensors import SafetensorError

    whole = out.resolve()
    made = whole.with_name(f".{whole.name[:100]}.tmp-{uuid.uuid4().hex[:12]}")
    try:
        made.mkdir(parents=True)
        yield made
        made.rename(whole)
    except (OSError, SafetensorError) as e:
        raise NotWritable(
            f"{out}: cannot be written ({getattr(e, 'strerror', None) or e})"
        ) from None
    finally:
        shutil.rmtree(made, ignore_errors=True)
