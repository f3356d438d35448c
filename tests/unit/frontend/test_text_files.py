"""The copy of a tokenizer that all API servers of a server read: theirs is what the files were at the start."""

from __future__ import annotations

from pathlib import Path

from octavo.frontend.http.api_servers.text_files import keep
from octavo.frontend.launch import engine_args, open_tokenizer, prepare_launch
from tests.support.tiny_checkpoint import write_tiny_checkpoint
from tests.unit.checkpoint.gguf_writer import write_gguf
from tests.unit.text.test_gguf_tokenizer import byte_level_metadata

MEGABYTE = 2**20


def test_a_gguf_tokenizer_is_that_of_the_start(tmp_path: Path) -> None:
    """Its header is kept, its weights take no room."""
    model, other = write_tiny_checkpoint(tmp_path / "model"), tmp_path / "other.gguf"
    write_gguf(other, byte_level_metadata())
    with other.open("ab") as file:
        file.write(b"w" * 4 * MEGABYTE)
    launch = prepare_launch(engine_args(str(model), {"tokenizer": str(other), "device": "cpu", "load_format": "dummy"}))
    expected = open_tokenizer(launch)
    texts = keep(launch, tmp_path / "kept")
    other.write_bytes(b"another file")
    found = open_tokenizer(texts.launch)
    assert expected is not None and found is not None
    assert found.encode("hello world") == expected.encode("hello world")
    (copy,) = (tmp_path / "kept").iterdir()
    assert copy.stat().st_blocks * 512 < MEGABYTE
    assert texts.told(f"{copy} is damaged") == f"{other} is damaged"
