"""Follows one HTTP request through the engine and writes its one line in the log when it is over."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from octavo.frontend.http.errors import clip
from octavo.frontend.http.settings import ServerSettings
from octavo.frontend.outputs import RequestOutput
from octavo.protocol.params import SamplingParams

logger = logging.getLogger("octavo.request")


@dataclass
class RequestTracker:
    """Token counts and times of one HTTP request. Times are time.monotonic(), as the engine's are."""

    request_id: str
    route: str
    client: str
    settings: ServerSettings
    arrival: float = field(default_factory=time.monotonic)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    first_token: float | None = None
    finish_reasons: Counter[str] = field(default_factory=Counter)
    texts: dict[tuple[int, int], list[str]] = field(default_factory=dict)
    """(prompt, index) -> pieces of output, kept only with --enable-log-outputs."""

    def received(self, params: SamplingParams, prompts: Sequence[str]) -> None:
        """For --enable-log-requests: who and what at info, the text only at debug."""
        if not self.settings.enable_log_requests:
            return
        logger.info("%s received", self.route, extra={"id": self.request_id, "client": self.client, "params": params})
        for prompt in prompts:
            logger.debug("%s prompt: %s", self.request_id, self._cut(prompt))

    def seen(self, number: int, output: RequestOutput, *, first: bool) -> None:
        """Counts the new tokens in `output` (the whole request's when it comes in one piece). `first`: the first of its prompt."""
        if first and output.prompt_token_ids is not None:
            self.prompt_tokens += len(output.prompt_token_ids)
            self.cached_tokens += output.num_cached_tokens or 0
        for completion in output.outputs:
            self.completion_tokens += len(completion.token_ids)
            if completion.finish_reason is not None:
                self.finish_reasons[completion.finish_reason] += 1
            if self.settings.enable_log_outputs:
                self.texts.setdefault((number, completion.index), []).append(completion.text)
        if self.first_token is None and output.outputs:
            times = output.metrics
            self.first_token = times.first_token if first and times is not None and times.first_token else time.monotonic()

    def close(self, error: BaseException | None = None) -> None:
        """The request is over; `error` is why, if it did not end well."""
        for key, pieces in self.texts.items():
            logger.debug("%s output %s: %s", self.request_id, key, self._cut("".join(pieces)))
        if self.settings.disable_request_summary:
            return
        reasons = self.finish_reasons
        reason = next(iter(reasons), "none") if len(reasons) < 2 else ",".join(f"{r}:{c}" for r, c in sorted(reasons.items()))
        fields = {
            "id": self.request_id,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.completion_tokens,
            "ttft_ms": None if self.first_token is None else round((self.first_token - self.arrival) * 1e3, 1),
            "total_ms": round((time.monotonic() - self.arrival) * 1e3, 1),
            "reason": reason if error is None else _reason(error),
            "client": self.client,
        }
        if isinstance(error, Exception):
            fields["error"] = clip(str(error), 300)
        logger.info("%s", self.route, extra=fields)

    def _cut(self, text: str) -> str:
        limit = self.settings.max_log_len
        return repr(text if limit is None else text[:limit])


def _reason(error: BaseException) -> str:
    return "error" if isinstance(error, Exception) else "disconnect"
