"""A `tokenizers.Tokenizer` built from the vocabulary inside a GGUF file.

Two kinds are built: "gpt2" (byte-level BPE, with the pre-tokenizer the file names) and "llama" (SentencePiece BPE with byte
fallback). Ids equal those of the tokenizer the file was converted from; a pre-tokenizer that is not known here is an error,
because a wrong one gives plausible, slightly wrong ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from octavo.errors import CheckpointError, UnsupportedModel

if TYPE_CHECKING:
    import tokenizers
    from tokenizers import pre_tokenizers

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _TAIL
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _TAIL
_CASED_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+{c}"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*{c}"
)
_TEKKEN = _CASED_WORDS.replace("{c}", "") + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT4O = _CASED_WORDS.replace("{c}", _CONTRACTIONS + "?") + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class _Pre:
    """One pre-tokenizer type."""

    pattern: str | None
    """Regular expression that cuts words; None is GPT-2's own, which is built in."""
    single_digits: bool = False
    """Cut out each digit first."""
    nfc: bool = False
    ignore_merges: bool = False
    """A word that is in the vocabulary is one token, however it would merge."""
    add_bos: bool = False
    """When the file does not say."""


_GPT2 = _Pre(None)
_SMOLLM = _Pre(None, single_digits=True)
_LLAMA_BPE = _Pre(_LLAMA3, ignore_merges=True, add_bos=True)
_QWEN = _Pre(_QWEN2, nfc=True)
_PRE_TOKENIZERS: Final[Mapping[str, _Pre]] = {
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "roberta-bpe", "gigachat", "a.x-4.0", "mellum"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _SMOLLM),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral"), _LLAMA_BPE),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _Pre(_LLAMA3)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "megrez"), _QWEN),
    "stablelm2": _Pre(_QWEN2),
    "tekken": _Pre(_TEKKEN, ignore_merges=True, add_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4"), _Pre(_GPT4O)),
}


@dataclass(frozen=True)
class GgufVocabulary:
    """The tokenizer of a GGUF file."""

    tokenizer: tokenizers.Tokenizer
    prefix: list[int]
    """Ids that go before a text (BOS), if the file says so."""
    suffix: list[int]
    special_tokens: dict[str, str]
    """bos_token, eos_token, ... as chat templates know them."""
    chat_templates: dict[str, str]
    """By name; the usual one is "default"."""


