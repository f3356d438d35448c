"""A `tokenizers.Tokenizer` built from ranked byte strings: tiktoken's files, and Mistral's tekken.json.

Such a vocabulary is a list of byte strings; of two neighbours those are joined whose joint string has the lowest rank. As byte-level BPE
that is one merge for every way to cut a string in two. A word that is in the list is one token, however it would merge.

A .tiktoken file (a line a string: base64, a space, its rank) says nothing of how text is cut into words, nor which special tokens follow:
that is in the code of each family. `_CUTS` knows some; others are refused, because a wrong one gives plausible, slightly wrong ids.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from octavo.checkpoint.files import read_json_object, require_file
from octavo.errors import CheckpointError, UnsupportedModel
from octavo.frontend.text.gguf_tokenizer import GPT4O_WORDS, KIMI_WORDS, LLAMA3_WORDS, QWEN2_WORDS
from octavo.frontend.text.token_bytes import byte_level_alphabet

if TYPE_CHECKING:
    import tokenizers

_MAX_FILE: Final = 128 << 20
_TEKKEN_SPECIAL: Final = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]",
    "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]",
    "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]",
)  # fmt: skip
"""Of files that do not list theirs, in order; the others are called <SPECIAL_n>."""


@dataclass(frozen=True)
class Ranked:
    """What of a vocabulary decides about ids."""

    tokens: Sequence[bytes]
    """By rank."""
    pattern: str
    """Regular expression that cuts words."""
    special: Mapping[str, int]
    """Special tokens with their ids."""
    first: int = 0
    """Id of rank 0."""
    nfc: bool = False
    version: str = ""
    """Of Mistral's formats, which tells how chats are written."""


def build(ranked: Ranked, where: str) -> tokenizers.Tokenizer:
    """The tokenizer of a vocabulary.

    Args:
        where: what to name in messages.

    Raises:
        CheckpointError: strings appear twice, bytes are missing, or ids collide.
    """
    import tokenizers
    from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

    spelled = {byte: char for char, byte in byte_level_alphabet().items()}
    names = ["".join(spelled[byte] for byte in token) for token in ranked.tokens]
    ranks = {token: rank for rank, token in enumerate(ranked.tokens)}
    if len(ranks) != len(names):
        raise CheckpointError(f"{where} has the same string at two ranks.")
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise CheckpointError(f"{where} has no token for {len(missing)} of the 256 bytes.")
    merges: list[tuple[int, int, int, str, str]] = []
    for rank, (token, name) in enumerate(zip(ranked.tokens, names, strict=True)):
        for cut in range(1, len(token)):
            left, right = ranks.get(token[:cut]), ranks.get(token[cut:])
            if left is not None and right is not None and max(left, right) < rank:
                merges.append((rank, left, right, name[:cut], name[cut:]))
    merges.sort()
    vocab = {name: ranked.first + rank for rank, name in enumerate(names)}
    taken = set(vocab.values())
    if collide := [token for token, i in ranked.special.items() if i in taken or token in vocab]:
        raise CheckpointError(f"{where}: the special token {collide[0]!r} has the id or the name of another token.")
    try:
        # Special tokens belong to the vocabulary: the library numbers added ones itself, from its end on.
        model = models.BPE(vocab={**vocab, **ranked.special}, merges=[(a, b) for *_, a, b in merges], ignore_merges=True)
        tokenizer = tokenizers.Tokenizer(model)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(ranked.pattern), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    except Exception as e:  # the library raises plain Exception
        raise CheckpointError(f"{where} cannot be made a tokenizer: {e}.") from None
    if ranked.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    in_order = sorted(ranked.special, key=lambda token: ranked.special[token])
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in in_order])
    return tokenizer


def read_ranks(path: Path) -> list[bytes]:
    """The strings of a .tiktoken file, by rank.

    Raises:
        CheckpointError: unreadable, or not such a file.
    """
    require_file(path)
    try:
        if path.stat().st_size > _MAX_FILE:
            raise CheckpointError(f"{path} is too large for a vocabulary.")
        lines = path.read_bytes().splitlines()
        pairs = [line.split() for line in lines if line.strip()]
        ranked = {int(rank): base64.b64decode(token, validate=True) for token, rank in pairs}
    except OSError as e:
        raise CheckpointError(f"{path} cannot be read: {e.strerror or e}.") from None
    except (ValueError, binascii.Error):
        raise CheckpointError(f"{path} is not a tiktoken vocabulary: each line must be a string in base64 and its rank.") from None
    if sorted(ranked) != list(range(len(pairs))) or not pairs:
        raise CheckpointError(f"{path} is not a sound tiktoken vocabulary: ranks must go from 0 to {len(pairs) - 1}, each once.")
    return [ranked[rank] for rank in range(len(pairs))]


def is_ranks(path: Path) -> bool:
    """Whether a file called tokenizer.model holds ranks, as those of Llama 3 do, and is no SentencePiece model."""
    require_file(path)
    try:
        with path.open("rb") as file:
            line = file.readline(4096).split()
        return len(line) == 2 and line[1].isdigit() and bool(base64.b64decode(line[0], validate=True))
    except (OSError, ValueError, binascii.Error):
        return False


