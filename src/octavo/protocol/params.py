"""What a caller may ask of a generation, and the rules it must keep.

`SamplingParams` is public and has the names, defaults and validation of the field's de-facto standard. It is a msgspec
struct so that it crosses process boundaries as it is. Everything that needs the model (vocabulary size, context length,
max_logprobs) is checked by the frontend at the door, not here.
"""

from __future__ import annotations

import copy
import enum
import math
import reprlib
from typing import Any, Literal

import msgspec

from octavo.errors import InvalidRequest

GREEDY_EPSILON = 1e-5
"""Temperatures below this mean greedy decoding."""
MIN_TEMPERATURE = 1e-2
"""Smaller (non-greedy) temperatures are raised to this: dividing by less overflows half precision."""
MAX_TEMPERATURE = 1e30
"""Larger ones are lowered to this: every token is as likely as any other long before, and beyond lies infinity in single precision."""
MAX_REPETITION_PENALTY = 1e30
"""Penalties are moved into [1 / this, this]: logits divided or multiplied by more overflow single precision."""
MAX_INT32 = 2**31 - 1
"""A larger top_k or stream_interval means the same, and messages and samplers hold 64 bits at most."""
MAX_N = 16384
"""Most sequences of one prompt: each costs memory before anything can refuse it."""
MAX_TEXTS = 1024
"""Most entries of bad_words, and of stop: each is looked for at every token."""
MAX_TEXTS_CHARS = 65_536
"""Most characters of all of them together: bad words are tokenized before a request is let in."""
MAX_TOKEN_IDS = 2**20
"""Most entries of a list of token ids: more than any vocabulary has."""
MAX_LENGTH_PENALTY = 20.0
"""length**penalty is a finite number for every length with exponents up to this."""


class RequestOutputKind(enum.IntEnum):
    """What each streamed `RequestOutput` holds: everything so far, only the new part, or one output at the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class OutputConstraint(msgspec.Struct, omit_defaults=True):
    """What a sequence may say, as the engine core enforces it. Made by the frontend from what a request asks for.

    A model that reasons first is free to do so: the grammar holds from the end of its reasoning on.
    """

    grammar: str = ""
    """Grammar text for `octavo.grammar`; empty for none."""
    cost: int = 0
    """Milliseconds that compiling it takes, where that is more than a few."""
    reasoning_budget: int | None = None
    """Most tokens of reasoning."""
    must_answer: bool = False
    """The sequence may not end within its reasoning: what the grammar promises comes behind it."""
    field: str = "structured_outputs"
    """The request's field that the grammar comes from, for errors."""
    reasoning_start: str = ""
    """The text that opens the reasoning, when the model decides whether to reason. Empty: it does so from its first token on, if there
    is a `reasoning_end` or a `reasoning_end_ids`."""
    reasoning_end: str = ""
    """The text that ends the reasoning: a model may cut it into tokens in several ways."""
    reasoning_end_ids: list[int] = []
    """The run of control tokens that ends the reasoning, where it is these tokens and not their text."""
    reasoning_stop_ids: list[int] = []
    """What is written when the budget is used up; ends with `reasoning_end_ids`, or stands for `reasoning_end`."""


_STRUCTURED: dict[str, tuple[type | tuple[type, ...], str]] = {
    "json": ((str, dict, bool), "a JSON schema, or one as JSON text"),
    "regex": (str, "a string"),
    "choice": ((list, tuple), "a list of strings"),
    "grammar": (str, "a string"),
    "json_object": (bool, "true or false"),
    "structural_tag": ((str, dict), "an object, or one as JSON text"),
    "disable_any_whitespace": (bool, "true or false"),
    "disable_additional_properties": (bool, "true or false"),
    "best_effort": (bool, "true or false"),
    "whitespace_pattern": (str, "a string"),
}
"""What the fields of a wish may be, in types and in words."""


