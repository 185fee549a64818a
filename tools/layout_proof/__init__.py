"""Layout proof: jobs of recipes as one rank of any number builds and steps them, without the other ranks and without memory."""

import os

os.environ.setdefault(
    "TORCH_CPP_LOG_LEVEL", "ERROR"
)  # of a fake group torch warns that it has no backend for hooks
