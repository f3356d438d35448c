"""Chats of folders with a tekken.json alone: the ids are those of Mistral's own library.

golden/mistral_chats.json holds them (mistral-common 1.13.1). Where the library is installed, it is asked again.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from octavo.checkpoint.types import Checkpoint
from octavo.config.args import EngineArgs
from octavo.frontend.parsing.formats import reasoning_format, tool_format
from octavo.frontend.text.mistral_template import mistral_template
from octavo.frontend.text.tokenizer import Tokenizer, load_tokenizer

GOLDEN: dict[str, list[int]] = json.loads((Path(__file__).parent / "golden" / "mistral_chats.json").read_text())
"""`version: chat` -> ids."""
SPECIAL = [
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]",
    "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]",
]  # fmt: skip
MORE = {
    3: [],
    7: [],
    11: ["[AUDIO]", "[BEGIN_AUDIO]", "[TRANSCRIBE]", "[ARGS]", "[CALL_ID]"],
    13: ["[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"],
}
RESERVED = 40
WORDS = [b"he", b"ll", b"hell", b"hello", b" w", b"or", b" wor", b" world", b"in", b"ci", b"city"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of each version a folder, named by it."""
    tokens = [bytes([i]) for i in range(256)] + WORDS
    vocab = [{"rank": i, "token_bytes": base64.b64encode(t).decode(), "token_str": None} for i, t in enumerate(tokens)]
    size = len(tokens) + RESERVED
    root = tmp_path_factory.mktemp("tekken")
    for version, more in MORE.items():
        config = {
            "pattern": r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+", "num_vocab_tokens": len(tokens), "default_vocab_size": size,
            "default_num_special_tokens": RESERVED, "version": f"v{version}",
        }  # fmt: skip
        data: dict[str, Any] = {"config": config, "vocab": vocab}
        if version >= 7:
            names = [*SPECIAL, *more]
            data["special_tokens"] = [{"rank": i, "token_str": name, "is_control": True} for i, name in enumerate(names)]
        (root / str(version)).mkdir()
        (root / str(version) / "tekken.json").write_text(json.dumps(data))
    return root


def ours(folder: Path) -> Tokenizer:
    return load_tokenizer(Checkpoint(str(folder), "m", "safetensors", {}, {}, ()), EngineArgs())


def theirs(folder: Path, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> list[int]:
    mistral = pytest.importorskip("mistral_common.tokens.tokenizers.mistral")
    from mistral_common.protocol.instruct.request import ChatCompletionRequest

    request = ChatCompletionRequest(messages=messages, tools=tools)
    ids: list[int] = mistral.MistralTokenizer.from_file(str(folder / "tekken.json")).encode_chat_completion(request).tokens
    return ids


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def calling(*arguments: str, content: str | None = None) -> dict[str, Any]:
    calls = [
        {"id": f"call{i:05}", "type": "function", "function": {"name": "weather", "arguments": one}} for i, one in enumerate(arguments)
    ]
    return {"role": "assistant", "tool_calls": calls} | ({} if content is None else {"content": content})


def result(i: int, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call{i:05}", "content": content, "name": "weather"}


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": 'Says "hot" or <cold>: é',
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    },
    {"type": "function", "function": {"name": "noon", "parameters": {"type": "object", "properties": {}}}},
]
SYSTEM = {"role": "system", "content": "Be brief."}
CHATS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]] | None]] = {
    "one": ([user("hello world")], None),
    "spaces": ([user("  hello \n world  ")], None),
    "system": ([SYSTEM, user("hello")], None),
    "turns": ([SYSTEM, user("hello"), {"role": "assistant", "content": "world  "}, user("and\n\n?")], None),
    "tools": ([user("hello"), {"role": "assistant", "content": "world"}, user("weather?")], TOOLS),
    "system and tools": ([SYSTEM, user("hello"), {"role": "assistant", "content": "world"}, user("weather?")], TOOLS),
    "called": ([user("weather?"), calling('{"city": "é"}'), result(0, "hot")], TOOLS),
    "called twice": ([user("weather?"), calling('{"city": "a"}', '{"city": "b"}'), result(0, '{"t": 3}'), result(1, "[1]")], TOOLS),
    "answered": (
        [user("weather?"), calling('{"city": "a"}'), result(0, "hot"), {"role": "assistant", "content": "It is."}, user("thanks")], TOOLS,
    ),
}  # fmt: skip


CHATS["text and call"] = ([user("weather?"), calling('{"city": "a"}', content="Let me see. "), result(0, "hot")], TOOLS)
EACH = [(version, name) for version in MORE for name in CHATS if version >= 7 or name != "text and call"]


@pytest.mark.parametrize(("version", "name"), EACH)
def test_ids_are_those_of_the_library(folder: Path, version: int, name: str) -> None:
    messages, tools = CHATS[name]
    tokenizer = ours(folder / str(version))
    text = tokenizer.apply_chat_template(messages, tools=tools)
    assert tokenizer.encode(text, add_special_tokens=False) == GOLDEN[f"{version}: {name}"]


@pytest.mark.parametrize(("version", "name"), EACH)
def test_the_library_still_says_so(folder: Path, version: int, name: str) -> None:
    assert theirs(folder / str(version), *CHATS[name]) == GOLDEN[f"{version}: {name}"]


def test_parts_of_a_text_and_of_images(folder: Path) -> None:
    tokenizer = ours(folder / "7")
    parts = [{"type": "text", "text": "hello"}, {"type": "text", "text": " world"}]
    assert tokenizer.apply_chat_template([user(parts)]).endswith("world[/INST]")


def test_what_the_template_shows_chooses_the_parsers() -> None:
    marks = frozenset({*SPECIAL, "[ARGS]", "[THINK]", "[/THINK]"})
    plain, named = mistral_template("v7", marks - {"[THINK]"}), mistral_template("v13", marks)
    for template, tools in ((plain, "mistral"), (named, "mistral_named")):
        chosen = tool_format(None, template)
        assert chosen is not None and chosen.name == tools
    thinks = reasoning_format(None, named)
    assert thinks is not None and thinks.name == "mistral"
    assert reasoning_format(None, plain) is None
    assert mistral_template("v15", marks) == named


def test_thoughts_come_back_between_their_marks(folder: Path) -> None:
    messages = [user("hello"), {"role": "assistant", "content": "world", "reasoning_content": "hm"}, user("hello")]
    assert "[THINK]hm[/THINK]world</s>" in ours(folder / "13").apply_chat_template(messages)
    assert "hm" not in ours(folder / "11").apply_chat_template(messages)


def test_a_template_of_the_folder_wins(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tekken.json").write_bytes((folder / "7" / "tekken.json").read_bytes())
    (tmp_path / "chat_template.jinja").write_text("mine")
    tokenizer = ours(tmp_path)
    assert tokenizer.apply_chat_template([user("hello")]) == "mine"