def read_tekken(path: Path) -> Ranked:
    """Parse a tekken.json.

    Raises:
        CheckpointError: not such a file.
    """
    data = read_json_object(path)
    config, entries = data.get("config"), data.get("vocab")
    try:
        assert isinstance(config, dict)
        assert isinstance(entries, list)
        size, reserved = int(config["default_vocab_size"]), int(config["default_num_special_tokens"])
        pattern = str(config["pattern"])
        assert 0 < reserved < size <= reserved + len(entries)
        tokens = [base64.b64decode(entry["token_bytes"], validate=True) for entry in entries[: size - reserved]]
        assert all(entry["rank"] == rank for rank, entry in enumerate(entries[: size - reserved]))
        listed = data.get("special_tokens") or [{"rank": i, "token_str": name} for i, name in enumerate(_TEKKEN_SPECIAL)]
        named = {int(entry["rank"]): str(entry["token_str"]) for entry in listed}
        assert all(0 <= rank < reserved for rank in named)
    except (AssertionError, KeyError, TypeError, ValueError, binascii.Error):
        raise CheckpointError(f"{path} is not a sound tekken vocabulary. Download it again.") from None
    special = {named.get(i, f"<SPECIAL_{i}>"): i for i in range(reserved)}
    return Ranked(tokens, pattern, special, first=reserved, version=str(config.get("version", "")))


@dataclass(frozen=True)
class _Cut:
    """How a family that publishes bare ranks cuts words."""

    pattern: str
    nfc: bool = False
    special: tuple[str, ...] = ()
    """Tokens behind the last rank, where the tokenizer's config does not list them."""
    numbered: Mapping[str, int] = field(default_factory=dict)
    """The same with their ids, where those have gaps."""
    bos: bool = False
    """The beginning of a text is marked, unless the tokenizer's config says otherwise."""


_QWEN1 = _Cut(QWEN2_WORDS, nfc=True, special=("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(205))))
_LLAMA3_SPECIAL = (
    "<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|reserved_special_token_1|>", "<|finetune_right_pad_id|>",
    "<|step_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>", "<|python_tag|>",
    *(f"<|reserved_special_token_{i}|>" for i in range(2, 247)),
)  # fmt: skip
_LLAMA3 = _Cut(LLAMA3_WORDS, special=_LLAMA3_SPECIAL, bos=True)
_CUTS: Final[Mapping[str, _Cut]] = {
    "QWenTokenizer": _QWEN1,
    "qwen": _QWEN1,
    "llama": _LLAMA3,
    "PreTrainedTokenizerFast": _LLAMA3,
    "TikTokenTokenizer": _Cut(KIMI_WORDS),
    "kimi_k2": _Cut(KIMI_WORDS),
}
"""By the tokenizer's class, or the model's type."""
_ENCODINGS: Final[Mapping[str, _Cut]] = {
    "cl100k_base": _Cut(
        LLAMA3_WORDS,
        numbered={
            "<|endoftext|>": 100257, "<|fim_prefix|>": 100258, "<|fim_middle|>": 100259, "<|fim_suffix|>": 100260, "<|endofprompt|>": 100276,
        },
    ),
    "o200k_base": _Cut(GPT4O_WORDS, numbered={"<|endoftext|>": 199999, "<|endofprompt|>": 200018}),
}  # fmt: skip
"""Files that are called after one of OpenAI's encodings, whatever model they belong to."""


def ranks_of_folder(path: Path, tokenizer_config: Mapping[str, Any], model_type: str) -> tuple[Ranked, bool]:
    """The vocabulary in `path` with what its family's code knows besides, and whether the beginning of a text is marked.

    Raises:
        CheckpointError: not such a file.
        UnsupportedModel: a family that is not known.
    """
    name = str(tokenizer_config.get("tokenizer_class", ""))
    cut = _ENCODINGS.get(path.stem) or _CUTS.get(name) or _CUTS.get(model_type)
    if cut is None:
        raise UnsupportedModel(
            f"{path} holds ranks alone, and how {name or model_type or 'this model'} cuts text into words is in code of its own, which is "
            "never run. Known are those of Qwen 1, Llama 3 and Moonshot (Kimi), and files named cl100k_base or o200k_base. Give a folder with "
            "a tokenizer.json as --tokenizer."
        )
    tokens = read_ranks(path)
    decoder = tokenizer_config.get("added_tokens_decoder")
    listed = {
        str(entry["content"]): int(key)
        for key, entry in (decoder.items() if isinstance(decoder, dict) else ())
        if str(key).isdigit() and isinstance(entry, dict) and isinstance(entry.get("content"), str) and int(key) >= len(tokens)
    }
    usual = {token: i for token, i in cut.numbered.items() if i >= len(tokens)}
    special = listed or usual or {token: len(tokens) + i for i, token in enumerate(cut.special)}
    return Ranked(tokens, cut.pattern, special, nfc=cut.nfc), bool(tokenizer_config.get("add_bos_token", cut.bos))
