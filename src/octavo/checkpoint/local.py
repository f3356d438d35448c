"""A checkpoint on local disk: which files of a folder are the weights, and its JSON configuration.

Owns everything that happens after a model is on this machine. Files are read as untrusted input: whatever is wrong with them
is a `CheckpointError` that names the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.checkpoint.files import is_there, read_json_object, require_file
from octavo.checkpoint.gguf_config import gguf_hf_config
from octavo.checkpoint.gguf_file import read_gguf
from octavo.checkpoint.text_part import text_part
from octavo.checkpoint.types import Checkpoint
from octavo.errors import CheckpointError, UnsupportedModel

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
SAFETENSORS_INDEX = "model.safetensors.index.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_QUANTIZATION_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}
"""Files of older quantisers -> the method they stand for."""
_GGUF_SAMPLING = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}


def apply_overrides(config: Mapping[str, Any], overrides: Mapping[str, Any] | None) -> dict[str, Any]:
    """`config` with entries replaced. Nested model configs (text_config, ...) are merged; any other value is replaced whole."""
    merged = dict(config)
    for key, value in (overrides or {}).items():
        old = merged.get(key)
        nested = key.endswith("_config") and key != "quantization_config"
        merged[key] = apply_overrides(old, value) if nested and isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def open_folder(folder: Path, name: str, overrides: Mapping[str, Any] | None, load_format: str) -> Checkpoint:
    """The checkpoint in a folder: config.json with safetensors (or no weights), else the one GGUF file in it."""
    ggufs = sorted(p for p in folder.glob("*.gguf") if not p.is_dir())
    if load_format == "gguf" or not is_there(folder / CONFIG):
        if ggufs:
            return open_gguf(_only_gguf(folder, ggufs), name, overrides, generation_from=folder)
        raise _not_a_model(folder, load_format)
    stored = read_json_object(folder / CONFIG)
    config = _checked_config(apply_overrides(stored | quantization_config(folder, stored), overrides), folder / CONFIG)
    config = text_part(config) or config
    generation = read_json_object(folder / GENERATION_CONFIG) if is_there(folder / GENERATION_CONFIG) else {}
    weights = () if load_format == "dummy" else safetensors_files(folder)
    if not weights and ggufs and load_format == "auto":
        return open_gguf(_only_gguf(folder, ggufs), name, overrides, generation_from=folder)
    return Checkpoint(
        path=str(folder),
        name=name,
        format="safetensors" if weights else "config",
        hf_config=config,
        generation_config=generation,
        weight_files=weights,
    )


def quantization_config(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """The entry `quantization_config` for a config.json that lacks it: older tools kept it in a file of its own, or called it otherwise."""
    if config.get("quantization_config") is not None:
        return {}
    if isinstance(other := config.get("compression_config"), dict):
        return {"quantization_config": {"quant_method": "compressed-tensors", **other}}
    for name, method in _QUANTIZATION_FILES.items():
        if is_there(folder / name):
            values = read_json_object(folder / name)
            usual = "squeezellm" if method == "awq" and "wbits" in values else method
            return {"quantization_config": {"quant_method": usual, **values}}
    return {}


def open_gguf(file: Path, name: str, overrides: Mapping[str, Any] | None, generation_from: Path | None = None) -> Checkpoint:
    """The checkpoint in one GGUF file. Its own metadata is the configuration, whatever lies beside it."""
    parsed = read_gguf(str(file))
    if parsed.metadata.get("split.count", 0) > 1:
        raise UnsupportedModel(
            f"{file} is one part of a GGUF split in {parsed.metadata['split.count']}. Merge the parts first: "
            f"llama-gguf-split --merge {file.name} merged.gguf"
        )
    config = apply_overrides(gguf_hf_config(parsed.metadata, parsed.tensors), overrides)
    generation: dict[str, Any] = {}
    if generation_from is not None and is_there(generation_from / GENERATION_CONFIG):
        generation = read_json_object(generation_from / GENERATION_CONFIG)
    else:
        generation = {ours: parsed.metadata[theirs] for theirs, ours in _GGUF_SAMPLING.items() if theirs in parsed.metadata}
    return Checkpoint(
        path=str(file),
        name=name,
        format="gguf",
        hf_config=_checked_config(config, file),
        generation_config=generation,
        weight_files=(str(file),),
        gguf_metadata=parsed.metadata,
    )


def safetensors_files(folder: Path) -> tuple[str, ...]:
    """Weight files of a folder in reading order: what the index lists, else every model file. Empty when there is none.

    Raises:
        CheckpointError: the index is malformed or names files that are not there.
    """
    index = folder / SAFETENSORS_INDEX
    if is_there(index):
        weight_map = read_json_object(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(f, str) for f in weight_map.values()):
            raise CheckpointError(f'{index} has no "weight_map" from tensor names to files.')
        files = sorted(set(weight_map.values()))
        if outside := [f for f in files if Path(f).name != f]:
            raise CheckpointError(f"{index} names {outside[0]!r}; only files in the same folder are allowed.")
        if missing := [f for f in files if not is_there(folder / f)]:
            shown = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
            raise CheckpointError(f"{folder}: {len(missing)} of {len(files)} weight files are missing: {shown}. Download it again.")
        return tuple(str(folder / f) for f in files)
    single = folder / "model.safetensors"
    if is_there(single):
        return (str(single),)
    # Adapters are no model weights, and consolidated*.safetensors repeats them under other names.
    found = [p for p in sorted(folder.glob("*.safetensors")) if not p.name.startswith(("adapter_", "consolidated"))]
    for path in found:
        require_file(path)
    return tuple(str(p) for p in found)


def require_weights(checkpoint: Checkpoint) -> None:
    """Check that there are weights to load.

    Raises:
        CheckpointError: only a configuration is there; the message says what was found instead and what to do.
    """
    if checkpoint.weight_files:
        return
    folder = Path(checkpoint.path)
    if any(p.suffix in _PICKLES for p in folder.glob("*")):
        raise CheckpointError(
            f"{folder} holds pickled PyTorch weights only, and unpickling can run code. Convert them to safetensors "
            "(save_pretrained of transformers does), or take a safetensors or GGUF version of the model."
        )
    raise CheckpointError(
        f"{folder} has a {CONFIG} but no weights (*.safetensors, pytorch_model.bin or *.gguf). Download them, or use --load-format dummy for random ones."
    )


def _only_gguf(folder: Path, files: list[Path]) -> Path:
    models = [p for p in files if not p.name.startswith("mmproj")]
    if len(models) == 1:
        return models[0]
    names = ", ".join(p.name for p in (models or files)[:8])
    raise CheckpointError(f"{folder} holds {len(models)} GGUF models ({names}). Give the path of the one to use.")


def _not_a_model(folder: Path, load_format: str) -> CheckpointError:
    if load_format == "gguf":
        return CheckpointError(f"{folder} has no .gguf file, and --load-format gguf asks for one.")
    if (folder / "adapter_config.json").is_file():
        return CheckpointError(f"{folder} is an adapter (LoRA), not a model. Give the base model it was trained on.")
    inner = sorted(p.parent.name for p in folder.glob(f"*/{CONFIG}"))
    hint = f" Did you mean {folder / inner[0]}?" if inner else ""
    return CheckpointError(f"{folder} is not a model folder: it has neither {CONFIG} nor a .gguf file.{hint}")


def _checked_config(config: dict[str, Any], source: Path) -> dict[str, Any]:
    architectures = config.get("architectures")
    if isinstance(architectures, list) and architectures and all(isinstance(a, str) for a in architectures):
        return config
    given = f"has {architectures!r}" if "architectures" in config else "has none"
    kind = f" (model_type {config['model_type']!r})" if "model_type" in config else ""
    raise UnsupportedModel(
        f'{source}{kind} must name its class in "architectures", and {given}. '
        """Add it there or with --hf-overrides '{"architectures": ["LlamaForCausalLM"]}'."""
    )
