"""`octavo quantize`: a low-bit checkpoint of a model, made by llmcompressor or auto-round, which are installed apart.

The tools pin versions of torch and transformers of their own. So they run in a process that can be another environment's
(`--python`), on a short program that this module writes.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.cli.flags import choice, positive_int
from octavo.cli.parser import CommandParser, Namespace, UsageError
from octavo.cli.tool_output import run_tool
from octavo.errors import ConfigError, plain_text


@dataclass(frozen=True)
class Tool:
    package: str
    """On the package index."""
    module: str
    install: str


LLMCOMPRESSOR = Tool("llmcompressor", "llmcompressor", "pip install llmcompressor")
AUTO_ROUND = Tool("auto-round", "auto_round", "pip install auto-round")
METHODS: Mapping[str, Tool] = {"fp8": LLMCOMPRESSOR, "int8": LLMCOMPRESSOR, "gptq": LLMCOMPRESSOR, "awq": AUTO_ROUND}

_PREPARE = """
import json, sys
from pathlib import Path
job = json.loads(sys.argv[1])
import torch, transformers
source = Path(job["model"])
if source.suffix == ".gguf":
    from transformers import GgufConfig
    where, more = str(source.parent), {"gguf_file": source.name}
    asked = {"quantization_config": GgufConfig(dequantize=True)}
else:
    where, more, asked = str(source), {}, {}
model = transformers.AutoModelForCausalLM.from_pretrained(where, dtype=torch.bfloat16, **more, **asked)
tokenizer = transformers.AutoTokenizer.from_pretrained(where, **more)
if more:
    # The tools read the model's config from its folder again; one made from a GGUF file is nowhere, and names no class.
    import atexit, shutil, tempfile
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    model.config._name_or_path = folder
def calibration():
    text = Path(job["text"]).read_text(encoding="utf-8")
    ids = tokenizer(text)["input_ids"]
    size = job["window"]
    rows = [ids[i : i + size] for i in range(0, len(ids) - size + 1, size)][: job["samples"]]
    if not rows:
        sys.exit(f"{job['text']} has fewer than {size} tokens: give a longer text or a smaller --window.")
    return rows
"""
_LLMCOMPRESSOR = """
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
more = {"processor": tokenizer}
if job["method"] == "gptq":
    import datasets
    rows = calibration()
    more["dataset"] = datasets.Dataset.from_dict({"input_ids": rows, "attention_mask": [[1] * len(r) for r in rows]})
    more |= {"num_calibration_samples": len(rows), "max_seq_length": job["window"]}
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": job["group"]}
    recipe = GPTQModifier(config_groups={"group_0": {"targets": ["Linear"], "weights": weights}}, ignore=["lm_head"])
else:
    scheme = {"fp8": "FP8_DYNAMIC", "int8": "W8A8"}[job["method"]]
    recipe = QuantizationModifier(targets="Linear", scheme=scheme, ignore=["lm_head"])
oneshot(model=model, recipe=recipe, **more)
model.save_pretrained(job["out"], save_compressed=True)
tokenizer.save_pretrained(job["out"])
"""
_AUTO_ROUND = """
import shutil, tempfile
from auto_round import AutoRound
quantiser = AutoRound(model, tokenizer, bits=4, group_size=job["group"], sym=False, iters=0, disable_opt_rtn=True)
out = Path(job["out"])
with tempfile.TemporaryDirectory(dir=out.parent) as scratch:
    quantiser.quantize_and_save(scratch, format="auto_awq")
    out.mkdir(parents=True, exist_ok=True)
    for file in next(Path(scratch).rglob("config.json")).parent.iterdir():
        shutil.move(str(file), str(out / file.name))