class StructuredOutputsParams(msgspec.Struct, omit_defaults=True):
    """Exactly one of json, regex, choice, grammar, json_object, structural_tag constrains the output."""

    json: str | dict[str, Any] | bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    best_effort: bool = False
    """What cannot be enforced of a JSON schema is left out, where it would be refused otherwise."""

    def __post_init__(self) -> None:
        if self.json is True:
            self.json = {}
        for name, (kind, said) in _STRUCTURED.items():
            if (value := getattr(self, name)) is not None and not isinstance(value, kind):
                raise InvalidRequest(
                    f"structured_outputs.{name} must be {said}, got {reprlib.repr(value)}.",
                    param="structured_outputs",
                )
        kinds = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
        given = [k for k in kinds if getattr(self, k) is not None]
        if len(given) != 1:
            raise InvalidRequest(
                f"structured_outputs needs exactly one of {', '.join(kinds)}; got {', '.join(given) or 'none'}.",
                param="structured_outputs",
            )


def _number(name: str, value: Any) -> float:
    try:
        if not isinstance(value, bool) and isinstance(value, (int, float)) and math.isfinite(number := float(value)):
            return number
    except OverflowError:
        raise InvalidRequest(f"{name} must be a finite number, got an integer of {value.bit_length()} bits.", param=name) from None
    raise InvalidRequest(f"{name} must be a finite number, got {value!r}.", param=name)


def _integer(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"{name} must be an integer, got {value!r}.", param=name)
    return value


def _token_id(key: Any) -> int:
    """A token id as JSON writes it where names stand."""
    if isinstance(key, str) and len(key) > 20:
        raise ValueError(f"{key[:20]!r}... is none")
    return int(key)


def _strings(name: str, value: Any) -> list[str]:
    if not isinstance(value, (list, tuple, set, frozenset)):
        raise InvalidRequest(f"{name} must be a list of strings, got {type(value).__name__}.", param=name)
    for text in value:
        if not isinstance(text, str) or not text:
            raise InvalidRequest(f"{name} must hold non-empty strings, got {text!r}.", param=name)
    if len(value) > MAX_TEXTS:
        raise InvalidRequest(f"{name} has {len(value)} entries; at most {MAX_TEXTS} are allowed.", param=name)
    if (chars := sum(map(len, value))) > MAX_TEXTS_CHARS:
        raise InvalidRequest(f"{name} has {chars} characters in all; at most {MAX_TEXTS_CHARS} are allowed.", param=name)
    return list(value)


def _token_ids(name: str, value: Any) -> list[int]:
    if not isinstance(value, (list, tuple)):
        raise InvalidRequest(f"{name} must be a list of token ids, got {type(value).__name__}.", param=name)
    if len(value) > MAX_TOKEN_IDS:
        raise InvalidRequest(f"{name} has {len(value)} entries; at most {MAX_TOKEN_IDS} are allowed.", param=name)
    return [_integer(name, v) for v in value]


_SWITCHES = ("ignore_eos", "detokenize", "skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output")
NOT_YET = ("flat_logprobs", "prompt_logprob_token_ids", "prompt_logprob_start", "repetition_detection")
"""Fields that are here for their names only."""


