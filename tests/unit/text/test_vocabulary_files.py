"""Tokenizers of folders without tokenizer.json: SentencePiece models and ranked byte strings, against the libraries they are made for."""

from __future__ import annotations

import base64
import importlib.util
import itertools
import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.checkpoint.types import Checkpoint
from octavo.config.args import EngineArgs
from octavo.errors import CheckpointError, UnsupportedModel
from octavo.frontend.text.gguf_tokenizer import QWEN2_WORDS, gguf_vocabulary
from octavo.frontend.text.sentencepiece_file import build as build_pieces
from octavo.frontend.text.sentencepiece_file import read_pieces
from octavo.frontend.text.tiktoken_file import Ranked, ranks_of_folder, read_ranks, read_tekken
from octavo.frontend.text.tiktoken_file import build as build_ranked
from octavo.frontend.text.tokenizer import Tokenizer, load_tokenizer

spm = pytest.importorskip("sentencepiece")
PARTS = [
    "a", "Z", "é", "ß", "İ", "日", "本", "한", "안", "ไ", "ي", "ا", "1", "23", "4567", " ", "  ", "   ", "\t", "\n", "\n\n", "'", "'s", "'LL",
    "!", "...", "--", "://", "{", "}", "😀", "👩‍👩‍👧", "\u3000", "\xa0", "_", "==", "Hello", "WORLD", "ing", "camelCase", "½", "\u200d",
]  # fmt: skip
CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog does not mind at all.",
    "def f(x):\n    return x ** 2  # a square",
    "日本語のテキスト 한국어 텍스트 Привет, мир! 12345",
] * 20


def texts(count: int = 400) -> list[str]:
    rng = random.Random(3)
    made = ["".join(rng.choice(PARTS) for _ in range(rng.randint(1, 25))) for _ in range(count)]
    return [*made, *CORPUS[:3], " leading", "trailing ", ""]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """SentencePiece models of several kinds, trained in a moment."""
    folder = tmp_path_factory.mktemp("pieces")
    kinds: dict[str, dict[str, Any]] = {
        "llama": {"model_type": "bpe", "remove_extra_whitespaces": False},
        "gemma": {
            "model_type": "bpe",
            "remove_extra_whitespaces": False,
            "add_dummy_prefix": False,
            "user_defined_symbols": ["<tool>", "\n", "\n\n", "▁▁", "▁▁▁"],
        },
        "squeezing": {"model_type": "bpe"},
        "unigram": {"model_type": "unigram"},
        "t5": {
            "model_type": "unigram",
            "byte_fallback": False,
            "normalization_rule_name": "nmt_nfkc",
            "unk_id": 2,
            "bos_id": -1,
            "eos_id": 1,
            "pad_id": 0,
        },
    }
    for name, options in kinds.items():
        spm.SentencePieceTrainer.train(
            sentence_iterator=iter(CORPUS),
            model_prefix=str(folder / name),
            vocab_size=420,
            hard_vocab_limit=False,
            minloglevel=2,
            **({"byte_fallback": True, "normalization_rule_name": "identity"} | options),
        )
    return {name: folder / f"{name}.model" for name in kinds}


@pytest.mark.parametrize("kind", ["llama", "gemma", "squeezing", "unigram"])
def test_pieces_equal_sentencepiece(models: dict[str, Path], kind: str) -> None:
    theirs, ours = spm.SentencePieceProcessor(model_file=str(models[kind])), build_pieces(read_pieces(models[kind]))
    for text in texts():
        ids = theirs.encode(text)
        assert ours.encode(text, add_special_tokens=False).ids == ids, text
        assert ours.decode(ids) == theirs.decode(ids), text


