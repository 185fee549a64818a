"""Mistakes of new users at the three doors: what is typed, written in a file or assigned, and the line that answers it."""

from __future__ import annotations

from pathlib import Path

import pytest

import fp8cfg
from fp8cfg.__main__ import main

TYPED = {
    # numbers with units, and numbers that are none
    (
        "trainer.max_steps=4k",
    ): "trainer.max_steps=4k: expected an integer, got str; write it out, as 4000 or 4096",
    (
        "trainer.max_steps=1.5M",
    ): "trainer.max_steps=1.5M: expected an integer, got str; write it out, as 1500000 or 1572864",
    ("model.seq_length=8192.5",): "model.seq_length=8192.5: expected an integer, got float",
    ("optim.lr=3e-4,",): "optim.lr=3e-4,: ends in a comma; write optim.lr=3e-4",
    ("fp8.margin=True",): "fp8.margin=true: expected an integer, got bool",
    ('fp8.margin="1"',): "fp8.margin=1: expected an integer, got str; write it without quotes",
    ("trainer.seed=1e400",): "trainer.seed=1e400: too large; expected a finite number",
    ("name=1e400",): "name=1e400: expected a string, got float; write 'name=\"1e400\"'",
    ("name=7",): "name=7: expected a string, got int; write 'name=\"7\"'",
    (
        "log.folder=2024",
    ): "log.folder=2024: expected a string, got int; write 'log.folder=\"2024\"'",
    ("name=true",): "name=true: expected a string, got bool; write 'name=\"true\"'",
    ("trainer.max_steps=null",): "trainer.max_steps=null: expected an integer, got null",
    (
        "trainer.gradient_clip_val=inf",
    ): "trainer.gradient_clip_val=inf: expected a finite number, got float",
    # lists for scalars, and scalars for lists
    (
        "trainer.max_steps=[100]",
    ): "trainer.max_steps=[100]: expected an integer, got a list; write trainer.max_steps=100",
    (
        "optim.betas=0.9,0.95",
    ): "optim.betas=0.9,0.95: several values are a sweep, but a run takes one; write a list as optim.betas=[0.9,0.95]",
    ("optim.betas=(0.9,0.95)",): "optim.betas=(0.9,0.95): a list is written optim.betas=[0.9,0.95]",
    ("data.mixture='a b'",): "data.mixture=a b: expected a list, got str",
    ("storage=false",): "storage=false: expected keys of storage, as in storage.weight=auto",
    ("optim.betas='1'",): "optim.betas=1: expected a list, got str",
    ("trainer.max_steps=[a]",): "trainer.max_steps=['a']: expected an integer, got a list",
    (
        "fp8={output_layer: choice(1,2)}",
    ): "fp8={output_layer: choice(1,2)}: a sweep cannot be inside braces; write a separate override, as in fp8.KEY=a,b",
    (
        "trainer={strategy.context_parallel_size: 2}",
    ): "trainer.strategy.context_parallel_size: a key in braces cannot have a dot; write trainer.strategy.context_parallel_size=2",
    ("trainer=[1]",): "trainer=[1]: expected keys of trainer, as in trainer.num_nodes=1",
    ("optim.betas=[0.9]",): "optim.betas=[0.9]: expected 2 values, got 1",
    ("fp8.exclude=[1]",): "fp8.exclude=1: expected a string, got int; put it in quotes",
    (
        "log.dir=a,b",
    ): "log.dir=a,b: takes one folder; quote a name with a comma, as in 'log.dir=\"a,b\"'",
    (
        "precision.fp8={enabled=true, margin=1}",
    ): "precision.fp8={enabled=true, margin=1}: use a colon and a space inside braces, as in 'precision.fp8={enabled: true, margin: 1}'",
    (
        "fp8.enabled=true, fp8.margin=1",
    ): "fp8.enabled=true, fp8.margin=1: several overrides in one; write fp8.enabled=true fp8.margin=1 without quotes",
    ("storage=O2",): "storage=O2: expected keys of storage; write opt_level=O2",
    ("storage=null",): "storage=null: expected keys of storage, as in storage.weight=auto",
    ("trainer.compile=null",): "trainer.compile=null: not an option; choose from auto, on, off",
    ("task={}",): "task={}: expected the name of a preset",
    ("fp8.x=1",): "fp8.x: no such key",
    # empty values
    ("optim.lr=",): "optim.lr=: needs a value",
    ("precision=",): "precision=: needs a name; see fp8cfg list precision",
    ("fp8=",): "fp8=: expected keys of fp8; write fp8.enabled=true",
    # truth in other words
    (
        "fp8.enabled=yes",
    ): "fp8.enabled=yes: expected true or false, got str; write fp8.enabled=true",
    (
        "trainer.smoke=0",
    ): "trainer.smoke=0: expected true or false, got int; write trainer.smoke=false",
    # quoting and spaces
    (
        "trainer.max_steps",
        "=",
        "5",
    ): "trainer.max_steps: needs a value, as in trainer.max_steps=VALUE\nerror: =: remove the spaces around it, as in key=value",
    (
        "trainer.max_steps:5",
    ): "trainer.max_steps:5: not of the form key=value; write trainer.max_steps=5",
    ("trainer.max_steps==5",): "trainer.max_steps==5: two '=' signs; write trainer.max_steps=5",
    (
        "trainer.max_steps=5 trainer.seed=1",
    ): "trainer.max_steps=5 trainer.seed=1: several overrides in one; write trainer.max_steps=5 trainer.seed=1 without quotes",
    ("'trainer.max_steps=5'",): "'trainer.max_steps=5': quoted twice; remove the inner quotes",
    ("fp8={margin:", "1}"): "1}: no command, recipe file or key=value; fp8cfg --help has them\n"
    "error: fp8={margin:: '{' without '}'; quote the override if it has spaces",
    (
        "fp8.exclude=[linear_qkv",
    ): "fp8.exclude=[linear_qkv: '[' without ']'; quote the override if it has spaces",
    (
        "precision=$PRECISION",
    ): "precision=$PRECISION: the shell did not replace this variable; write its value",
    ("$ARGS",): "$ARGS: the shell did not replace this variable; write its value",
    # signs that only look right
    (
        "precision=“bf16_fp8”",
    ): "precision=“bf16_fp8”: '“' cannot be part of a key or a number; retype it, or quote a text as in 'log.dir=\"a b\"'",
    (
        "trainer.max_steps=\uff11\uff10",
    ): "trainer.max_steps=\uff11\uff10: '\uff11' cannot be part of a key or a number; retype it, or quote a text as in 'log.dir=\"a b\"'",
    (
        "log.folder=a€b",
    ): "log.folder=a€b: a text with special characters needs quotes; write 'log.folder=\"a€b\"'",
    (
        "data.path=a=b.txt",
    ): "data.path=a=b.txt: a text with special characters needs quotes; write 'data.path=\"a=b.txt\"'",
    (
        "data.path=(p).txt",
    ): "data.path=(p).txt: a text with special characters needs quotes; write 'data.path=\"(p).txt\"'",
    (
        "hydra.run.dir=a=b",
    ): "hydra.run.dir=a=b: a text with special characters needs quotes; write 'hydra.run.dir=\"a=b\"'",
    (
        "hydra/launcher=ü",
    ): "hydra/launcher=ü: 'ü' cannot be part of a key or a number; retype it, or quote a text as in 'log.dir=\"a b\"'",
    # names
    (
        "recipe=8b",
    ): "recipe=8b: no such recipe; did you mean one of llama31_8b, llama3_8b, llama_8b, nemotron3_8b, qwen3_8b?",
    (
        "recipe=meta-llama/Llama-3.1-8B",
    ): "recipe=meta-llama/Llama-3.1-8B: a hub id is not a recipe; set recipe=from_hf model.path=hf://meta-llama/Llama-3.1-8B, or recipe=llama31_8b",
    ("trainer.plugns=3",): "trainer.plugns: no such key; did you mean 'trainer.plugins'?",
    ("Precision=bf16_fp8",): "Precision: no such key; did you mean 'precision'?",
    (
        "llama_8b",
        "bf16_fp8",
    ): "llama_8b: not of the form key=value; did you mean 'recipe=llama_8b'?",
    # presets by what they come to
    (
        "precision=fp8_mixed",
    ): "precision=fp8_mixed: no such precision preset; did you mean 'bf16_fp8'?",
    (
        "precision=bf16_fp8_delayed",
    ): "precision=bf16_fp8_delayed: no such precision preset; did you mean 'bf16_fp8'?",
    (
        "precision=fp8_tensorwise",
    ): "precision=fp8_tensorwise: no such precision preset; did you mean 'bf16_fp8_current'?",
    ("precision=bfloat16",): "precision=bfloat16: no such precision preset; did you mean 'bf16'?",
    ("precision=16",): "precision=16: expected the name of a preset; did you mean 'fp16'?",
    ("precision=int8",): "precision=int8: no such precision preset; see fp8cfg list precision",
    # text from elsewhere
    (
        "model.vocab_size=50,257",
    ): "model.vocab_size=50,257: several values are a sweep; write a number without commas: model.vocab_size=50257",
    ("fp8.margin = 1",): "fp8.margin = 1: spaces around '='; write fp8.margin=1",
    ("storage.exp_avg=8bit",): "storage.exp_avg=8bit: not an option; did you mean 'fp8_block'?",
}
WRITTEN = {
    'fp8:\n  margin: "1"\n': "2: fp8.margin=1: expected an integer, got str; write it without quotes",
    "trainer:\n  smoke: yes\n": "2: trainer.smoke=yes: expected true or false, got str; write trainer.smoke=true",
    "model:\n  seq_length: 8k\n": "2: model.seq_length=8k: expected an integer, got str; write it out, as 8000 or 8192",
    "optim:\n  betas: 0.9\n": "2: optim.betas=0.9: expected a list, got float",
    "model:\n  num_layers: [4]\n": "2: model.num_layers=[4]: expected an integer, got a list; write model.num_layers=4",
    "recipe: llama_tiny\ntrainer:\n  max_steps:\n": "3: trainer.max_steps=null: expected an integer, got null",
    "model:\n  num_layers 4\n": "1: model=num_layers 4: expected a mapping of keys, got str, as in model.num_layers=4",
    "optim:\n  lr: 1e-3\n  lr: 1e-4\n": " line 3: duplicate key 'lr'",
    "recipe: llama_tiny\noptim: {lr: 1e-3}\n\nname: a\nname: b\n": " line 5: duplicate key 'name'",
    "recipe: llama_tiny\n1: 2\n": " line 2: key 1 is not a name",
    "num_train_epochs: 3\n": "1: num_train_epochs: no such key; trainer.max_steps counts steps, not epochs",
    "model:\n  vocab_size: 50,257\n": "2: model.vocab_size=50,257: expected an integer, got str; write it out, as 50257",
    "fp8: hybrid\n": "1: fp8=hybrid: expected a mapping of keys, got str; write fp8.format=hybrid",
    "fp8:\n  enabled: 'true'\n": "2: fp8.enabled=true: expected true or false, got str; write it without quotes",
    "precision: float8\n": "1: precision=float8: no such precision preset; did you mean 'bf16_fp8'?",
    "precision: 16\n": "1: precision=16: expected a mapping of keys, got int; did you mean 'fp16'?",
    "storage:\n  shard: fully_shard\n": "2: storage.shard=fully_shard: not an option; did you mean 'fsdp'?",
    "model:\n\thidden_size: 64\n": " line 2: not valid YAML (found character '\\t' that cannot start any token)",
}
ASSIGNED = {
    "recipe.trainer.max_steps = '4k'": "trainer.max_steps=4k: expected an integer, got str; write it out, as 4000 or 4096",
    "recipe.fp8.enabled = 'on'": "fp8.enabled=on: expected true or false, got str; write fp8.enabled=true",
    "recipe.optim.lr = [1e-3]": "optim.lr=[0.001]: expected a number, got a list; write optim.lr=0.001",
    "recipe.optim.lr = None": "optim.lr=null: expected a number, got null",
    "recipe.precision = 'fp8'": "precision=fp8: no such precision preset; did you mean 'bf16_fp8'?",
    "recipe.trainer.precision = 'bf16-mixed'": "trainer.precision: no such key; it belongs to precision (precision=bf16_fp8)",
    "recipe.fp8_margin = 1": "fp8_margin: no such key; it belongs to fp8.margin",
    "recipe.precision = 'bf16_fp8_delayed'": "precision=bf16_fp8_delayed: no such precision preset; did you mean 'bf16_fp8'?",
    "recipe.fp8 = True": "fp8=true: expected a mapping of keys, got bool; write fp8.enabled=true",
    "recipe.fp8.override_linear_precision = (False, False, True)": "fp8.override_linear_precision=[false, false, true]: expected a mapping of keys, got a list; "
    "write 'fp8.override_linear_precision={fprop: false, dgrad: false, wgrad: true}'",
    "recipe.trainer.max_steps = '1_000'": "trainer.max_steps=1_000: expected an integer, got str; write it out, as 1000",
    "recipe.trainer.plugins = [fp8cfg.bf16_mixed()]": "precision: expected a single value, got a list; write it without brackets",
    "fp8cfg.compose({'fp8.margin': 1})": "compose: expected a list of overrides, as in compose(['recipe=llama_8b', 'fp8.margin=1'])",
    "fp8cfg.compose(['fp8.margin=1'], base='llama_8b')": "compose: base: expected a Recipe, got str; pass a name as an override, as in recipe=llama_8b",
    "fp8cfg.from_yaml('mine.yaml')": "from_yaml: mine.yaml: a str is read as YAML text; for a file use from_yaml(Path('mine.yaml'))",
    "recipe.optim = {1: 2}": "{1: 2}: key 1 is not a name",
    "recipe.model = fp8cfg.Recipe()": "model=Recipe: expected a mapping of keys, got Recipe",
    "fp8cfg.compose(file='')": ".: is a folder; expected a file",
    "fp8cfg.compose(['log.dir=\"a\\0b\"'])": "log.dir='a\\x00b': has a null character; remove it",
    "fp8cfg.compose('recipe=llama_8b')": "compose: expected a list of overrides, as in compose(['recipe=llama_8b', 'fp8.margin=1'])",
}


