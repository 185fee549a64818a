"""JSON of a run folder, which may be damaged or come from somebody else."""

from __future__ import annotations

import errno
import json
from typing import Any

from fp8cfg.config.errors import ConfigError
from fp8cfg.training.folder_descriptor import StrangeFile
from fp8cfg.training.run_files import MAX_BYTES, RunFiles


def read_object(folder: RunFiles, name: str) -> dict[str, Any]:
    """The JSON object in the file `name` of a run folder. Raises ConfigError where there is none."""
    path = folder.path / name
    try:
        data = json.loads(folder.read(name))
    except FileNotFoundError:
        raise ConfigError(f"{path}: is not there") from None
    except StrangeFile as e:
        raise ConfigError(str(e)) from None
    except OSError as e:
        what = (
            f"larger than {MAX_BYTES // 1024} KB"
            if e.errno == errno.EFBIG
            else f"cannot be read ({e.strerror})"
        )
        raise ConfigError(f"{path}: {what}") from None
    except (ValueError, RecursionError) as e:
        raise ConfigError(f"{path}: cannot be read ({e})") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: not a JSON object")
    return data
