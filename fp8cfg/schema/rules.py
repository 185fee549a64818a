"""Validation rules between keys. Each rule yields lines that name the keys, what is wrong, and what to write instead."""

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
from fp8cfg.schema.rules_fp8 import without_fp8
from fp8cfg.schema.rules_layout import batches, multiple, strategy_rules
from fp8cfg.schema.rules_precision import precision_rules
from fp8cfg.schema.storage import low_bit
from fp8cfg.schema.violation import Violation

if TYPE_CHECKING:
    from fp8cfg.schema.recipe import Recipe


def lora_rules(recipe: Recipe) -> Iterator[Violation]:
    """Every rule about adapters."""
    lora, p = recipe.lora, recipe.precision
    if not lora.enabled:
        others = [name for name in LoRA.model_fields if name != "enabled"]
        yield from idle(lora, others, " while lora.enabled=false; write task=lora", "lora.enabled")
        return
    if not lora.targets:
        yield Violation(
            "lora.targets=[]", "leaves no layer with an adapter; write [q_proj,v_proj], or drop it"
        )
    if (
        p.backend != "auto"
        and (p.fp8.enabled or capabilities(p.backend).own_state)
        and not capabilities(p.backend).adapters
    ):
        yield Violation(
            f"backend={p.backend}",
            "has no adapters over its layers; write backend=native",
            [("backend", "auto")],
            ["lora.enabled"],
        )
    if every := recipe.log.fp8_stats_every_n_steps:
        yield Violation(
            f"log.fp8_stats_every_n_steps={every}",
            "measures the gradients of weights, which lora.enabled=true freezes; drop it",
            [("log.fp8_stats_every_n_steps", 0)],
            ["lora.enabled"],
        )


DOCUMENTS = ("eod_mask_loss", "reset_attention_mask", "reset_position_ids")
"""Keys of data that act where documents end."""
LONGEST_NAME = 255
"""Bytes of the longest name of a file or folder (NAME_MAX of Linux and macOS)."""
STREAMS = data_kinds.TABLES
"""Kinds of data that data.streaming reads row by row."""


def model_rules(recipe: Recipe) -> Iterator[Violation]:
    m = recipe.model
    heads, groups = m.num_attention_heads, m.num_query_groups
    if m.kv_channels is None and m.hidden_size % heads:
        yield (
            Violation(
                f"model.hidden_size={m.hidden_size}",
                f"not a multiple of"
                f" model.num_attention_heads={heads}; nearest is {multiple(m.hidden_size, heads)}, or"
                " set model.kv_channels",
            )
        )
    elif m.head_dim % 2 and m.position_embedding_type == "rope":
        if m.kv_channels is None:
            yield (
                Violation(
                    f"model.hidden_size={m.hidden_size}",
                    f"{heads} heads of {m.head_dim}, and rotary"
                    " positions need an even head width; nearest is"
                    f" {multiple(m.hidden_size, 2 * heads)}, or set model.kv_channels",
                )
            )
        else:
            yield (
                Violation(
                    f"model.kv_channels={m.head_dim}",
                    f"rotary positions need an even head width; nearest is {m.head_dim + 1}",
                )
            )
    if heads % groups:
        near = _divisor(heads, groups)
        yield Violation(
            f"model.num_query_groups={groups}",
            f"must divide model.num_attention_heads={heads}; nearest is {near}",
            [("model.num_query_groups", near)],
            ["model.num_attention_heads"],
        )
    if m.rope_scaling.factor == 1.0:
        others = [name for name in type(m.rope_scaling).model_fields if name != "factor"]
        yield from idle(
            m.rope_scaling,
            others,
            " while model.rope_scaling.factor=1; set the factor (Llama 3.1 has 8)",
            "model.rope_scaling.factor",
        )
    elif m.rope_scaling.rope_type == "linear":
        yield from idle(
            m.rope_scaling,
            ("low_freq_factor", "high_freq_factor", "original_max_position"),
            " with model.rope_scaling.rope_type=linear, which stretches all",
            "model.rope_scaling.rope_type",
        )
    elif m.rope_scaling.high_freq_factor <= m.rope_scaling.low_freq_factor:
        yield (
            Violation(
                "model.rope_scaling.high_freq_factor",
                "must be more than model.rope_scaling.low_freq_factor",
            )
        )


