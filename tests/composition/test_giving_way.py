"""What the user did not write gives way to what he wrote, with one line; what he wrote and has no effect is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

import fp8cfg
from fp8cfg.composition.config_groups import Library
from fp8cfg.composition.layers import Source
from fp8cfg.composition.precedence import composed, resolved_for_build
from fp8cfg.recipes import llama_tiny
from fp8cfg.schema import presets
from fp8cfg.schema.keys import full
from tests.support.layers import compose_layers, layers_of
from tests.support.small import small

LIBRARY = Library()
NEMOTRON = "precision=nemotron_3_super_bf16_nvfp4"


def notes(words: str, library: Library = LIBRARY) -> list[str]:
    found = composed(words.split(), library)
    assert not found.problems
    return [note.removeprefix("note: ") for note in found.notes]


def problems(words: str) -> list[str]:
    return [str(found) for found in composed(words.split(), LIBRARY).problems]


GIVES_WAY = [
    (
        "trainer.max_steps=5",
        "optim.warmup_steps 20 -> 5: the recipe's value is changed to fit trainer.max_steps=5",
    ),
    (
        "recipe=llama_8b trainer.max_steps=100",
        "optim.warmup_steps 2000 -> 100: the default is changed to fit trainer.max_steps=100",
    ),
    (
        "trainer.max_steps=50 optim.constant_steps=40",
        "optim.warmup_steps 20 -> 10: the recipe's value is changed to fit trainer.max_steps=50 and optim.constant_steps=40",
    ),
    (
        "trainer.val_check_interval=0",
        "trainer.limit_val_batches 4 -> 32: the recipe's value is changed to fit trainer.val_check_interval=0",
    ),
    (
        "trainer.global_batch_size=8",
        "trainer.micro_batch_size 16 -> 8: the default is changed to fit trainer.global_batch_size=8",
    ),
    (
        "trainer.global_batch_size=24",
        "trainer.micro_batch_size 16 -> 12: the default is changed to fit trainer.global_batch_size=24",
    ),
    (
        "trainer.devices=2",
        "trainer.micro_batch_size 16 -> 8: the default is changed to fit trainer.devices=2",
    ),
    (
        "trainer.micro_batch_size=3",
        "trainer.global_batch_size 16 -> 15: the default is changed to fit trainer.micro_batch_size=3",
    ),
    (
        "precision=bf16_fp8 fp8.enabled=false",
        "fp8.params true -> false: the preset's value is changed to fit fp8.enabled=false",
    ),
    (
        "precision=bf16_fp8_current fp8.enabled=false",
        "fp8.scaling current -> delayed, fp8.params true -> false, fp8.high_precision_at_start 1 -> 0, fp8.high_precision_at_end 1 -> 0: "
        "the preset's value is changed to fit fp8.enabled=false",
    ),
    (
        "precision=bf16_fp8 fp8.scaling=mxfp8",
        "fp8.format hybrid -> e4m3: the preset's value is changed to fit fp8.scaling=mxfp8",
    ),
    (
        "precision=bf16_fp8_current backend=torchao",
        "fp8.params true -> false: the preset's value is changed to fit backend=torchao",
    ),
    (
        "precision=bf16_fp8 backend=te storage.shard=zero1",
        "fp8.params true -> false: the preset's value is changed to fit storage.shard=zero1 and backend=te",
    ),
    (
        "precision=bf16_fp8 storage.weight=bf16",
        "fp8.params true -> false: the preset's value is changed to fit storage.weight=bf16",
    ),
    (
        "precision=bf16_fp8 opt_level=O1",
        "fp8.params true -> false: the preset's value is changed to fit opt_level=O1",
    ),
    (
        "precision=bf16_fp8 storage.shard=fsdp storage.gather=bf16",
        "fp8.params true -> false: the preset's value is changed to fit storage.gather=bf16",
    ),
    (
        "precision=bf16_fp8 opt_level=O2",
        "fp8.params true -> false: the preset's value is changed to fit opt_level=O2",
    ),
    (
        "precision=bf16_adamw_fp8 precision.compute=fp32 storage.master_weight=auto",
        "storage.rounding stochastic -> nearest: the preset's value is changed to fit precision.compute=fp32 and storage.master_weight=auto",
    ),
    (
        NEMOTRON,
        "fp8.high_precision_at_end 14 -> 3: the preset's value is changed to fit model.num_layers=4",
    ),
    (
        f"{NEMOTRON} model.num_layers=8",
        "fp8.high_precision_at_end 14 -> 7: the preset's value is changed to fit model.num_layers=8",
    ),
    (
        "precision=fp16 precision.initial_loss_scale=0.5",
        "precision.min_loss_scale 1 -> 0.5: the preset's value is changed to fit precision.initial_loss_scale=0.5",
    ),
    # storage, and the optimizer's numbers
    (
        "precision=bf16_fp8_block_deepseek_v3 optim.betas=[0.9,0.999]",
        "storage.exp_avg_sq bf16 -> fp16_scaled: the preset's value is changed to fit optim.betas=[0.9, 0.999]",
    ),
    (
        "precision=bf16 storage.exp_avg_sq=bf16 recipe=own",
        "optim.betas [0.9, 0.999] -> [0.9, 0.9961]: the recipe's value is changed to fit "
        "storage.exp_avg_sq=bf16",
    ),
    (
        "precision=bf16 storage.exp_avg_sq=fp16 recipe=own",
        "optim.eps 1e-08 -> 0.000172633: the recipe's value is changed to fit storage.exp_avg_sq=fp16",
    ),
    (
        "precision=bf16_adamw_fp8 storage.weight=fp8",
        "storage.master_weight none -> fp32: the preset's value is changed to fit storage.weight=fp8",
    ),
    (
        "precision=bf16_adamw_fp8 optim.lr=1e-6 storage.rounding=nearest",
        "storage.master_weight none -> fp32: the preset's value is changed to fit optim.lr=1e-06 and storage.rounding=nearest",
    ),
    (
        "storage.weight=bf16 storage.master_weight=none optim.lr=1e-6 precision=bf16",
        "storage.rounding nearest -> stochastic: the preset's value is changed to fit optim.lr=1e-06 and storage.weight=bf16 and storage.master_weight=none",
    ),
    (
        "storage.weight=bf16 storage.master_weight=none storage.rounding=nearest recipe=own",
        "optim.lr 1e-05 -> 6.10352e-05: the recipe's value is changed to fit storage.rounding=nearest and storage.weight=bf16 and "
        "storage.master_weight=none",
    ),
    (
        "precision=bf16_adamw_fp8 optim.name=sgd",
        "storage.exp_avg fp8_block -> auto, storage.exp_avg_sq fp8_block -> auto, storage.master_weight "
        "none -> auto, storage.weight_grad bf16 -> auto, storage.rounding stochastic -> nearest: the preset's value is changed to fit optim.name=sgd",
    ),
    (
        "precision=own storage.comm=fp8",
        "storage.weight_grad fp8_pow2 -> fp8: the preset's value is changed to fit storage.comm=fp8",
    ),
    (
        "precision=own storage.weight_grad=fp8",
        "storage.comm fp8_pow2 -> fp8: the preset's value is changed to fit storage.weight_grad=fp8",
    ),
    (
        "precision=own_fp8 fp8.scaling=block",
        "fp8.dot_product_attention true -> false: the preset's value is changed to fit fp8.scaling=block",
    ),
    (
        "precision=own_fp8 backend=torchao",
        "fp8.dot_product_attention true -> false: the preset's value is changed to fit backend=torchao",
    ),
    (
        "precision=own_fp8 fp8.override_linear_precision={fprop:true,dgrad:true} fp8.dot_product_attention=false",
        "fp8.override_linear_precision.wgrad true -> false: the preset's value is changed to fit fp8.override_linear_precision.dgrad=true and "
        "fp8.override_linear_precision.fprop=true",
    ),
    (
        "precision=own_fp8 fp8.scaling=delayed backend=msamp fp8.dot_product_attention=false fp8.reduce_amax=false storage.accumulate=stored "
        "fp8.amax_history_len=16",
        "fp8.override_linear_precision.wgrad true -> false: the preset's value is changed to fit backend=msamp",
    ),
    (
        "precision=own_gather fp8.granularity=row",
        "storage.gather fp8 -> auto: the preset's value is changed to fit fp8.granularity=row",
    ),
    (
        "precision=own_gather precision.compute=bf16 fp8.scaling=delayed",
        "storage.gather fp8 -> auto: the preset's value is changed to fit fp8.scaling=delayed",
    ),
    (
        "optim.warmup_steps=9 trainer.max_steps=10 optim.min_lr=1e-6 optim.lr_decay_style=linear",
        "optim.min_lr=1e-06, optim.lr_decay_style=linear: has no effect, "
        "the learning rate never decays; optim.warmup_steps=9, trainer.max_steps=10",
    ),
    ("optim.warmup_steps=8 trainer.max_steps=10 optim.min_lr=1e-6", None),
    ("optim.warmup_steps=10 trainer.max_steps=10", None),
    (
        "model.sliding_window=16 model.window_attn_skip_freq=5",
        "model.window_attn_skip_freq=5: all layers have the window, because model.num_layers=4",
    ),
    (
        "precision=fp16 precision.loss_scale_window=100",
        "precision.loss_scale_window=100: the scale never grows, because the run ends with trainer.max_steps=100",
    ),
    (
        "precision=bf16_fp8 fp8.amax_history_len=16 fp8.amax_compute_algo=most_recent",
        "fp8.amax_history_len=16: fp8.amax_compute_algo=most_recent reads only the last amax",
    ),
    (
        "trainer.max_steps=40 checkpoint.every_n_steps=50",
        "checkpoint.every_n_steps=50: saves only at the end, because the run ends with trainer.max_steps=40",
    ),
    ("trainer.max_steps=40 checkpoint.every_n_steps=40", None),
    ("precision=bf16_fp8 fp8.amax_history_len=100", None),
    ("precision=bf16_fp8 fp8.amax_compute_algo=most_recent", None),
    (
        "model.sliding_window=256",
        "model.sliding_window=256: has no effect with model.seq_length=256; an exported checkpoint keeps it",
    ),
    ("model.sliding_window=255", None),
    ("recipe=mistral_7b", None),
    ("model.num_attention_heads=2", None),
    ("precision=bf16_fp8 opt_level=O3", None),
    ("precision=bf16_fp8 fp8.margin=0", None),
]


OWN = {
    "recipe/own": "recipe: llama_tiny\nprecision: bf16\noptim: {betas: [0.9, 0.999], eps: 1.0e-8, lr: 1.0e-5, min_lr: 1.0e-6}\n",
    "precision/own": "storage: {weight_grad: fp8_pow2, comm: fp8_pow2}\n",
    "precision/own_fp8": "fp8: {enabled: true, scaling: current, dot_product_attention: true, override_linear_precision: {wgrad: true}}\n",
    "precision/own_gather": "fp8: {enabled: true, scaling: current}\nstorage: {shard: fsdp, gather: fp8}\n",
}
"""Presets and a recipe of one's own, in which stand values that no shipped one has."""


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Library:
    folder = tmp_path_factory.mktemp("own")
    for name, text in OWN.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / f"{name}.yaml").write_text(text)
    return Library(folder)


