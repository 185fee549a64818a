"""Reads a .wandb file of an offline run with W&B's own message classes.

W&B 0.31 reads such files in Go only (`wandb sync`). The file has LevelDB's log format: blocks of
32 KiB with records, each with a CRC-32, a length and a type. A long record continues in the next
block.
"""

from __future__ import annotations

import json
import struct
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK = 32 * 1024
FILE_HEADER = struct.Struct("<4sHB")
RECORD_HEADER = struct.Struct("<IHB")
FULL, LAST = 1, 4
WRITE_SECONDS = 60.0


def records(path: Path) -> list[Any]:
    """Returns the protobuf records of a finished run, in order.

    `run.finish()` does not wait for the file: it returns when wandb-core has got the exit record,
    and wandb-core writes its buffered records afterwards. So this waits for the exit record, the
    last one.
    """
    deadline = time.monotonic() + WRITE_SECONDS
    while True:
        found = list(_written_records(path))
        if found and found[-1].WhichOneof("record_type") == "exit":
            return found
        assert time.monotonic() < deadline, f"{path}: no exit record after {len(found)} records"
        time.sleep(0.05)


def _written_records(path: Path) -> Iterator[Any]:
    """Yields the records that are written so far."""
    from wandb.proto.wandb_internal_pb2 import Record

    data = path.read_bytes()
    assert FILE_HEADER.unpack_from(data) == (b":W&B", 0xBEE1, 0)
    at = FILE_HEADER.size
    parts = b""
    while at + RECORD_HEADER.size <= len(data):
        if BLOCK - at % BLOCK < RECORD_HEADER.size:  # the rest of a block is padding
            at += BLOCK - at % BLOCK
            continue
        checksum, length, kind = RECORD_HEADER.unpack_from(data, at)
        at += RECORD_HEADER.size
        if at + length > len(data):
            return
        part = data[at : at + length]
        assert zlib.crc32(part, zlib.crc32(bytes([kind]))) == checksum
        at += length
        parts += part
        if kind in (FULL, LAST):
            yield Record.FromString(parts)
            parts = b""


def history(path: Path) -> list[dict[str, Any]]:
    """Returns the rows of `run.log`, without W&B's own fields."""
    rows = []
    for record in records(path):
        if record.WhichOneof("record_type") == "history":
            items = {item.key or ".".join(item.nested_key): item for item in record.history.item}
            rows.append(
                {key: json.loads(item.value_json) for key, item in items.items() if key[0] != "_"}
            )
    return rows
