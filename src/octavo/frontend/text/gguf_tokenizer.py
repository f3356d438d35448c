"""A `tokenizers.Tokenizer` built from the vocabulary inside a GGUF file.

Four kinds are built: "gpt2" (byte-level BPE, with the pre-tokenizer the file names), "llama" (SentencePiece BPE with byte fallback), "t5"
(SentencePiece unigrams: T5, and encoders that came of XLM-RoBERTa) and "bert" (WordPiece). Ids equal those of the tokenizer the file was
converted from; a pre-tokenizer that is not known here is an error, because a wrong one gives plausible, slightly wrong ids.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from octavo.errors import CheckpointError, UnsupportedModel
from octavo.frontend.text.sentencepiece_file import BYTE, CONTROL, NORMAL, UNKNOWN, Pieces, add_special, build

if TYPE_CHECKING:
    import tokenizers
    from tokenizers import pre_tokenizers

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3_WORDS: Final = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _TAIL
QWEN2_WORDS: Final = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _TAIL
_CASED_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+{c}"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*{c}"
)
_TEKKEN = _CASED_WORDS.replace("{c}", "") + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
GPT4O_WORDS: Final = _CASED_WORDS.replace("{c}", _CONTRACTIONS + "?") + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"

_NO_HAN = r"&&[^\p{Han}]"
KIMI_WORDS: Final = (
    r"[\p{Han}]+|"
    + _CASED_WORDS.replace(r"\p{M}]", r"\p{M}" + _NO_HAN + "]").replace("{c}", _CONTRACTIONS + "?")
    + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Of Moonshot's models (Kimi K2, Moonlight): Chinese characters are cut from their neighbours first."""
_SEED_WORDS = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class _Pre:
    """One pre-tokenizer type."""

    pattern: str | tuple[str, ...] | None
    """Regular expression that cuts words, or several, each of which cuts what those before it have left; None is GPT-2's own, which is
    built in."""
    single_digits: bool = False
    """Cut out each digit first."""
    nfc: bool = False
    ignore_merges: bool = False
    """A word that is in the vocabulary is one token, however it would merge."""
    add_bos: bool = False
    """When the file does not say."""
    add_eos: bool = False
    """As `add_bos`."""


_PUNCTUATED = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
_DEEPSEEK3 = (r"\p{N}{1,3}", r"[一-龥\u3040-ゟ゠-ヿ]+", _PUNCTUATED + r"|\s*[\r\n]+|\s+(?!\S)|\s+")
_DEEPSEEK_LLM = (
    r"[\r\n]",
    r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
    r"\s?[!-/:-~！-／：-～‘-‟\u3000-。]+",
    r"\s+$",
    r"[一-龥ࠀ-一가-\uD7FF]+",
    r"\p{N}+",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-\uD7FF]+", r"\p{N}")
_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2_WORDS, r"\p{N}+", r"[0-9][0-9][0-9]")
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", *_FALCON[1:])
"""For files that name none: punctuation, GPT-2's words, then digits in threes."""

_BLOOM_WORDS = r" ?[^(\s|.,!?…。，、।۔،)]+"

