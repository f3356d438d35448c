"""A `tokenizers.Tokenizer` built from a SentencePiece model file (tokenizer.model), without the sentencepiece library.

The file is a protocol buffer of which a handful of fields matter: pieces with scores and kinds, the algorithm (BPE or unigram), how spaces
are treated, and a table of character normalisation. It is taken for hostile: whatever does not parse is a `CheckpointError`.

Format: sentencepiece_model.proto of https://github.com/google/sentencepiece
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from octavo.checkpoint.files import require_file
from octavo.errors import CheckpointError, UnsupportedModel

if TYPE_CHECKING:
    import tokenizers

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Kinds of pieces, here and in GGUF files."""
_UNIGRAM, _BPE = 1, 2
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MAX_FILE: Final = 64 << 20


@dataclass(frozen=True)
class Pieces:
    """A SentencePiece vocabulary: what of it decides about ids."""

    tokens: Sequence[str]
    scores: Sequence[float]
    kinds: Sequence[int]
    unigram: bool = False
    byte_fallback: bool = True
    space_prefix: bool = True
    """A space goes before a text."""
    squeeze_spaces: bool = False
    """Spaces at the ends are dropped, and several become one."""
    charsmap: bytes = b""
    """Compiled character normalisation; empty: none."""
    unknown: int | None = None
    """Id of the unknown piece."""


def read_pieces(path: Path) -> Pieces:
    """Parse a model file.

    Raises:
        CheckpointError: unreadable or not such a file.
        UnsupportedModel: it splits text into words or characters.
    """
    require_file(path)
    try:
        if path.stat().st_size > _MAX_FILE:
            raise CheckpointError(f"{path} is too large for a SentencePiece model.")
        data = path.read_bytes()
    except OSError as e:
        raise CheckpointError(f"{path} cannot be read: {e.strerror or e}.") from None
    try:
        pieces = _parse(data, path)
    except (ValueError, IndexError, struct.error, UnicodeDecodeError) as e:
        raise CheckpointError(f"{path} is not a sound SentencePiece model ({e}).") from None
    if not pieces.tokens:
        raise CheckpointError(f"{path} is not a sound SentencePiece model (it has no pieces).")
    return pieces


def _parse(data: bytes, path: Path) -> Pieces:
    tokens: list[str] = []
    scores: list[float] = []
    kinds: list[int] = []
    trainer: dict[int, Any] = {}
    normalizer: dict[int, Any] = {}
    for number, value in _fields(data):
        if number == 1:
            piece = dict(_fields(_message(value)))
            tokens.append(_message(piece[1]).decode("utf-8") if 1 in piece else "")
            scores.append(_score(piece.get(2, 0.0)))
            kinds.append(_integer(piece.get(3, NORMAL)))
        elif number == 2:
            trainer = dict(_fields(_message(value)))
        elif number == 3:
            normalizer = dict(_fields(_message(value)))
    algorithm = trainer.get(3, _UNIGRAM)
    if algorithm not in (_UNIGRAM, _BPE):
        raise UnsupportedModel(f"{path} is a SentencePiece model of words or characters; BPE and unigram models can be read.")
    return Pieces(
        tokens,
        scores,
        kinds,
        unigram=algorithm == _UNIGRAM,
        byte_fallback=bool(_integer(trainer.get(35, 0))),
        space_prefix=bool(_integer(normalizer.get(3, 1))),
        squeeze_spaces=bool(_integer(normalizer.get(4, 1))),
        charsmap=_message(normalizer.get(2, b"")),
        unknown=next((i for i, kind in enumerate(kinds) if kind == UNKNOWN), None),
    )


def _message(value: Any) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("a number where bytes belong")
    return value


def _integer(value: Any) -> int:
    if not isinstance(value, int):
        raise ValueError("no integer where one belongs")
    return value


