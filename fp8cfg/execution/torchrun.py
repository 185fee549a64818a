"""Local ranks through torch.distributed's launcher: `python -m fp8cfg.execution.torchrun RANKS WORDS`."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence


def start(ranks: int, argv: Sequence[str]) -> int:
    """Run `fp8cfg ARGV` on that many ranks of this machine. Returns the exit code of the rank that failed first; 75 where a signal
    stopped them, 0 where none failed."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.getLogger("torch.distributed.elastic").setLevel(
        logging.CRITICAL
    )  # the ranks say in a line what was wrong
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun's default, of which it would warn
    try:
        run.run(
            run.parse_args(["--standalone", "--nproc-per-node", str(ranks), "-m", "fp8cfg", *argv])
        )
    except ChildFailedError as e:
        _, first = e.get_first_failure()
        return first.exitcode if first.exitcode > 0 else 128 - first.exitcode
    except SignalException:
        return 75
    return 0


if __name__ == "__main__":
    sys.exit(start(int(sys.argv[1]), sys.argv[2:]))
