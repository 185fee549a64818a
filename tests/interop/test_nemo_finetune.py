"""NeMo's finetune_recipe, read as data: its peft_scheme is a task here, and what is set on `peft` the lora node."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

import fp8cfg
from fp8cfg.__main__ import main
from fp8cfg.interop.projects import from_file
from fp8cfg.recipes import llama3_8b
from fp8cfg.schema.errors import ConfigError

HEAD = "import nemo_run as run\nfrom nemo.collections import llm\n"


@pytest.mark.parametrize(
    ("text", "want"),
    [
        (
            'recipe = llm.llama3_8b.finetune_recipe(name="mine", peft_scheme="lora")\n',
            llama3_8b(task="lora", name="mine"),
        ),
        (
            'recipe = llm.llama3_8b.finetune_recipe(name="mine")\nrecipe.peft.dim = 16\nrecipe.peft.target_modules = ["linear_qkv"]\n',
            llama3_8b(task="lora", name="mine", lora={"rank": 16, "targets": ["linear_qkv"]}),
        ),
        (
            "recipe = llm.llama3_8b.finetune_recipe(peft_scheme=None)\nrecipe.trainer.plugins = bf16_with_fp8_mixed()\n",
            llama3_8b(task="sft", precision="bf16_fp8"),
        ),
    ],
)
def test_a_finetune_recipe_is_a_task(text: str, want: fp8cfg.Recipe, tmp_path: Path) -> None:
    (tmp_path / "theirs.py").write_text(HEAD + text)
    assert from_file("nemo", tmp_path / "theirs.py", llama3_8b()).recipe == want


def test_what_is_not_here_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "theirs.py"
    file.write_text(HEAD + 'recipe = llm.llama3_8b.finetune_recipe(peft_scheme="dora")\n')
    with pytest.raises(
        ConfigError,
        match="peft_scheme=dora: not supported; set task=lora or task=sft",
    ):
        from_file("nemo", file)
    file.write_text(
        HEAD + 'recipe = llm.llama3_8b.finetune_recipe()\nrecipe.peft.dropout_position = "post"\n'
    )
    assert main(["import", "nemo", str(file), "recipe=llama3_8b"]) == 0
    text = capsys.readouterr().out
    assert (
        "# recipe.peft.dropout_position = 'post': not read" in text
        and yaml.safe_load(text)["lora"]["enabled"] is True
    )
