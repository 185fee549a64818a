"""Ids of the Hugging Face hub: a stand-in for the hub on this machine serves a checkpoint, as huggingface_hub asks for it."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

import fp8cfg
from fp8cfg.schema import hub
from fp8cfg.schema.errors import ConfigError
from fp8cfg.training.data import named_tokenizer

huggingface_hub = pytest.importorskip("huggingface_hub")
transformers = pytest.importorskip("transformers")

COMMIT = "c0ffee" + "0" * 34
WORDS = [
    "data=tiny",
    "precision=fp32",
    "model.seq_length=32",
    "trainer.global_batch_size=4",
    "trainer.accelerator=cpu",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the repository owner/small has."""
    from tokenizers import Tokenizer, models

    made = tmp_path_factory.mktemp("small")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        num_hidden_layers=1,
        hidden_size=64,
        intermediate_size=96,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=272,
        head_dim=32,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(made)
    Tokenizer(models.WordLevel({"a": 0, "<end>": 1}, unk_token="a")).save(
        str(made / "tokenizer.json")
    )
    (made / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    (made / "consolidated.safetensors").write_bytes(b"the same weights once more")
    (made / "run.py").write_text("raise SystemExit('remote code')")
    return made


@pytest.fixture
def served(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The paths that the stand-in was asked for."""
    asked: list[str] = []

    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.answer(head=True)

        def do_GET(self) -> None:
            asked.append(self.path)
            self.answer(head=False)

        def answer(self, head: bool) -> None:
            if self.path.startswith(
                (
                    "/api/models/owner/small/revision/main",
                    f"/api/models/owner/small/revision/{COMMIT}",
                )
            ):
                found = {
                    "id": "owner/small",
                    "modelId": "owner/small",
                    "sha": COMMIT,
                    "private": False,
                    "siblings": [{"rfilename": file.name} for file in sorted(folder.iterdir())],
                    "tags": [],
                    "downloads": 0,
                }
                return self.send(json.dumps(found).encode(), head)
            if "/api/models/owner/small/tree/" in self.path:
                found_files = [
                    {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": "0"}
                    for file in sorted(folder.iterdir())
                ]
                return self.send(json.dumps(found_files).encode(), head)
            if self.path.startswith("/owner/small/resolve/"):
                return self.send((folder / self.path.rpartition("/")[2]).read_bytes(), head)
            code = "RevisionNotFound" if "/owner/small/" in self.path else "RepoNotFound"
            self.send_response(404)
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return None

        def send(self, body: bytes, head: bool) -> None:
            self.send_response(200)
            for name, value in (
                ("ETag", f'"{hashlib.sha1(body).hexdigest()}"'),
                ("X-Repo-Commit", COMMIT),
                ("Content-Length", str(len(body))),
            ):
                self.send_header(name, value)
            self.end_headers()
            if not head:
                self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(
        constants,
        "HUGGINGFACE_CO_URL_TEMPLATE",
        constants.ENDPOINT + "/{repo_id}/resolve/{revision}/{filename}",
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
    hub._download.cache_clear()
    yield asked
    server.shutdown()
    server.server_close()
    thread.join()
    hub._download.cache_clear()


def test_an_id_gives_the_shape_the_weights_and_the_tokenizer(
    served: list[str], folder: Path, tmp_path: Path
) -> None:
    recipe = fp8cfg.compose(["recipe=from_hf", "model.path=hf://owner/small", *WORDS])
    assert (recipe.model.hidden_size, recipe.model.weights) == (64, f"hf://owner/small@{COMMIT}")
    assert [path.rpartition("/")[2] for path in served if "/resolve/" in path] == ["config.json"]
    model = fp8cfg.build(recipe).model
    local = fp8cfg.build(fp8cfg.compose(["recipe=from_hf", f"model.path={folder}", *WORDS])).model
    assert all(
        torch.equal(ours, theirs)
        for ours, theirs in zip(model.parameters(), local.parameters(), strict=True)
    )
    assert named_tokenizer("hf://owner/small").eos == 1
    held = [file.name for file in (tmp_path / "cache").glob("models--owner--small/snapshots/*/*")]
    assert "model.safetensors" in held and not {"run.py", "consolidated.safetensors"} & set(held)
    asked = len(served)
    fp8cfg.compose(["recipe=from_hf", "model.path=hf://owner/small", *WORDS])
    assert len(served) == asked  # once in a process
    assert str(
        fp8cfg.explain(["recipe=from_hf", "model.path=hf://owner/small"], "model.hidden_size")
    ).count("owner/small")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("hf://small", "is not a hub id; write hf://OWNER/NAME"),
        (
            "hf://owner/smal",
            r"not found on the hub, or not accessible with this token \(HF_TOKEN\)",
        ),
        ("hf://owner/small@v2", "owner/small has no revision v2"),
        (
            "owner/small",
            r"owner/small/config.json not found; for a hub id write model.path=hf://owner/small",
        ),
    ],
)
def test_an_id_that_is_not_there_is_one_line(served: list[str], name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"^model.path={name}: {said}$"):
        fp8cfg.compose(["recipe=from_hf", f"model.path={name}", *WORDS])


def test_without_the_hub_what_was_downloaded_serves(
    served: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["recipe=from_hf", "model.path=hf://owner/small", *WORDS]
    with monkeypatch.context() as alone:
        alone.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        with pytest.raises(
            ConfigError,
            match=r"^model\.path=hf://owner/small: could not be downloaded, and is not in the cache",
        ):
            fp8cfg.compose(words)
    first = fp8cfg.compose(words)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    hub._download.cache_clear()
    assert fp8cfg.compose(words) == first
