"""Small tokenizers of each kind, made in milliseconds: byte-level BPE, SentencePiece BPE with byte fallback, WordPiece."""

from __future__ import annotations

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from octavo.frontend.text.backend import FastBackend
from octavo.frontend.text.chat_template import ChatTemplates
from octavo.frontend.text.token_bytes import byte_level_alphabet
from octavo.frontend.text.tokenizer import Tokenizer

MERGES = [
    "h e",
    "l l",
    "he ll",
    "hell o",
    "Ġ w",
    "o r",
    "Ġw or",
    "l d",
    "Ġwor ld",
    "Ġ he",
    "Ġhe ll",
    "Ġhell o",
    "i n",
    "Ã ©",
    "ð Ł",
    "ðŁ ĺ",
]


def byte_level(*, bos: bool = False) -> tokenizers.Tokenizer:
    """All 256 bytes, a few merges (some end inside a character), <s> and </s>, and a plain added token."""
    vocab = {c: i for i, c in enumerate(byte_level_alphabet())}
    pairs = [(a, b) for a, b in (m.split(" ") for m in MERGES)]
    for a, b in pairs:
        vocab[a + b] = len(vocab)
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    tokenizer.add_tokens([AddedToken("<tool call>", special=False)])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))])
    return tokenizer


def byte_fallback() -> tokenizers.Tokenizer:
    """Llama-2's shape: a space goes before the text, unknown characters are spelled in <0xNN> tokens."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "h", "e", "l", "o", "w", "r", "d", "é", "▁h"]
    pieces += ["el", "▁hel", "lo", "▁hello", "▁w", "or", "ld", "▁wor", "▁world"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    pairs = [
        ("▁", "h"),
        ("e", "l"),
        ("▁h", "el"),
        ("l", "o"),
        ("▁hel", "lo"),
        ("▁", "w"),
        ("o", "r"),
        ("l", "d"),
        ("▁w", "or"),
        ("▁wor", "ld"),
    ]
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=pairs, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(content=" ", left=1, right=0)]
    )
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<unk>", "<s>", "</s>")])
    return tokenizer


def word_piece() -> tokenizers.Tokenizer:
    """A decoder that is no concatenation of bytes: words are joined by spaces, ## continues a word."""
    vocab = {t: i for i, t in enumerate(["[UNK]", "[SEP]", "hello", "world", "##s", "##ly", "é", "日", "a"])}
    tokenizer = tokenizers.Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    tokenizer.add_special_tokens([AddedToken("[SEP]", special=True)])
    return tokenizer


def wrap(tokenizer: tokenizers.Tokenizer, templates: dict[str, str] | None = None) -> Tokenizer:
    """An Octavo tokenizer around a `tokenizers` one, with <s> and </s> as BOS and EOS."""
    backend = FastBackend(tokenizer)
    prefix, suffix = backend.added_ends()
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    return Tokenizer(backend, templates=ChatTemplates(templates or {}, special), special_tokens=special, prefix=prefix, suffix=suffix)
