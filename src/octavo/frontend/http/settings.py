"""`ServerSettings`: every setting of the HTTP server, in the same form as `EngineArgs` (the CLI and the docs read both).

Names and defaults follow vLLM where it has them. Values from the environment (OCTAVO_API_KEY, VLLM_API_KEY,
VLLM_SERVER_DEV_MODE) are read by the command line and arrive here as plain values.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from octavo.config.args import setting
from octavo.errors import ConfigError
from octavo.frontend.parsing.formats import ALIASES, REASONING_ALIASES, REASONING_FORMATS, TOOL_FORMATS, known_names

TOOL_PARSERS = known_names(TOOL_FORMATS, ALIASES)
REASONING_PARSERS = known_names(REASONING_FORMATS, REASONING_ALIASES)
MAX_API_SERVERS = 64
LOG_LEVELS = ("trace", "debug", "info", "warning", "error", "critical")


@dataclass(frozen=True)
class ServerSettings:
    """User settings of the server. See the configuration reference for each field."""

    # Where to listen
    host: str | None = setting(None, "Address to listen on. Default: every interface.", group="server")
    port: int = setting(8000, "Port to listen on; 0 takes a free one.", group="server")
    uds: str | None = setting(None, "Listen on this Unix socket instead of host and port.", group="server")
    root_path: str = setting("", "Path prefix under which a proxy publishes the server.", group="server")
    api_server_count: int = setting(
        1,
        f"HTTP server processes over the one engine, 1 to {MAX_API_SERVERS}: for more streamed tokens than one process can send.",
        group="server",
    )
    shutdown_timeout: float = setting(
        15.0, "Seconds that running requests may take to finish after the first SIGTERM or Ctrl-C.", group="server"
    )
    timeout_keep_alive: int = setting(75, "Seconds an idle connection stays open.", group="server")
    client_timeout: float = setting(
        60.0,
        "Seconds that a client may take for the head of a request, send nothing within its body, or read nothing of its reply; "
        "0: no limit.",
        group="server",
    )
    sse_keep_alive: float = setting(
        15.0, "Seconds of silence after which a stream gets a comment, so that proxies keep it open; 0 sends none.", group="server"
    )
    disable_fastapi_docs: bool = setting(False, "No /docs and /openapi.json.", group="server")
    disable_dashboard: bool = setting(False, "No dashboard page at / and no /stats.", group="server")
    server_dev_mode: bool = setting(
        False, "Adds routes for development: /reset_prefix_cache (also env VLLM_SERVER_DEV_MODE=1).", group="server"
    )

    # Who may use it
    api_key: list[str] | None = setting(
        None, "Keys that a client may send as `Authorization: Bearer KEY` (also env OCTAVO_API_KEY).", group="access"
    )
    allowed_origins: list[str] = setting(["*"], "CORS: origins.", group="access")
    allowed_methods: list[str] = setting(["*"], "CORS: methods.", group="access")
    allowed_headers: list[str] = setting(["*"], "CORS: headers.", group="access")
    allow_credentials: bool = setting(False, "CORS: credentials.", group="access")
    ssl_keyfile: str | None = setting(None, "TLS key file.", group="access")
    ssl_certfile: str | None = setting(None, "TLS certificate file.", group="access")
    ssl_ca_certs: str | None = setting(None, "TLS: certificates of authorities for client certificates.", group="access")
    ssl_cert_reqs: int = setting(0, "TLS: client certificate 0 not asked, 1 optional, 2 required.", group="access")
    enable_ssl_refresh: bool = setting(False, "Reload the TLS files when they change.", group="access", status="not yet")

    # Limits
    max_body_bytes: int = setting(32 * 1024 * 1024, "Largest request body (8m, 8M); a larger one gets 413.", group="limits", size=True)
    max_sequences: int = setting(16384, "Most sequences (prompts x n) in one request.", group="limits")
    h11_max_incomplete_event_size: int = setting(
        4 * 1024 * 1024, "The HTTP parser is not h11; accepted and ignored.", group="limits", size=True, status="ignored"
    )
    h11_max_header_count: int = setting(256, "The HTTP parser is not h11; accepted and ignored.", group="limits", status="ignored")

    # What is kept
    response_store_ttl: float = setting(
        24 * 3600.0, "Seconds that a response of /v1/responses is kept after its last use (in memory).", group="stores"
    )
    response_store_bytes: int = setting(
        256 * 1024 * 1024,
        "Most bytes of kept responses (64m, 1G); the least recently used go first. 0 keeps none.",
        group="stores",
        size=True,
    )

    state_dir: str | None = setting(
        None, "Folder of uploaded files and batches. Default: ~/.local/state/octavo/server-PORT; none with port 0 or --uds.", group="stores"
    )
    max_file_bytes: int = setting(512 * 1024 * 1024, "Largest file of /v1/files (512m, 2G).", group="stores", size=True)
    file_store_bytes: int = setting(16 * 1024**3, "Most bytes of all files of /v1/files together.", group="stores", size=True)
    batch_concurrency: int = setting(64, "Requests of a batch in work at once; they give way to live requests.", group="stores")

    # What replies hold
    response_role: str = setting("assistant", "Role in chat replies.", group="replies")
    trust_request_chat_template: bool = setting(False, "Let a request bring its own chat template.", group="replies")
    enable_request_id_headers: bool = setting(False, "Send X-Request-Id back.", group="replies")
    enable_force_include_usage: bool = setting(False, "Send usage at the end of every stream.", group="replies")
    enable_prompt_tokens_details: bool = setting(
        True, "usage.prompt_tokens_details.cached_tokens: how much of the prompt the prefix cache held.", group="replies"
    )
    return_tokens_as_token_ids: bool = setting(False, "Logprobs name tokens as token_id:123.", group="replies")
    enable_auto_tool_choice: bool = setting(False, "Tools are always on; accepted and ignored.", group="replies", status="ignored")
    tool_call_parser: str | None = setting(
        None,
        "How the model writes tool calls (hermes, llama3_json, pythonic, mistral, mistral_named, granite, deepseek_v3, deepseek_v31, "
        "qwen3_coder, openai, json). Default: what the chat template shows; none leaves them in the text.",
        group="replies",
    )
    tool_parser_plugin: str = setting("", "File with a tool parser.", group="replies", status="not yet")
    reasoning_parser: str | None = setting(
        None,
        "How the model marks its reasoning (think, deepseek_r1, mistral, granite, seed_oss, openai_gptoss). Default: what the chat template "
        "shows; none leaves it in the text.",
        group="replies",
    )
    lora_modules: list[str] | None = setting(None, "LoRA adapters: name=path.", group="replies", status="not yet")

    # Logs
    uvicorn_log_level: str = setting("info", "Log level of the HTTP server.", group="logs", choices=LOG_LEVELS)
    log_format: str = setting("text", "Log lines as text, or one JSON object a line.", group="logs", choices=("text", "json"))
    disable_uvicorn_access_log: bool = setting(False, "No access log.", group="logs")
    disable_access_log_for_endpoints: list[str] | None = setting(None, "Paths that the access log leaves out.", group="logs")
    disable_request_summary: bool = setting(False, "No line for each finished request.", group="logs")
    enable_log_requests: bool = setting(False, "Log each request on arrival; its prompt only at level debug.", group="logs")
    disable_log_requests: bool = setting(False, "Requests are not logged on arrival by default; ignored.", group="logs", status="ignored")
    enable_log_outputs: bool = setting(False, "Log generated text (with --enable-log-requests, level debug).", group="logs")
    max_log_len: int | None = setting(None, "Most characters of a prompt or output in the log. Default: no limit.", group="logs")
    log_config_file: str | None = setting(None, "Python logging configuration (JSON) instead of ours.", group="logs")
    log_stats_interval: float = setting(10.0, "Seconds between the lines with throughput and cache use, while busy.", group="logs")

    def __post_init__(self) -> None:
        if isinstance(self.port, bool) or not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be between 0 and 65535, got {self.port}.")
        if isinstance(self.api_server_count, bool) or not 1 <= self.api_server_count <= MAX_API_SERVERS:
            raise ConfigError(f"api_server_count must be between 1 and {MAX_API_SERVERS}, got {self.api_server_count}.")
        for name in ("max_body_bytes", "max_sequences", "max_file_bytes", "batch_concurrency"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if self.shutdown_timeout < 0:
            raise ConfigError(f"shutdown_timeout must not be negative, got {self.shutdown_timeout}.")
        for name in ("sse_keep_alive", "client_timeout", "response_store_ttl", "response_store_bytes", "file_store_bytes"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative, got {getattr(self, name)}.")
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ConfigError("TLS needs both ssl_keyfile and ssl_certfile.")
        for name in ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "log_config_file"):
            path = getattr(self, name)
            if path is not None and not os.path.isfile(path):
                raise ConfigError(f"{name}: there is no file {path!r}.")
        if self.ssl_cert_reqs not in (0, 1, 2):
            raise ConfigError(f"ssl_cert_reqs must be 0, 1 or 2, got {self.ssl_cert_reqs}.")
        for name, allowed in (("uvicorn_log_level", LOG_LEVELS), ("log_format", ("text", "json"))):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}.")
        for name, names in (("tool_call_parser", TOOL_PARSERS), ("reasoning_parser", REASONING_PARSERS)):
            if (value := getattr(self, name)) is not None and value not in names:
                raise ConfigError(f"{name} must be one of {', '.join(names)}, got {value!r}.")
        if self.api_key is not None and any(not key for key in self.api_key):
            raise ConfigError("An API key must not be empty.")

    @property
    def tls(self) -> bool:
        return self.ssl_certfile is not None
