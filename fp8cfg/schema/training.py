"""Schema nodes of a training run: optim, trainer, checkpoint and log."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import pydantic
from pydantic import Field

from fp8cfg.schema.errors import ConfigError
from fp8cfg.schema.messages import Level
from fp8cfg.schema.node import Node, expand_home
from fp8cfg.schema.precision import Precision
from fp8cfg.schema.presets import built_config, precision_preset


class Optim(Node):
    """Optimizer and learning-rate schedule."""

    home: ClassVar[str] = "optim"

    name: Literal["adamw", "adam", "sgd"] = "adamw"
    """adamw: decoupled weight decay (arXiv 1711.05101); adam: L2; sgd: with momentum. Default adamw (NeMo)."""
    lr: float = Field(default=3e-4, gt=0)
    """Highest learning rate. Default 3e-4 (NeMo)."""
    min_lr: float | None = Field(default=None, ge=0)
    """Learning rate at the end of the decay; null is 0.1 x lr. Default null (NeMo)."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of Adam's two moments, each in [0, 1). Default 0.9, 0.95 (NeMo)."""
    eps: float = Field(default=1e-5, gt=0)
    """Added to Adam's denominator. Default 1e-5 (NeMo)."""
    momentum: float = Field(default=0.9, ge=0, lt=1)
    """Momentum of sgd. Default 0.9."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Decay of matrices; norms and biases have none (Megatron). Default 0.1 (NeMo)."""
    lr_decay_style: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape of the decay to min_lr at trainer.max_steps. Default cosine (NeMo)."""
    warmup_steps: int = Field(default=2000, ge=0)
    """Optimizer steps of linear warm-up. Default 2000 (NeMo)."""
    constant_steps: int = Field(default=0, ge=0)
    """Optimizer steps at min_lr at the end. Default 0 (NeMo)."""

    @property
    def end_lr(self) -> float:
        """The learning rate at the end of the decay."""
        if self.min_lr is None:
            return 0.1 * self.lr
        return self.min_lr


class Strategy(Node):
    """The parallel layout. It never changes by itself; only the data-parallel size follows the launch."""

    home: ClassVar[str] = "trainer.strategy"

    tensor_model_parallel_size: int = Field(default=1, ge=1)
    """GPUs that share each matrix (Megatron-LM, arXiv 1909.08053). Must divide heads, query groups, MLP width and vocabulary.
    Default 1."""
    pipeline_model_parallel_size: int = Field(default=1, ge=1)
    """GPUs that share the layers, each with consecutive ones (Megatron-LM, arXiv 2104.04473). A step needs at least as many
    microbatches. Default 1."""
    virtual_pipeline_model_parallel_size: int | None = Field(default=None, ge=1)
    """Chunks of layers on each pipeline GPU (interleaved stages): less idle time, more communication. Default null, one chunk
    (Megatron)."""
    pipeline_schedule: Literal["auto", "1f1b", "interleaved_1f1b"] = "auto"
    """Order of forward and backward passes: 1f1b alternates them; interleaved_1f1b does so for several chunks. Default auto:
    interleaved_1f1b if virtual_pipeline_model_parallel_size is above 1."""
    context_parallel_size: int = Field(default=1, ge=1)
    """GPUs that share each sequence: attention gathers its keys and values (Megatron's cp_comm_type all_gather). Default 1."""
    data_parallel_replicate_size: int = Field(default=1, ge=1)
    """Groups of GPUs that each hold all of the model's state (HSDP, arXiv 2304.11277, section 3.2.2): storage.shard splits state
    within a group, and groups sum their gradients. Must divide the data-parallel size. Default 1."""
    sequence_parallel: bool = False
    """Split sequences over the tensor-parallel GPUs outside of split layers, so that norms and the residual stream are computed
    and stored once (arXiv 2205.05198). Default false."""

    @pydantic.field_validator("pipeline_schedule", mode="before")
    @classmethod
    def _known_schedule(cls, value: Any) -> Any:
        """Accepts torchtitan's spelling, and rejects zero-bubble schedules with the reason."""
        name = str(value).lower().replace("_", "")
        if any(part in name for part in ("zerobubble", "zb", "dualpipe")):
            raise ConfigError(
                f"trainer.strategy.pipeline_schedule={value}: zero-bubble schedules compute"
                " gradients of weights and inputs separately, but FP8 layers compute both from one"
                " quantized gradient; set it to auto"
            )
        if name == "interleaved1f1b":  # torchtitan's Interleaved1F1B
            return "interleaved_1f1b"
        return value

    @property
    def chunks(self) -> int:
        """Chunks of layers on each pipeline rank."""
        return self.virtual_pipeline_model_parallel_size or 1

    @property
    def size(self) -> int:
        """GPUs of one model replica."""
        return (
            self.tensor_model_parallel_size
            * self.pipeline_model_parallel_size
            * self.context_parallel_size
        )

    def smaller(self, ranks: int, microbatches: int = 0) -> str:
        """Suggests one smaller parallel size for `ranks` ranks.

        Args:
            ranks: Number of ranks. They must be whole replicas.
            microbatches: Number of microbatches to divide among replicas. 0 for any number.

        Returns:
            ", or key=size", or an empty string if no single size is enough.
        """
        # The sizes in order of preference, and whether another key would have no effect at size 1.
        needs_several = {
            "context_parallel_size": False,
            "tensor_model_parallel_size": self.sequence_parallel,
            "pipeline_model_parallel_size": self.virtual_pipeline_model_parallel_size is not None,
        }
        for name, is_needed in needs_several.items():
            other_sizes = self.size // getattr(self, name)
            if ranks % other_sizes:
                continue
            size = math.gcd(getattr(self, name), ranks // other_sizes)
            if size == 1 and is_needed:
                continue
            replicas = ranks // (other_sizes * size)
            if microbatches % replicas == 0:
                return f", or {self.key(name)}={size}"
        return ""


class Timeout(Node):
    """How long a rank waits for the others in a collective. Then the run ends with an error that names the missing ranks."""

    home: ClassVar[str] = "trainer.timeout"
    units: ClassVar[Mapping[str, str]] = {"start": "seconds", "step": "seconds"}

    start: float = Field(default=600.0, gt=0, le=86400)
    """Seconds, or 10m, 1h, for the first step, which compiles, and for evaluations and saves. Default 600."""
    step: float = Field(default=100.0, gt=0, le=86400)
    """Seconds, or 10m, 1h, for all steps after the first. Default 100 (torchtitan)."""


class Trainer(Node):
    """The training loop. `plugins` is the precision plugin; it also takes a preset's name."""

    home: ClassVar[str] = "trainer"

    plugins: Precision = Field(default_factory=Precision)
    """The precision plugin: a preset object, or a preset's name such as bf16-mixed."""
    strategy: Strategy = Field(default_factory=Strategy)
    """The parallel layout."""
    timeout: Timeout = Field(default_factory=Timeout)
    """Timeouts of collectives."""
    num_nodes: int = Field(default=1, ge=1)
    """Nodes that the recipe is meant for. Default 1."""
    devices: int = Field(default=1, ge=1)
    """GPUs per node that the recipe is meant for; a run uses what it is launched on. Default 1."""
    accelerator: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to run on. Default auto: cuda if there is a GPU, otherwise cpu."""
    max_steps: int = Field(default=300_000, ge=1)
    """Optimizer steps. Default 300000 (Megatron-Bridge)."""
    global_batch_size: int = Field(default=16, ge=1)
    """Samples of one optimizer step, over all ranks and microbatches. Default 16."""
    micro_batch_size: int = Field(default=16, ge=1)
    """Samples of one forward and backward pass on one rank; gradients accumulate over the rest. Default 16."""
    gradient_clip_val: float = Field(default=1.0, ge=0)
    """Gradients are clipped to this norm; 0 is off. Default 1.0 (NeMo)."""
    spike_factor: float = Field(default=0.0, ge=0)
    """A loss above this many times the median of the last 100 losses is a bad step, such as 2; 0 is off. The host then reads each
    loss before the update, which takes some time on a GPU. Default 0."""
    on_bad_step: Literal["stop", "skip", "rewind"] = "stop"
    """What to do after a step with a loss or gradients that are not finite, or with a spike: stop the run; skip the batch; or return
    to the newest checkpoint and skip the batch. The host then reads each loss before the update. Default stop."""
    max_bad_steps: int = Field(default=10, ge=1)
    """Steps in a row to skip at most. Default 10."""
    val_check_interval: int = Field(default=100, ge=0)
    """Optimizer steps between evaluations; 0 is never. Default 100."""
    limit_val_batches: int = Field(default=32, ge=1)
    """Global batches of one evaluation. Default 32 (NeMo)."""
    seed: int = Field(default=1234, ge=0, le=2**31 - 1)
    """Seeds weights, sample order and dropout. Default 1234 (Megatron)."""
    smoke: bool = False
    """Smoke test: train three steps of a small version of the recipe on the shipped corpus, with an evaluation, a save and a
    resume, and print what was cut. Keeps the layout as far as there are ranks. At most 4 GiB over eight ranks. Default false."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Compile the layers of the model with torch.compile; true and false are on and off. Default auto: if a compiler is present
    and the run is long enough to pay for it."""

    @pydantic.field_validator("val_check_interval", "limit_val_batches", mode="before")
    @classmethod
    def _refuse_share(cls, value: Any, info: pydantic.ValidationInfo) -> Any:
        """Rejects floats: in Lightning and NeMo 0.25 means four times per epoch, 1.0 once."""
        # Without this, 1.0 would become the integer 1 in `Node._normalize`.
        if isinstance(value, float):
            unit = "steps" if info.field_name == "val_check_interval" else "batches"
            raise ConfigError(
                f"trainer.{info.field_name}={value}: a float is a share of an epoch in Lightning"
                f" and NeMo; set a number of {unit}, such as 100"
            )
        return value

    @pydantic.field_validator("compile", mode="before")
    @classmethod
    def _accept_bool(cls, value: Any) -> Any:
        """Converts true and false to "on" and "off"."""
        if isinstance(value, bool):
            return "on" if value else "off"
        return value

    @pydantic.field_validator("plugins", mode="before")
    @classmethod
    def _accept_preset(cls, value: Any) -> Any:
        """Accepts the name of a preset or a Fiddle Config of a preset."""
        if isinstance(value, str):
            return precision_preset(value)
        return built_config(value)


class Checkpoint(Node):
    """What is saved, and when."""

    home: ClassVar[str] = "checkpoint"

    every_n_steps: int = Field(default=100, ge=0)
    """Optimizer steps between checkpoints; 0 saves only at the end. Default 100."""
    every_minutes: float = Field(default=0.0, ge=0, le=10080)
    """Minutes between additional checkpoints, by the clock of the first rank; 0 is never. Default 0."""
    keep: int = Field(default=2, ge=1)
    """Number of newest checkpoints to keep. Default 2: one to fall back on."""
    async_save: bool = False
    """Continue with steps while a thread writes the checkpoint from a copy in host memory. The run waits for the last one.
    Default false (Megatron's async_save)."""


class Log(Node):
    """What a run writes and prints."""

    home: ClassVar[str] = "log"

    dir: str = Field(default="runs", min_length=1)
    """Folder that run folders are created in. Default runs."""
    folder: str | None = Field(default=None, min_length=1)
    """The run folder itself, instead of a new one under log.dir. Default null."""
    resume: Literal["never", "auto"] = "never"
    """auto: continue the run in log.folder, or start one if there is none, so that one command line does both. Default never: a
    folder with a run is an error."""
    every_n_steps: int = Field(default=10, ge=1)
    """Optimizer steps between printed lines; metrics.jsonl has every step. Default 10 (NeMo)."""
    level: Level = "info"
    """Least level of printed messages. debug also prints the planned tables, and the observed coverage of the first step in full;
    warning and error print no steps. `--verbose` is short for debug. Default info."""
    progress: Literal["auto", "bar", "plain", "json", "off"] = "auto"
    """How steps are shown. bar: a live line with loss, speed and remaining time; plain: a line every log.every_n_steps; json: the
    same as JSON objects on standard output, with all messages on standard error; off: no steps. Default auto: bar on a terminal,
    otherwise plain."""
    loggers: tuple[Literal["tensorboard", "wandb", "mlflow", "trackio"], ...] = ()
    """Loggers that get metrics and artifacts too, as in [wandb,tensorboard]. Each needs its library: pip install 'fp8cfg[wandb]'.
    Default []: the files in the run folder only."""
    project: str | None = Field(default=None, min_length=1)
    """Project in W&B and Trackio, experiment in MLflow. Default null: WANDB_PROJECT or MLFLOW_EXPERIMENT_NAME if set, otherwise
    fp8cfg."""
    profile: tuple[int, int] | None = None
    """Steps to record with torch.profiler, as START:END: 10:12 records steps 10, 11 and 12 of the first rank. The trace is in
    profile/ in the run folder. Default null."""
    memory_snapshot: bool = False
    """Record allocations of GPU memory on the first rank, and write a snapshot to profile/ in the run folder after three steps and
    when memory runs out. Needs a GPU. Default false."""
    fp8_stats_every_n_steps: int = Field(default=0, ge=0)
    """Optimizer steps between statistics of the FP8 tensors (amax, scales, underflow, overflow, quantization error) in
    fp8_stats.jsonl. Each takes one more forward and backward pass and covers the tensors of the first rank; of FP8 weights, those
    whose masters or FSDP2 shards it has. Default 0: never."""

    @pydantic.field_validator("loggers", mode="before")
    @classmethod
    def _accept_one(cls, value: Any) -> Any:
        """Converts the name of one logger to a list."""
        if value is None or value == "none":
            raise ConfigError("log.loggers=none: write log.loggers=[]")
        return (value,) if isinstance(value, str) else value

    @pydantic.field_validator("loggers")
    @classmethod
    def _refuse_repeated(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        repeated = [name for name in dict.fromkeys(value) if value.count(name) > 1]
        if repeated:
            raise ConfigError(f"log.loggers: {', '.join(repeated)} is listed twice; drop one")
        return value

    @pydantic.field_validator("profile", mode="before")
    @classmethod
    def _parse_steps(cls, value: Any) -> Any:
        """Converts "10:12" to (10, 12). Rejects empty ranges."""
        steps = value
        if isinstance(value, str) and re.fullmatch(r"\d{1,9}:\d{1,9}", value):
            steps = tuple(int(step) for step in value.split(":"))
        if steps is None:
            return None
        is_pair = isinstance(steps, (tuple, list)) and len(steps) == 2
        if not is_pair or not all(type(step) is int for step in steps):
            raise ConfigError(
                f"log.profile={value}: expected START:END, as in log.profile=10:12; in YAML"
                ' profile: "10:12"'
            )
        if not 1 <= steps[0] <= steps[1]:
            raise ConfigError(
                f"log.profile={steps[0]}:{steps[1]}: START must be at least 1 and at most END"
            )
        return steps

    @pydantic.field_validator("dir", "folder", mode="before")
    @classmethod
    def _expand(cls, value: Any) -> Any:
        return expand_home(value)
