"""What goes to the log and how it looks: one line an event, text or JSON, quiet by default."""

from __future__ import annotations

import json
import logging
import logging.config
import sys
import time
from collections.abc import Iterable
from typing import Any

from octavo.errors import ConfigError

TRACE = 5
QUIET_PATHS = frozenset({"/health", "/live", "/ready", "/ping", "/metrics", "/load", "/stats"})
"""Probes and scrapers: successful ones say nothing."""
SUMMARISED_PATHS = frozenset({"/v1/completions", "/v1/chat/completions"})
"""A finished request of these has a line of its own."""

_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "color_message", "taskName"}


class TextFormatter(logging.Formatter):
    """`12:30:59 INFO octavo.server: text key=value ...`"""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s", "%m-%d %H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record) + "".join(f" {k}={v}" for k, v in extra_fields(record).items())
        # One event is one line, whatever a client put into a header or a path.
        return text if record.exc_info else text.replace("\r", "\\r").replace("\n", "\\n")


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        event: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **extra_fields(record),
        }
        if record.exc_info:
            event["traceback"] = self.formatException(record.exc_info)
        return json.dumps(event, default=str)


def extra_fields(record: logging.LogRecord) -> dict[str, Any]:
    """What the caller passed as `extra`."""
    return {k: v for k, v in record.__dict__.items() if k not in _STANDARD and not k.startswith("_")}


class AccessFilter(logging.Filter):
    """Leaves out access lines that say nothing new: successful probes, and requests that get a summary line."""

    def __init__(self, more_paths: Iterable[str] = ()) -> None:
        super().__init__()
        self._quiet = QUIET_PATHS | SUMMARISED_PATHS
        self._never = frozenset(more_paths)

    def filter(self, record: logging.LogRecord) -> bool:
        if not isinstance(record.args, tuple) or len(record.args) != 5:
            return True
        path = str(record.args[2]).split("?", 1)[0]
        status = record.args[4]
        return path not in self._never and not (path in self._quiet and isinstance(status, int) and status < 400)


def configure_logging(log_format: str, level: str, config_file: str | None = None) -> None:
    """Sends the log of this process to stderr.

    Raises:
        ConfigError: `config_file` is not a logging configuration.
    """
    logging.addLevelName(TRACE, "TRACE")
    if config_file is not None:
        try:
            with open(config_file, encoding="utf-8") as f:
                logging.config.dictConfig(json.load(f))
        except (OSError, ValueError, TypeError, AttributeError, ImportError) as e:
            raise ConfigError(f"log_config_file {config_file}: {e}.") from None
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    number = TRACE if level == "trace" else logging.getLevelName(level.upper())
    for name in ("octavo", "uvicorn"):
        log = logging.getLogger(name)
        log.handlers[:] = [handler]
        log.setLevel(number)
        log.propagate = False
    # Start and stop are told by octavo.server; what remains of uvicorn's are warnings and errors.
    logging.getLogger("uvicorn.error").setLevel(max(number, logging.WARNING) if number > logging.DEBUG else number)
    for name in ("uvicorn.access", "uvicorn.error"):
        logging.getLogger(name).handlers.clear()
        logging.getLogger(name).propagate = True