def family_rules(recipe: Recipe) -> Iterator[Violation]:
    """Of the keys in which model families differ."""
    m = recipe.model
    if m.position_embedding_type == "learned_absolute":
        yield from idle(
            m,
            ("rotary_base", "rotary_percent", "rotary_base_local"),
            " with model.position_embedding_type=learned_absolute, which rotates nothing",
            "model.position_embedding_type",
        )
        if m.rope_scaling.factor != 1.0:
            yield (
                Violation(
                    "model.rope_scaling.factor",
                    "has no effect with model.position_embedding_type=learned_absolute; write 1",
                )
            )
        if m.max_position_embeddings is not None and m.max_position_embeddings < m.seq_length:
            yield (
                Violation(
                    f"model.seq_length={m.seq_length}",
                    f"more than"
                    f" model.max_position_embeddings={m.max_position_embeddings}, the positions that"
                    " are learned",
                )
            )
    else:
        turned = m.head_dim * m.rotary_percent
        if m.rotary_percent < 1 and (
            turned != int(turned) or int(turned) % 2
        ):  # all of an odd head is refused above
            yield (
                Violation(
                    f"model.rotary_percent={m.rotary_percent:g}",
                    f"of {m.head_dim} channels of a head"
                    f" that is {turned:g}, and must be an even number; nearest is"
                    f" {max(2, round(turned / 2) * 2) / m.head_dim:g}",
                )
            )
    if m.sliding_window is None:
        yield from idle(
            m,
            ("window_attn_skip_freq", "rotary_base_local"),
            " while model.sliding_window=null (no layer has one)",
            "model.sliding_window",
        )
    if (
        m.weights and "model.init_method_std" in WRITTEN.get() and not low_bit(recipe.precision)
    ):  # whose rules read it
        yield from idle(
            m,
            ("init_method_std",),
            " beside model.weights, which are not drawn; drop it",
            "model.weights",
        )
    if m.add_bias_linear:
        yield from idle(
            m,
            ("add_qkv_bias",),
            " with model.add_bias_linear=true, which has these too",
            "model.add_bias_linear",
        )
    if (
        m.attn_logit_softcapping is not None
        and recipe.fp8.enabled
        and recipe.fp8.dot_product_attention
    ):
        yield (
            Violation(
                "fp8.dot_product_attention=true",
                "attention in FP8 knows no"
                " model.attn_logit_softcapping; write fp8.dot_product_attention=false",
            )
        )


def missing_data(recipe: Recipe) -> Iterator[Violation]:
    """A line where nothing says what is trained on."""
    d = recipe.data
    if d.name not in SHIPPED and not d.path and not d.mixture:
        what = {
            "text": "folder of text files",
            "tokens": ".bin/.idx prefix",
            "chat": ".jsonl file of conversations; or write data=NAME of another kind",
            "dataset": "folder of save_to_disk",
        }.get(d.name, f".{d.name} file")
        yield Violation(f"data={d.name}", f"needs data.path, a {what}")


def _kinds_of_paths(data: Data) -> Iterator[Violation]:
    """Every rule between the kind of the data and its files."""
    if data.name in SHIPPED and data.mixture:
        paths = [part["path"] for part in data.mixture]
        shown = f"data.mixture={spelled(data.mixture)}"
        yield _kind_of_shipped(data, "data.mixture", shown, paths)
    elif data.name in SHIPPED and data.path:
        yield _kind_of_shipped(data, "data.path", f"data.path={data.path}", [data.path])
    elif data.name in ("text", "tokens", "dataset", *data_kinds.TABLES):
        for key, path in data.paths.items():
            kind = data_kinds.kind_by_ending(path)
            if kind in data_kinds.TABLES and kind != data.name:
                as_text = ", it would train on the raw file" if data.name == "text" else ""
                yield Violation(
                    f"{key}={path}", f"not data={data.name}{as_text}; write data={kind}"
                )


def _kind_of_shipped(data: Data, key: str, shown: str, paths: Sequence[str]) -> Violation:
    """The error of paths next to a shipped corpus. The default corpus gives way to their kind."""
    kinds = {data_kinds.kind_at(path) for path in paths}
    kind = kinds.pop() if len(kinds) == 1 else None
    line = f"has no effect with data={data.name}"
    if kind is None:
        names = [*data_kinds.ENDINGS, "dataset"]
        return Violation(shown, f"{line}; set data to its kind: {', '.join(names)} or chat")
    if data.name != "stdlib":
        return Violation(shown, f"{line}; write data={kind}")
    return Violation(shown, f"{line}; write data={kind}", [("data.name", kind)], [key])


