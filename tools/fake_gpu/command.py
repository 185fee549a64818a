"""fp8cfg's command line on the fake GPU, with values (values.py), so that a run proves itself as on a GPU.

    python tools/fake_gpu/command.py WORDS
    FAKE_GPUS=2 torchrun --nproc-per-node 2 tools/fake_gpu/command.py WORDS trainer.micro_batch_size=8

Several ranks have a fake GPU each, and send one another bytes through the NCCL of stubs/nccl.c. A rank that another rank does not
follow, or that asks for another collective than the others, ends with both of their calls.
"""

from __future__ import annotations

import torch.distributed.nn  # noqa: F401, before a group is made (fp8cfg/parallel/process_group.py)

from fp8cfg.__main__ import entry
from tools.fake_gpu.values import compute_values

if __name__ == "__main__":
    compute_values()
    entry()
