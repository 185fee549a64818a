"""Names of the files and folders in a run folder."""

RECIPE, ENVIRONMENT, CHECKPOINTS = "recipe.yaml", "environment.json", "checkpoints"
METRICS, FP8_STATS, COVERAGE = "metrics.jsonl", "fp8_stats.jsonl", "coverage.json"
SKIPPED_STEPS = "skipped_steps.json"
LOCK, TENSORBOARD, STATUS = "run.lock", "tensorboard", "status.json"
LOGGERS, PLAN, PROFILE = "loggers.json", "plan.json", "profile"
REQUEST = "request.yaml"
"""The recipe that an executor has asked for. It writes the file before the run starts."""
