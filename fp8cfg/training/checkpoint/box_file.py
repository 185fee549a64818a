"""Box file: boxes of tensors in the safetensors format, written in one pass with its sha256, so that nothing is read back.

A file has a name once: a second box of a tensor stands in another file. Where a box begins in the whole stands in the header under
the key of torch.distributed.checkpoint's safetensors storage, whose reader therefore takes these files (torch 2.13). Its writer
builds a rank's whole share in memory twice (1,026 MiB for 512 MiB of tensors, against 1 MiB here), writes the second box of a name
over the first without a word, and sums nothing; so this one streams.
Format: https://huggingface.co/docs/safetensors, eight bytes with the length of a JSON header, the header, the bytes of the tensors.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from fp8cfg.training.checkpoint.failpoint import failpoint
from fp8cfg.training.checkpoint.manifest import FileEntry
from fp8cfg.training.checkpoint.tensor_box import TensorBox
from fp8cfg.training.run_files import RunFiles, write_all

SHARDING, OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"
SUFFIX = ".safetensors"
LIMIT = 4 << 30
"""Bytes of tensors in a file, about: files are what a resumed run's ranks share the checking of."""
CHUNK = 64 << 20
DTYPES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.uint16: "U16", torch.int16: "I16", torch.uint32: "U32",
    torch.int32: "I32", torch.uint64: "U64", torch.int64: "I64", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0", torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64",
    torch.complex64: "C64",
}  # fmt: skip


def files_of(boxes: Sequence[TensorBox], limit: int = LIMIT) -> list[list[TensorBox]]:
    """`boxes` by the file that each stands in: no file has a name twice, and one of several boxes at most `limit` bytes."""
    files: list[list[TensorBox]] = []
    held: list[tuple[set[str], int]] = []
    for box in boxes:
        names = {box.name, *box.also}
        fits = (i for i, (taken, size) in enumerate(held) if not taken & names and size + box.tensor.nbytes <= limit)
        at = next(fits, len(files))
        if at == len(files):
            files.append([])
            held.append((set(), 0))
        files[at].append(box)
        held[at] = held[at][0] | names, held[at][1] + box.tensor.nbytes
    return files


def write(folder: RunFiles, name: str, boxes: Sequence[TensorBox], placed: bool = True) -> FileEntry:
    """Write `boxes` to the new file `name`, brought to disk, and return its length and sha256. A file that is not `placed` has
    whole tensors and says nothing of places. Raises OSError, and TypeError for what the format does not store."""
    header = _header(boxes, placed)
    digest, size = hashlib.sha256(), 0
    with open(folder.open_at(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb", buffering=0) as file:
        for data in chain([memoryview(header)], (chunk for box in boxes for chunk in _chunks(box.tensor))):
            write_all(file, data)
            digest.update(data)
            size += len(data)
        failpoint("shard")
        os.fsync(file.fileno())
    return FileEntry(size, digest.hexdigest())


def _header(boxes: Sequence[TensorBox], placed: bool) -> bytes:
    entries: dict[str, Any] = {}
    if placed:
        places = {box.name: {OFFSETS: list(box.offsets)} for box in boxes}
        also = {other: box.name for box in boxes for other in box.also}
        entries["__metadata__"] = {**also, SHARDING: json.dumps(places)}
    at = 0
    for box in boxes:
        t = box.tensor
        if t.dtype not in DTYPES or t.is_meta or t.layout != torch.strided:
            raise TypeError(f"{box.name}: only plain dense tensors can be stored, not {t.dtype} of {type(t).__name__}")
        entries[box.name] = {"dtype": DTYPES[t.dtype], "shape": list(t.shape), "data_offsets": [at, at + t.nbytes]}
        at += t.nbytes
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8, as safetensors' own writer has it
    return len(text).to_bytes(8, "little") + text


def _chunks(t: Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor, a part of it at a time on the CPU."""
    flat = t.detach().contiguous().reshape(-1)
    count = CHUNK // flat.element_size()
    for start in range(0, flat.numel(), count):
        yield flat[start : start + count].cpu().view(torch.uint8).numpy().data
