"""Reading a tokenizer with its special tokens and chat templates from a checkpoint.

`tokenizer.json`, GGUF vocabularies, SentencePiece models and ranks (tekken.json, tiktoken's files) are read directly, in a second or
less; what they do not cover goes through `transformers`, if that is installed. Code of a checkpoint is never run.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.checkpoint.files import is_there, read_json_object, read_text
from octavo.checkpoint.gguf_file import read_gguf
from octavo.checkpoint.resolve import tokenizer_source
from octavo.checkpoint.stand_in import stand_in
from octavo.checkpoint.types import Checkpoint
from octavo.config.args import EngineArgs
from octavo.errors import CheckpointError, ConfigError
from octavo.frontend.text.backend import FastBackend, SlowBackend
from octavo.frontend.text.chat_template import DEFAULT, ChatTemplates
from octavo.frontend.text.gguf_tokenizer import gguf_vocabulary
from octavo.frontend.text.mistral_template import mistral_template
from octavo.frontend.text.sentencepiece_file import build as build_pieces
from octavo.frontend.text.sentencepiece_file import read_pieces
from octavo.frontend.text.template_inspection import check_template
from octavo.frontend.text.tiktoken_file import build as build_ranked
from octavo.frontend.text.tiktoken_file import is_ranks, ranks_of_folder, read_tekken
from octavo.frontend.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import tokenizers

logger = logging.getLogger(__name__)

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def load(checkpoint: Checkpoint, args: EngineArgs) -> Tokenizer:
    """See `tokenizer.load_tokenizer`, its public name."""
    # Encoding one text never needs the Rust library's own threads, and having used them makes it warn when we fork.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    override = _template_override(args.chat_template)
    if args.tokenizer:
        source = tokenizer_source(args.tokenizer, download_dir=args.download_dir, token=args.hf_token)
    else:
        source = Path(checkpoint.path)
    if source.is_file():
        metadata = checkpoint.gguf_metadata if str(source) == checkpoint.path else {}
        return _from_gguf(metadata or read_gguf(str(source)).metadata, str(source), override, args)
    if args.tokenizer_mode != "slow" and is_there(source / "tokenizer.json"):
        return _from_folder(source, override, args)
    if args.tokenizer_mode != "slow" and (built := _from_vocabulary_file(source)) is not None:
        return _with_config(built, source, override, args)
    return _from_transformers(source, override, args)


def _from_gguf(metadata: Mapping[str, Any], path: str, override: str | None, args: EngineArgs) -> Tokenizer:
    vocabulary = gguf_vocabulary(metadata, path)
    return Tokenizer(
        FastBackend(vocabulary.tokenizer),
        templates=_templates(vocabulary.chat_templates, vocabulary.special_tokens, override, args),
        special_tokens=vocabulary.special_tokens,
        prefix=vocabulary.prefix,
        suffix=vocabulary.suffix,
    )


def _from_folder(folder: Path, override: str | None, args: EngineArgs) -> Tokenizer:
    import tokenizers

    path = folder / "tokenizer.json"
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as e:  # the library raises plain Exception
        raise CheckpointError(stand_in(path) or f"{path} cannot be read as a tokenizer: {e}") from None
    config = _optional_json(folder / "tokenizer_config.json")
    special = _special_tokens(config, _optional_json(folder / "special_tokens_map.json"))
    _apply_added_tokens(tokenizer, config, special)
    backend = FastBackend(tokenizer)
    prefix, suffix = backend.added_ends()
    return Tokenizer(
        backend,
        templates=_templates(_folder_templates(folder, config), special, override, args),
        special_tokens=special,
        prefix=prefix,
        suffix=suffix,
    )


_PLAIN_PIECES = frozenset(
    {"", "LlamaTokenizer", "LlamaTokenizerFast", "GemmaTokenizer", "GemmaTokenizerFast", "CodeLlamaTokenizer", "CodeLlamaTokenizerFast"}
) | {"TokenizersBackend", "PreTrainedTokenizerFast"}
"""Tokenizer classes whose ids are those of the SentencePiece model; the last two are names for any that has no code of its own."""


@dataclass(frozen=True)
class _Vocabulary:
    """What a vocabulary alone tells."""

    tokenizer: tokenizers.Tokenizer
    named: dict[str, str]
    """The special tokens that its file names, by role."""
    marks_beginning: bool
    """Whether BOS goes before a text where no config says so."""
    template: str | None = None
    """For chats, where no file has one."""


def _from_vocabulary_file(folder: Path) -> _Vocabulary | None:
    """The tokenizer of a folder without tokenizer.json; None: the folder has none of the kinds that are read here.

    Raises:
        CheckpointError, UnsupportedModel: it has one, but that is damaged or needs code of its own.
    """
    if is_there(tekken := folder / "tekken.json"):
        ranked = read_tekken(tekken)
        names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
        named = {role: name for role, name in names.items() if name in ranked.special}
        marks = frozenset(ranked.special)
        template = mistral_template(ranked.version, marks) if {"[INST]", "[/INST]"} <= marks else None
        return _Vocabulary(build_ranked(ranked, str(tekken)), named, True, template)
    config = _optional_json(folder / "tokenizer_config.json")
    model_type = str(_optional_json(folder / "config.json").get("model_type", ""))
    model = next((p for p in (folder / "tokenizer.model", *sorted(folder.glob("tokenizer.model.v*"), reverse=True)) if is_there(p)), None)
    ranks = next(iter(sorted((*folder.glob("*.tiktoken"), *folder.glob("tiktoken.model")))), None)
    if ranks is None and model is not None and is_ranks(model):
        ranks = model
    if ranks is not None:
        ranked, marks_beginning = ranks_of_folder(ranks, config, model_type)
        return _Vocabulary(build_ranked(ranked, str(ranks)), _usual_ends(model_type), marks_beginning)
    if model is None or str(config.get("tokenizer_class", "")) not in _PLAIN_PIECES:
        return None
    pieces = read_pieces(model)
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    if "<bos>" in pieces.tokens:
        names = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return _Vocabulary(build_pieces(pieces), {role: name for role, name in names.items() if name in pieces.tokens}, True)


def _usual_ends(model_type: str) -> dict[str, str]:
    """Of families whose files of ranks do not name any."""
    if model_type == "llama":
        return {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}
    return {"eos_token": "<|endoftext|>"}


def _with_config(vocabulary: _Vocabulary, folder: Path, override: str | None, args: EngineArgs) -> Tokenizer:
    """A tokenizer made from a vocabulary alone, with what the folder's other files say: special tokens, ends, templates."""
    tokenizer, config = vocabulary.tokenizer, _optional_json(folder / "tokenizer_config.json")
    special = {**vocabulary.named, **_special_tokens(config, _optional_json(folder / "special_tokens_map.json"))}
    _apply_added_tokens(tokenizer, config, special)

    def end(flag: str, role: str, default: bool) -> list[int]:
        token = special.get(role)
        found = tokenizer.token_to_id(token) if isinstance(token, str) else None
        return [found] if found is not None and config.get(flag, default) else []

    templates = _folder_templates(folder, config)
    if not templates and vocabulary.template is not None:
        templates = {DEFAULT: vocabulary.template}
    return Tokenizer(
        FastBackend(tokenizer),
        templates=_templates(templates, special, override, args),
        special_tokens=special,
        prefix=end("add_bos_token", "bos_token", vocabulary.marks_beginning),
        suffix=end("add_eos_token", "eos_token", False),
    )