tokenizer.save_pretrained(job["out"])
"""
PROGRAMS: Mapping[str, str] = {"llmcompressor": _PREPARE + _LLMCOMPRESSOR, "auto-round": _PREPARE + _AUTO_ROUND}


def configure(parser: CommandParser) -> None:
    parser.usage = "octavo quantize [MODEL] --method METHOD --out FOLDER [flags]"
    parser.add_argument("model", nargs="?", metavar="MODEL", help="A folder, .gguf file or hub name; nothing is the bundled model.")
    parser.add_argument(
        "--method",
        type=choice(tuple(METHODS)),
        metavar="METHOD",
        help="fp8, int8 (weights and inputs in 8 bits), gptq (4 bits, calibrated on --text; these three in the layout of compressed-tensors) "
        "or awq (4 bits in AWQ's layout).",
    )
    parser.add_argument("--out", metavar="FOLDER", help="Where the checkpoint goes; it must not be there.")
    parser.add_argument(
        "--group-size", type=positive_int, metavar="N", help="Inputs that share a scale, for 4 bits. Default: 128 or what fits."
    )
    parser.add_argument("--text", metavar="FILE", help="What gptq is calibrated on: text like that which the model will see.")
    parser.add_argument("--samples", type=positive_int, metavar="N", help="Windows of the text. Default: 128.")
    parser.add_argument("--window", type=positive_int, metavar="N", help="Tokens of a window. Default: 512.")
    parser.add_argument("--python", metavar="FILE", help="Interpreter of the environment that has the tool. Default: this one.")


def run(options: Namespace) -> int:
    method, out = getattr(options, "method", None), getattr(options, "out", None)
    if method is None or out is None:
        raise UsageError("Give a method and a folder: octavo quantize MODEL --method fp8 --out FOLDER.")
    if Path(out).exists():
        raise ConfigError(f"--out {out} is there already. Name another folder, or remove it.")
    if method == "gptq" and not hasattr(options, "text"):
        raise UsageError("--method gptq is calibrated on a text: give one with --text FILE.")
    if hasattr(options, "text") and not Path(options.text).is_file():
        raise ConfigError(f"--text {options.text}: there is no such file.")
    tool, python = METHODS[method], getattr(options, "python", sys.executable)
    _check_installed(tool, python)
    from octavo.checkpoint.local import require_weights
    from octavo.checkpoint.resolve import resolve_checkpoint

    checkpoint = resolve_checkpoint(getattr(options, "model", ""))
    require_weights(checkpoint)
    if checkpoint.hf_config.get("quantization_config") is not None:
        raise ConfigError(f"{checkpoint.name} is quantised already. Give the full-precision model.")
    folder = Path(out).absolute()
    unfinished = folder.with_name(folder.name + ".part")
    try:  # now, and not after an hour of work
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent):
            pass
    except OSError as e:
        raise ConfigError(f"--out {out} cannot be written: {e.strerror or e}.") from None
    job = {
        "model": checkpoint.path,
        "out": str(unfinished),
        "method": method,
        "group": _group(options, checkpoint.hf_config),
        "text": str(Path(getattr(options, "text", "")).absolute()),
        "samples": getattr(options, "samples", 128),
        "window": getattr(options, "window", 512),
    }
    print(f"Quantising {checkpoint.name} to {method} with {tool.package} ...", file=sys.stderr, flush=True)
    began = time.monotonic()
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        if code := run_tool([python, "-c", PROGRAMS[tool.package], json.dumps(job)]):
            raise ConfigError(f"{tool.package} did not finish (exit code {code}); its own messages are above.")
        if not (unfinished / "config.json").is_file():
            raise ConfigError(f"{tool.package} ended without an error and left no checkpoint. Try another version of it.")
        _open_to_others(unfinished)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    against = getattr(options, "model", "") or checkpoint.name
    print(
        f"Written to {out} in {time.monotonic() - began:.0f} s. Serve it: octavo serve {out}. "
        f"What it costs: octavo eval {out} --text FILE --against {against}.",
        file=sys.stderr,
    )
    return 0


def _check_installed(tool: Tool, python: str) -> None:
    """
    Raises:
        ConfigError: the interpreter is not there, is none, or has no such tool; says what to do.
    """
    program = f"import importlib.util; print('octavo asks:', importlib.util.find_spec({tool.module!r}) is not None)"
    try:
        found = subprocess.run([python, "-"], input=program, check=False, capture_output=True, text=True, errors="replace", timeout=60)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"--python {python} does not answer as a Python interpreter does. Name that of the tool's environment.") from None
    except OSError as e:
        raise ConfigError(f"--python {python}: {e.strerror or e}.") from None
    answer = found.stdout.strip().rpartition("\n")[2]
    if answer not in ("octavo asks: True", "octavo asks: False"):
        said = plain_text(found.stderr.strip().rpartition("\n")[2])[:200]
        raise ConfigError(
            f"--python {python} is no working Python interpreter{f' (it says: {said})' if said else ''}. "
            "Name that of the tool's environment: quantize/bin/python."
        )
    if not answer.endswith("True"):
        raise ConfigError(
            f"{tool.package} is not installed for {python}. It pins versions of its own, so give it an environment of its own: "
            f"python -m venv quantize && quantize/bin/{tool.install}, then add --python quantize/bin/python."
        )


def _open_to_others(folder: Path) -> None:
    """Give files the permissions that new files of this user have: the tools write weights that nobody else may read."""
    mask = os.umask(0)
    os.umask(mask)
    for path in (folder, *folder.rglob("*")):
        if not path.is_symlink():
            path.chmod(path.stat().st_mode | ((0o777 if path.is_dir() else 0o666) & ~mask))


def _group(options: Namespace, config: Mapping[str, Any]) -> int:
    """Inputs that share a scale: as asked for, else the largest of 128, 64 and 32 that divides the model's sizes.

    Raises:
        ConfigError: one that does not divide them.
    """
    sizes = [config[key] for key in ("hidden_size", "intermediate_size") if isinstance(config.get(key), int)]
    asked = getattr(options, "group_size", None)
    if asked is not None:
        if wrong := [size for size in sizes if size % asked]:
            raise ConfigError(f"--group-size {asked} does not divide {wrong[0]}, the width of a layer of this model.")
        return int(asked)
    return next((group for group in (128, 64, 32) if not any(size % group for size in sizes)), 32)
