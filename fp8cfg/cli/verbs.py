"""Verbs: the subcommands of `fp8cfg`, each of which is the module of its name beside this one."""

VERBS = ("train", "sweep", "resume", "rerun", "list", "explain", "diff", "plan", "check", "doctor", "export", "import", "schema",
         "completion", "help")
RUNS = ("train", "sweep", "resume", "rerun")
"""Verbs that train; what they print is beside the point."""
