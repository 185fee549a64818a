"""Lock of a run folder: one process at a time writes in it."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from io import FileIO

from fp8cfg.training.run_files import RunFiles
from fp8cfg.training.run_folder_errors import RunFolderInUse


def take_lock(files: RunFiles) -> FileIO:
    """Lock run.lock, which the kernel undoes when the process ends, however it ends; what it says is for people.

    Raises RunFolderInUse where another process has it, OSError, StrangeFile.
    """
    # Held open as long as the run.
    file = open(files.shared("run.lock"), "rb+", buffering=0)  # noqa: SIM115
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = (file.read(200) or b"").decode(errors="replace").strip()
        file.close()
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            raise RunFolderInUse(
                f"{files.path} is in use by {holder or 'another process'}"
            ) from error
        raise
    file.truncate(0)
    file.write(f"pid {os.getpid()} on {socket.gethostname()}\n".encode())
    # A forked data worker that outlives its parent would hold the lock with its copy of the handle.
    os.register_at_fork(after_in_child=file.close)
    return file
