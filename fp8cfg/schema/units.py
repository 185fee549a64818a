"""Units of values: `10m` for a key in seconds, `2GiB` for one in bytes."""

from __future__ import annotations

import re
from typing import Any

SECONDS: dict[str, float] = {
    "ms": 0.001,
    "s": 1,
    "sec": 1,
    "m": 60,
    "min": 60,
    "h": 3600,
    "d": 86400,
}
BYTES: dict[str, float] = {
    "b": 1,
    "kb": 1000,
    "mb": 1000**2,
    "gb": 1000**3,
    "tb": 1000**4,
    "kib": 1024,
    "mib": 1024**2,
    "gib": 1024**3,
    "tib": 1024**4,
}
UNITS = {"seconds": SECONDS, "bytes": BYTES}
EXAMPLES = {"seconds": "a time such as 10m", "bytes": "a size such as 2GiB"}
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]+)")


def in_unit(value: Any, unit: str) -> Any:
    """Converts a text such as `10m` to a number of seconds or bytes.

    Returns other values as they are. Validation then rejects or accepts them.

    Args:
        value: The value of the key.
        unit: "seconds" or "bytes".
    """
    match = _QUANTITY.fullmatch(value.strip()) if isinstance(value, str) else None
    factor = UNITS[unit].get(match[2].lower()) if match else None
    if match is None or factor is None:
        return value
    return float(match[1]) * factor
