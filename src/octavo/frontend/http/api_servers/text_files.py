"""The files of a tokenizer and its chat templates, as they were when the server started.

API servers read them on their own. One that takes another's place later has to read the same, or it would talk to the engine in another
vocabulary than its neighbours: so all of them read a copy.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from octavo.checkpoint.gguf_file import read_gguf
from octavo.errors import ConfigError
from octavo.frontend.launch import Launch

_WEIGHTS: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack")
"""Endings of what is not copied."""
_TEMPLATES: Final = "additional_chat_templates"
"""The one folder of a checkpoint that has text too."""


@dataclass(frozen=True)
class TextFiles:
    """What to read."""

    launch: Launch
    copies: dict[str, str] = field(default_factory=dict)
    """Path -> that of the file or folder which it is a copy of."""

    def told(self, message: str) -> str:
        """A message about the files, with the names that the user knows."""
        for copy, source in self.copies.items():
            message = message.replace(copy, source)
        return message


def keep(launch: Launch, folder: Path) -> TextFiles:
    """Copy what `launch`'s tokenizer is read from into a new folder. (Of a GGUF model that brings its own, it is in `launch` already.)

    Raises:
        OctavoError: the tokenizer that was asked for is nowhere, or cannot be read.
    """
    from octavo.checkpoint.resolve import tokenizer_source

    args, copies = launch.args, dict[str, str]()
    if args.skip_tokenizer_init:
        return TextFiles(launch)
    folder.mkdir()
    source = Path(launch.checkpoint.path)
    if args.tokenizer:
        source = tokenizer_source(args.tokenizer, download_dir=args.download_dir, token=args.hf_token)
    if source.is_dir():
        place = folder / "files"
        for path in _texts(source):
            _copy(path, place / path.relative_to(source))
        copies[str(place)] = str(source)
        args = dataclasses.replace(args, tokenizer=str(place))
    elif args.tokenizer:  # a GGUF file
        place = folder / "tokenizer.gguf"
        _copy_header(source, place)
        copies[str(place)] = str(source)
        args = dataclasses.replace(args, tokenizer=str(place))
    given = args.chat_template
    if given is not None and "{" not in given and (path := Path(given).expanduser()).is_file():
        _copy(path, folder / "template")
        copies[str(folder / "template")] = given
        args = dataclasses.replace(args, chat_template=str(folder / "template"))
    return TextFiles(dataclasses.replace(launch, args=args), copies)


def _copy(path: Path, place: Path) -> None:
    place.parent.mkdir(exist_ok=True)
    try:
        shutil.copyfile(path, place)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read, or not be kept in {place.parent}: {error.strerror or error}.") from None


def _copy_header(path: Path, place: Path) -> None:
    """A GGUF file with all that is not weights: these are a hole, which takes no room."""
    beginning = read_gguf(str(path)).data_offset
    try:
        with path.open("rb") as file, place.open("wb") as copy:
            copy.write(file.read(beginning))
            copy.truncate(os.fstat(file.fileno()).st_size)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read, or not be kept in {place.parent}: {error.strerror or error}.") from None


def _texts(folder: Path) -> Iterator[Path]:
    for path in (*folder.iterdir(), *folder.glob(f"{_TEMPLATES}/*")):
        if path.is_file() and not path.name.endswith(_WEIGHTS):
            yield path
