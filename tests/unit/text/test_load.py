"""Reading tokenizers from folders and GGUF checkpoints."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from octavo.checkpoint.types import Checkpoint
from octavo.config.args import EngineArgs
from octavo.errors import CheckpointError, ConfigError, InvalidRequest, ModelNotFound
from octavo.frontend.text.backend import SlowBackend
from octavo.frontend.text.detokenizer import IncrementalDetokenizer
from octavo.frontend.text.tokenizer import Tokenizer, load_tokenizer
from tests.unit.text import small_tokenizers
from tests.unit.text.test_gguf_tokenizer import byte_level_metadata

USER = [{"role": "user", "content": "hello"}]


def folder_with(path: Path, config: dict[str, Any] | None = None, *, bos: bool = False) -> Path:
    path.mkdir(exist_ok=True)
    small_tokenizers.byte_level(bos=bos).save(str(path / "tokenizer.json"))
    if config is not None:
        (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def load(path: Path, **args: Any) -> Tokenizer:
    return load_tokenizer(Checkpoint(str(path), "m", "safetensors", {}, {}, ()), EngineArgs(**args))


def test_folder(tmp_path: Path) -> None:
    config = {
        "bos_token": "<s>",
        "eos_token": {"content": "</s>", "special": True},
        "chat_template": "{{ bos_token }}{{ messages[0].content }}",
    }
    tokenizer = load(folder_with(tmp_path, config, bos=True))
    assert tokenizer.backend.token(tokenizer.eos_token_id or 0) == "</s>"
    assert tokenizer.apply_chat_template(USER) == "<s>hello"
    assert tokenizer.encode("<s>hello") == tokenizer.encode("hello")
    assert tokenizer.encode("hello")[0] == tokenizer.bos_token_id


def test_tokenizer_json_alone_is_enough(tmp_path: Path) -> None:
    tokenizer = load(folder_with(tmp_path))
    assert tokenizer.decode(tokenizer.encode("hello world")) == "hello world"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.chat_template) == (None, None, None)
    with pytest.raises(InvalidRequest, match="no chat template"):
        tokenizer.apply_chat_template(USER)


def test_special_tokens_map_fills_in(tmp_path: Path) -> None:
    folder_with(tmp_path, {"eos_token": "</s>"})
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": {"content": "<s>"}, "eos_token": "<s>"}')
    tokenizer = load(tmp_path)
    assert tokenizer.backend.token(tokenizer.bos_token_id or 0) == "<s>"
    assert tokenizer.backend.token(tokenizer.eos_token_id or 0) == "</s>"


def test_added_tokens_of_the_config_are_applied_where_ids_fit(tmp_path: Path) -> None:
    size = small_tokenizers.byte_level().get_vocab_size()
    config = {
        "eos_token": "hello",  # in the vocabulary, but no special token there
        "added_tokens_decoder": {
            str(size): {"content": "<|new|>", "special": True},
            str(size - 1): {"content": "<tool call>", "special": True},
            str(size + 7): {"content": "<|misplaced|>", "special": True},
            "x": {"content": ""},
        },
    }
    tokenizer = load(folder_with(tmp_path, config))
    assert tokenizer.encode("<|new|>") == [size]
    assert tokenizer.backend.id_of("<|misplaced|>") is None
    assert tokenizer.decode(tokenizer.encode("hello<tool call><|new|> world")) == " world"


@pytest.mark.parametrize("shape", ["text", "list", "dict", "json", "jinja", "additional"])
def test_every_place_a_template_can_be(tmp_path: Path, shape: str) -> None:
    named = {"default": "D", "tool_use": "T"}
    config: dict[str, Any] = {
        "chat_template": {"text": "D", "list": [{"name": n, "template": t} for n, t in named.items()], "dict": named}.get(shape)
    }
    folder_with(tmp_path, config)
    if shape == "json":
        (tmp_path / "chat_template.json").write_text('{"chat_template": "D"}')
    if shape in ("jinja", "additional"):
        (tmp_path / "chat_template.jinja").write_text("D")
    if shape == "additional":
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("T")
    tokenizer = load(tmp_path)
    assert tokenizer.chat_template == tokenizer.apply_chat_template(USER) == "D"
    assert tokenizer.apply_chat_template(USER, tools=[{}]) == ("T" if shape in ("list", "dict", "additional") else "D")


def test_chat_template_setting_replaces_the_models(tmp_path: Path) -> None:
    folder_with(tmp_path, {"chat_template": "D"})
    (tmp_path / "mine.jinja").write_text("{{ 'mine' }}")
    assert load(tmp_path, chat_template=str(tmp_path / "mine.jinja")).apply_chat_template(USER, tools=[{}]) == "mine"
    assert load(tmp_path, chat_template="{{ 1 + 1 }}").apply_chat_template(USER) == "2"
    with pytest.raises(ConfigError, match=r"--chat-template nope\.jinja: No such file"):
        load(tmp_path, chat_template="nope.jinja")
    with pytest.raises(ConfigError, match=r"not a valid template: .*line 1"):
        load(tmp_path, chat_template="{% if %}")


def test_content_format_setting(tmp_path: Path) -> None:
    folder_with(tmp_path, {"chat_template": "{{ messages[0].content }}"})
    assert load(tmp_path).apply_chat_template(USER) == "hello"
    assert "type" in load(tmp_path, chat_template_content_format="openai").apply_chat_template(USER)


def test_default_template_variables_setting(tmp_path: Path) -> None:
    tokenizer = load(folder_with(tmp_path, {"chat_template": "{{ think }}"}), default_chat_template_kwargs={"think": "no"})
    assert tokenizer.apply_chat_template(USER) == "no"
    assert tokenizer.apply_chat_template(USER, think="yes") == "yes"


def test_a_broken_template_of_the_model_leaves_plain_prompts_alive(tmp_path: Path) -> None:
    tokenizer = load(folder_with(tmp_path, {"chat_template": "{% if %}"}))
    assert tokenizer.encode("hello")
    with pytest.raises(InvalidRequest, match="not valid"):
        tokenizer.apply_chat_template(USER)


def test_gguf(tmp_path: Path) -> None:
    metadata = byte_level_metadata(**{"tokenizer.chat_template": "{{ eos_token }}"})
    checkpoint = Checkpoint(str(tmp_path / "m.gguf"), "m", "gguf", {}, {}, (), gguf_metadata=metadata)
    (tmp_path / "m.gguf").touch()
    tokenizer = load_tokenizer(checkpoint, EngineArgs())
    assert tokenizer.decode(tokenizer.encode("hello world")) == "hello world"
    assert tokenizer.apply_chat_template(USER) == "<|end|>"
    assert tokenizer.encode("<|end|>") == [tokenizer.eos_token_id]


def test_tokenizer_setting_wins_over_the_checkpoint(tmp_path: Path) -> None:
    other = folder_with(tmp_path / "other")
    tokenizer = load(tmp_path, tokenizer=str(other))
    assert tokenizer.encode("hello") == small_tokenizers.wrap(small_tokenizers.byte_level()).encode("hello")
    with pytest.raises(ModelNotFound, match="No tokenizer 'nothing'"):
        load(tmp_path, tokenizer="nothing")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no tokenizer.*--tokenizer"):
        load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read as a tokenizer"):
        load(tmp_path)
    folder_with(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json is not valid JSON"):
        load(tmp_path)


def test_other_formats_need_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vocab.txt").write_text("[UNK]")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match="pip install transformers"):
        load(tmp_path)


def test_a_python_tokenizer_through_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.ByT5Tokenizer().save_pretrained(str(tmp_path))
    tokenizer = load(tmp_path)
    assert isinstance(tokenizer.backend, SlowBackend)
    text = "héllo 😀 wörld"
    ids = tokenizer.encode(text)
    assert ids == [*(b + 3 for b in text.encode()), tokenizer.eos_token_id] == tokenizer.encode(text + "</s>")
    assert tokenizer.decode(ids) == text
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert "".join(detokenizer.push([i]) for i in ids) + detokenizer.flush() == text
    assert tokenizer.token_text(10**6) == tokenizer.decode([10**6, -1]) == ""


def test_nothing_here_imports_transformers_or_torch(tmp_path: Path) -> None:
    import subprocess

    folder_with(tmp_path)
    code = (
        "import sys\nfrom octavo.checkpoint.types import Checkpoint\nfrom octavo.config.args import EngineArgs\n"
        "from octavo.frontend.text.tokenizer import load_tokenizer\n"
        f"load_tokenizer(Checkpoint({str(tmp_path)!r}, 'm', 'config', {{}}, {{}}, ()), EngineArgs()).encode('hello')\n"
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_setting_read_here_exists() -> None:
    names = {f.name for f in dataclasses.fields(EngineArgs)}
    assert {"tokenizer", "tokenizer_mode", "chat_template", "chat_template_content_format", "download_dir", "hf_token"} <= names


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"chat_template": 7}, r"tokenizer_config\.json: chat_template must be a template's text, .* got 7"),
        ({"bos_token": 5}, r"tokenizer_config\.json: bos_token must be a token's text, .* got 5"),
        ({"eos_token": ["x"]}, r"tokenizer_config\.json: eos_token must be a token's text"),
    ],
)
def test_entries_of_the_wrong_kind_are_said(tmp_path: Path, config: dict[str, Any], says: str) -> None:
    with pytest.raises(CheckpointError, match=says):
        load(folder_with(tmp_path, config))


@pytest.mark.parametrize("template", ["{% for m in messages %}", "{{ bos_token | }}"])
def test_a_template_that_does_not_compile_is_said_at_the_start(tmp_path: Path, template: str, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = load(folder_with(tmp_path, {"chat_template": template}))
    assert [r.getMessage().partition(":")[0] for r in caplog.records] == ["The model's chat template is not valid"]
    with pytest.raises(InvalidRequest, match="chat template is not valid"):
        tokenizer.apply_chat_template(USER)
    caplog.clear()
    load(folder_with(tmp_path, {"chat_template": "{{ messages[0].content }}"}))
    assert not caplog.records
