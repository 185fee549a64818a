"""What an error suggests is run: no suggestion leads back to an error that was there before."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

import fp8cfg
from fp8cfg.__main__ import main
from tests.composition.test_mistakes import TYPED

MORE = [
    "trainer.timeout.step=10k",
    "data.path=a.txt,b.txt",
    "data.path=[a.txt,b.txt]",
    "fp8.exclude='[\"*.linear_fc1\"]'",
    "trainer.max_steps=010",
    "optim.lr=00.5",
    "name=1e5",
    "name=0x1f",
    "lora.target=all",
    "optim.betas=0.9",
    "storage=zero1",
    "precision.fp8=true",
    "trainer.strategy=ddp",
    "fp8=hybrid",
    "data.mixture=a,b",
    "fp8.include=linear_fc1",
    "model.seq_length=4096.0",
    "trainer.val_check_interval=0.5",
    "trainer.limit_val_batches=1.0",
    "checkpoint.save_dir=x",
    "optim=adam",
    "log=wandb",
]
_QUOTED = r"\"[^\"]+\"|'(?:[^']|'(?=\"))+'|\S+"
_WRITE = re.compile(
    rf"(?:write|set|write a list as|without commas:|remove the \+:) ({_QUOTED})"
    rf"(?: or ({_QUOTED}))?(?=$|[;,]| or | without)"
)
_MEANT = re.compile(r"did you mean '([^']+)'\?")
STEPS = 4


def follow(words: list[str], line: str) -> list[str] | None:
    """The words with what an error line suggests; None if it suggests nothing to type."""
    meant = _MEANT.search(line)
    written = _WRITE.search(line)
    if written and "fp8cfg " not in line:
        try:
            new = shlex.split(written[1])[0]
        except ValueError:
            new = written[1].strip("'\"")
        if "=" not in new:
            return None
        key = new.partition("=")[0]
        rest = [word for word in words if not _is_for(word, (key, _key_of(line)))]
        return [*rest, new]
    if not meant:
        return None
    if "=" in meant[1]:
        name = line.partition(":")[0]
        return [meant[1] if word == name else word for word in words]
    key = _key_of(line)
    new_words: list[str] = []
    for word in words:
        name, _, value = word.partition("=")
        if name != key:
            new_words.append(word)
        elif "no such key" in line:
            new_words.append(f"{meant[1]}={value}")
        else:
            new_words.append(f"{name}={meant[1]}")
    return new_words


def _is_for(word: str, keys: tuple[str, ...]) -> bool:
    """Whether a word sets one of the keys, or a node around one."""
    return any(f"{key}.".startswith(f"{_key_of(word)}.") for key in keys)


def _key_of(line: str) -> str:
    return re.split(r"[=:]", line, maxsplit=1)[0]


def errors(words: list[str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    code = main(["check", *words])
    lines = capsys.readouterr().err.splitlines()
    assert code in (0, 2, 3), lines
    return [each.removeprefix("error: ") for each in lines if each.startswith("error: ")]


CASES = [*map(list, TYPED), *([word] for word in MORE)]


@pytest.mark.parametrize("words", CASES, ids=lambda words: " ".join(words))
def test_a_suggestion_leads_on(
    words: list[str],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    seen: list[str] = []
    for _ in range(STEPS):
        lines = errors(words, capsys)
        again = [line for line in lines if line in seen]
        assert again == [], (seen, words)
        seen += lines
        changed = next(filter(None, (follow(words, line) for line in lines)), None)
        if changed is None:
            return
        words = changed
    raise AssertionError(f"no end after {STEPS} suggestions: {seen}")


@pytest.mark.parametrize(
    ("word", "seconds"), [("10m", 600), ("1.5h", 5400), ("90s", 90), ("500ms", 0.5)]
)
def test_a_key_with_a_unit_reads_it(word: str, seconds: float) -> None:
    """At each door."""
    recipe = fp8cfg.compose([f"trainer.timeout.step={word}"])
    assert recipe.trainer.timeout.step == seconds
    other = fp8cfg.compose([])
    other.trainer.timeout.step = word  # type: ignore[assignment]
    assert other == recipe


ANSWERS = {
    "trainer.timeout.step=10k": "expected a number, got str; write seconds, or a time such as 10m",
    "data.path=a.txt,b.txt": "takes one path; write 'data.mixture=[{path: a.txt, weight: 1}, {path: b.txt, weight: 1}]'",
    "data.path=[a.txt,b.txt]": "expected a string, got a list; write 'data.mixture=[{path: a.txt, weight: 1}, {path: b.txt, weight: 1}]'",
    "fp8.exclude='[\"*.x\"]'": "expected a list, got str; write \"fp8.exclude=['*.x']\"",
    "trainer.max_steps=010": "expected an integer, got str; write trainer.max_steps=10",
    "optim.lr=00.5": "expected a number, got str; write optim.lr=0.5",
}


@pytest.mark.parametrize("word", ANSWERS)
def test_answers_that_went_in_circles(word: str) -> None:
    with pytest.raises(fp8cfg.ConfigError) as error:
        fp8cfg.compose([word])
    assert str(error.value).endswith(ANSWERS[word])


def test_a_number_for_a_text_in_a_file_is_put_in_quotes(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("name: 1e5\n")
    with pytest.raises(fp8cfg.ConfigError, match="expected a string, got float; put it in quotes"):
        fp8cfg.compose([], file=tmp_path / "a.yaml")
    (tmp_path / "a.yaml").write_text("name: '1e5'\n")
    assert fp8cfg.compose([], file=tmp_path / "a.yaml").name == "1e5"


def test_a_file_that_chooses_in_a_group_of_its_own_is_answered_once(tmp_path: Path) -> None:
    """With and without `override`, which led to each other."""
    (tmp_path / "optim").mkdir()
    (tmp_path / "experiment").mkdir()
    (tmp_path / "optim/slow.yaml").write_text("lr: 1e-4\n")
    answers = set()
    for entry in ("/optim: slow", "override /optim: slow"):
        (tmp_path / "experiment/a.yaml").write_text(
            f"# @package _global_\ndefaults:\n  - {entry}\ntrainer: {{max_steps: 50}}\n"
        )
        with pytest.raises(fp8cfg.ConfigError) as error:
            fp8cfg.compose(["experiment=a"], config_dir=tmp_path)
        answers.add(str(error.value).partition("defaults: ")[2])
    assert answers == {
        "optim: a file can choose only in shipped groups; remove it and pass optim=slow on the command line"
    }
    (tmp_path / "experiment/a.yaml").write_text("# @package _global_\ntrainer: {max_steps: 50}\n")
    recipe = fp8cfg.compose(["experiment=a", "optim=slow"], config_dir=tmp_path)
    assert (recipe.optim.lr, recipe.trainer.max_steps) == (1e-4, 50)
