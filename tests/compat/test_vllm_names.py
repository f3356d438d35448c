"""Programs written for vLLM run on Octavo with the stand-in installed: here, with it on the path."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.support.octavo_process import environment, free_port, serving, write_script
from tests.support.tiny_checkpoint import write_tiny_checkpoint

ANSWER = "hello world"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("compat") / "tiny")


@pytest.fixture(scope="module")
def script(tiny: Path) -> Path:
    return write_script(tiny.parent / "script.json", tiny, ANSWER)


def python(code: str, *argv: str) -> str:
    done = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, env=environment(), timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_names_are_where_programs_look_for_them() -> None:
    out = python(
        "from vllm import LLM, SamplingParams, AsyncLLMEngine, AsyncEngineArgs, EngineArgs, RequestOutput, CompletionOutput, PoolingParams\n"
        "from vllm import TextPrompt, TokensPrompt, __version__\n"
        "from vllm.sampling_params import SamplingParams as A, RequestOutputKind, StructuredOutputsParams, BeamSearchParams\n"
        "from vllm.outputs import RequestOutput as B, CompletionOutput\n"
        "from vllm.inputs import TokensPrompt as C\n"
        "from vllm.engine.arg_utils import AsyncEngineArgs as D, EngineArgs\n"
        "from vllm.engine.async_llm_engine import AsyncLLMEngine as E\n"
        "from vllm.v1.engine.async_llm import AsyncLLM\n"
        "from vllm.entrypoints.llm import LLM as F\n"
        "from vllm.logprobs import Logprob\n"
        "from vllm.version import __version__ as v\n"
        "assert (A, B, C, D, E, F, v) == (SamplingParams, RequestOutput, TokensPrompt, AsyncEngineArgs, AsyncLLMEngine, LLM, __version__)\n"
        "import octavo; assert F is octavo.LLM\n"
        "print(__version__)"
    )
    assert "+octavo." in out


def test_importing_it_is_as_cheap_as_octavo() -> None:
    out = python("import sys, vllm; print([m for m in ('torch', 'msgspec', 'numpy', 'fastapi') if m in sys.modules])")
    assert out == "[]\n"


def test_a_name_that_is_missing_fails_at_the_import() -> None:
    code = "import vllm\ntry: from vllm import LLMEngine\nexcept ImportError as e: print(e)"
    assert "LLMEngine" in python(code)


def test_an_offline_program(tiny: Path, script: Path) -> None:
    code = (
        "import sys\n"
        "from vllm import LLM, SamplingParams\n"
        "llm = LLM(model=sys.argv[1], load_format='dummy', device='cpu', debug_scripted_model=sys.argv[2], tensor_parallel_size=1,\n"
        "          gpu_memory_utilization=0.9, enforce_eager=True, trust_remote_code=False, swap_space=4)\n"
        "params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=20)\n"
        "for output in llm.generate(['The president of', 'The future of AI is'], params):\n"
        "    print(repr(output.prompt), repr(output.outputs[0].text))\n"
    )
    assert python(code, str(tiny), str(script)).splitlines() == [f"'The president of' '{ANSWER}'", f"'The future of AI is' '{ANSWER}'"]


def test_an_asynchronous_program(tiny: Path, script: Path) -> None:
    code = (
        "import asyncio, sys\n"
        "from vllm import AsyncEngineArgs, AsyncLLMEngine, SamplingParams\n"
        "async def main():\n"
        "    args = AsyncEngineArgs(model=sys.argv[1], load_format='dummy', device='cpu', debug_scripted_model=sys.argv[2])\n"
        "    engine = AsyncLLMEngine.from_engine_args(args)\n"
        "    async for output in engine.generate('hi', SamplingParams(max_tokens=20), request_id='r1'):\n"
        "        last = output\n"
        "    print(last.request_id, last.outputs[0].text)\n"
        "    await engine.shutdown()\n"
        "asyncio.run(main())\n"
    )
    assert python(code, str(tiny), str(script)) == f"r1 {ANSWER}\n"


@pytest.mark.parametrize("entry", [["vllm.entrypoints.openai.api_server", "--model"], ["vllm", "serve"]])
def test_a_server_started_the_old_way(entry: list[str], tiny: Path, script: Path, tmp_path: Path) -> None:
    port = free_port()
    flags = ["--tensor-parallel-size", "1", "--gpu-memory-utilization", "0.9", "--max-model-len", "256", "--enable-chunked-prefill"]
    flags += ["--enable-prefix-caching", "--disable-log-requests", "--served-model-name", "m", "--swap-space", "0"]
    ours = ["--load-format", "dummy", "--device", "cpu", "--debug-scripted-model", str(script)]
    with serving([*entry, str(tiny), *flags, *ours], port, tmp_path / "log"):
        body = json.dumps({"model": "m", "prompt": "hi"}).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=30) as reply:
            assert json.load(reply)["choices"][0]["text"] == ANSWER


def test_the_command_knows_its_version() -> None:
    done = subprocess.run([sys.executable, "-m", "vllm", "--version"], capture_output=True, text=True, env=environment(), check=True)
    assert "+octavo." in done.stdout