class SamplingParams(msgspec.Struct, omit_defaults=True, kw_only=False):
    """How to turn logits into tokens, and when to stop.

    Defaults and rules follow OpenAI and vLLM. `max_tokens=None` means up to the context limit; temperature below 1e-5 is
    greedy; `top_k` 0 or -1 is off; `seed=None` draws a fresh seed at admission.

    Raises:
        InvalidRequest: a value outside its range; `.param` names the field.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    stream_interval: int | None = None
    structured_outputs: StructuredOutputsParams | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    extra_args: dict[str, Any] | None = None
    skip_reading_prefix_cache: bool | None = None
    thinking_token_budget: int | None = None

    # Known by name, not there yet: the door refuses any value but the default.
    flat_logprobs: bool = False
    prompt_logprob_token_ids: list[int] | None = None
    prompt_logprob_start: int | None = None
    repetition_detection: Any = None

    # Filled in by the frontend, never by a user.
    bad_words_token_ids: list[list[int]] | None = None
    constraint: OutputConstraint | None = None

    def __post_init__(self) -> None:
        self._coerce()
        self._verify()
        if self.temperature < GREEDY_EPSILON:
            if self.n > 1:
                raise InvalidRequest(f"n must be 1 when using greedy sampling (temperature 0), got n={self.n}.", param="n")
            self.temperature, self.top_p, self.top_k, self.min_p = 0.0, 1.0, 0, 0.0
        elif self.temperature < MIN_TEMPERATURE:
            self.temperature = MIN_TEMPERATURE
        self.temperature = min(self.temperature, MAX_TEMPERATURE)
        self.top_k = min(self.top_k, MAX_INT32)
        if self.stream_interval is not None:
            self.stream_interval = min(self.stream_interval, MAX_INT32)
        self.repetition_penalty = min(max(self.repetition_penalty, 1 / MAX_REPETITION_PENALTY), MAX_REPETITION_PENALTY)

    def _coerce(self) -> None:
        for name in ("n", "top_k", "min_tokens"):
            setattr(self, name, _integer(name, getattr(self, name)))
        for name in ("presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "min_p"):
            setattr(self, name, _number(name, getattr(self, name)))
        for name in ("max_tokens", "seed", "stream_interval", "thinking_token_budget"):
            if (value := getattr(self, name)) is not None:
                setattr(self, name, _integer(name, value))
        for name in _SWITCHES:
            if not isinstance(value := getattr(self, name), bool):
                raise InvalidRequest(f"{name} must be true or false, got {value!r}.", param=name)
        if self.skip_reading_prefix_cache is not None and not isinstance(self.skip_reading_prefix_cache, bool):
            raise InvalidRequest(
                f"skip_reading_prefix_cache must be true or false, got {self.skip_reading_prefix_cache!r}.",
                param="skip_reading_prefix_cache",
            )
        if self.extra_args is not None and not isinstance(self.extra_args, dict):
            raise InvalidRequest(f"extra_args must be a dict, got {type(self.extra_args).__name__}.", param="extra_args")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if isinstance(value, bool):
                setattr(self, name, 1 if value else None)
            elif value is not None:
                setattr(self, name, _integer(name, value))
        if self.seed == -1:
            self.seed = None
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        if self.stop is not None:
            self.stop = _strings("stop", self.stop)
        if self.bad_words is not None:
            self.bad_words = _strings("bad_words", self.bad_words)
        for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids"):
            if (value := getattr(self, name)) is not None:
                setattr(self, name, _token_ids(name, value))
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, dict):
                raise InvalidRequest("logit_bias must map token ids to numbers.", param="logit_bias")
            try:
                self.logit_bias = {_token_id(k): min(100.0, max(-100.0, _number("logit_bias", v))) for k, v in self.logit_bias.items()}
            except (TypeError, ValueError) as e:
                if isinstance(e, InvalidRequest):
                    raise
                raise InvalidRequest(f"logit_bias keys must be token ids: {e}.", param="logit_bias") from None

    def _verify(self) -> None:
        def require(ok: bool, param: str, rule: str) -> None:
            if not ok:
                raise InvalidRequest(f"{param} {rule}, got {getattr(self, param)!r}.", param=param)

        require(1 <= self.n <= MAX_N, "n", f"must be at least 1 and at most {MAX_N}")
        require(-2.0 <= self.presence_penalty <= 2.0, "presence_penalty", "must be in [-2, 2]")
        require(-2.0 <= self.frequency_penalty <= 2.0, "frequency_penalty", "must be in [-2, 2]")
        require(self.repetition_penalty > 0.0, "repetition_penalty", "must be greater than 0")
        require(self.temperature >= 0.0, "temperature", "must be non-negative")
        require(0.0 < self.top_p <= 1.0, "top_p", "must be in (0, 1]")
        require(self.top_k >= -1, "top_k", "must be 0 or -1 (off), or at least 1")
        require(0.0 <= self.min_p <= 1.0, "min_p", "must be in [0, 1]")
        require(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", "must be at least 1")
        require(self.min_tokens >= 0, "min_tokens", "must be non-negative")
        require(
            self.max_tokens is None or self.min_tokens <= self.max_tokens,
            "min_tokens",
            f"must be at most max_tokens={self.max_tokens}",
        )
        require(self.logprobs is None or self.logprobs >= -1, "logprobs", "must be non-negative, or -1 for all")
        require(self.prompt_logprobs is None or self.prompt_logprobs >= -1, "prompt_logprobs", "must be non-negative, or -1 for all")
        require(self.seed is None or -(2**63) <= self.seed < 2**63, "seed", "must fit in a signed 64-bit integer")
        budget = self.thinking_token_budget
        require(budget is None or 0 <= budget < 2**63, "thinking_token_budget", "must be non-negative and below 2**63")
        require(self.stream_interval is None or self.stream_interval >= 1, "stream_interval", "must be at least 1")
        if self.stop and not self.detokenize:
            raise InvalidRequest("stop strings need detokenize=True.", param="stop")
        require(self.allowed_token_ids is None or len(self.allowed_token_ids) > 0, "allowed_token_ids", "must not be empty")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def stops(self) -> list[str]:
        """The stop strings as a list."""
        return self.stop if isinstance(self.stop, list) else []

    def clone(self) -> SamplingParams:
        return copy.deepcopy(self)


class BeamSearchParams(msgspec.Struct, omit_defaults=True):
    """Beam search: keep the `beam_width` most likely continuations, ranked by logprob / length**length_penalty."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        if not 1 <= _integer("beam_width", self.beam_width) <= MAX_N:
            raise InvalidRequest(f"beam_width must be at least 1 and at most {MAX_N}, got {self.beam_width}.", param="beam_width")
        if _integer("max_tokens", self.max_tokens) < 1:
            raise InvalidRequest(f"max_tokens must be at least 1, got {self.max_tokens}.", param="max_tokens")
        if _number("temperature", self.temperature) < 0.0:
            raise InvalidRequest(f"temperature must be non-negative, got {self.temperature}.", param="temperature")
        self.temperature = min(self.temperature, MAX_TEMPERATURE)
        if abs(_number("length_penalty", self.length_penalty)) > MAX_LENGTH_PENALTY:
            allowed = f"[-{MAX_LENGTH_PENALTY:g}, {MAX_LENGTH_PENALTY:g}]"
            raise InvalidRequest(f"length_penalty must be in {allowed}, got {self.length_penalty}.", param="length_penalty")