def data_rules(recipe: Recipe) -> Iterator[Violation]:
    d = recipe.data
    shipped, tables = d.name in SHIPPED, (*data_kinds.TABLES, "dataset")
    if d.name != "chat":  # which task=sft says, that can be planned before there is a file
        yield from missing_data(recipe)
    yield from _kinds_of_paths(d)
    if d.mixture and d.path:
        yield (
            Violation(
                f"data.path={d.path}",
                "has no effect beside data.mixture; put it in there, with a weight",
            )
        )
    for key, path in d.paths.items():
        if "://" in path:
            yield Violation(f"{key}={path}", NO_ADDRESS)
    if shipped:
        yield from idle(
            d,
            ("validation_path",),
            f" with data={d.name}, which holds out its own end; set data.path too",
            "data.name",
        )
    if d.name not in STREAMS:
        yield from idle(
            d,
            ("streaming",),
            f" with data={d.name}; what is streamed is {', '.join(STREAMS[:-1])} or {STREAMS[-1]}",
            "data.name",
        )
    if d.streaming and d.mixture:
        yield Violation(
            "data.streaming=true",
            "there is one stream, and data.mixture has several parts; write"
            " token files of each with fp8cfg data prepare, or false",
            [("data.streaming", False)],
            ["data.mixture"],
        )
    if d.validation_path is not None:
        yield from idle(
            d,
            ("validation_fraction",),
            " beside data.validation_path, which is held out",
            "data.validation_path",
        )
    elif d.streaming:
        yield from idle(
            d,
            ("validation_fraction",),
            " with data.streaming=true, of which nothing is held out",
            "data.streaming",
        )
        if every := recipe.trainer.val_check_interval:
            yield Violation(
                f"trainer.val_check_interval={every}",
                "nothing of a stream is held out; write data.validation_path, or 0",
                [("trainer.val_check_interval", 0)],
                ["data.streaming"],
            )
    if d.name not in tables:
        yield from idle(
            d,
            ("text_key",),
            f" with data={d.name}; tables have columns: {', '.join(tables)}",
            "data.name",
        )
    if d.name == "chat":
        yield from idle(
            d, DOCUMENTS, " with data=chat, where each sample is one conversation", "data.name"
        )
    elif d.name == "tokens" and d.tokenizer is None:
        for name in (name for name in DOCUMENTS if getattr(d, name)):
            yield Violation(
                f"data.{name}=true",
                "token files do not say which token ends a document; write data.tokenizer",
                [(f"data.{name}", False)],
                ["data.name", "data.tokenizer"],
            )
    if d.reset_attention_mask and recipe.fp8.enabled and recipe.fp8.dot_product_attention:
        yield Violation(
            "data.reset_attention_mask=true",
            "attention in FP8 has no masks of documents; write fp8.dot_product_attention=false",
            [("fp8.dot_product_attention", False)],
            ["data.reset_attention_mask"],
        )


def optim_rules(recipe: Recipe) -> Iterator[Violation]:
    o, steps = recipe.optim, recipe.trainer.max_steps
    for beta in o.betas:
        if not 0 <= beta < 1:
            yield Violation(
                f"optim.betas={list(o.betas)}", "each must be at least 0 and less than 1"
            )
    unused = ("betas", "eps") if o.name == "sgd" else ("momentum",)
    yield from idle(o, unused, f" with optim.name={o.name}", "optim.name")
    if o.end_lr > o.lr:
        yield Violation(
            f"optim.min_lr={o.end_lr:g}",
            f"more than optim.lr={o.lr:g}",
            [("optim.min_lr", o.lr)],
            ["optim.lr"],
        )
    if o.lr_decay_style == "constant":
        yield from idle(
            o,
            ("min_lr", "constant_steps"),
            " with optim.lr_decay_style=constant; use cosine or linear",
            "optim.lr_decay_style",
        )
    if o.warmup_steps + o.constant_steps > steps:
        warmup, constant = max(0, steps - o.constant_steps), max(0, steps - o.warmup_steps)
        yield Violation(
            f"optim.warmup_steps={o.warmup_steps}",
            f"with optim.constant_steps={o.constant_steps}"
            f" more than trainer.max_steps={steps}; nearest is {warmup}",
            [("optim.warmup_steps", warmup), ("optim.constant_steps", constant)],
            ["trainer.max_steps", "optim.warmup_steps", "optim.constant_steps"],
        )


