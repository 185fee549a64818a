"""A tokenizer of a few hundred tokens, made by the tokenizers library and written as transformers writes one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GENERATION = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n{% generation %}"
    "{{ m.content }}<|im_end|>{% endgeneration %}\n{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|begin|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def write_tokenizer(folder: Path, size: int = 400, **config: Any) -> Path:
    """`folder` with a byte-level BPE of at most `size` tokens, whose special tokens are the last of them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    text = (Path(__file__).parents[2] / "fp8cfg" / "data" / "tiny.txt").read_text()
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    made.train_from_iterator(
        [text[:20_000]],
        trainers.BpeTrainer(
            vocab_size=size - len(SPECIAL),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    made.add_special_tokens(SPECIAL)
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    said = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|begin|>",
        "eos_token": "<|endoftext|>",
        **config,
    }
    (folder / "tokenizer_config.json").write_text(
        json.dumps({k: v for k, v in said.items() if v is not None})
    )
    return folder