@pytest.mark.parametrize(("words", "note"), GIVES_WAY, ids=[words for words, _ in GIVES_WAY])
def test_what_the_user_did_not_write_gives_way_and_one_line_says_so(
    words: str, note: str | None, own: Library
) -> None:
    assert notes(words, own if "own" in words else LIBRARY) == ([note] if note else [])


REFUSED = [
    (
        "trainer.max_steps=5 optim.warmup_steps=20",
        "optim.warmup_steps=20: longer than trainer.max_steps=5; set it to 5 or less",
    ),
    (
        "optim.warmup_steps=500",
        "optim.warmup_steps=500: longer than trainer.max_steps=100; set it to 100 or less",
    ),
    (
        "trainer.global_batch_size=8 trainer.micro_batch_size=16",
        "trainer.global_batch_size=8: not a multiple of trainer.micro_batch_size=16; nearest is 16",
    ),
    (
        "precision=bf16_fp8 fp8.scaling=mxfp8 fp8.format=hybrid",
        "fp8.format=hybrid: fp8.scaling=mxfp8 needs e4m3; training diverges with E5M2 gradients and fine-grained scales",
    ),
    (
        "precision=bf16_mxfp8 fp8.format=hybrid",
        "fp8.format=hybrid: fp8.scaling=mxfp8 needs e4m3; training diverges with E5M2 gradients and fine-grained scales",
    ),
    (
        f"{NEMOTRON} fp8.high_precision_at_end=14",
        "fp8.high_precision_at_start=0 and fp8.high_precision_at_end=14: leave no layer of "
        "model.num_layers=4 in FP8; nearest is fp8.high_precision_at_end=3",
    ),
    (
        "precision=bf16_fp8 fp8.high_precision_at_start=9 fp8.high_precision_at_end=1",
        "fp8.high_precision_at_start=9 and fp8.high_precision_at_end=1: leave no layer of model.num_layers=4 in FP8; nearest is "
        "fp8.high_precision_at_start=3 fp8.high_precision_at_end=0",
    ),
    (
        "precision=bf16_fp8 fp8.params=true opt_level=O1",
        "fp8.params=true: has no effect, opt_level=O1 stores weights in fp16_scaled; remove one of them",
    ),
    (
        "precision=bf16_fp8 fp8.params=true opt_level=O2",
        "fp8.params=true: has no effect, opt_level=O2 stores weights in fp16_scaled; remove one of them",
    ),
    (
        "precision=bf16 opt_level=O2 storage.comm=fp8_pow2",
        "storage.comm=fp8_pow2: gradients are stored in fp8 and sent unchanged; set it to fp8, or bf16 or fp32 to sum them before they are stored",
    ),
    (
        "precision=bf16 opt_level=O2 optim.betas=[0.9,0.9999]",
        "optim.betas=[0.9, 0.9999]: rounding in storage.exp_avg_sq=fp16_scaled stops an average of rate "
        "0.9999, so it never decays; nearest is 0.9995, or set storage.exp_avg_sq=fp32",
    ),
    (
        "precision=bf16 storage.weight=fp8 storage.master_weight=none",
        "storage.master_weight=none: storage.weight=fp8 needs master weights; set it to fp16_scaled or fp32",
    ),
    (
        "precision=bf16 storage.weight=bf16 storage.master_weight=none storage.rounding=nearest optim.lr=1e-6",
        "optim.lr=1e-06: storage.weight=bf16 loses most updates below 6.1e-05 of weights around 0.02; set "
        "storage.rounding=stochastic or storage.master_weight=fp32",
    ),
    (
        "precision=bf16_fp8 opt_level=O1 optim.name=sgd",
        "opt_level=O1: needs optim.name=adamw or adam, not sgd (MS-AMP)",
    ),
    # at their defaults
    (
        "precision=bf16 fp8.margin=0",
        "fp8.margin=0: has no effect with fp8.enabled=false; set precision=bf16_fp8 or fp8.enabled=true",
    ),
    (
        "precision=bf16 fp8={margin:0}",
        "fp8.margin=0: has no effect with fp8.enabled=false; set precision=bf16_fp8 or fp8.enabled=true",
    ),
    (
        "precision=bf16_fp8_current fp8.amax_history_len=1024",
        "fp8.amax_history_len=1024: has no effect with fp8.scaling=current; remove it or set fp8.scaling=delayed",
    ),
    (
        "trainer.val_check_interval=0 trainer.limit_val_batches=32",
        "trainer.limit_val_batches=32: has no effect with trainer.val_check_interval=0 (no evaluation); remove it",
    ),
    ("optim.momentum=0.9", "optim.momentum=0.9: has no effect with optim.name=adamw"),
    (
        "precision.hysteresis=2",
        "precision.hysteresis=2: has no effect with precision.compute=bf16; only fp16 has loss scaling",
    ),
    (
        "checkpoint.every_n_steps=0 checkpoint.keep=2",
        "checkpoint.keep=2: has no effect with checkpoint.every_n_steps=0 (saves only at the end)",
    ),
]