def _score(value: Any) -> float:
    if not isinstance(value, float):
        raise ValueError("a score is no number")
    return value


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """(number, value) of each field of a protocol buffer."""
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        number, wire = key >> 3, key & 7
        if wire == _VARINT:
            value, position = _varint(data, position)
            yield number, value
            continue
        size = 8 if wire == _FIXED64 else 4
        if wire == _BYTES:
            size, position = _varint(data, position)
        elif wire not in (_FIXED64, _FIXED32):
            raise ValueError(f"a field of type {wire} at byte {position}")
        end = position + size
        if end > len(data):
            raise ValueError(f"it ends inside the field at byte {position}")
        raw = data[position:end]
        position = end
        yield number, struct.unpack("<f", raw)[0] if wire == _FIXED32 else raw


def _varint(data: bytes, position: int) -> tuple[int, int]:
    result = shift = 0
    while True:
        byte = data[position]
        position += 1
        result |= (byte & 0x7F) << shift
        if byte < 0x80:
            return result, position
        shift += 7
        if shift > 63:
            raise ValueError(f"a number without end at byte {position}")


def build(pieces: Pieces) -> tokenizers.Tokenizer:
    """The tokenizer of a vocabulary, special pieces included.

    Raises:
        CheckpointError: pieces that no tokenizer can be made of.
    """
    import tokenizers
    from tokenizers import decoders, models, normalizers

    unknown = pieces.tokens[pieces.unknown] if pieces.unknown is not None else None
    try:
        model: Any
        if pieces.unigram:
            listed = list(zip(pieces.tokens, pieces.scores, strict=True))
            model = models.Unigram(listed, unk_id=pieces.unknown, byte_fallback=pieces.byte_fallback)
        else:
            vocab = {token: i for i, token in enumerate(pieces.tokens)}
            merges = _merges(pieces, vocab)
            model = models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=pieces.byte_fallback)
        steps: list[normalizers.Normalizer] = [normalizers.Precompiled(pieces.charsmap)] if pieces.charsmap else []
    except Exception as e:  # the library raises plain Exception
        raise CheckpointError(f"The SentencePiece vocabulary is not sound: {e}.") from None
    tokenizer = tokenizers.Tokenizer(model)
    if pieces.squeeze_spaces:
        steps += [normalizers.Replace(tokenizers.Regex(r"\A +| +\z"), ""), normalizers.Replace(tokenizers.Regex(" {2,}"), " ")]
    steps += [normalizers.Prepend("▁")] if pieces.space_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    undo: list[decoders.Decoder] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*undo, decoders.Strip(content=" ", left=1, right=0)] if pieces.space_prefix else undo)
    add_special(tokenizer, pieces.tokens, pieces.kinds, spaces_as_pieces=not pieces.space_prefix)
    return tokenizer


def _merges(pieces: Pieces, vocab: dict[str, int]) -> list[tuple[str, str]]:
    """SentencePiece merges the pair whose result has the best score; as BPE that is one merge for every way to cut a piece."""
    merges: list[tuple[float, int, int, str, str]] = []
    for piece, score, kind in zip(pieces.tokens, pieces.scores, pieces.kinds, strict=True):
        if kind not in (NORMAL, USER_DEFINED):
            continue
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocab and right in vocab:
                merges.append((-score, vocab[left], vocab[right], left, right))
    merges.sort()
    return [(left, right) for *_, left, right in merges]


def add_special(tokenizer: tokenizers.Tokenizer, tokens: Sequence[str], kinds: Sequence[int], *, spaces_as_pieces: bool = False) -> None:
    """Have control pieces, and those that a user defined, found in a text before anything else is.

    Args:
        spaces_as_pieces: those of a user that stand for spaces (Gemma has some) are looked for where spaces have become U+2581.
    """
    from tokenizers import AddedToken

    special = [AddedToken(t, special=True, normalized=False) for t, kind in zip(tokens, kinds, strict=True) if kind in (UNKNOWN, CONTROL)]
    plain = [
        AddedToken(t, special=False, normalized=spaces_as_pieces and "▁" in t)
        for t, kind in zip(tokens, kinds, strict=True)
        if kind == USER_DEFINED
    ]
    tokenizer.add_special_tokens([t for t in special if t.content])
    tokenizer.add_tokens([t for t in plain if t.content])
