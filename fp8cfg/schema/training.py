"""Schema nodes of a training run: optim, trainer, checkpoint and log."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import pydantic
from pydantic import Field

from fp8cfg.schema.errors import ConfigError
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
        """The learning rate that the decay ends at."""
        return 0.1 * self.lr if self.min_lr is None else self.min_lr


class Strategy(Node):
    """The parallel layout, which is never changed: the data-parallel size is what the launch leaves beside it."""

    home: ClassVar[str] = "trainer.strategy"

    tensor_model_parallel_size: int = Field(default=1, ge=1)
    """GPUs that share each matrix (Megatron-LM, arXiv 1909.08053). It must divide heads, query groups, MLP and vocabulary. Default
    1."""
    pipeline_model_parallel_size: int = Field(default=1, ge=1)
    """GPUs that share the layers, each with consecutive ones (Megatron-LM, arXiv 2104.04473). A step needs at least as many
    microbatches. Default 1."""
    virtual_pipeline_model_parallel_size: int | None = Field(default=None, ge=1)
    """Chunks of layers on each of those GPUs, which take turns: interleaved stages, that idle less and send more. Default null,
    one chunk (Megatron)."""
    pipeline_schedule: Literal["auto", "1f1b", "interleaved_1f1b"] = "auto"
    """Order of forward and backward passes: 1f1b, one backward after one forward pass; interleaved_1f1b, of several chunks. Default
    auto: interleaved_1f1b where virtual_pipeline_model_parallel_size has several."""
    context_parallel_size: int = Field(default=1, ge=1)
    """GPUs that share each sequence: attention gathers its keys and values (Megatron's cp_comm_type all_gather). Default 1."""
    data_parallel_replicate_size: int = Field(default=1, ge=1)
    """Groups of GPUs, each of which has all of the model's state: storage.shard splits it within a group, and groups sum their
    gradients (HSDP, arXiv 2304.11277, section 3.2.2). It must divide the data-parallel size. Default 1."""
    sequence_parallel: bool = False
    """Split each sequence over the tensor-parallel GPUs between the layers that they share, so that norms and the residual stream
    are computed and kept once (arXiv 2205.05198). Default false."""

    @pydantic.field_validator("pipeline_schedule", mode="before")
    @classmethod
    def _known(cls, value: Any) -> Any:
        name = str(value).lower().replace("_", "")
        if any(part in name for part in ("zerobubble", "zb", "dualpipe")):
            raise ConfigError(
                f"trainer.strategy.pipeline_schedule={value}: zero-bubble schedules take the"
                " gradients of weights apart from those of inputs, and FP8 layers make both of one"
                " quantized gradient; write auto"
            )
        return {"interleaved1f1b": "interleaved_1f1b"}.get(
            name, value
        )  # torchtitan's Interleaved1F1B

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
        """A word that makes a replica divide `ranks`, by one size alone, with ", or" before it, where replicas divide so many
        `microbatches`; empty where none does that."""
        kept = {
            "tensor_model_parallel_size": self.sequence_parallel,
            "pipeline_model_parallel_size": self.virtual_pipeline_model_parallel_size is not None,
        }
        for name in ("context_parallel_size", *kept):
            rest = self.size // getattr(self, name)
            size = 0 if ranks % rest else math.gcd(getattr(self, name), ranks // rest)
            if (size > 1 or (size == 1 and not kept.get(name))) and microbatches % (
                ranks // (rest * size)
            ) == 0:
                return f", or {self.key(name)}={size}"
        return ""


class Timeout(Node):
    """How long a rank waits for the others in a collective before the run ends, with a line that says who is missing."""

    home: ClassVar[str] = "trainer.timeout"
    units: ClassVar[Mapping[str, str]] = {"start": "seconds", "step": "seconds"}

    start: float = Field(default=600.0, gt=0, le=86400)
    """Seconds, or 10m, 1h, at the start, which compiles, and in evaluations and saves. Default 600."""
    step: float = Field(default=100.0, gt=0, le=86400)
    """Seconds, or 10m, 1h, within steps after the first. Default 100 (torchtitan)."""


class Trainer(Node):
    """The training loop. `plugins` is the precision plugin; it also takes a preset's name."""

    home: ClassVar[str] = "trainer"

    plugins: Precision = Field(default_factory=Precision)
    """The precision plugin: a preset object, or a preset's name such as bf16-mixed."""
    strategy: Strategy = Field(default_factory=Strategy)
    """The parallel layout."""
    timeout: Timeout = Field(default_factory=Timeout)
    """Limits of waiting for other ranks."""
    num_nodes: int = Field(default=1, ge=1)
    """Machines that the recipe is meant for. Default 1."""
    devices: int = Field(default=1, ge=1)
    """GPUs of each machine that the recipe is meant for; a run takes what it is launched on. Default 1."""
    accelerator: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run. Default auto: cuda where there is one, else cpu."""
    max_steps: int = Field(default=300_000, ge=1)
    """Optimizer steps. Default 300000 (Megatron-Bridge)."""
    global_batch_size: int = Field(default=16, ge=1)
    """Samples of one optimizer step, over all ranks and microbatches. Default 16."""
    micro_batch_size: int = Field(default=16, ge=1)
    """Samples of one forward and backward on one rank; the rest is accumulated. Default 16."""
    gradient_clip_val: float = Field(default=1.0, ge=0)
    """Largest norm of all gradients together; 0 is off. Default 1.0 (NeMo)."""
    val_check_interval: int = Field(default=100, ge=0)
    """Optimizer steps between evaluations; 0 is never. Default 100."""
    limit_val_batches: int = Field(default=32, ge=1)
    """Global batches of one evaluation. Default 32 (NeMo)."""
    seed: int = Field(default=1234, ge=0, le=2**31 - 1)
    """Seeds weights, sample order and dropout. Default 1234 (Megatron)."""
    smoke: bool = False
    """Train three steps of the recipe cut to a size for any machine, on the shipped corpus, on its layout as far as there are
    ranks, with an evaluation, a save and a resume; what was cut is said. At most 4 GiB over eight ranks. Default false."""
    compile: Literal["auto", "on", "off"] = "auto"
    """torch.compile the layers of the model; true and false are on and off. Default auto: where a compiler is present and the run
    is long enough to pay for it."""

    @pydantic.field_validator("val_check_interval", "limit_val_batches", mode="before")
    @classmethod
    def _no_share(cls, value: Any, info: pydantic.ValidationInfo) -> Any:
        if isinstance(value, float):
            unit = {"val_check_interval": "steps", "limit_val_batches": "batches"}
            raise ConfigError(
                f"trainer.{info.field_name}={value}: a float is a share of an epoch in Lightning"
                f" and NeMo; write a number of {unit[str(info.field_name)]}, such as 100"
            )
        return value

    @pydantic.field_validator("compile", mode="before")
    @classmethod
    def _switched(cls, value: Any) -> Any:
        return {True: "on", False: "off"}[value] if isinstance(value, bool) else value

    @pydantic.field_validator("plugins", mode="before")
    @classmethod
    def _named(cls, value: Any) -> Any:
        return precision_preset(value) if isinstance(value, str) else built_config(value)


class Checkpoint(Node):
    """What is saved, and when."""

    home: ClassVar[str] = "checkpoint"

    every_n_steps: int = Field(default=100, ge=0)
    """Optimizer steps between checkpoints; 0 saves at the end alone. Default 100."""
    every_minutes: float = Field(default=0.0, ge=0, le=10080)
    """Minutes after which a run saves between two of those checkpoints; 0 is never. The first rank's clock decides. Default 0."""
    keep: int = Field(default=2, ge=1)
    """Newest checkpoints that are kept. Default 2: one to fall back on."""
    async_save: bool = False
    """Go on with steps while a thread writes a checkpoint, from a copy in the host's memory; the last is waited for. Default false
    (Megatron's async_save)."""


class Log(Node):
    """What a run writes and prints."""

    home: ClassVar[str] = "log"

    dir: str = Field(default="runs", min_length=1)
    """Folder that run folders are created in. Default runs."""
    folder: str | None = Field(default=None, min_length=1)
    """Exactly the run folder, instead of a new one under log.dir. Default null."""
    resume: Literal["never", "auto"] = "never"
    """auto: go on with log.folder where it has a run, else start it, so that one command line starts a run and goes on with it.
    Default never: a folder that has a run is refused."""
    every_n_steps: int = Field(default=10, ge=1)
    """Optimizer steps between two printed lines; metrics.jsonl has every step. Default 10 (NeMo)."""
    tensorboard: bool = False
    """Write TensorBoard events too. Default false."""
    fp8_stats_every_n_steps: int = Field(default=0, ge=0)
    """Optimizer steps between statistics of the FP8 tensors (amax, scales, underflow, overflow, quantization error), written to
    fp8_stats.jsonl; each takes a forward and backward pass more, and the first rank's own tensors, of weights that are held in FP8
    alone those whose masters it has or FSDP2 has shards of. Default 0: never."""

    @pydantic.field_validator("dir", "folder", mode="before")
    @classmethod
    def _expand(cls, value: Any) -> Any:
        return expand_home(value)