_GPT2 = _Pre(None)
_SMOLLM = _Pre(None, single_digits=True)
_LLAMA_BPE = _Pre(LLAMA3_WORDS, ignore_merges=True, add_bos=True)
_QWEN = _Pre(QWEN2_WORDS, nfc=True)
_PRE_TOKENIZERS: Final[Mapping[str, _Pre]] = {
    **dict.fromkeys(
        ("gpt-2", "phi-2", "mpt", "olmo", "jais", "gigachat", "a.x-4.0", "mellum", "trillion", "granite-docling", "exaone4"), _GPT2
    ),
    "roberta-bpe": _Pre(None, add_bos=True, add_eos=True),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _SMOLLM),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0"), _LLAMA_BPE),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _Pre(LLAMA3_WORDS)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "megrez"), _QWEN),
    **dict.fromkeys(("stablelm2", "hunyuan"), _Pre(QWEN2_WORDS)),
    "seed-coder": _Pre(_SEED_WORDS),
    "superbpe": _Pre((r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    "kimi-k2": _Pre(KIMI_WORDS, ignore_merges=True),
    "tekken": _Pre(_TEKKEN, ignore_merges=True, add_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2"), _Pre(GPT4O_WORDS)),
    **dict.fromkeys(("chatglm-bpe", "glm4"), _Pre(LLAMA3_WORDS)),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), _Pre(_DEEPSEEK3)),
    "deepseek-llm": _Pre(_DEEPSEEK_LLM),
    "deepseek-coder": _Pre(_DEEPSEEK_CODER),
    "falcon": _Pre(_FALCON),
    **dict.fromkeys(("bloom", "gpt3-finnish", "poro-chat"), _Pre((_BLOOM_WORDS,))),
    "default": _Pre(_DEFAULT),
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
        types = [NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise CheckpointError(f"{path} has {len(tokens)} tokens but {len(types)} token types.")
    if kind == "gpt2":
        pre_name = metadata.get("tokenizer.ggml.pre", "default")
        tokenizer = _byte_level_bpe(tokens, metadata.get("tokenizer.ggml.merges"), str(pre_name), path)
        pre = _PRE_TOKENIZERS[str(pre_name)]
        adds_bos, adds_eos = pre.add_bos, pre.add_eos
        add_special(tokenizer, tokens, types)
    elif kind == "llama":
        tokenizer = _sentencepiece(metadata, tokens, types, path)
        adds_bos, adds_eos = True, False
    elif kind == "t5":
        tokenizer = _unigrams(metadata, tokens, types, path)
        adds_bos, adds_eos = metadata.get("general.architecture") == "bert", True
    elif kind == "bert":
        tokenizer = _word_piece(tokens, types)
        return _bert_vocabulary(metadata, tokenizer, tokens, path)
    else:
        raise UnsupportedModel(
            f"{path} has a vocabulary of kind {kind!r}; gpt2, llama, t5 and bert can be read. Give a tokenizer with --tokenizer."
        )

    ids = _special_ids(metadata, len(tokens), path)
    bos, eos = ids.get("bos_token"), ids.get("eos_token")
    templates = {
        "default" if key == "tokenizer.chat_template" else key.removeprefix("tokenizer.chat_template."): value
        for key, value in metadata.items()
        if (key == "tokenizer.chat_template" or key.startswith("tokenizer.chat_template.")) and isinstance(value, str)
    }
    prefix = [bos] if bos is not None and metadata.get("tokenizer.ggml.add_bos_token", adds_bos) else []
    suffix = [eos] if eos is not None and metadata.get("tokenizer.ggml.add_eos_token", adds_eos) else []
    if prefix and suffix and metadata.get("general.architecture") == "bert":
        _between_pairs(tokenizer, (tokens[prefix[0]], prefix[0]), (tokens[suffix[0]], suffix[0]))
    return GgufVocabulary(
        tokenizer=tokenizer,
        prefix=prefix,
        suffix=suffix,
        special_tokens={name: tokens[i] for name, i in ids.items()},
        chat_templates=templates,
    )


_SPECIAL: Final = (
    ("bos_token", "bos"),
    ("eos_token", "eos"),
    ("unk_token", "unknown"),
    ("pad_token", "padding"),
    ("sep_token", "seperator"),  # as the format spells it
)


def _between_pairs(tokenizer: tokenizers.Tokenizer, first: tuple[str, int], last: tuple[str, int]) -> None:
    """What RoBERTa has around texts, and twice between those of a pair."""
    from tokenizers import processors

    tokenizer.post_processor = processors.RobertaProcessing(last, first, trim_offsets=True, add_prefix_space=False)


def _bert_vocabulary(metadata: Mapping[str, Any], tokenizer: tokenizers.Tokenizer, tokens: list[str], path: str) -> GgufVocabulary:
    """[CLS] before a text, [SEP] behind it and between two: the file calls them beginning and separator."""
    from tokenizers import processors

    ids = _special_ids(metadata, len(tokens), path)
    ends = []
    for role, usual in (("bos_token", "[CLS]"), ("sep_token", "[SEP]")):
        found = ids.get(role, tokenizer.token_to_id(usual))
        if found is None:
            raise CheckpointError(f"{path} has a BERT vocabulary without {usual}. Give a tokenizer with --tokenizer.")
        ends.append(found)
    cls, sep = ((tokens[i], i) for i in ends)
    tokenizer.post_processor = processors.BertProcessing(sep, cls)
    special = {
        "cls_token": cls[0],
        "sep_token": sep[0],
        **{name: tokens[i] for name, i in ids.items() if name in ("unk_token", "pad_token")},
    }
    return GgufVocabulary(tokenizer, [cls[1]], [sep[1]], special, {})


def _special_ids(metadata: Mapping[str, Any], size: int, path: str) -> dict[str, int]:
    ids = {}
    for name, key in _SPECIAL:
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
    if pre_name not in _PRE_TOKENIZERS:
        raise UnsupportedModel(f"{path} needs the pre-tokenizer {pre_name!r}, which is not known here. Give a tokenizer with --tokenizer.")
    vocab = {token: i for i, token in enumerate(tokens)}
    # The cut is looked for from the second character on: a part may itself be a space.
    pairs = [(m[:cut], m[cut + 1 :]) for m in merges if (cut := m.find(" ", 1)) > 0]
    pre = _PRE_TOKENIZERS[pre_name]
    try:
        model = models.BPE(vocab=vocab, merges=pairs, ignore_merges=pre.ignore_merges)
    except Exception:  # some merges are of tokens that were cut from the vocabulary: those can never apply
        pairs = [(a, b) for a, b in pairs if a in vocab and b in vocab and a + b in vocab]
        model = models.BPE(vocab=vocab, merges=pairs, ignore_merges=pre.ignore_merges)
    tokenizer = tokenizers.Tokenizer(model)
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(pre)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pre_tokenizer(pre: _Pre) -> pre_tokenizers.PreTokenizer:
    from tokenizers import Regex, pre_tokenizers

    steps: list[pre_tokenizers.PreTokenizer] = []
    if pre.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    patterns = (pre.pattern,) if isinstance(pre.pattern, str) else pre.pattern or ()
    steps += [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre.pattern is None))
    return pre_tokenizers.Sequence(steps)


def _sentencepiece(metadata: Mapping[str, Any], tokens: list[str], types: list[int], path: str) -> tokenizers.Tokenizer:
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise CheckpointError(f"{path} has a SentencePiece vocabulary without a score for each token. Give a tokenizer with --tokenizer.")
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    known = isinstance(unknown, int) and 0 <= unknown < len(tokens)
    prefixed = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    return build(Pieces(tokens, scores, types, space_prefix=prefixed, unknown=unknown if known else None))


def _unigrams(metadata: Mapping[str, Any], tokens: list[str], types: list[int], path: str) -> tokenizers.Tokenizer:
    scores, charsmap = metadata.get("tokenizer.ggml.scores"), metadata.get("tokenizer.ggml.precompiled_charsmap", [])
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise CheckpointError(f"{path} has a SentencePiece vocabulary without a score for each token. Give a tokenizer with --tokenizer.")
    if not isinstance(charsmap, list) or not all(isinstance(byte, int) and -128 <= byte < 256 for byte in charsmap):
        raise CheckpointError(f"{path}: tokenizer.ggml.precompiled_charsmap must be a list of bytes. Give a tokenizer with --tokenizer.")
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    if not isinstance(unknown, int) or not 0 <= unknown < len(tokens):
        unknown = next((i for i, kind in enumerate(types) if kind == UNKNOWN), None)
    return build(
        Pieces(
            tokens,
            scores,
            types,
            unigram=True,
            byte_fallback=BYTE in types,
            space_prefix=bool(metadata.get("tokenizer.ggml.add_space_prefix", True)),
            squeeze_spaces=bool(metadata.get("tokenizer.ggml.remove_extra_whitespaces", True)),
            charsmap=bytes(byte & 0xFF for byte in charsmap),  # some converters wrote them as signed
            unknown=unknown,
        )
    )


def _word_piece(tokens: list[str], types: list[int]) -> tokenizers.Tokenizer:
    """BERT's, uncased: in these files a word begins with U+2581, and what continues one has lost its ##."""
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    special = [kind in (UNKNOWN, CONTROL) or bool(re.fullmatch(r"\[[A-Z]+\d*\]", t)) for t, kind in zip(tokens, types, strict=True)]
    spelled = [t if s else t[1:] if t.startswith("▁") else f"##{t}" for t, s in zip(tokens, special, strict=True)]
    vocab = {token: i for i, token in enumerate(spelled)}
    tokenizer = tokenizers.Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    add_special(tokenizer, spelled, [CONTROL if s else NORMAL for s in special])
    return tokenizer