def gguf_vocabulary(metadata: Mapping[str, Any], path: str) -> GgufVocabulary:
    """Build the tokenizer from a GGUF file's metadata; `path` is for messages.

    Raises:
        CheckpointError: the vocabulary is missing or inconsistent.
        UnsupportedModel: a kind of vocabulary or pre-tokenizer that is not known here.
    """
    kind = metadata.get("tokenizer.ggml.model")
    tokens, types = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.token_type")
    if not isinstance(tokens, list) or not tokens or not all(isinstance(t, str) for t in tokens):
        raise CheckpointError(f"{path} has no vocabulary. Give a tokenizer with --tokenizer.")
    if not isinstance(types, list):
        types = [_NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise CheckpointError(f"{path} has {len(tokens)} tokens but {len(types)} token types.")
    if kind == "gpt2":
        pre_name = metadata.get("tokenizer.ggml.pre", "default")
        tokenizer = _byte_level_bpe(tokens, metadata.get("tokenizer.ggml.merges"), str(pre_name), path)
        adds_bos = pre_name in _PRE_TOKENIZERS and _PRE_TOKENIZERS[pre_name].add_bos
    elif kind == "llama":
        tokenizer = _sentencepiece_bpe(metadata, tokens, types, path)
        adds_bos = True
    else:
        raise UnsupportedModel(f"{path} has a vocabulary of kind {kind!r}; gpt2 and llama can be read. Give a tokenizer with --tokenizer.")
    _add_special_tokens(tokenizer, tokens, types)

    ids = _special_ids(metadata, len(tokens), path)
    bos, eos = ids.get("bos_token"), ids.get("eos_token")
    templates = {
        "default" if key == "tokenizer.chat_template" else key.removeprefix("tokenizer.chat_template."): value
        for key, value in metadata.items()
        if (key == "tokenizer.chat_template" or key.startswith("tokenizer.chat_template.")) and isinstance(value, str)
    }
    return GgufVocabulary(
        tokenizer=tokenizer,
        prefix=[bos] if bos is not None and metadata.get("tokenizer.ggml.add_bos_token", adds_bos) else [],
        suffix=[eos] if eos is not None and metadata.get("tokenizer.ggml.add_eos_token", False) else [],
        special_tokens={name: tokens[i] for name, i in ids.items()},
        chat_templates=templates,
    )


def _special_ids(metadata: Mapping[str, Any], size: int, path: str) -> dict[str, int]:
    ids = {}
    for name, key in (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding")):
        value = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if value is None:
            continue
        if not isinstance(value, int) or not 0 <= value < size:
            raise CheckpointError(f"{path}: tokenizer.ggml.{key}_token_id {value!r} is outside the vocabulary of {size} tokens.")
        ids[name] = value
    return ids


def _byte_level_bpe(tokens: list[str], merges: Any, pre_name: str, path: str) -> tokenizers.Tokenizer:
    import tokenizers
    from tokenizers import decoders, models, normalizers

    if not isinstance(merges, list) or not all(isinstance(m, str) for m in merges):
        raise CheckpointError(f"{path} has a byte-level vocabulary without merges. Give a tokenizer with --tokenizer.")
    if pre_name != "default" and pre_name not in _PRE_TOKENIZERS:
        raise UnsupportedModel(f"{path} needs the pre-tokenizer {pre_name!r}, which is not known here. Give a tokenizer with --tokenizer.")
    vocab = {token: i for i, token in enumerate(tokens)}
    # The cut is looked for from the second character on: a part may itself be a space.
    pairs = [(m[:cut], m[cut + 1 :]) for m in merges if (cut := m.find(" ", 1)) > 0]
    pre = _PRE_TOKENIZERS.get(pre_name, _GPT2)
    try:
        model = models.BPE(vocab=vocab, merges=pairs, ignore_merges=pre.ignore_merges)
    except Exception:  # some merges are of tokens that were cut from the vocabulary: those can never apply
        pairs = [(a, b) for a, b in pairs if a in vocab and b in vocab and a + b in vocab]
        model = models.BPE(vocab=vocab, merges=pairs, ignore_merges=pre.ignore_merges)
    tokenizer = tokenizers.Tokenizer(model)
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _default_pre_tokenizer() if pre_name == "default" else _pre_tokenizer(pre)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pre_tokenizer(pre: _Pre) -> pre_tokenizers.PreTokenizer:
    from tokenizers import Regex, pre_tokenizers

    steps: list[pre_tokenizers.PreTokenizer] = []
    if pre.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if pre.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(pre.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre.pattern is None))
    return pre_tokenizers.Sequence(steps)


def _default_pre_tokenizer() -> pre_tokenizers.PreTokenizer:
    """For files that name none: punctuation, GPT-2's words, then digits in threes."""
    from tokenizers import Regex, pre_tokenizers

    gpt2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
    patterns = [r"[\p{P}\$\+<=>\^~\|]+", gpt2, r"\p{N}+", r"[0-9][0-9][0-9]"]
    steps: list[pre_tokenizers.PreTokenizer] = [pre_tokenizers.Split(Regex(p), behavior="isolated") for p in patterns]
    return pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _sentencepiece_bpe(metadata: Mapping[str, Any], tokens: list[str], types: list[int], path: str) -> tokenizers.Tokenizer:
    """SentencePiece merges the pair whose result has the best score; as BPE that is one merge for every way to cut a piece."""
    import tokenizers
    from tokenizers import decoders, models, normalizers

    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise CheckpointError(f"{path} has a SentencePiece vocabulary without a score for each token. Give a tokenizer with --tokenizer.")
    vocab = {token: i for i, token in enumerate(tokens)}
    merges: list[tuple[float, int, int, str, str]] = []
    for piece, score, kind in zip(tokens, scores, types, strict=True):
        if kind in (_NORMAL, _USER_DEFINED):
            for cut in range(1, len(piece)):
                left, right = piece[:cut], piece[cut:]
                if left in vocab and right in vocab:
                    merges.append((-score, vocab[left], vocab[right], left, right))
    merges.sort()
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    tokenizer = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=[(left, right) for *_, left, right in merges],
            unk_token=tokens[unknown] if isinstance(unknown, int) and 0 <= unknown < len(tokens) else None,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefixed = metadata.get("tokenizer.ggml.add_space_prefix", True)
    steps: list[normalizers.Normalizer] = [normalizers.Prepend("▁")] if prefixed else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    undo: list[decoders.Decoder] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*undo, decoders.Strip(content=" ", left=1, right=0)] if prefixed else undo)
    return tokenizer


def _add_special_tokens(tokenizer: tokenizers.Tokenizer, tokens: list[str], types: list[int]) -> None:
    from tokenizers import AddedToken

    special = [AddedToken(t, special=True, normalized=False) for t, kind in zip(tokens, types, strict=True) if kind in (_UNKNOWN, _CONTROL)]
    plain = [AddedToken(t, special=False, normalized=False) for t, kind in zip(tokens, types, strict=True) if kind == _USER_DEFINED]
    tokenizer.add_special_tokens([t for t in special if t.content])
    tokenizer.add_tokens([t for t in plain if t.content])