@pytest.mark.parametrize("kind", ["unigram", "t5"])
@pytest.mark.parametrize("signed", [False, True])
def test_unigrams_of_a_gguf_file_equal_sentencepiece(models: dict[str, Path], kind: str, signed: bool) -> None:
    """As converters write them; some had the bytes of the normalisation signed."""
    pieces = read_pieces(models[kind])
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.tokens": list(pieces.tokens),
        "tokenizer.ggml.scores": list(pieces.scores),
        "tokenizer.ggml.token_type": list(pieces.kinds),
        "tokenizer.ggml.add_space_prefix": pieces.space_prefix,
        "tokenizer.ggml.remove_extra_whitespaces": pieces.squeeze_spaces,
        "tokenizer.ggml.unknown_token_id": pieces.unknown,
        "tokenizer.ggml.eos_token_id": 1,
    }
    if pieces.charsmap:
        metadata["tokenizer.ggml.precompiled_charsmap"] = [b - 256 if signed and b > 127 else b for b in pieces.charsmap]
    assert bool(pieces.charsmap) is (kind == "t5")
    vocabulary = gguf_vocabulary(metadata, "m.gguf")
    theirs = spm.SentencePieceProcessor(model_file=str(models[kind]))
    # Of several characters that are read as one, the tokenizers library normalises the first alone, in tokenizer.json files too.
    left_out = "\u200d" if pieces.charsmap else ""
    for text in (text.replace(left_out, "") for text in texts()):
        assert vocabulary.tokenizer.encode(text, add_special_tokens=False).ids == theirs.encode(text), text
    assert (vocabulary.prefix, vocabulary.suffix) == ([], [1])


def test_damaged_unigrams_are_refused(models: dict[str, Path]) -> None:
    pieces = read_pieces(models["t5"])
    metadata: dict[str, Any] = {"tokenizer.ggml.model": "t5", "tokenizer.ggml.tokens": list(pieces.tokens), "tokenizer.ggml.scores": [1.0]}
    with pytest.raises(CheckpointError, match="score for each token"):
        gguf_vocabulary(metadata, "m.gguf")
    metadata["tokenizer.ggml.scores"] = list(pieces.scores)
    for charsmap, says in (([1000], "list of bytes"), ("abc", "list of bytes"), ([1, 2, 3], "not sound")):
        with pytest.raises(CheckpointError, match=says):
            gguf_vocabulary(metadata | {"tokenizer.ggml.precompiled_charsmap": charsmap}, "m.gguf")


def mistral_files(pattern: str) -> list[Path]:
    """Real vocabularies, where the package that has them is installed; only its data are read."""
    found = importlib.util.find_spec("mistral_common")
    folders = found.submodule_search_locations if found is not None else None
    return sorted(Path(folders[0]).glob(f"data/{pattern}")) if folders else []


@pytest.mark.parametrize("path", mistral_files("*.model*") or [None], ids=lambda p: p.name if p else "none")
def test_mistrals_models_equal_sentencepiece(path: Path | None) -> None:
    if path is None:
        pytest.skip("mistral-common is not installed (pip install --no-deps mistral-common)")
    theirs, ours = spm.SentencePieceProcessor(model_file=str(path)), build_pieces(read_pieces(path))
    for text in texts(1000):
        ids = theirs.encode(text)
        assert ours.encode(text, add_special_tokens=False).ids == ids, text
        assert ours.decode(ids) == theirs.decode(ids), text


@pytest.mark.parametrize("path", mistral_files("tekken*.json")[-1:] or [None], ids=lambda p: p.name if p else "none")
def test_mistrals_tekken_equals_tiktoken(path: Path | None) -> None:
    if path is None:
        pytest.skip("mistral-common is not installed (pip install --no-deps mistral-common)")
    ranked = read_tekken(path)
    ours = build_ranked(ranked, "x")
    assert (ours.get_vocab_size(), ours.token_to_id("[INST]"), ours.token_to_id("</s>")) == (131072, 3, 2)
    check_against_tiktoken(ranked, ours, texts(1000))


def check_against_tiktoken(ranked: Ranked, ours: Any, asked: list[str]) -> None:
    ranks = {token: rank for rank, token in enumerate(ranked.tokens)}
    theirs = tiktoken.Encoding(name="x", pat_str=ranked.pattern, mergeable_ranks=ranks, special_tokens={})
    for text in asked:
        ids = [ranked.first + rank for rank in theirs.encode_ordinary(text)]
        assert ours.encode(text, add_special_tokens=False).ids == ids, text
        assert ours.decode(ids) == text


def ranks_by_training() -> list[bytes]:
    """All bytes, then what joining the most frequent neighbours of the corpus gives."""
    words = [[bytes([b]) for b in text.encode()] for text in CORPUS]
    tokens = [bytes([b]) for b in range(256)]
    for _ in range(150):
        counts: dict[bytes, int] = {}
        for word in words:
            for a, b in itertools.pairwise(word):
                counts[a + b] = counts.get(a + b, 0) + 1
        best = max(counts, key=lambda joint: (counts[joint], joint))
        tokens.append(best)
        for word in words:
            i = 0
            while i + 1 < len(word):
                if word[i] + word[i + 1] == best:
                    word[i : i + 2] = [best]
                i += 1
    return list(dict.fromkeys(tokens))


