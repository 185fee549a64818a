"""Validation rules between keys.

Each rule yields violations. A violation has the wrong setting, the problem and values to fix it.
`rules_layout.py` has the rules of the parallel layout, `rules_precision.py` has the rules of the
precision plugin.

Rules treat presets, defaults and overrides alike, except for keys without effect: an override
without effect is an error even at its default. Composition then changes presets and defaults in
conflict with an override (composition/precedence.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

from fp8cfg.schema import data_kinds
from fp8cfg.schema.backends import capabilities
from fp8cfg.schema.changed_fields import WRITTEN, idle
from fp8cfg.schema.data import NO_ADDRESS, SHIPPED, Data
from fp8cfg.schema.errors import refuse_if
from fp8cfg.schema.keys import spelled
from fp8cfg.schema.model import LoRA
from fp8cfg.schema.rules_layout import nearest_multiple, strategy_rules, uneven_batch
from fp8cfg.schema.rules_precision import precision_rules
from fp8cfg.schema.storage import low_bit
from fp8cfg.schema.violation import Violation

if TYPE_CHECKING:
    from fp8cfg.schema.recipe_fields import RecipeFields

DOCUMENT_KEYS = ("eod_mask_loss", "reset_attention_mask", "reset_position_ids")
"""Keys of the `data` node that act at document boundaries, named as in Megatron."""
MAX_NAME_BYTES = 255
"""Longest file name of Linux and macOS (NAME_MAX)."""
STREAMS = data_kinds.TABLES
"""Kinds of data for data.streaming, which reads row by row."""


def check(recipe: RecipeFields, written: Collection[str] = ()) -> None:
    """Raises ConfigError with every violation of the rules.

    Args:
        recipe: The recipe.
        written: Short names of the user's keys. A key without effect is an error if the user wrote
            it, even at its default.

    Raises:
        ConfigError: It has one line for each violation.
    """
    refuse_if([violation for violation in broken(recipe, written) if violation.is_error(written)])


def broken(recipe: RecipeFields, written: Collection[str] = ()) -> list[Violation]:
    """Lists the violations of all rules, including harmless settings of presets and defaults.

    Args:
        recipe: The recipe.
        written: See `check`.
    """
    # A context variable, because `idle` reads it deep inside the rules.
    token = WRITTEN.set(frozenset(written))
    try:
        return [violation for rule in RULES for violation in rule(recipe)]
    finally:
        WRITTEN.reset(token)


def model_rules(recipe: RecipeFields) -> Iterator[Violation]:
    """Rules of the attention heads and of rotary scaling."""
    model = recipe.model
    heads, groups = model.num_attention_heads, model.num_query_groups
    if model.kv_channels is None and model.hidden_size % heads:
        yield Violation(
            f"model.hidden_size={model.hidden_size}",
            f"not a multiple of model.num_attention_heads={heads}; nearest is"
            f" {nearest_multiple(model.hidden_size, heads)}, or set model.kv_channels",
        )
    elif model.head_dim % 2 and model.position_embedding_type == "rope":
        # Rotary positions rotate pairs of channels.
        if model.kv_channels is None:
            yield Violation(
                f"model.hidden_size={model.hidden_size}",
                f"gives heads of {model.head_dim} channels, but rotary positions need an even"
                f" number; nearest is {nearest_multiple(model.hidden_size, 2 * heads)}, or set"
                " model.kv_channels",
            )
        else:
            yield Violation(
                f"model.kv_channels={model.head_dim}",
                f"must be even for rotary positions; nearest is {model.head_dim + 1}",
            )
    # Grouped-query attention: the same number of query heads shares each key-value head.
    if heads % groups:
        nearest = _nearest_divisor(heads, groups)
        yield Violation(
            f"model.num_query_groups={groups}",
            f"must divide model.num_attention_heads={heads}; nearest is {nearest}",
            [("model.num_query_groups", nearest)],
            ["model.num_attention_heads"],
        )
    yield from _rope_scaling_rules(recipe)


def _nearest_divisor(number: int, value: int) -> int:
    """Returns the divisor of `number` nearest to `value`."""
    divisors = [divisor for divisor in range(1, number + 1) if number % divisor == 0]
    return min(divisors, key=lambda divisor: abs(divisor - value))


def _rope_scaling_rules(recipe: RecipeFields) -> Iterator[Violation]:
    """Rejects keys of rope_scaling without effect, and an empty range between its frequencies."""
    scaling = recipe.model.rope_scaling
    if scaling.factor == 1.0:
        other_keys = [name for name in type(scaling).model_fields if name != "factor"]
        yield from idle(
            scaling,
            other_keys,
            " with model.rope_scaling.factor=1; set the factor (Llama 3.1: 8)",
            "model.rope_scaling.factor",
        )
    # Position interpolation (arXiv 2306.15595) divides every frequency by the factor. The other
    # keys belong to Llama 3.1.
    elif scaling.rope_type == "linear":
        yield from idle(
            scaling,
            ("low_freq_factor", "high_freq_factor", "original_max_position"),
            " with model.rope_scaling.rope_type=linear, which scales all frequencies",
            "model.rope_scaling.rope_type",
        )
    # Llama 3.1 blends frequencies between the two, and the blend divides by their difference.
    elif scaling.high_freq_factor <= scaling.low_freq_factor:
        yield Violation(
            "model.rope_scaling.high_freq_factor",
            "must be more than model.rope_scaling.low_freq_factor",
        )


def family_rules(recipe: RecipeFields) -> Iterator[Violation]:
    """Rules of keys that differ between model families: positions, windows, biases, soft caps."""
    model = recipe.model
    yield from _position_rules(recipe)
    if model.sliding_window is None:
        yield from idle(
            model,
            ("window_attn_skip_freq", "rotary_base_local"),
            " with model.sliding_window=null; set a window",
            "model.sliding_window",
        )
    # Pretrained weights are not drawn, so init_method_std does nothing. The exception is low-bit
    # state, whose rules read it as the size of a typical weight (`lost_updates`). Recipes of all
    # sizes set the key, so only an override is an error.
    if model.weights and "model.init_method_std" in WRITTEN.get() and not low_bit(recipe.precision):
        yield from idle(
            model,
            ("init_method_std",),
            " with model.weights, which are loaded and not initialized; remove it",
            "model.weights",
        )
    if model.add_bias_linear:
        yield from idle(
            model,
            ("add_qkv_bias",),
            " with model.add_bias_linear=true, which adds these biases too",
            "model.add_bias_linear",
        )
    has_fp8_attention = recipe.fp8.enabled and recipe.fp8.dot_product_attention
    # FP8 attention has no soft cap between its two GEMMs (numerics/fp8_attention.py).
    if has_fp8_attention and model.attn_logit_softcapping is not None:
        yield Violation(
            "fp8.dot_product_attention=true",
            "FP8 attention does not support model.attn_logit_softcapping; set"
            " fp8.dot_product_attention=false",
        )


def _position_rules(recipe: RecipeFields) -> Iterator[Violation]:
    """Rules of learned and rotary positions."""
    model = recipe.model
    if model.position_embedding_type != "learned_absolute":
        channels = model.head_dim * model.rotary_percent
        is_even = channels == int(channels) and int(channels) % 2 == 0
        # `model_rules` rejects odd heads if all channels rotate.
        if model.rotary_percent < 1 and not is_even:
            nearest = max(2, round(channels / 2) * 2) / model.head_dim
            yield Violation(
                f"model.rotary_percent={model.rotary_percent:g}",
                f"rotates {channels:g} of {model.head_dim} channels of a head, but the number must"
                f" be even; nearest is {nearest:g}",
            )
        return
    yield from idle(
        model,
        ("rotary_base", "rotary_percent", "rotary_base_local"),
        " with model.position_embedding_type=learned_absolute, which has no rotary positions",
        "model.position_embedding_type",
    )
    if model.rope_scaling.factor != 1.0:
        yield Violation(
            "model.rope_scaling.factor",
            "has no effect with model.position_embedding_type=learned_absolute; set it to 1",
        )
    positions = model.max_position_embeddings
    if positions is not None and positions < model.seq_length:
        yield Violation(
            f"model.seq_length={model.seq_length}",
            f"longer than model.max_position_embeddings={positions}, the learned positions; set it"
            f" to {positions} or less",
        )


def lora_rules(recipe: RecipeFields) -> Iterator[Violation]:
    """Rules of LoRA adapters."""
    lora, precision = recipe.lora, recipe.precision
    if not lora.enabled:
        other_keys = [name for name in LoRA.model_fields if name != "enabled"]
        advice = "remove one of them" if "lora.enabled" in WRITTEN.get() else "set task=lora"
        reason = f" with lora.enabled=false; {advice}"
        yield from idle(lora, other_keys, reason, "lora.enabled")
        return
    if not lora.targets:
        yield Violation(
            "lora.targets=[]", "adds no adapter; set it to [q_proj,v_proj] or remove it"
        )
    # A backend matters only if it replaces layers: for FP8, or to store their weights itself.
    # backend=auto picks one with adapters.
    backend = capabilities(precision.backend)
    converts_layers = precision.fp8.enabled or backend.own_state
    if precision.backend != "auto" and converts_layers and not backend.adapters:
        yield Violation(
            f"backend={precision.backend}",
            "does not support LoRA adapters; set backend=native",
            [("backend", "auto")],
            ["lora.enabled"],
        )
    interval = recipe.log.fp8_stats_every_n_steps
    if interval:
        yield Violation(
            f"log.fp8_stats_every_n_steps={interval}",
            "measures gradients of weights, but lora.enabled=true freezes them; remove it",
            [("log.fp8_stats_every_n_steps", 0)],
            ["lora.enabled"],
        )


def data_rules(recipe: RecipeFields) -> Iterator[Violation]:
    """Rules of training and validation data. They do not open files."""
    data = recipe.data
    # task=sft sets data=chat without a file, so that you can plan it first. A run then calls
    # `missing_data` itself.
    if data.name != "chat":
        yield from missing_data(recipe)
    yield from _path_kind_rules(data)
    if data.mixture and data.path:
        yield Violation(
            f"data.path={data.path}",
            "has no effect with data.mixture; add it to the mixture, with a weight",
        )
    for key, path in data.paths.items():
        if "://" in path:
            yield Violation(f"{key}={path}", NO_ADDRESS)
    if data.name in SHIPPED:
        yield from idle(
            data,
            ("validation_path",),
            f" with data={data.name}, which validates on the end of its own text; set data.path"
            " too",
            "data.name",
        )
    yield from _streaming_rules(data)
    yield from _validation_rules(recipe)
    tables = (*data_kinds.TABLES, "dataset")
    if data.name not in tables:
        yield from idle(
            data,
            ("text_key",),
            f" with data={data.name}; only these have columns: {', '.join(tables)}",
            "data.name",
        )
    yield from _document_rules(recipe)


def missing_data(recipe: RecipeFields) -> Iterator[Violation]:
    """Yields a violation if the recipe names no training data."""
    data = recipe.data
    if data.name in SHIPPED or data.path or data.mixture:
        return
    expected = {
        "text": "folder of text files",
        "tokens": ".bin/.idx prefix",
        "chat": ".jsonl file of conversations, or another data=NAME",
        "dataset": "folder of save_to_disk",
    }
    expected_path = expected.get(data.name, f".{data.name} file")
    yield Violation(f"data={data.name}", f"needs data.path, a {expected_path}")


def _path_kind_rules(data: Data) -> Iterator[Violation]:
    """Rejects files of another kind than data.name."""
    if data.name in SHIPPED and data.mixture:
        paths = [part["path"] for part in data.mixture]
        setting = f"data.mixture={spelled(data.mixture)}"
        yield _paths_of_shipped(data, "data.mixture", setting, paths)
    elif data.name in SHIPPED and data.path:
        yield _paths_of_shipped(data, "data.path", f"data.path={data.path}", [data.path])
    elif data.name in ("text", "tokens", "dataset", *data_kinds.TABLES):
        for key, path in data.paths.items():
            # Text data may have any ending, but a table would train on its own syntax.
            kind = data_kinds.kind_by_ending(path)
            if kind in data_kinds.TABLES and kind != data.name:
                reason = f"not data={data.name}"
                if data.name == "text":
                    reason = "but data=text would train on the raw file"
                yield Violation(f"{key}={path}", f"needs data={kind}, {reason}; set data={kind}")


def _paths_of_shipped(data: Data, key: str, setting: str, paths: Sequence[str]) -> Violation:
    """Rejects paths next to a shipped corpus.

    Args:
        data: The data node.
        key: The key of the paths, data.path or data.mixture.
        setting: The key and its value, for the message.
        paths: The paths. Their kind is the fix if data.name is the default corpus.
    """
    kinds = {data_kinds.kind_at(path) for path in paths}
    kind = kinds.pop() if len(kinds) == 1 else None
    problem = f"has no effect with data={data.name}"
    if kind is None:
        names = [*data_kinds.ENDINGS, "dataset"]
        return Violation(setting, f"{problem}; set data to its kind: {', '.join(names)} or chat")
    # stdlib is the default, so a path alone says what the user wants. Another name is an override.
    if data.name != "stdlib":
        return Violation(setting, f"{problem}; set data={kind}")
    return Violation(setting, f"{problem}; set data={kind}", [("data.name", kind)], [key])


def _validation_rules(recipe: RecipeFields) -> Iterator[Violation]:
    """Rejects keys of validation data without effect, and evaluation without such data."""
    data = recipe.data
    if data.validation_path is not None:
        yield from idle(
            data,
            ("validation_fraction",),
            " with data.validation_path; remove one of them",
            "data.validation_path",
        )
    elif data.streaming:
        yield from idle(
            data,
            ("validation_fraction",),
            " with data.streaming=true; set data.validation_path instead",
            "data.streaming",
        )
        interval = recipe.trainer.val_check_interval
        if interval:
            yield Violation(
                f"trainer.val_check_interval={interval}",
                "a stream has no held-out part; set data.validation_path, or set it to 0",
                [("trainer.val_check_interval", 0)],
                ["data.streaming"],
            )


def _streaming_rules(data: Data) -> Iterator[Violation]:
    """Rejects data.streaming with a kind of data that cannot stream, and with a mixture."""
    if data.name not in STREAMS:
        yield from idle(
            data,
            ("streaming",),
            f" with data={data.name}; only {', '.join(STREAMS[:-1])} and {STREAMS[-1]} can be"
            " streamed",
            "data.name",
        )
    if data.streaming and data.mixture:
        yield Violation(
            "data.streaming=true",
            "does not work with data.mixture; make token files of each part with fp8cfg data"
            " prepare, or set it to false",
            [("data.streaming", False)],
            ["data.mixture"],
        )


def _document_rules(recipe: RecipeFields) -> Iterator[Violation]:
    """Rules of the keys that act at document boundaries."""
    data = recipe.data
    # The three keys separate documents that are packed into one sample.
    if data.name == "chat":
        reason = " with data=chat, whose samples are single conversations"
        yield from idle(data, DOCUMENT_KEYS, reason, "data.name")
    elif data.name == "tokens" and data.tokenizer is None:
        for name in DOCUMENT_KEYS:
            if getattr(data, name):
                yield Violation(
                    f"data.{name}=true",
                    "token files do not store the end-of-document token; set data.tokenizer",
                    [(f"data.{name}", False)],
                    ["data.name", "data.tokenizer"],
                )
    if data.reset_attention_mask and recipe.fp8.enabled and recipe.fp8.dot_product_attention:
        yield Violation(
            "data.reset_attention_mask=true",
            "FP8 attention does not support document masks; set fp8.dot_product_attention=false",
            [("fp8.dot_product_attention", False)],
            ["data.reset_attention_mask"],
        )


def optim_rules(recipe: RecipeFields) -> Iterator[Violation]:
    """Rules of the optimizer and the learning-rate schedule."""
    optim, max_steps = recipe.optim, recipe.trainer.max_steps
    for beta in optim.betas:
        if not 0 <= beta < 1:
            yield Violation(
                f"optim.betas={list(optim.betas)}", "each must be at least 0 and less than 1"
            )
    unused = ("betas", "eps") if optim.name == "sgd" else ("momentum",)
    yield from idle(optim, unused, f" with optim.name={optim.name}", "optim.name")
    if optim.end_lr > optim.lr:
        yield Violation(
            f"optim.min_lr={optim.end_lr:g}",
            f"more than optim.lr={optim.lr:g}",
            [("optim.min_lr", optim.lr)],
            ["optim.lr"],
        )
    if optim.lr_decay_style == "constant":
        yield from idle(
            optim,
            ("min_lr", "constant_steps"),
            " with optim.lr_decay_style=constant; use cosine or linear",
            "optim.lr_decay_style",
        )
    # The schedule is warmup, decay and, as in NeMo, constant_steps at min_lr.
    if optim.warmup_steps + optim.constant_steps > max_steps:
        warmup_steps = max(0, max_steps - optim.constant_steps)
        constant_steps = max(0, max_steps - optim.warmup_steps)
        constant = ""
        if optim.constant_steps:
            constant = f" with optim.constant_steps={optim.constant_steps}"
        yield Violation(
            f"optim.warmup_steps={optim.warmup_steps}",
            f"longer than trainer.max_steps={max_steps}{constant}; set it to {warmup_steps} or"
            " less",
            [("optim.warmup_steps", warmup_steps), ("optim.constant_steps", constant_steps)],
            ["trainer.max_steps", "optim.warmup_steps", "optim.constant_steps"],
        )


def trainer_rules(recipe: RecipeFields) -> Iterator[Violation]:
    """Rules of the batch, evaluation, compilation and checkpoints."""
    trainer, checkpoint = recipe.trainer, recipe.checkpoint
    if trainer.global_batch_size % trainer.micro_batch_size:
        yield uneven_batch(recipe, 1, f"trainer.micro_batch_size={trainer.micro_batch_size}")
    # Without evaluation, limit_val_batches and use_autocast_during_eval do nothing.
    if trainer.val_check_interval == 0:
        reason = " with trainer.val_check_interval=0 (no evaluation)"
        key = "trainer.val_check_interval"
        default = type(trainer).model_fields["limit_val_batches"].default
        advice = f"set {default}"
        if trainer.limit_val_batches == default:
            advice = "remove it"
        yield from idle(trainer, ("limit_val_batches",), f"{reason}; {advice}", key)
        if recipe.fp8.enabled:
            yield from idle(recipe.fp8, ("use_autocast_during_eval",), reason, key)
    backend = recipe.precision.backend
    # compile=auto just leaves such layers eager.
    if trainer.compile == "on" and not capabilities(backend).compiles:
        yield Violation(
            "trainer.compile=on",
            f"backend={backend} does not support torch.compile; set it to off",
            [("trainer.compile", "off")],
            ["backend"],
        )
    if checkpoint.every_n_steps == 0 and not checkpoint.every_minutes:
        yield from idle(
            checkpoint,
            ("keep", "async_save"),
            " with checkpoint.every_n_steps=0 (saves only at the end)",
            "checkpoint.every_n_steps",
        )


def bad_step_rules(recipe: RecipeFields) -> Iterator[Violation]:
    """Rules of steps with a bad loss or bad gradients."""
    trainer, checkpoint = recipe.trainer, recipe.checkpoint
    if 0 < trainer.spike_factor <= 1:
        yield Violation(
            f"trainer.spike_factor={trainer.spike_factor:g}",
            "every loss above the median would be a spike; write more than 1, such as 2, or 0 for"
            " off",
        )
    if trainer.on_bad_step == "stop":
        yield from idle(
            trainer,
            ("max_bad_steps",),
            " while trainer.on_bad_step=stop; use skip or rewind",
            "trainer.on_bad_step",
        )
        return
    if recipe.precision.compute == "fp16" and not trainer.spike_factor:
        yield from idle(
            trainer,
            ("on_bad_step",),
            " under fp16, whose loss scale skips steps itself; set trainer.spike_factor or drop it",
            "precision.compute",
        )
    if trainer.on_bad_step == "rewind" and not (
        checkpoint.every_n_steps or checkpoint.every_minutes
    ):
        yield Violation(
            "trainer.on_bad_step=rewind",
            "there is no checkpoint to return to with checkpoint.every_n_steps=0; save more often,"
            " or write skip",
            [("trainer.on_bad_step", "skip")],
            ["checkpoint.every_n_steps"],
        )


def path_rules(recipe: RecipeFields) -> Iterator[Violation]:
    """Rejects paths that no file system can have, with a message about their key."""
    model, data, log = recipe.model, recipe.data, recipe.log
    paths = {
        "log.dir": log.dir,
        "log.folder": log.folder,
        "data.tokenizer": data.tokenizer,
        **data.paths,
        "model.path": model.path,
        "model.weights": model.weights,
        "lora.weights": recipe.lora.weights,
    }
    for key, path in paths.items():
        if not path:
            continue
        if "\0" in path:
            yield Violation(f"{key}={path!r}", "has a null character; remove it")
        names = path.encode(errors="replace").split(b"/")
        if max(len(name) for name in names) > MAX_NAME_BYTES:
            yield Violation(
                f"{key}={path[:40]}...",
                f"a file name is longer than {MAX_NAME_BYTES} bytes; use a shorter one",
            )


def log_rules(recipe: RecipeFields) -> Iterator[Violation]:
    """Rules of the run folder, loggers and FP8 statistics."""
    log, max_steps = recipe.log, recipe.trainer.max_steps
    # TensorBoard has no projects.
    if not set(log.loggers) - {"tensorboard"}:
        yield from idle(
            log,
            ("project",),
            f" with log.loggers=[{','.join(log.loggers)}]; add wandb, mlflow or trackio",
            "log.loggers",
        )
    # Without log.folder each run gets a new folder, so there would never be a run to resume.
    if log.resume == "auto" and log.folder is None:
        yield Violation(
            "log.resume=auto",
            "needs log.folder, the run folder to start or continue; set"
            f" log.folder=runs/{recipe.name}, or log.resume=never",
            [("log.resume", "never")],
            ["log.folder"],
        )
    if recipe.trainer.accelerator == "cpu":
        reason = " with trainer.accelerator=cpu: it records GPU memory"
        yield from idle(log, ("memory_snapshot",), reason, "trainer.accelerator")
    if log.profile and log.profile[1] > max_steps:
        first, last = log.profile
        yield Violation(
            f"log.profile={first}:{last}",
            f"ends after trainer.max_steps={max_steps}, the last step",
        )
    interval = log.fp8_stats_every_n_steps
    if not recipe.fp8.enabled:
        reason = " with fp8.enabled=false; remove it or set precision=bf16_fp8"
        yield from idle(log, ("fp8_stats_every_n_steps",), reason, "fp8.enabled")
    elif interval > max_steps:
        yield Violation(
            f"log.fp8_stats_every_n_steps={interval}",
            f"has no effect, the run ends with trainer.max_steps={max_steps}; nearest is"
            f" {max_steps}",
            [("log.fp8_stats_every_n_steps", max_steps)],
            ["trainer.max_steps"],
        )


RULES = (
    model_rules,
    family_rules,
    data_rules,
    optim_rules,
    trainer_rules,
    bad_step_rules,
    strategy_rules,
    precision_rules,
    path_rules,
    log_rules,
    lora_rules,
)