@pytest.mark.parametrize(("words", "line"), REFUSED, ids=[words for words, _ in REFUSED])
def test_what_the_user_wrote_is_refused(words: str, line: str) -> None:
    assert problems(words) == [line]


def test_python_is_told_by_the_logger(caplog: pytest.LogCaptureFixture) -> None:
    r = fp8cfg.compose(["trainer.max_steps=5"])
    assert (r.optim.warmup_steps, caplog.messages) == (
        5,
        [
            "note: optim.warmup_steps 20 -> 5: the recipe's value is changed to fit trainer.max_steps=5"
        ],
    )
    given = llama_tiny()
    assert (
        fp8cfg.compose(["trainer.max_steps=5"], base=given) == r and given.optim.warmup_steps == 20
    )


def test_a_recipe_is_built_without_remarks_that_were_made_or_that_nobody_caused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    r = fp8cfg.compose(
        ["recipe=mistral_tiny", "precision=fp16", "model.seq_length=32", "model.num_layers=1"]
    )
    caplog.clear()
    fp8cfg.lower(r)
    assert not caplog.messages
    r.model.sliding_window = 33
    fp8cfg.lower(r)
    assert [m.partition(": has")[0] for m in caplog.messages] == ["note: model.sliding_window=33"]


def test_a_recipe_in_python_is_as_it_stands() -> None:
    r = llama_tiny()
    r.trainer.max_steps = 5
    with pytest.raises(fp8cfg.ConfigError, match=r"optim\.warmup_steps=20: .* set it to 5 or less"):
        r.check()
    r = llama_tiny()
    r.precision, r.opt_level = "bf16_fp8", "O2"
    r.check()
    assert r.fp8.params, "nobody knows that it was not written"