RANKS = ranks_by_training()
RANKED = Ranked(RANKS, QWEN2_WORDS, {})
BUILT = build_ranked(RANKED, "trained here")


def write_ranks(path: Path, tokens: list[bytes]) -> Path:
    path.write_bytes(b"".join(base64.b64encode(token) + f" {rank}\n".encode() for rank, token in enumerate(tokens)))
    return path


def write_tekken(path: Path, *, special: bool) -> Path:
    vocab = [{"rank": i, "token_bytes": base64.b64encode(t).decode(), "token_str": None} for i, t in enumerate([*RANKS, b"cut off"])]
    config = {"pattern": r"\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+", "default_vocab_size": len(RANKS) + 30, "default_num_special_tokens": 30}
    data: dict[str, Any] = {"config": config, "vocab": vocab}
    if special:
        data["special_tokens"] = [{"rank": i, "token_str": f"<{i}>", "is_control": True} for i in range(3)]
    path.write_text(json.dumps(data))
    return path


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=40))
def test_ranks_equal_tiktoken(text: str) -> None:
    check_against_tiktoken(RANKED, BUILT, [text])


def load(folder: Path, **args: Any) -> Tokenizer:
    return load_tokenizer(Checkpoint(str(folder), "m", "safetensors", {}, {}, ()), EngineArgs(**args))


def test_a_folder_with_a_sentencepiece_model(tmp_path: Path, models: dict[str, Path]) -> None:
    (tmp_path / "tokenizer.model").write_bytes(models["llama"].read_bytes())
    tokenizer = load(tmp_path)
    bos = spm.SentencePieceProcessor(model_file=str(models["llama"])).bos_id()
    assert tokenizer.encode("the dog")[0] == tokenizer.bos_token_id == bos
    assert tokenizer.decode(tokenizer.encode("the dog"), skip_special_tokens=True) == "the dog"
    config = {
        "tokenizer_class": "LlamaTokenizer",
        "add_bos_token": False,
        "add_eos_token": True,
        "chat_template": "{{ messages[0].content }}",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load(tmp_path)
    assert tokenizer.encode("the dog")[-1] == tokenizer.eos_token_id
    assert tokenizer.encode("the dog")[0] != bos
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}]) == "hi"


@pytest.mark.parametrize("name", ["TokenizersBackend", "PreTrainedTokenizerFast", "CodeLlamaTokenizerFast", "GemmaTokenizer"])
def test_classes_that_tell_nothing_of_the_ids(tmp_path: Path, models: dict[str, Path], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    (tmp_path / "tokenizer.model").write_bytes(models["llama"].read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name, "bos_token": "<s>", "eos_token": "</s>"}))
    text, tokenizer = "the dog", load(tmp_path)
    assert tokenizer.encode(text, add_special_tokens=False) == spm.SentencePieceProcessor(model_file=str(models["llama"])).encode(text)


@pytest.mark.parametrize("special", [True, False])
def test_a_folder_with_tekken(tmp_path: Path, special: bool) -> None:
    write_tekken(tmp_path / "tekken.json", special=special)
    tokenizer = load(tmp_path)
    assert tokenizer.bos_token_id == (None if special else 1)
    ids = tokenizer.encode("the dog", add_special_tokens=False)
    assert min(ids) >= 30
    assert tokenizer.decode(ids) == "the dog"
    assert tokenizer.encode("<2>" if special else "</s>", add_special_tokens=False) == [2]
    assert tokenizer.backend.id_of("<SPECIAL_29>") == 29


def test_a_folder_with_ranks(tmp_path: Path) -> None:
    write_ranks(tmp_path / "qwen.tiktoken", RANKS)
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "QWenTokenizer", "auto_map": {"AutoTokenizer": ["x.Y", None]}})
    )
    tokenizer = load(tmp_path)
    assert tokenizer.encode("<|im_start|>") == [len(RANKS) + 1]
    assert tokenizer.eos_token_id == len(RANKS)
    assert tokenizer.decode(tokenizer.encode("the dog 12")) == "the dog 12"
    assert tokenizer.encode("e\u0301") == tokenizer.encode("\xe9")  # NFC


