"""What running out of memory looks like, from Python's allocator, the system's and torch's: a line instead of a traceback."""

from __future__ import annotations

import errno
import re

_WORDS = re.compile(
    r"out of memory|can(?:'|no)t allocate memory|bad_alloc|can't start new thread|failed to map"
    r" segment|"
    r"unable to mmap|not enough memory",
    re.IGNORECASE,
)


def out_of_memory(error: BaseException) -> str:
    """The line for an error that says that memory ran out, or an empty one. MemoryError and torch.OutOfMemoryError are such, and
    RuntimeError, OSError and ImportError with the words of an allocator, of malloc, of mmap or of the loader.
    """
    known = isinstance(error, MemoryError) or (
        isinstance(error, OSError) and error.errno == errno.ENOMEM
    )
    if not known and not (
        isinstance(error, (RuntimeError, OSError, ImportError)) and _WORDS.search(str(error))
    ):
        return ""
    said = (str(error).strip().splitlines() or [""])[0][:200]
    cure = (
        "lower trainer.micro_batch_size or model.seq_length, or take a smaller model; fp8cfg plan"
        " has what a recipe takes"
    )
    return "out of memory" + (f" ({said})" if said else "") + f": {cure}"