PoolingTask = Literal["embed", "token_embed", "classify", "score"]
POOLING_TASKS: tuple[PoolingTask, ...] = ("embed", "token_embed", "classify", "score")


class PoolingParams(msgspec.Struct, omit_defaults=True):
    """What a pooling (embedding, classification, scoring) request may ask for.

    Raises:
        InvalidRequest: a value outside its range; `.param` names the field.
    """

    dimensions: int | None = None
    """Keep this many numbers of an embedding, as models trained for it allow (Kusupati et al. 2022)."""
    normalize: bool | None = None
    """Embeddings of length 1. None: as the model's own files say."""
    task: str | None = None
    """None: embed, or what the called method or route does."""
    use_activation: bool | None = None
    """Classes and scores as probabilities. None: as the model's own files say."""

    def __post_init__(self) -> None:
        if self.dimensions is not None and _integer("dimensions", self.dimensions) < 1:
            raise InvalidRequest(f"dimensions must be at least 1, got {self.dimensions}.", param="dimensions")
        for name in ("normalize", "use_activation"):
            if not isinstance(value := getattr(self, name), bool | None):
                raise InvalidRequest(f"{name} must be true or false, got {value!r}.", param=name)
        if self.task is not None and self.task not in POOLING_TASKS:
            raise InvalidRequest(f"task must be one of {', '.join(POOLING_TASKS)}, got {self.task!r}.", param="task")
