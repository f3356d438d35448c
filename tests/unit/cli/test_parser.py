"""Command lines people have already written must parse here to the same meaning."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo.cli.flags import add_engine_settings, add_settings, build, engine_args
from octavo.cli.parser import CommandParser, Namespace, UsageError
from octavo.cli.serve import environment_settings
from octavo.config.args import EngineArgs
from octavo.config.resolve import _whole
from octavo.errors import ConfigError, NotYet
from octavo.frontend.http.settings import ServerSettings


def parse(*argv: str) -> tuple[EngineArgs, ServerSettings]:
    parser = CommandParser("serve", "")
    add_settings(parser, ServerSettings)
    add_engine_settings(parser)
    options = parser.parse(argv)
    return engine_args(options), build(ServerSettings, options)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["org/model"], {"model": "org/model"}),
        (["--model", "org/model"], {"model": "org/model"}),
        (["--port", "8001", "org/model"], {"model": "org/model", "port": 8001}),
        (["org/model", "--port=8001"], {"model": "org/model", "port": 8001}),
        (["m", "--tensor-parallel-size", "2"], {"tensor_parallel_size": 2}),
        (["m", "-tp", "2", "-pp", "2"], {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
        (["m", "-tp=4"], {"tensor_parallel_size": 4}),
        (["m", "-q", "awq"], {"quantization": "awq"}),
        (["m", "--max-model-len", "8k"], {"max_model_len": 8000}),
        (["m", "--max_model_len", "8K"], {"max_model_len": 8192}),
        (["m", "--max_model_len=1.5k"], {"max_model_len": 1500}),
        (["m", "--max-model-len", "auto"], {"max_model_len": "auto"}),
        (["m", "--max-model-len", "-1"], {"max_model_len": -1}),
        (["m", "--gpu-memory-utilization", "0.85"], {"gpu_memory_utilization": 0.85}),
        (["m", "--kv-cache-memory-bytes", "2G"], {"kv_cache_memory_bytes": 2**31}),
        (["m", "--served-model-name", "a", "b"], {"model": "m", "served_model_name": ["a", "b"]}),
        (["m", "--served-model-name", '["a", "b"]'], {"served_model_name": ["a", "b"]}),
        (["m", "--enable-prefix-caching", "--enable-chunked-prefill"], {"enable_prefix_caching": True}),
        (["m", "--no-enable-prefix-caching"], {"enable_prefix_caching": False}),
        (["m", "--no-enable-chunked-prefill"], {"enable_chunked_prefill": False}),
        (["m", "--async-scheduling"], {"async_scheduling": True}),
        (["m", "--no-async-scheduling"], {"async_scheduling": False}),
        (["m", "--hf-overrides", '{"rope_theta": 1e6}'], {"hf_overrides": {"rope_theta": 1e6}}),
        (
            ["m", "--default-chat-template-kwargs.enable_thinking", "false"],
            {"default_chat_template_kwargs": {"enable_thinking": False}},
        ),
        (
            ["m", "--hf-overrides", '{"a": {"x": 1}}', "--hf_overrides.a.y", "2", "--hf-overrides.name_with_underscore=text"],
            {"hf_overrides": {"a": {"x": 1, "y": 2}, "name_with_underscore": "text"}},
        ),
        (["m", "--host", "0.0.0.0", "--api-key", "k1", "k2"], {"host": "0.0.0.0", "api_key": ["k1", "k2"]}),
        (["m", "--allowed-origins", '["https://a.example"]'], {"allowed_origins": ["https://a.example"]}),
        (["m", "--disable-log-stats", "--enforce-eager"], {"disable_log_stats": True, "enforce_eager": True}),
        (["m", "--seed", "-5"], {"seed": -5}),
        (["m", "--chat-template", "{{ messages }}"], {"chat_template": "{{ messages }}"}),
    ],
)
def test_command_lines_mean_what_they_say(argv: list[str], expected: dict[str, object]) -> None:
    args, settings = parse(*argv)
    for name, value in expected.items():
        holder = args if hasattr(args, name) else settings
        assert getattr(holder, name) == value, name


def test_flags_not_given_leave_every_default() -> None:
    assert parse() == (EngineArgs(), ServerSettings())


def test_defaults_of_lists_are_not_shared_between_parses() -> None:
    parse("m", "--allowed-origins", "https://a.example")
    assert parse("m")[1].allowed_origins == ["*"]


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["m", "--max-model-lne", "3"], "Did you mean --max-model-len?"),
        (["m", "--frobnicate"], "there is no flag --frobnicate"),
        (["m", "--max-model", "3"], "there is no flag --max-model"),  # no abbreviations: they would change meaning with new flags
        (["m", "--dtype", "flaot16"], "Did you mean float16?"),
        (["m", "--dtype"], "--dtype: expected one argument"),
        (["m", "--max-model-len", "8q"], "'8q' is not a size"),
        (["m", "--max-model-len", "1.5K"], "decimals go with k, m or g"),
        (["m", "--block-size", "x"], "'x' is not a whole number"),
        (["m", "--gpu-memory-utilization", "most"], "'most' is not a number"),
        (["m", "--hf-overrides", "{rope: 1}"], "is not JSON"),
        (["m", "--hf-overrides", "[1]"], "is not a JSON object"),
        (["m", "--hf-overrides.a"], "needs a value"),
        (["m", "other"], "unexpected argument 'other'"),
    ],
)
def test_a_command_line_that_makes_no_sense_is_refused(argv: list[str], part: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse(*argv)
    assert part in str(refused.value)


def test_two_different_models_are_refused() -> None:
    with pytest.raises(ConfigError, match="Two models"):
        parse("a", "--model", "b")
    assert parse("a", "--model", "a")[0].model == "a"


@pytest.mark.parametrize(
    "argv",
    [
        ["--disable-frontend-multiprocessing"],
        ["--compilation-config", '{"level": 3}'],
        ["-O3"],
        ["--num-scheduler-steps", "8"],
        ["--use-v2-block-manager", "--enable-server-load-tracking"],
        ["--limit-mm-per-prompt", '{"image": 1}'],
        ["--prefix-caching-hash-algo", "sha256"],
        ["--middleware", "a.b", "c.d"],
    ],
)
def test_flags_without_meaning_here_are_accepted_with_one_line_each(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    args, _ = parse("m", *argv, "--max-model-len", "100")
    assert (args.model, args.max_model_len) == ("m", 100)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == sum(a.startswith("-") for a in argv)
    assert all(line.startswith("octavo: warning: --") and "is ignored" in line for line in lines)


@pytest.mark.parametrize("argv", [["--kv-offloading-size", "4"], ["--rope-scaling", '{"type": "yarn"}'], ["--enable-eplb"]])
def test_flags_for_what_cannot_be_done_yet_are_refused(argv: list[str]) -> None:
    with pytest.raises(NotYet, match=f"{argv[0]} is not available yet"):
        parse("m", *argv)


def test_such_flags_are_accepted_when_they_ask_for_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse("m", "--kv-offloading-size", "0", "--max-loras", "1")[0].model == "m"
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_a_config_file_gives_flags_and_the_command_line_wins(tmp_path: Path, suffix: str) -> None:
    content = {
        "model": "from-file",
        "max_model_len": "4K",
        "port": 9000,
        "enable-prefix-caching": False,
        "served-model-name": ["x", "y"],
        "hf-overrides": {"a": 1},
        "api-key": None,
    }
    path = tmp_path / f"c.{suffix}"
    path.write_text(json.dumps(content))  # JSON is YAML
    args, settings = parse("--config", str(path), "--port", "9001")
    assert (args.model, args.max_model_len, args.enable_prefix_caching) == ("from-file", 4096, False)
    assert (args.served_model_name, args.hf_overrides) == (["x", "y"], {"a": 1})
    assert (settings.port, settings.api_key) == (9001, None)


@pytest.mark.parametrize(
    ("content", "part"),
    [("max_model_lne: 3", "Did you mean --max-model-len?"), ("a: [", "is not valid YAML"), ("- a\n- b", "must be a table")],
)
def test_a_bad_config_file_is_refused(tmp_path: Path, content: str, part: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError) as refused:
        parse("--config", str(path))
    assert part in str(refused.value)


def test_a_missing_config_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: No such file"):
        parse("--config", "nowhere.yaml")


def test_keys_come_from_the_environment_unless_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "from-env")
    assert environment_settings(Namespace()).api_key == ["from-env"]
    monkeypatch.setenv("OCTAVO_API_KEY", "ours")
    assert environment_settings(Namespace()).api_key == ["ours"]
    assert environment_settings(Namespace(api_key=["given"])).api_key == ["given"]


def test_every_setting_has_a_flag_and_both_spellings() -> None:
    import dataclasses

    parser = CommandParser("serve", "")
    add_settings(parser, ServerSettings)
    add_engine_settings(parser)
    for field in [*dataclasses.fields(EngineArgs), *dataclasses.fields(ServerSettings)]:
        assert parser.has("--" + field.name.replace("_", "-")), field.name
    assert "{auto,hf,slow}" in parser.format_help()


def test_a_value_for_a_switch_is_explained() -> None:
    with pytest.raises(UsageError, match=r"^--enable-prefix-caching is a switch .* got 'false'. Write .* or --no-enable-prefix-caching"):
        parse("m", "--enable-prefix-caching=false")


def test_a_word_where_a_size_belongs_names_the_flag() -> None:
    args, _ = parse("m", "--max-model-len", "long")
    with pytest.raises(ConfigError, match=r"^--max-model-len: 'long' is not a size"):
        _whole(args, "max_model_len")