def trainer_rules(recipe: Recipe) -> Iterator[Violation]:
    t = recipe.trainer
    if t.global_batch_size % t.micro_batch_size:
        yield batches(recipe, 1, f"trainer.micro_batch_size={t.micro_batch_size}")
    if t.val_check_interval == 0:
        never, key = (
            " while trainer.val_check_interval=0 (never evaluate)",
            "trainer.val_check_interval",
        )
        default = type(t).model_fields["limit_val_batches"].default
        cure = "drop it" if t.limit_val_batches == default else f"write {default}"
        yield from idle(t, ("limit_val_batches",), f"{never}; {cure}", key)
        if recipe.fp8.enabled:
            yield from idle(recipe.fp8, ("use_autocast_during_eval",), never, key)
    backend = recipe.precision.backend
    if t.compile == "on" and not capabilities(backend).compiles:
        yield Violation(
            "trainer.compile=on",
            f"layers of backend={backend} are not compiled; write off",
            [("trainer.compile", "off")],
            ["backend"],
        )
    if recipe.checkpoint.every_n_steps == 0 and not recipe.checkpoint.every_minutes:
        yield from idle(
            recipe.checkpoint,
            ("keep", "async_save"),
            " while checkpoint.every_n_steps=0 (the end alone)",
            "checkpoint.every_n_steps",
        )


def path_rules(recipe: Recipe) -> Iterator[Violation]:
    """Of paths that no file system has."""
    m, d, log = recipe.model, recipe.data, recipe.log
    named = {
        "log.dir": log.dir,
        "log.folder": log.folder,
        "data.tokenizer": d.tokenizer,
        **d.paths,
        "model.path": m.path,
        "model.weights": m.weights,
        "lora.weights": recipe.lora.weights,
    }
    for key, path in named.items():
        if path and max(map(len, path.encode(errors="replace").split(b"/"))) > LONGEST_NAME:
            yield (
                Violation(
                    f"{key}={path[:40]}...",
                    f"a name of more than {LONGEST_NAME} bytes, which no folder"
                    " takes; write a shorter one",
                )
            )


def log_rules(recipe: Recipe) -> Iterator[Violation]:
    if recipe.log.resume == "auto" and recipe.log.folder is None:
        yield Violation(
            "log.resume=auto",
            "needs log.folder, the run folder to start or to go on with; write"
            f" log.folder=runs/{recipe.name}, or log.resume=never",
            [("log.resume", "never")],
            ["log.folder"],
        )
    every, steps = recipe.log.fp8_stats_every_n_steps, recipe.trainer.max_steps
    if not recipe.fp8.enabled:
        yield from idle(
            recipe.log,
            ("fp8_stats_every_n_steps",),
            f"{without_fp8(recipe.precision)}; write precision=bf16_fp8 or drop it",
            "fp8.enabled",
        )
    elif every > steps:
        yield Violation(
            f"log.fp8_stats_every_n_steps={every}",
            f"has no effect, trainer.max_steps={steps} ends before; nearest is {steps}",
            [("log.fp8_stats_every_n_steps", steps)],
            ["trainer.max_steps"],
        )


RULES = (
    model_rules,
    family_rules,
    data_rules,
    optim_rules,
    trainer_rules,
    strategy_rules,
    precision_rules,
    path_rules,
    log_rules,
    lora_rules,
)


def check(recipe: Recipe, written: Collection[str] = ()) -> None:
    """Raise ConfigError with every broken rule of `recipe`, one line each. `written` are the keys, by their short names, that the
    user wrote: one that has no effect is refused at its default too."""
    refuse_if([found for found in broken(recipe, written) if found.is_error(written)])


def broken(recipe: Recipe, written: Collection[str] = ()) -> list[Violation]:
    """Every violation of the rules, harmless ones that nobody wrote included."""
    token = WRITTEN.set(frozenset(written))
    try:
        return [line for rule in RULES for line in rule(recipe)]
    finally:
        WRITTEN.reset(token)


def _divisor(value: int, near: int) -> int:
    return min((d for d in range(1, value + 1) if value % d == 0), key=lambda d: abs(d - near))
