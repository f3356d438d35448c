"""What every frontend does before it has an engine: find the model, resolve the settings, read the tokenizer."""

from __future__ import annotations

import dataclasses
import difflib
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.config import address_space, open_files
from octavo.config.args import EngineArgs
from octavo.config.sizes import format_bytes
from octavo.config.types import EngineConfig
from octavo.errors import CheckpointError, ConfigError
from octavo.frontend.client import Progress
from octavo.frontend.processor import default_sampling_params
from octavo.protocol.engine import EngineReady

if TYPE_CHECKING:
    from octavo.checkpoint.types import Checkpoint
    from octavo.frontend.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

MOST_SURPLUS_TOKENS = 256
"""Fine-tunes add a few tokens that the weights do not have; a prompt that holds one is refused. More is another model's tokenizer."""
LEAST_MISSING_TOKENS = 256
"""Weights have more rows than there are tokens, to make up a round number: that many more at the most, or a tenth."""


LEAST_ADDRESSES = 256 << 20
ADDRESSES_A_TOKEN = 1 << 10
"""Of address space: what a frontend with its tokenizer maps before the first request, measured and rounded up."""


@dataclass(frozen=True)
class Launch:
    """A model that is ready to be loaded."""

    args: EngineArgs
    checkpoint: Checkpoint
    config: EngineConfig
    default_sampling_params: dict[str, Any]


def engine_args(model: str, settings: dict[str, Any]) -> EngineArgs:
    """`EngineArgs` from keywords.

    Raises:
        ConfigError: a keyword that is no setting, with the nearest one that is.
    """
    known = {f.name for f in dataclasses.fields(EngineArgs)}
    for name in settings:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise ConfigError(f"{name!r} is not a setting of the engine.{hint}")
    if not isinstance(model, str | os.PathLike):
        raise ConfigError(f"model must be a folder, a .gguf file or a hub name, got {type(model).__name__}.")
    return EngineArgs(model=os.fspath(model), **settings)


def prepare_launch(args: EngineArgs, progress: Progress | None = None, *, offline: bool = False) -> Launch:
    """Find the model and resolve the settings. Reads no weights; may download them.

    Args:
        offline: nobody waits for single tokens.

    Raises:
        OctavoError: the model cannot be found or a setting cannot work.
    """
    from octavo.checkpoint.pooling import pooling_settings
    from octavo.checkpoint.resolve import eos_token_ids, resolve_checkpoint
    from octavo.config.device import detect_device
    from octavo.config.resolve import resolve

    open_files.check()
    address_space.be_frugal()  # the engine may be of this process, whose program we do not know
    if args.batch_invariant is None and os.environ.get("VLLM_BATCH_INVARIANT", "0") not in ("", "0"):
        args = dataclasses.replace(args, batch_invariant=True)
    device = detect_device(args.device, args.threads)
    checkpoint = resolve_checkpoint(
        args.model,
        revision=args.revision,
        download_dir=args.download_dir,
        token=args.hf_token,
        hf_overrides=args.hf_overrides,
        load_format=args.load_format,
        progress=progress,
    )
    pooling = pooling_settings(checkpoint, args.runner)
    config = resolve(
        args,
        path=checkpoint.path,
        name=checkpoint.name,
        hf_config=checkpoint.hf_config,
        eos_token_ids=eos_token_ids(checkpoint),
        device=device,
        pooling=None if pooling is None else pooling.config,
        pooling_length=None if pooling is None else pooling.max_length,
        node_token=node_token(args),
        share_gpus=os.environ.get("OCTAVO_SHARE_GPUS", "0") not in ("", "0"),
        offline=offline,
    )
    _check_addresses(config)
    defaults = default_sampling_params(checkpoint, args)
    for warning in config.warnings:
        logger.warning("%s", warning)
    if pooling is not None and pooling.prompts:
        shown = ", ".join(f"{name} {text!r}" for name, text in list(pooling.prompts.items())[:4])
        logger.info(
            "%s was trained with a prompt in front of a text, by what it is for: %s%s. Texts are embedded as they are sent: put it there.",
            checkpoint.name,
            shown,
            ", ..." if len(pooling.prompts) > 4 else "",
        )
    if defaults:
        shown = ", ".join(f"{name}={value}" for name, value in defaults.items())
        logger.info("Sampling defaults of the model, where a request says nothing: %s (--generation-config none turns them off)", shown)
    return Launch(args, checkpoint, config, defaults)


def log_warnings(ready: EngineReady, config: EngineConfig) -> None:
    """What the engine found while it started, for programs that show no start-up report. The settings' own were logged before."""
    for warning in ready.warnings:
        if warning not in config.warnings:
            logger.warning("%s", warning)


def _check_addresses(config: EngineConfig) -> None:
    """Said here, because what fails later may be anything, and some libraries end the process where they get no memory.

    Raises:
        ConfigError: the limit of the address space is less than a frontend needs, or an engine.
    """
    least = LEAST_ADDRESSES + ADDRESSES_A_TOKEN * config.model.vocab_size
    if (most := address_space.limit()) is not None and most < least:
        raise ConfigError(
            f"The address space of each process is limited to {format_bytes(most)} (ulimit -v), and {config.model.name} needs at least "
            f"{format_bytes(least)} to start, more with its weights and KV cache. Raise that limit; it counts what is mapped, not only what is used."
        )


def node_token(args: EngineArgs) -> str:
    """The secret that several hosts know each other by; empty when there is none.

    Raises:
        ConfigError: the file with it cannot be read.
    """
    if args.node_token_file is None:
        return os.environ.get("OCTAVO_NODE_TOKEN", "").strip()
    try:
        token = Path(args.node_token_file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"--node-token-file {args.node_token_file}: {getattr(e, 'strerror', None) or e}.") from None
    if not token:
        raise ConfigError(f"--node-token-file {args.node_token_file}: it is empty.")
    return token


def open_tokenizer(launch: Launch) -> Tokenizer | None:
    """The model's tokenizer; None with skip_tokenizer_init.

    Raises:
        CheckpointError: it cannot be read, or belongs to another model.
    """
    if launch.args.skip_tokenizer_init:
        return None
    from octavo.frontend.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(launch.checkpoint, launch.args)
    model = launch.config.model
    surplus = tokenizer.vocab_size > model.vocab_size
    beyond = sum(token_id >= model.vocab_size for token_id in tokenizer.backend.vocab().values()) if surplus else 0
    if beyond > MOST_SURPLUS_TOKENS:
        raise CheckpointError(
            f"The tokenizer has {beyond} tokens that {model.name} (vocab_size {model.vocab_size}) does not have: the two do not belong "
            "together. Give the right one with --tokenizer."
        )
    missing = model.vocab_size - tokenizer.vocab_size
    if missing > max(LEAST_MISSING_TOKENS, model.vocab_size // 10):
        logger.warning(
            "The tokenizer has %d tokens and %s %d (vocab_size): what it writes with the others cannot be read. If the two do not belong "
            "together, give the right tokenizer with --tokenizer.",
            tokenizer.vocab_size,
            model.name,
            model.vocab_size,
        )
    return tokenizer