def test_llama_3_calls_its_ranks_tokenizer_model(tmp_path: Path) -> None:
    write_ranks(tmp_path / "tokenizer.model", RANKS)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    tokenizer = load(tmp_path)
    assert tokenizer.encode("the dog")[0] == tokenizer.bos_token_id == len(RANKS)
    assert tokenizer.encode("<|eot_id|>", add_special_tokens=False) == [len(RANKS) + 9]


KIMI_TEXTS = ["Hello日本語world", "汉字abc汉字's", "漢字12345 漢", "I'LL 한국어's", "ǅǆ汉x\u0301", "a\u0301汉\u0301"]


def test_moonshots_ranks_equal_tiktoken(tmp_path: Path) -> None:
    """Chinese characters are cut from their neighbours; special tokens are where the config says, with names of its own."""
    write_ranks(tmp_path / "tiktoken.model", RANKS)
    size = len(RANKS)
    config = {
        "tokenizer_class": "TikTokenTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "added_tokens_decoder": {str(size + i): {"content": t, "special": True} for i, t in enumerate(("[BOS]", "[EOS]", "<|im_end|>"))},
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load(tmp_path)
    assert tokenizer.encode("<|im_end|>") == [size + 2], "no beginning is marked"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (size, size + 1)
    ranked, _ = ranks_of_folder(tmp_path / "tiktoken.model", config, "")
    check_against_tiktoken(ranked, build_ranked(ranked, "x"), [*KIMI_TEXTS, *texts()])


@pytest.mark.parametrize(("name", "end"), [("cl100k_base", 100257), ("o200k_base", 199999)])
def test_files_called_after_an_encoding(tmp_path: Path, name: str, end: int) -> None:
    write_ranks(tmp_path / f"{name}.tiktoken", RANKS)
    tokenizer = load(tmp_path)
    assert tokenizer.encode("<|endoftext|>") == [end] == [tokenizer.eos_token_id]
    ranked, _ = ranks_of_folder(tmp_path / f"{name}.tiktoken", {}, "")
    published = {
        "cl100k_base": r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s""",
        "o200k_base": "|".join([
            r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
            r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
            r"""\p{N}{1,3}""", r""" ?[^\s\p{L}\p{N}]+[\r\n/]*""", r"""\s*[\r\n]+""", r"""\s+(?!\S)""", r"""\s+""",
        ]),
    }  # fmt: skip
    theirs = Ranked(ranked.tokens, published[name], {})
    check_against_tiktoken(theirs, build_ranked(ranked, "x"), texts())


def test_ranks_of_an_unknown_family_are_refused_and_no_code_is_run(tmp_path: Path) -> None:
    write_ranks(tmp_path / "some.tiktoken", RANKS)
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    config = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["evil.OwnTokenizer", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match=r"OwnTokenizer.*never run.*--tokenizer"):
        load(tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("tokenizer.model", b"\x0a\xff\xff\xff\xff\x0fabc", "not a sound SentencePiece model"),
        ("tokenizer.model", b"", "not a sound SentencePiece model"),
        ("tokenizer.model", b"\x80" * 20, "not a sound SentencePiece model"),
        ("tekken.json", b"{}", "not a sound tekken vocabulary"),
        ("tekken.json", b'{"config": 1, "vocab": []}', "not a sound tekken vocabulary"),
        ("qwen.tiktoken", b"YQ== 0\nYg== 2\n", "ranks must go from 0 to 1"),
        ("qwen.tiktoken", b"?? 0\n", "base64"),
        ("qwen.tiktoken", b"YQ== 0\n", "no token for 255 of the 256 bytes"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, name: str, content: bytes, says: str) -> None:
    (tmp_path / name).write_bytes(content)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen"}))
    with pytest.raises(CheckpointError, match=says):
        load(tmp_path)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_no_damage_to_a_model_gets_past_an_octavo_error(models: dict[str, Path], tmp_path_factory: Any, data: st.DataObject) -> None:
    content = bytearray(models["llama"].read_bytes())
    if data.draw(st.booleans()):
        content = content[: data.draw(st.integers(0, len(content) - 1))]
    else:
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    damaged = models["llama"].with_name("damaged.model")
    damaged.write_bytes(content)
    try:
        build_pieces(read_pieces(damaged)).encode("the dog")
    except (CheckpointError, UnsupportedModel) as e:
        assert str(e)


def test_ranks_are_read_in_their_order(tmp_path: Path) -> None:
    path = tmp_path / "x.tiktoken"
    path.write_bytes(b"Yg== 1\nYQ== 0\n\n")
    assert read_ranks(path) == [b"a", b"b"]
