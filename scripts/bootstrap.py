"""Make the virtual environment that `make serve` and `make test` use. Standard library only; runs on any Python 3.8+.

Picks a Python from 3.11 to 3.13, makes the environment, installs the right torch (a CPU build where there is no NVIDIA GPU, as
that is a tenth of the download), then Octavo itself, editable. What is there already is kept, so that a second run is quick.

The choice of torch can be overruled: TORCH_SPEC="torch==2.10.0" and TORCH_INDEX=https://... in the environment.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

TORCH = "torch==2.13.0"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
"""Where the makers of torch publish CPU builds."""
PYTHONS = ("python3.12", "python3.13", "python3.11")
OLDEST, NEWEST = (3, 11), (3, 13)


class SetupError(Exception):
    """Told to the user as it is."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Make Octavo's virtual environment.")
    parser.add_argument("--venv", default=".venv", help="Folder of the environment.")
    parser.add_argument("--extra", action="append", default=[], help="Extra of the package to install, such as test.")
    options = parser.parse_args()
    venv = Path(options.venv)
    try:
        make_venv(venv)
        python = str(venv / "bin" / "python")
        install_torch(python)
        install_octavo(python, options.extra)
    except SetupError as e:
        print(f"set-up: error: {e}", file=sys.stderr)
        return 1
    return 0


def say(text: str) -> None:
    print("set-up: " + text, file=sys.stderr, flush=True)


def make_venv(venv: Path) -> None:
    if works(str(venv / "bin" / "python"), "import pip"):
        return
    python = find_python()
    say(f"making {venv} with {python}")
    if run([python, "-m", "venv", "--clear", str(venv)]) != 0:
        raise SetupError(f"{python} cannot make a virtual environment. On Debian or Ubuntu: apt install python3-venv.")


def find_python() -> str:
    """The first interpreter that can make an environment for Octavo: the one that runs this, then those on PATH."""
    check = f"import sys, venv, ensurepip; assert {OLDEST} <= sys.version_info[:2] <= {NEWEST}"
    for candidate in (sys.executable, *PYTHONS):
        path = shutil.which(candidate)
        if path and works(path, check):
            return path
    raise SetupError(
        "Octavo needs Python 3.11, 3.12 or 3.13 with the venv module, and none was found on PATH "
        f"(this is {platform.python_version()}). Install one, for example: apt install python3.12 python3.12-venv."
    )


def works(python: str, code: str) -> bool:
    """Whether an interpreter is there and runs `code`."""
    try:
        return subprocess.run([python, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False).returncode == 0
    except OSError:
        return False


def run(command: list) -> int:
    return subprocess.run(command, check=False).returncode


def pip(python: str, *arguments: str) -> int:
    return run([python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", *arguments])


def has_gpu() -> bool:
    """Whether an NVIDIA driver answers."""
    tool = shutil.which("nvidia-smi")
    if not tool:
        return False
    try:
        return subprocess.run([tool], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=60, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def torch_sources(gpu: bool, default_is_cpu: bool, environment: dict) -> list:
    """Ways to install torch, as pip arguments, best first.

    default_is_cpu: the index or folder that pip is configured with gives a CPU build by itself.
    """
    spec = environment.get("TORCH_SPEC", TORCH)
    if environment.get("TORCH_INDEX"):
        return [[spec, "--index-url", environment["TORCH_INDEX"]]]
    if gpu or default_is_cpu:
        return [[spec]]
    return [[spec, "--index-url", CPU_INDEX], [spec]]


def default_is_cpu(python: str, spec: str) -> bool:
    """Ask pip what it would install. Outside x86-64 Linux the plain build is the CPU build."""
    if platform.system() != "Linux" or platform.machine() not in ("x86_64", "AMD64"):
        return True
    command = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--dry-run", "--no-deps", "--report", "-", spec]
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False)
    try:
        return json.loads(result.stdout.decode())["install"][0]["metadata"]["version"].endswith("+cpu")
    except (ValueError, KeyError, IndexError):
        return False


def install_torch(python: str) -> None:
    if works(python, "import importlib.metadata as m; m.version('torch')"):
        return
    gpu = has_gpu()
    spec = os.environ.get("TORCH_SPEC", TORCH)
    say("installing {} for {} (minutes, the first time)".format(spec, "an NVIDIA GPU" if gpu else "the CPU"))
    sources = torch_sources(gpu, not gpu and default_is_cpu(python, spec), os.environ)
    for number, arguments in enumerate(sources, 1):
        if pip(python, *arguments) == 0:
            return
        if number < len(sources):
            say("that index did not work; trying the default one, whose build is larger")
    raise SetupError("torch could not be installed. pip's message is above; TORCH_INDEX=https://... names another package index.")


def install_octavo(python: str, extras: list) -> None:
    target = "." + ("[{}]".format(",".join(extras)) if extras else "")
    say("installing Octavo{}".format(" with " + ", ".join(extras) if extras else ""))
    if pip(python, "--editable", target) != 0:
        raise SetupError("Octavo could not be installed. pip's message is above.")


if __name__ == "__main__":
    sys.exit(main())
