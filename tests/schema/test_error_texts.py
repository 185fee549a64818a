"""What a mistake is answered with: each line, exactly. All go to stderr, with exit code 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from fp8cfg.__main__ import main

ROOT = Path(__file__).parents[2]

OPTIONS = "choose from --config-dir, --cfg, --info, --package, --multirun, --resolve, --hydra-help, --verbose, --help, --version"
MISTAKES: list[tuple[str, str | list[str]]] = [
    # a typo in a key, a group, a choice, a verb, an option, an enum value
    ("fp8.margn=1", "fp8.margn: no such key; did you mean 'fp8.margin'?"),
    ("trainer.plugins.fp8.margn=1", "fp8.margn: no such key; did you mean 'fp8.margin'?"),
    ("reciep=llama_8b", "reciep: no such key; did you mean 'recipe'?"),
    ("recipe=lama_8b", "recipe=lama_8b: no such recipe; did you mean 'llama_8b'?"),
    (
        "precision=bf16_pf8",
        "precision=bf16_pf8: no such precision preset; did you mean 'bf16_fp8'?",
    ),
    (
        "data=wiki",
        "data=wiki: no such data preset; choose from chat, csv, dataset, jsonl, parquet, stdlib, text, tiny, tokens",
    ),
    ("exprt", "exprt: no such command; did you mean 'export'?"),
    ("lst --json", "lst: no such command; did you mean 'list'?"),
    ("help lst", "lst: no such command; did you mean 'list'?"),
    ("lst --help", "lst: no such command; did you mean 'list'?"),
    ("recipe=llama_tiny resume", "resume: a command comes first, as in: fp8cfg resume"),
    ("recipe=llama_tiny plan --gpu h100", "plan: a command comes first, as in: fp8cfg plan"),
    ("recipe=xyz", "recipe=xyz: no such recipe; see fp8cfg list recipe"),
    ("recipe:llama_tiny", "recipe:llama_tiny: not of the form key=value; write recipe=llama_tiny"),
    ("tp=2", "tp: no such key; it belongs to trainer.strategy.tensor_model_parallel_size"),
    (
        "fp8.override_linear_precision=(True,False,True)",
        "fp8.override_linear_precision=(True,False,True): expected keys; "
        "write 'fp8.override_linear_precision={fprop: true, dgrad: false, wgrad: true}'",
    ),
    ("frobnicate", "frobnicate: no command, recipe file or key=value; fp8cfg --help has them"),
    ("generate", "generate: no such command; did you mean 'sample'?"),
    ("llama_8b", "llama_8b: not of the form key=value; did you mean 'recipe=llama_8b'?"),
    ("bf16_fp8", "bf16_fp8: not of the form key=value; did you mean 'precision=bf16_fp8'?"),
    ("reciep", "reciep: not of the form key=value; did you mean 'recipe'?"),
    ("tests", "tests: is a folder; run folders are for fp8cfg resume, rerun and diff"),
    ("README.md", "README.md: not a recipe file; its name must end in .yaml or .json"),
    ("check --jsno", "--jsno: no such option; did you mean '--json'?"),
    ("plan --tre", "--tre: no such option; did you mean '--tree'?"),
    ("--multrun", "--multrun: no such option; did you mean '--multirun'?"),
    (
        "fp8.scaling=delayd precision=bf16_fp8",
        "fp8.scaling=delayd: not an option; did you mean 'delayed'?",
    ),
    ("opt_level=O9", "opt_level=O9: not an option; choose from O1, O2, O3"),
    ("trainer.plugins.opt_level=O9", "opt_level=O9: not an option; choose from O1, O2, O3"),
    ("precision.backend=tee", "backend=tee: not an option; did you mean 'te'?"),
    ("trainer.compile=maybe", "trainer.compile=maybe: not an option; choose from auto, on, off"),
    (
        "log.wandb=true",
        "log.wandb: no such key; it belongs to log.loggers=[wandb]",
    ),
    ("log.loggrs=[wandb]", "log.loggrs: no such key; did you mean 'log.loggers'?"),
    (
        "log.tensorboard=true",
        "log.tensorboard: no such key; it belongs to log.loggers=[tensorboard]",
    ),
    ("report_to=wandb", "report_to: no such key; it belongs to log.loggers"),
    ("log.loggers=[wandbb]", "log.loggers=wandbb: not an option; did you mean 'wandb'?"),
    ("log.loggers=[wandb,wandb]", "log.loggers: wandb is listed twice; drop one"),
    ("log.loggers=none", "log.loggers=none: write log.loggers=[]"),
    (
        "log.project=x",
        "log.project=x: has no effect with log.loggers=[]; add wandb, mlflow or trackio",
    ),
    ("optim.weight_decy=1", "optim.weight_decy: no such key; did you mean 'optim.weight_decay'?"),
    # a leaf name alone
    ("margin=1", "margin: no such key; did you mean 'fp8.margin'?"),
    ("lr=1e-4", "lr: no such key; did you mean 'optim.lr'?"),
    (
        "every_n_steps=1",
        "every_n_steps: no such key; did you mean one of checkpoint.every_n_steps, log.every_n_steps?",
    ),
    # words of other projects
    ("fp8_margin=1", "fp8_margin: no such key; it belongs to fp8.margin"),
    ("storage.master=fp16", "storage.master: no such key; it belongs to storage.master_weight"),
    ("storage.grad=fp8", "storage.grad: no such key; it belongs to storage.weight_grad"),
    (
        "storage.moments=fp8",
        "storage.moments: no such key; it belongs to storage.exp_avg and storage.exp_avg_sq",
    ),
    ("trainer.fp8_params=true", "trainer.fp8_params: no such key; it belongs to fp8.params"),
    ("fp8_recipe=tensorwise", "fp8_recipe=tensorwise: no such key; set fp8.scaling=current"),
    ("fp8_recipe=blockwise", "fp8_recipe=blockwise: no such key; set fp8.scaling=block"),
    ("fp8_recipe=delayed", "fp8_recipe=delayed: no such key; set fp8.scaling=delayed"),
    ("fp8_recipe=custom", "fp8_recipe: no such key; it belongs to fp8.scaling"),
    ("fp8.scaling=tensorwise", "fp8.scaling=tensorwise: not an option; did you mean 'current'?"),
    ("fp8.scaling=Blockwise", "fp8.scaling=Blockwise: not an option; did you mean 'block'?"),
    ("fp8={scaling:tensorwise}", "fp8.scaling=tensorwise: not an option; did you mean 'current'?"),
    ("mixed_precision=fp8", "mixed_precision=fp8: no such key; set precision=bf16_fp8"),
    ("mixed_precision=no", "mixed_precision=no: no such key; set precision=fp32"),
    (
        "mixed_precision=fp9",
        "mixed_precision: no such key; it belongs to precision (precision=bf16_fp8)",
    ),
    ("trainer.precision=bf16", "trainer.precision=bf16: no such key; set precision=bf16"),
    ("trainer.precision=16-mixed", "trainer.precision=16-mixed: no such key; set precision=fp16"),
    ("precision=fp8", "precision=fp8: no such precision preset; did you mean 'bf16_fp8'?"),
    ("precision=16-mixed", "precision=16-mixed: no such precision preset; did you mean 'fp16'?"),
    ("optimization_level=O2", "optimization_level: no such key; it belongs to opt_level"),
    (
        "ddp.keep_fp8_transpose_cache=true",
        "ddp.keep_fp8_transpose_cache: no such key; it belongs to fp8.keep_transpose_cache",
    ),
    # types, bounds, and keys that would do nothing
    ("fp8.margin=abc", "fp8.margin=abc: expected an integer, got str"),
    ("fp8.margin=99", "fp8.margin=99: must be at most 16"),
    (
        "fp8.margin=1",
        "fp8.margin=1: has no effect with fp8.enabled=false; set precision=bf16_fp8 or fp8.enabled=true",
    ),
    (
        "fp8.margin=1 precision=bf16_fp8 fp8.enabled=false",
        "fp8.margin=1: has no effect with fp8.enabled=false; remove one of them",
    ),
    (
        "fp8.scaling=block",
        "fp8.scaling=block: has no effect with fp8.enabled=false; set precision=bf16_fp8 or fp8.enabled=true",
    ),
    (
        "lora.enabled=false lora.rank=4",
        "lora.rank=4: has no effect with lora.enabled=false; remove one of them",
    ),
    (
        "log.fp8_stats_every_n_steps=2 precision=bf16_fp8 fp8.enabled=false",
        "log.fp8_stats_every_n_steps=2: has no effect with fp8.enabled=false; remove it or set precision=bf16_fp8",
    ),
    (
        "fp8.margin=1 precision=bf16_fp8_current",
        "fp8.margin=1: has no effect with fp8.scaling=current; remove it or set fp8.scaling=delayed",
    ),
    # Hydra's grammar
    ("fp8.margin", "fp8.margin: needs a value, as in fp8.margin=VALUE"),
    ("precision", "precision: needs a value, as in precision=NAME"),
    (
        "=1",
        "=1: not of the form key=value; quote a value with special characters, as in 'log.dir=\"a b\"'",
    ),
    (
        "fp8.margin=0,1",
        "fp8.margin=0,1: several values are a sweep, but a run takes one; run fp8cfg sweep fp8.margin=0,1",
    ),
    (
        "precision=bf16_fp8,fp8.margin=1",
        "precision=bf16_fp8,fp8.margin=1: several overrides in one; write precision=bf16_fp8 fp8.margin=1",
    ),
    (
        "fp8={margin=1,interval=2}",
        "fp8={margin=1,interval=2}: use a colon and a space inside braces, as in 'fp8={margin: 1,interval: 2}'",
    ),
    ("trainer.accelerator=gpu", "trainer.accelerator=gpu: not an option; did you mean 'cuda'?"),
    ("+fp8.margin=1", "+fp8.margin=1: fp8.margin already exists; remove the +: fp8.margin=1"),
    ("~fp8.margin", "~fp8.margin: keys cannot be removed; set fp8.margin to its default instead"),
    ("precision@x=bf16", "precision@x=bf16: packages are fixed; write precision=bf16"),
    ("name=${oc.env:HOME}", "name=${oc.env:HOME}: interpolation is not accepted; write the value"),
    ("hydra.run.dri=x", "hydra.run.dri=x: no such setting of Hydra; did you mean 'hydra.run.dir'?"),
    (
        "hydra.verbose=true",
        "hydra.verbose=true: does nothing in a single run; use it with -m, --cfg or --info",
    ),
    (
        "hydra/launcher=basic",
        "hydra/launcher=basic: does nothing in a single run; use it with -m, --cfg or --info",
    ),
    # all at once: options, verbs and words
    (
        "--foo fp8.margn=1 recipe=lama_8b --config-dir",
        [
            f"--foo: no such option; {OPTIONS}",
            "--config-dir: needs a value",
            "fp8.margn: no such key; did you mean 'fp8.margin'?",
            "recipe=lama_8b: no such recipe; did you mean 'llama_8b'?",
        ],
    ),
    (
        "exprt fp8.margn=1 --json",
        [
            "exprt: no such command; did you mean 'export'?",
            "fp8.margn: no such key; did you mean 'fp8.margin'?",
        ],
    ),
    (
        "hydra.verbose=true fp8.margn=1",
        [
            "hydra.verbose=true: does nothing in a single run; use it with -m, --cfg or --info",
            "fp8.margn: no such key; did you mean 'fp8.margin'?",
        ],
    ),
    (
        "resume x --alow fp8 fp8.margn=1",
        [
            "--alow: no such option; did you mean '--allow'?",
            "fp8.margn: no such key; did you mean 'fp8.margin'?",
        ],
    ),
    (
        "-m fp8.margin=0,99 --foo",
        [f"--foo: no such option; {OPTIONS}", "fp8.margin=99: must be at most 16"],
    ),
    ("completion", "completion: needs a shell; choose from bash, zsh, fish"),
    ("completion bsh", "completion bsh: no such shell; did you mean 'bash'?"),
    ("rerun", "rerun: needs one run folder, as in: fp8cfg rerun runs/NAME"),
    (
        "rerun nowhere",
        "nowhere: run folder not found; check the path, or list your runs with fp8cfg runs",
    ),
]


@pytest.mark.parametrize(("words", "lines"), MISTAKES, ids=[words for words, _ in MISTAKES])
def test_a_mistake_is_answered_with_these_lines(
    words: str,
    lines: str | list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    assert main(words.split()) == 2
    out, err = capsys.readouterr()
    assert err.splitlines() == [
        f"error: {line}" for line in ([lines] if isinstance(lines, str) else lines)
    ]
    assert out == ""


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("", "'': not of the form key=value, nor a path; remove it"),
        ("a\nb", "a\\nb: no command, recipe file or key=value; fp8cfg --help has them"),
        (
            "\x1b[31mred",
            "\\x1b[31mred: no command, recipe file or key=value; fp8cfg --help has them",
        ),
        (
            "name=a\nb",
            "name=a\\nb: not of the form key=value; quote a value with special characters, as in 'log.dir=\"a b\"'",
        ),
        ("x" * 5000, f"{'x' * 5000}: no command, recipe file or key=value; fp8cfg --help has them"),
        (
            "fp8=" + "{a: " * 600 + "1" + "}" * 600,
            "fp8={a: {a: {a: {a: {a: {a: {a: {a: {a: ...: nested too deeply",
        ),
    ],
)
def test_a_word_whatever_is_in_it_is_answered_with_one_line(
    word: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", word]) == 2
    assert capsys.readouterr().err == f"error: {line}\n"


@pytest.mark.parametrize(
    "verb", ["resume", "rerun", "check --config-dir", "list --config-dir", "diff x.yaml"]
)
def test_a_name_too_long_for_a_file_is_one_line(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*verb.split(), "x" * 5000]) == 2
    said = (
        f"--config-dir {'x' * 40}...: no such folder"
        if verb.startswith("check")
        else f"{'x' * 40}...: File name too long"
    )
    assert capsys.readouterr().err.splitlines()[-1] == f"error: {said}"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "hydra: {run: {dir: x}}",
            "hydra: Hydra's own settings are not part of a recipe; pass them on the command line",
        ),
        (
            "hydra/launcher: x",
            "hydra/launcher: Hydra's own settings are not part of a recipe; pass them on the command line",
        ),
        (
            "fp8: {override_linear_precision.wgrad: true}",
            "fp8.override_linear_precision.wgrad: use dotted names only at the top level of a file; write a node for each dot",
        ),
        ("recipe: 5", "recipe=5: needs the name of a preset"),
        ("defaults: [{data: [5]}]", "data=5: needs the name of a preset"),
        ("defaults: {}", "defaults={}: expected a list, as in defaults: [llama_8b]"),
    ],
)
def test_a_mistake_in_a_file(
    text: str, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    assert main(["check", str(file)]) == 2
    at = "" if text.startswith("defaults: [") else ":1"  # the entries of a list are told by no key
    assert capsys.readouterr().err == f"error: {file}{at}: {line}\n"
