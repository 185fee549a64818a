# In a checkout `recipes/` stands beside the package: this file tells type checkers where fp8cfg.recipes is.
from recipes import *  # noqa: F403