@pytest.mark.parametrize("words", TYPED, ids=" ".join)
def test_what_is_typed(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", *words]) == 2
    assert capsys.readouterr().err == f"error: {TYPED[words]}\n"


@pytest.mark.parametrize(
    ("verb", "ours"),
    [("run", "train"), ("validate", "check"), ("estimate", "plan"), ("trian", "train")],
)
def test_commands_of_other_trainers(
    verb: str, ours: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([verb, "precision=bf16_fp8"]) == 2
    assert capsys.readouterr().err == f"error: {verb}: no such command; did you mean {ours!r}?\n"


def test_a_preset_function_that_is_not_called() -> None:
    with pytest.raises(
        fp8cfg.ConfigError,
        match=r"^precision=<function .*: expected a mapping of keys, got function; write bf16_with_fp8_mixed\(\)$",
    ):
        fp8cfg.Recipe().precision = fp8cfg.bf16_with_fp8_mixed  # type: ignore[assignment]


@pytest.mark.parametrize("text", WRITTEN)
def test_what_is_written(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.yaml").write_text(text)
    assert main(["check", "my.yaml"]) == 2
    assert capsys.readouterr().err == f"error: my.yaml:{WRITTEN[text]}\n"


@pytest.mark.parametrize("statement", ASSIGNED)
def test_what_is_assigned(statement: str) -> None:
    with pytest.raises(fp8cfg.ConfigError) as e:
        exec(statement, {"recipe": fp8cfg.Recipe(), "fp8cfg": fp8cfg})
    assert str(e.value) == ASSIGNED[statement]