_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tokenizer_config.json", "spiece.model")


def _from_transformers(folder: Path, override: str | None, args: EngineArgs) -> Tokenizer:
    names = (*_TOKENIZER_FILES, "merges.txt", "added_tokens.json", "special_tokens_map.json", "sentencepiece.bpe.model", "config.json")
    present = [name for name in names if is_there(folder / name)]  # all of them: the library opens whatever bears its names
    if not set(present) & set(_TOKENIZER_FILES) and not any(folder.glob("*.tiktoken")):
        raise CheckpointError(f"{folder} has no tokenizer (no tokenizer.json). Give one with --tokenizer, or use --skip-tokenizer-init.")
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise ConfigError(
            f"{folder} has no tokenizer.json, and reading its tokenizer needs transformers: pip install transformers, "
            "or give a folder with a tokenizer.json as --tokenizer."
        ) from None
    try:
        loaded: Any = AutoTokenizer.from_pretrained(str(folder), use_fast=args.tokenizer_mode != "slow", trust_remote_code=False)
    except Exception as e:  # missing sentencepiece, custom code, malformed files: each with its own class
        first_line = next(iter(str(e).strip().splitlines()), type(e).__name__)
        raise CheckpointError(f"{folder}: transformers cannot load the tokenizer: {first_line[:300]}") from None
    import tokenizers

    inner = getattr(loaded, "backend_tokenizer", None)
    backend = FastBackend(inner) if isinstance(inner, tokenizers.Tokenizer) else SlowBackend(loaded)
    special = {name: str(token) for name in _SPECIAL if (token := getattr(loaded, name, None)) is not None}
    prefix, suffix = backend.added_ends()
    named = loaded.chat_template if isinstance(loaded.chat_template, dict) else {DEFAULT: loaded.chat_template}
    return Tokenizer(
        backend,
        templates=_templates({name: t for name, t in named.items() if isinstance(t, str)}, special, override, args),
        special_tokens=special,
        prefix=prefix,
        suffix=suffix,
    )


def _templates(named: Mapping[str, str], special: Mapping[str, Any], override: str | None, args: EngineArgs) -> ChatTemplates:
    content_format: Any = args.chat_template_content_format
    # An override replaces all of the model's templates: also the one for tools.
    templates = {DEFAULT: override} if override is not None else dict(named)
    for name, source in templates.items():
        if (problem := check_template(source)) is not None:
            called = "chat template" if name == DEFAULT else f"chat template {name!r}"
            logger.warning(
                "The model's %s is not valid: %s. Conversations that need it are refused; start with --chat-template FILE to give another.",
                called,
                problem,
            )
    return ChatTemplates(templates, dict(special), content_format, args.default_chat_template_kwargs)


