"""What the user did not write gives way to what he wrote, with one line; what he wrote and has no effect is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

import fp8cfg
from fp8cfg.composition.config_groups import Library
from fp8cfg.composition.flatten import flat
from fp8cfg.composition.giving_way import composed
from fp8cfg.composition.provenance import trace
from fp8cfg.config import presets
from fp8cfg.config.key_names import full
from fp8cfg.recipes import llama_tiny

LIBRARY = Library()
NEMOTRON = "precision=nemotron_3_super_bf16_nvfp4"


def notes(words: str) -> list[str]:
    found = composed(words.split(), LIBRARY)
    assert not found.problems
    return [note.removeprefix("note: ") for note in found.notes]


def problems(words: str) -> list[str]:
    return list(composed(words.split(), LIBRARY).problems)


GIVES_WAY = [
    ("trainer.max_steps=5", "optim.warmup_steps 20 -> 5: what the recipe says gives way to trainer.max_steps=5"),
    ("recipe=llama_8b trainer.max_steps=100", "optim.warmup_steps 2000 -> 100: the default gives way to trainer.max_steps=100"),
    ("trainer.max_steps=50 optim.constant_steps=40",
     "optim.warmup_steps 20 -> 10: what the recipe says gives way to trainer.max_steps=50 and optim.constant_steps=40"),
    ("trainer.val_check_interval=0", "trainer.limit_val_batches 4 -> 32: what the recipe says gives way to trainer.val_check_interval=0"),
    ("trainer.global_batch_size=8", "trainer.micro_batch_size 16 -> 8: the default gives way to trainer.global_batch_size=8"),
    ("trainer.global_batch_size=24", "trainer.micro_batch_size 16 -> 12: the default gives way to trainer.global_batch_size=24"),
    ("trainer.devices=2", "trainer.micro_batch_size 16 -> 8: the default gives way to trainer.devices=2"),
    ("trainer.micro_batch_size=3", "trainer.global_batch_size 16 -> 15: the default gives way to trainer.micro_batch_size=3"),
    ("precision=bf16_fp8 fp8.enabled=false", "fp8.params True -> False: what the preset says gives way to fp8.enabled=False"),
    ("precision=bf16_fp8_current fp8.enabled=false",
     "fp8.scaling current -> delayed, fp8.params True -> False, fp8.high_precision_at_start 1 -> 0, fp8.high_precision_at_end 1 -> 0: "
     "what the preset says gives way to fp8.enabled=False"),
    ("precision=bf16_fp8 fp8.scaling=mxfp8", "fp8.format hybrid -> e4m3: what the preset says gives way to fp8.scaling=mxfp8"),
    ("precision=bf16_fp8_current backend=torchao", "fp8.params True -> False: what the preset says gives way to backend=torchao"),
    ("precision=bf16_fp8 backend=te storage.shard=zero1",
     "fp8.params True -> False: what the preset says gives way to storage.shard=zero1 and backend=te"),
    ("precision=bf16_fp8 storage.shard=fsdp", "fp8.params True -> False: what the preset says gives way to storage.shard=fsdp"),
    ("precision=bf16_fp8 storage.weight=bf16", "fp8.params True -> False: what the preset says gives way to storage.weight=bf16"),
    ("precision=bf16_fp8 opt_level=O1", "fp8.params True -> False: what the preset says gives way to opt_level=O1"),
    ("precision=bf16_fp8 opt_level=O2", "fp8.params True -> False: what the preset says gives way to opt_level=O2"),
    ("precision=bf16_adamw_fp8 precision.compute=fp32 storage.master_weight=auto",
     "storage.rounding stochastic -> nearest: what the preset says gives way to precision.compute=fp32 and storage.master_weight=auto"),
    (f"{NEMOTRON} model.num_layers=8", "fp8.high_precision_at_end 14 -> 7: what the preset says gives way to model.num_layers=8"),
    ("precision=fp16 precision.initial_loss_scale=0.5",
     "precision.min_loss_scale 1 -> 0.5: what the preset says gives way to precision.initial_loss_scale=0.5"),
    ("model.num_attention_heads=2", None), ("precision=bf16_fp8 opt_level=O3", None), ("precision=bf16_fp8 fp8.margin=0", None),
]


@pytest.mark.parametrize(("words", "note"), GIVES_WAY, ids=[words for words, _ in GIVES_WAY])
def test_what_the_user_did_not_write_gives_way_and_one_line_says_so(words: str, note: str | None) -> None:
    assert notes(words) == ([note] if note else [])


REFUSED = [
    ("trainer.max_steps=5 optim.warmup_steps=20",
     "optim.warmup_steps=20: with optim.constant_steps=0 more than trainer.max_steps=5; nearest is 5"),
    ("optim.warmup_steps=500", "optim.warmup_steps=500: with optim.constant_steps=0 more than trainer.max_steps=100; nearest is 100"),
    ("trainer.global_batch_size=8 trainer.micro_batch_size=16",
     "trainer.global_batch_size=8: not a multiple of trainer.micro_batch_size=16; nearest is 16"),
    ("precision=bf16_fp8 fp8.scaling=mxfp8 fp8.format=hybrid",
     "fp8.format=hybrid: fp8.scaling=mxfp8 needs e4m3; E5M2 gradients under fine-grained scales make training diverge"),
    ("precision=bf16_mxfp8 fp8.format=hybrid",
     "fp8.format=hybrid: fp8.scaling=mxfp8 needs e4m3; E5M2 gradients under fine-grained scales make training diverge"),
    (NEMOTRON, "fp8.high_precision_at_start=0 and fp8.high_precision_at_end=14: leave no layer of model.num_layers=4 in FP8; nearest is at "
     "most 3 together"),
    ("precision=bf16_fp8 fp8.params=true storage.shard=fsdp",
     "fp8.params=True: storage.shard=fsdp keeps float32 weights; write fp8.params=false, or storage.shard=zero2"),
    ("precision=bf16_fp8 fp8.params=true opt_level=O1", "fp8.params=True: has no effect, opt_level=O1 stores weights in fp16_scaled; drop one of the two"),
    ("precision=bf16_fp8 fp8.params=true opt_level=O2", "fp8.params=True: has no effect, opt_level=O2 stores weights in fp16_scaled; drop one of the two"),
    # at their defaults
    ("precision=bf16 fp8.margin=0", "fp8.margin=0: has no effect, precision.compute=bf16 runs no FP8; write precision=bf16_fp8 or fp8.enabled=true"),
    ("precision=bf16 fp8={margin:0}", "fp8.margin=0: has no effect, precision.compute=bf16 runs no FP8; write precision=bf16_fp8 or fp8.enabled=true"),
    ("precision=bf16_fp8_current fp8.amax_history_len=1024",
     "fp8.amax_history_len=1024: has no effect under fp8.scaling=current, only under delayed; drop it or write fp8.scaling=delayed"),
    ("trainer.val_check_interval=0 trainer.limit_val_batches=32",
     "trainer.limit_val_batches=32: has no effect while trainer.val_check_interval=0 (never evaluate); drop it"),
    ("optim.momentum=0.9", "optim.momentum=0.9: has no effect with optim.name=adamw"),
    ("precision.hysteresis=2", "precision.hysteresis=2: has no effect, loss scaling is for precision.compute=fp16 alone, not bf16"),
    ("checkpoint.every_n_steps=0 checkpoint.keep=2", "checkpoint.keep=2: has no effect while checkpoint.every_n_steps=0 (the end alone)"),
]


@pytest.mark.parametrize(("words", "line"), REFUSED, ids=[words for words, _ in REFUSED])
def test_what_the_user_wrote_is_refused(words: str, line: str) -> None:
    assert problems(words) == [line]


def test_python_is_told_by_the_logger(caplog: pytest.LogCaptureFixture) -> None:
    r = fp8cfg.compose(["trainer.max_steps=5"])
    assert (r.optim.warmup_steps, caplog.messages) == (5, ["note: optim.warmup_steps 20 -> 5: what the recipe says gives way to trainer.max_steps=5"])
    given = llama_tiny()
    assert fp8cfg.compose(["trainer.max_steps=5"], base=given) == r and given.optim.warmup_steps == 20


def test_a_recipe_in_python_is_as_it_stands() -> None:
    r = llama_tiny()
    r.trainer.max_steps = 5
    with pytest.raises(fp8cfg.ConfigError, match=r"optim\.warmup_steps=20: .* nearest is 5"):
        r.check()
    r = llama_tiny()
    r.precision, r.opt_level = "bf16_fp8", "O2"
    r.check()
    assert r.fp8.params, "nobody knows that it was not written"


def test_a_file_is_the_users_where_it_differs_from_the_default(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def composed_of(text: str, *words: str) -> fp8cfg.Recipe:
        file = tmp_path / "mine.yaml"
        file.write_text(text)
        return fp8cfg.compose(words, file=file)

    assert composed_of("trainer: {max_steps: 5}").optim.warmup_steps == 5 == fp8cfg.from_yaml("trainer: {max_steps: 5}").optim.warmup_steps
    assert caplog.messages == ["note: optim.warmup_steps 20 -> 5: what the recipe says gives way to trainer.max_steps=5"] * 2
    assert composed_of("precision: bf16\nfp8: {margin: 0}").fp8.margin == 0, "an exported recipe says so"
    with pytest.raises(fp8cfg.ConfigError, match=r"optim\.warmup_steps=20"):
        composed_of("optim: {warmup_steps: 20}", "trainer.max_steps=5")
    with pytest.raises(fp8cfg.ConfigError, match=r"fp8\.params=True: has no effect, opt_level=O2"):
        composed_of("precision: bf16_fp8\nfp8: {params: true}\nopt_level: O2")
    assert not composed_of("precision: bf16_fp8\nopt_level: O2").fp8.params
    assert composed_of("precision: bf16_fp8\nfp8: {margin: 1}", "precision=bf16").fp8.margin == 0, "a preset goes over all of precision"


def test_a_recipe_and_a_preset_of_ones_own_give_way_to_words(tmp_path: Path) -> None:
    for folder in ("recipe", "precision"):
        (tmp_path / folder).mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_text("precision: own\noptim: {warmup_steps: 30}\nlog: {fp8_stats_every_n_steps: 20}\n")
    (tmp_path / "precision" / "own.yaml").write_text("fp8: {enabled: true, scaling: current, granularity: row}\n")
    library = Library(tmp_path)
    found = composed(["recipe=mine", "trainer.max_steps=5", "fp8.scaling=delayed", "optim.warmup_steps=1"], library)
    assert not found.problems and found.notes == [
        "note: fp8.granularity row -> tensor: what the recipe says gives way to fp8.scaling=delayed",
        "note: log.fp8_stats_every_n_steps 20 -> 5: what the recipe says gives way to trainer.max_steps=5"]
    found = composed(["recipe=mine", "precision=bf16"], library)
    assert not found.problems and found.notes == [
        "note: log.fp8_stats_every_n_steps 20 -> 0: what the recipe says gives way to fp8.enabled=False"]


def test_an_export_of_every_preset_is_accepted(caplog: pytest.LogCaptureFixture) -> None:
    for name in presets.choices():
        for more in ([], ["opt_level=O2"] if "adamw" not in name and "aware" not in name else []):
            found = composed([f"precision={name}", "model.num_layers=32", *more], LIBRARY)
            if not found.problems:
                assert fp8cfg.from_yaml(fp8cfg.to_yaml(found.recipe)) == found.recipe
    r = llama_tiny()
    r.precision, r.opt_level = "bf16_fp8", "O2"
    assert fp8cfg.from_yaml(fp8cfg.to_yaml(r)) == r, "a file with every key is an export, which nobody wrote"
    assert not caplog.messages


def test_every_given_value_has_its_layer() -> None:
    for words, note in GIVES_WAY[:8]:
        traced = trace(words.split())
        assert {key: layers[-1].value for key, layers in traced.layers.items()} == flat(traced.recipe)
        key = full(str(note).split()[0])
        assert traced.layers[key][-1].kind == "gave way" and str(note).endswith(traced.layers[key][-1].at.text)