def test_a_file_is_the_users_where_it_differs_from_the_default(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def composed_of(text: str, *words: str) -> fp8cfg.Recipe:
        file = tmp_path / "mine.yaml"
        file.write_text(text)
        return fp8cfg.compose(words, file=file)

    assert (
        composed_of("trainer: {max_steps: 5}").optim.warmup_steps
        == 5
        == fp8cfg.from_yaml("trainer: {max_steps: 5}").optim.warmup_steps
    )
    assert (
        caplog.messages
        == [
            "note: optim.warmup_steps 20 -> 5: the recipe's value is changed to fit trainer.max_steps=5"
        ]
        * 2
    )
    assert composed_of("precision: bf16\nfp8: {margin: 0}").fp8.margin == 0, (
        "an exported recipe says so"
    )
    with pytest.raises(fp8cfg.ConfigError, match=r"optim\.warmup_steps=20"):
        composed_of("optim: {warmup_steps: 20}", "trainer.max_steps=5")
    with pytest.raises(fp8cfg.ConfigError, match=r"fp8\.params=true: has no effect, opt_level=O2"):
        composed_of("precision: bf16_fp8\nfp8: {params: true}\nopt_level: O2")
    assert not composed_of("precision: bf16_fp8\nopt_level: O2").fp8.params
    assert composed_of("precision: bf16_fp8\nfp8: {margin: 1}", "precision=bf16").fp8.margin == 0, (
        "a preset goes over all of precision"
    )


def test_a_recipe_and_a_preset_of_ones_own_give_way_to_words(tmp_path: Path) -> None:
    for folder in ("recipe", "precision"):
        (tmp_path / folder).mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_text(
        "precision: own\noptim: {warmup_steps: 30}\nlog: {fp8_stats_every_n_steps: 20}\n"
    )
    (tmp_path / "precision" / "own.yaml").write_text(
        "fp8: {enabled: true, scaling: current, granularity: row}\n"
    )
    library = Library(tmp_path)
    found = composed(
        ["recipe=mine", "trainer.max_steps=5", "fp8.scaling=delayed", "optim.warmup_steps=1"],
        library,
    )
    assert not found.problems and found.notes == [
        "note: fp8.granularity row -> tensor: the recipe's value is changed to fit fp8.scaling=delayed",
        "note: log.fp8_stats_every_n_steps 20 -> 5: the recipe's value is changed to fit trainer.max_steps=5",
    ]
    found = composed(["recipe=mine", "precision=bf16"], library)
    assert not found.problems and found.notes == [
        "note: log.fp8_stats_every_n_steps 20 -> 0: the recipe's value is changed to fit fp8.enabled=false"
    ]


def test_an_export_of_every_preset_is_accepted(caplog: pytest.LogCaptureFixture) -> None:
    for name in presets.choices():
        for more in ([], ["opt_level=O2"] if "adamw" not in name and "aware" not in name else []):
            found = composed([f"precision={name}", "model.num_layers=32", *more], LIBRARY)
            if not found.problems:
                assert fp8cfg.from_yaml(fp8cfg.to_yaml(found.recipe)) == found.recipe
    r = llama_tiny()
    r.precision, r.opt_level = "bf16_fp8", "O2"
    assert fp8cfg.from_yaml(fp8cfg.to_yaml(r)) == r, (
        "a file with every key is an export, which nobody wrote"
    )
    assert not caplog.messages


def test_every_given_value_has_its_layer() -> None:
    for words, note in GIVES_WAY[:8]:
        key = full(str(note).split()[0])
        last = layers_of(compose_layers(words.split()), key)[-1]
        assert last.source is Source.CONFLICT and str(note).endswith(last.location.text)


# Python's door.


@pytest.mark.parametrize(
    ("preset", "statement", "words", "note"),
    [
        (
            "bf16_fp8_current",
            "model.num_layers = 2",
            "model.num_layers=2",
            "fp8.high_precision_at_end 1 -> 0: the preset's value is changed to fit model.num_layers=2",
        ),
        (
            "bf16_fp8",
            "fp8.scaling = 'mxfp8'",
            "fp8.scaling=mxfp8",
            "fp8.format hybrid -> e4m3: the preset's value is changed to fit fp8.scaling=mxfp8",
        ),
    ],
)
def test_a_preset_that_python_assigns_gives_way_as_one_of_words(
    preset: str, statement: str, words: str, note: str, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = llama_tiny()
    recipe.precision = preset  # type: ignore[assignment]
    exec(f"recipe.{statement}")
    before = recipe.model_copy(deep=True)
    caplog.clear()
    of_words = fp8cfg.compose(["recipe=llama_tiny", f"precision={preset}", words])
    for door in (fp8cfg.lower, fp8cfg.plan):
        door(recipe)
    assert (
        caplog.messages == [f"note: {note}"] * 3
        and recipe == before
        and resolved_for_build(recipe) == of_words
    )


def test_what_python_assigned_itself_is_refused() -> None:
    recipe = llama_tiny()
    recipe.precision = "bf16_fp8_current"  # type: ignore[assignment]
    (
        recipe.model.num_layers,
        recipe.fp8.high_precision_at_start,
        recipe.fp8.high_precision_at_end,
    ) = 2, 1, 1
    for door in (fp8cfg.lower, fp8cfg.plan, fp8cfg.build):
        with pytest.raises(
            fp8cfg.ConfigError,
            match=r"leave no layer of model\.num_layers=2 in FP8; nearest is fp8\.high_precision_at_end=0",
        ):
            door(recipe)


def test_a_small_recipe_of_python_is_built() -> None:
    recipe = small()
    recipe.precision, recipe.model.num_layers = "bf16_fp8_current", 2  # type: ignore[assignment]
    job = fp8cfg.build(recipe)
    assert (job.recipe.fp8.high_precision_at_start, job.recipe.fp8.high_precision_at_end) == (
        1,
        0,
    ) and any(p.fp8 for p in job.plan)