def _template_override(given: str | None) -> str | None:
    """--chat-template: the file it names, or itself.

    Raises:
        ConfigError: neither a readable file nor a valid template.
    """
    if given is None:
        return None
    source = given
    looks_like_path = "{" not in given and "\n" not in given
    if looks_like_path:
        try:
            source = Path(given).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as e:
            reason = getattr(e, "strerror", None) or "not a text file"
            raise ConfigError(f"--chat-template {given}: {reason}. Give a file, or the template itself (it has {{% or {{{{).") from None
    if (problem := check_template(source)) is not None:
        raise ConfigError(f"--chat-template{f' {given}' if looks_like_path else ''} is not a valid template: {problem}.")
    return source


def _checked_tokens(values: dict[str, Any], path: Path) -> dict[str, Any]:
    """What a file says, if its special tokens and templates are of the kinds that those are.

    Raises:
        CheckpointError: one is not.
    """
    for name in _SPECIAL:
        token = values.get(name)
        if token is not None and not isinstance(token, (str, dict)):
            raise CheckpointError(f'{path}: {name} must be a token\'s text, or an object with it as "content", got {token!r}.')
    template = values.get("chat_template")
    if template is not None and not isinstance(template, (str, dict, list)):
        raise CheckpointError(f"{path}: chat_template must be a template's text, or several by name, got {template!r}.")
    return values


def _optional_json(path: Path) -> dict[str, Any]:
    return _checked_tokens(read_json_object(path), path) if is_there(path) else {}


def _folder_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Templates of a folder by name. Files of their own win over tokenizer_config.json, as in transformers."""
    named: dict[str, str] = {}
    for value in (config.get("chat_template"), _optional_json(folder / "chat_template.json").get("chat_template")):
        if isinstance(value, str):
            named[DEFAULT] = value
        elif isinstance(value, dict):
            named |= {name: text for name, text in value.items() if isinstance(text, str)}
        elif isinstance(value, list):
            entries = [entry for entry in value if isinstance(entry, dict)]
            named |= {str(e.get("name")): e["template"] for e in entries if isinstance(e.get("template"), str)}
    if is_there(folder / "chat_template.jinja"):
        named[DEFAULT] = read_text(folder / "chat_template.jinja")
    for path in sorted(folder.glob("additional_chat_templates/*.jinja")):
        named[path.stem] = read_text(path)
    return named


def _special_tokens(config: Mapping[str, Any], special_map: Mapping[str, Any]) -> dict[str, Any]:
    """Special tokens as text, by role. They are written as strings or as objects with "content"."""

    def text(value: Any) -> str | None:
        content = value.get("content") if isinstance(value, dict) else value
        return content if isinstance(content, str) else None

    special: dict[str, Any] = {}
    for name in _SPECIAL:
        token = text(config.get(name)) or text(special_map.get(name))
        if token is not None:
            special[name] = token
    for source in (config.get("extra_special_tokens"), config.get("model_specific_special_tokens")):
        if isinstance(source, dict):
            special |= {name: token for name, value in source.items() if (token := text(value)) is not None}
    more = config.get("additional_special_tokens") or special_map.get("additional_special_tokens")
    if isinstance(more, list):
        special["additional_special_tokens"] = [token for value in more if (token := text(value)) is not None]
    return special


def _apply_added_tokens(tokenizer: Any, config: Mapping[str, Any], special: Mapping[str, Any]) -> None:
    """Bring tokenizer.json up to what tokenizer_config.json says of added tokens; ids never change.

    Fine-tunes often edit one of the two files alone: a token there may be missing here, or not be marked special.
    """
    from tokenizers import AddedToken

    known = {token.content: token.special for token in tokenizer.get_added_tokens_decoder().values()}
    decoder = config.get("added_tokens_decoder")
    for key, entry in sorted((decoder if isinstance(decoder, dict) else {}).items(), key=lambda item: (len(item[0]), item[0])):
        if not isinstance(entry, dict) or not isinstance(entry.get("content"), str) or not entry["content"]:
            continue
        content, is_special = entry["content"], bool(entry.get("special"))
        present = tokenizer.token_to_id(content)
        fits = str(present) == key if present is not None else str(tokenizer.get_vocab_size()) == key
        if fits and known.get(content) != is_special:
            flags = {name: bool(entry.get(name, False)) for name in ("lstrip", "rstrip", "single_word", "normalized")}
            token = AddedToken(content, special=is_special, **flags)
            (tokenizer.add_special_tokens if is_special else tokenizer.add_tokens)([token])
            known[content] = is_special
    roles = [value for name, value in special.items() if isinstance(value, str)] + list(special.get("additional_special_tokens", ()))
    unmarked = [t for t in dict.fromkeys(roles) if t and not known.get(t) and tokenizer.token_to_id(t) is not None]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in unmarked])
