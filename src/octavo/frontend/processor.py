"""From a user's prompt and parameters to a `NewRequest` that the core can trust.

Everything that needs the model is checked here, at the door, with the offending parameter's name; what comes out is resolved:
seed and max_tokens are set, ids are inside the vocabulary, the prompt fits. Nothing past this point refuses a request for what
it says.
"""

from __future__ import annotations

import copy
import itertools
import json
import random
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import numpy as np

from octavo.config.args import EngineArgs
from octavo.config.types import EngineConfig
from octavo.errors import ConfigError, InvalidRequest, NotYet
from octavo.frontend.prompts import ParsedPrompt, Prompt, parse_prompt
from octavo.frontend.structured import GrammarDoor, constraint_of, engine_vocabulary, wants_first
from octavo.grammar.check import Checked
from octavo.protocol.engine import NewRequest, Vocabulary
from octavo.protocol.params import NOT_YET, RequestOutputKind, SamplingParams, StructuredOutputsParams

if TYPE_CHECKING:
    from octavo.checkpoint.types import Checkpoint
    from octavo.frontend.text.tokenizer import Tokenizer

MAX_CACHE_SALT = 1024
MAX_REQUEST_ID = 1024
MAX_INT64 = 2**63
MAX_WORD_LISTS = 32
"""Lists of bad words whose tokens are remembered."""

_GENERATION_KEYS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""generation_config.json's name -> ours."""


@dataclass(frozen=True)
class Prepared:
    """A request that passed the door."""

    request_id: str
    """The user's name for it; `request` has the engine's."""
    request: NewRequest
    prompt: str | None
    """The prompt's text, when it is known."""


class InputProcessor:
    """See the module. Holds no state but the counter of engine ids, the source of seeds, and what it remembers of bad words.

    Args:
        tokenizer: None with skip_tokenizer_init: then prompts are token ids and there is no text.
        max_model_len: the length the engine ended up with (it may be less than the config's under `auto`).
    """

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer | None, max_model_len: int | None = None) -> None:
        self._config = config
        self._model = config.model
        self._tokenizer = tokenizer
        self.max_model_len = max_model_len or config.model.max_model_len
        can_end = bool(self._model.eos_token_ids) or (tokenizer is not None and tokenizer.eos_token_id is not None)
        self.grammars = GrammarDoor(self.vocabulary if tokenizer is not None and can_end else None)
        self._vocabulary: Vocabulary | None = None
        self._bad_words: dict[tuple[str, ...], list[list[int]]] = {}
        self._serial = itertools.count()
        self._seeds = random.Random(config.model.seed)

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        fair_key: str = "",
        cache_salt: str | None = None,
        truncate_prompt_tokens: int | None = None,
        truncation_side: Literal["left", "right"] = "left",
        add_special_tokens: bool = True,
        lora_request: Any = None,
        arrival_time: float | None = None,
        report_progress: bool = False,
        grammar: Checked | None = None,
    ) -> Prepared:
        """Check and resolve one request. `params` is not changed.

        Args:
            grammar: what `GrammarDoor` found of `params.structured_outputs`, where it was asked already.

        Raises:
            InvalidRequest: with `param` naming what is wrong.
            NotYet: a feature that does not exist yet.
        """
        parsed = parse_prompt(prompt)
        check_generates(self._config)
        sampling = self.check_sampling(params, grammar)
        _check_names(request_id, priority)
        if lora_request is not None:
            raise NotYet("lora_request: Octavo does not do LoRA adapters yet. Leave it out.", param="lora_request")
        salt = _check_salt(cache_salt if cache_salt is not None else parsed.cache_salt)
        if truncate_prompt_tokens is None:
            self.check_text_length(parsed, sampling)
        limit = self.token_limit(truncate_prompt_tokens, truncation_side, sampling)
        token_ids = self.token_ids(parsed, add_special_tokens, limit, from_end=truncation_side == "left")
        if limit is not None:
            token_ids = token_ids[-limit:] if truncation_side == "left" else token_ids[:limit]
        self._check_length(token_ids, sampling)
        room = self.max_model_len - len(token_ids)
        sampling.max_tokens = room if sampling.max_tokens is None else min(sampling.max_tokens, room)
        sampling.min_tokens = min(sampling.min_tokens, sampling.max_tokens)
        if sampling.seed is None:
            sampling.seed = self._seeds.getrandbits(63)
        request = NewRequest(
            request_id=self.engine_id(request_id),
            prompt_token_ids=token_ids,
            sampling=sampling,
            arrival_time=time.monotonic() if arrival_time is None else arrival_time,
            eos_token_ids=list(self._model.eos_token_ids),
            priority=priority,
            fair_key=fair_key,
            extra_key=salt,
            report_progress=report_progress,
        )
        return Prepared(request_id, request, parsed.text)

    @property
    def vocab_size(self) -> int:
        return self._model.vocab_size

    def engine_id(self, request_id: str) -> str:
        """A name that was never used before: tokens still on their way for an ended request cannot reach a namesake."""
        return f"{request_id}#{next(self._serial)}"

    def check_sampling(self, params: SamplingParams, grammar: Checked | None = None) -> SamplingParams:
        """A copy of `params`, checked against the model, with bad words as token ids.

        Args:
            grammar: see `prepare`.

        Raises:
            InvalidRequest, NotYet: see `prepare`.
        """
        if not isinstance(params, SamplingParams):
            raise InvalidRequest(f"sampling_params must be SamplingParams, got {type(params).__name__}.", param="sampling_params")
        sampling = copy.copy(params)
        try:
            sampling.output_kind = RequestOutputKind(sampling.output_kind)
        except ValueError:
            raise InvalidRequest(
                f"output_kind must be CUMULATIVE, DELTA or FINAL_ONLY, got {sampling.output_kind!r}.", param="output_kind"
            ) from None
        first = self._constrain(sampling, grammar)
        for name in NOT_YET:
            if getattr(sampling, name):
                raise NotYet(f"{name}: Octavo does not do this yet. Leave it out.", param=name)
        sampling.bad_words_token_ids = None
        sampling.extra_args = None  # nothing behind the door reads them, and they may hold what no message can
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(sampling, name)
            self._check_logprobs(name, value)
            if value is not None and value > self._model.vocab_size:
                setattr(sampling, name, self._model.vocab_size)
        self._check_ids("stop_token_ids", sampling.stop_token_ids)
        self._check_ids("allowed_token_ids", sampling.allowed_token_ids)
        self._check_ids("logprob_token_ids", sampling.logprob_token_ids)
        if sampling.logprob_token_ids is not None:
            sampling.logprob_token_ids = list(dict.fromkeys(sampling.logprob_token_ids))
            self._check_logprob_ids(sampling.logprob_token_ids)
        self._check_ids("logit_bias", sampling.logit_bias)
        if self._tokenizer is None:
            if sampling.stop:
                raise InvalidRequest("stop strings need a tokenizer, and this engine runs with skip_tokenizer_init.", param="stop")
            if sampling.bad_words:
                raise InvalidRequest("bad_words needs a tokenizer, and this engine runs with skip_tokenizer_init.", param="bad_words")
            sampling.detokenize = False
        elif sampling.bad_words:
            sampling.bad_words_token_ids = self.bad_words(sampling.bad_words)
        self._check_something_is_allowed(sampling, first)
        return sampling

    def _constrain(self, sampling: SamplingParams, grammar: Checked | None) -> bytes | None:
        """Give `sampling` its constraint. Returns a bit for each token that the output may begin with, where that was looked at."""
        wish = sampling.structured_outputs
        if wish is not None and not isinstance(wish, StructuredOutputsParams):
            raise InvalidRequest(
                f"structured_outputs must be StructuredOutputsParams, got {type(wish).__name__}.", param="structured_outputs"
            )
        if wish is None:
            grammar = None
        elif grammar is None:
            grammar = self.grammars.check(wish, first=wants_first(sampling))
        sampling.constraint = constraint_of(sampling, grammar)
        if sampling.constraint is None:
            return None
        if self._tokenizer is None:
            raise InvalidRequest(
                "structured_outputs needs a tokenizer, and this engine runs with skip_tokenizer_init.", param="structured_outputs"
            )
        if not self._model.eos_token_ids and self._tokenizer.eos_token_id is None:
            raise InvalidRequest(
                "structured_outputs needs a model with a token that ends the output; this one names none.", param="structured_outputs"
            )
        sampling.structured_outputs = None  # the constraint says it all
        reasons = sampling.constraint.reasoning_end_ids or sampling.constraint.reasoning_end
        return None if grammar is None or reasons else grammar.first

    def vocabulary(self) -> Vocabulary:
        """What the engine must know before it gets a constrained request; made once."""
        if self._vocabulary is None:
            assert self._tokenizer is not None
            self._vocabulary = engine_vocabulary(self._tokenizer, self._model.vocab_size, self._model.eos_token_ids)
        return self._vocabulary

    def _check_something_is_allowed(self, sampling: SamplingParams, first: bytes | None) -> None:
        """Refuse parameters that together forbid every token: there would be nothing to sample from.

        Args:
            first: a bit for each token that the output may begin with, if a grammar says so.
        """
        bad = {ids[0] for ids in sampling.bad_words_token_ids or () if len(ids) == 1}
        if first:
            beginnings = set(np.flatnonzero(np.unpackbits(np.frombuffer(first, np.uint8), bitorder="little")).tolist())
            wanted = beginnings if sampling.allowed_token_ids is None else beginnings & set(sampling.allowed_token_ids)
            if not wanted - bad:
                name = "bad_words" if wanted else "allowed_token_ids"
                rest = "forbids every token" if wanted else "allows none of the tokens"
                assert sampling.constraint is not None
                raise InvalidRequest(f"{name} {rest} that {sampling.constraint.field} begins with: no token is left.", param=name)
        if sampling.allowed_token_ids is None:
            return
        left = set(sampling.allowed_token_ids) - bad
        if not left:
            raise InvalidRequest("bad_words forbids every one of allowed_token_ids: no token is left.", param="bad_words")
        stops = set(sampling.stop_token_ids or ()) | (set() if sampling.ignore_eos else set(self._model.eos_token_ids))
        if sampling.min_tokens > 0 and not left - stops:
            raise InvalidRequest(
                f"min_tokens={sampling.min_tokens} forbids tokens that end the output until then, and allowed_token_ids allows no other.",
                param="min_tokens",
            )

    def _check_logprobs(self, name: str, value: int | None) -> None:
        limit = self._model.max_logprobs
        if value is None or limit == -1:
            return
        if (self._model.vocab_size if value == -1 else value) > limit:
            what = f"{name}=-1 (all of them)" if value == -1 else f"{name}={value}"
            raise InvalidRequest(
                f"{what} is more than this server gives ({limit}). Ask for fewer, or start it with a higher --max-logprobs.",
                param=name,
            )

    def _check_logprob_ids(self, ids: list[int]) -> None:
        """The same limit as for the most likely ones: each is worked out, sent and written for every token."""
        limit = self._model.max_logprobs
        if limit != -1 and len(ids) > limit:
            raise InvalidRequest(
                f"logprob_token_ids has {len(ids)} tokens, more than this server gives ({limit}). "
                "Ask for fewer, or start it with a higher --max-logprobs.",
                param="logprob_token_ids",
            )

    def _check_ids(self, name: str, ids: Iterable[int] | None) -> None:
        vocab_size = self._model.vocab_size
        for token_id in ids or ():
            if not 0 <= token_id < vocab_size:
                raise InvalidRequest(
                    f"{name} holds {token_id}, which is not a token of this model: ids go from 0 to {vocab_size - 1}.", param=name
                )

    def bad_words(self, words: list[str]) -> list[list[int]]:
        """Token sequences of each word as the text's first word, and after a space. May run on any thread; the last ones are
        remembered, so that a list is tokenized once for all prompts of a request."""
        key = tuple(words)
        if (known := self._bad_words.get(key)) is not None:
            return known
        tokenizer = self._tokenizer
        assert tokenizer is not None
        sequences: dict[tuple[int, ...], None] = {}
        for word in words:
            for text in (word.lstrip() or word, " " + word.lstrip()):
                sequences[tuple(tokenizer.encode(text, add_special_tokens=False))] = None
        result = [list(ids) for ids in sequences if ids]
        if len(self._bad_words) >= MAX_WORD_LISTS:
            self._bad_words.clear()
        self._bad_words[key] = result
        return result

    def token_ids(self, parsed: ParsedPrompt, add_special_tokens: bool, limit: int | None = None, *, from_end: bool = False) -> list[int]:
        """A prompt as ids of the vocabulary.

        Args:
            limit: no more tokens than these are wanted of a text, from its beginning or end. There may be more all the same.

        Raises:
            InvalidRequest: it is empty, or has other ids, or is text where there is no tokenizer.
        """
        if parsed.token_ids is not None:
            self._check_ids("prompt", parsed.token_ids)
            token_ids = parsed.token_ids
        elif self._tokenizer is None:
            raise InvalidRequest("This engine runs with skip_tokenizer_init: send prompts as token ids.", param="prompt")
        else:
            assert parsed.text is not None
            if limit is None:
                token_ids = self._tokenizer.encode(parsed.text, add_special_tokens=add_special_tokens)
            else:
                token_ids = self._tokenizer.encode_part(parsed.text, limit, from_end=from_end, add_special_tokens=add_special_tokens)
            if token_ids and max(token_ids) >= self._model.vocab_size:
                raise InvalidRequest(
                    f"The text holds a token that the tokenizer has (id {max(token_ids)}) and the model has not "
                    f"({self._model.vocab_size} tokens): do the two belong together?",
                    param="prompt",
                )
        if not token_ids:
            raise InvalidRequest("The prompt is empty: it needs at least one token.", param="prompt")
        return token_ids

    def token_limit(self, limit: int | None, side: Literal["left", "right"], sampling: SamplingParams) -> int | None:
        """Tokens that a prompt is cut to; None: it is not."""
        if limit is None:
            return None
        if isinstance(limit, bool) or not isinstance(limit, int) or (limit < 1 and limit != -1):
            raise InvalidRequest(
                f"truncate_prompt_tokens must be at least 1, or -1 for what fits; got {limit!r}.", param="truncate_prompt_tokens"
            )
        if side not in ("left", "right"):
            raise InvalidRequest(f"truncation_side must be left or right, got {side!r}.", param="truncation_side")
        if limit == -1:
            limit = max(1, self.max_model_len - (sampling.max_tokens or 1))
        return limit

    def _check_length(self, token_ids: list[int], sampling: SamplingParams) -> None:
        if len(token_ids) >= self.max_model_len:
            self._refuse_length(str(len(token_ids)), sampling)

    def check_text_length(self, parsed: ParsedPrompt, sampling: SamplingParams) -> None:
        """Refuse a text that is far too long without tokenizing it."""
        if parsed.token_ids is None and parsed.text is not None and self._tokenizer is not None:
            fewest = len(parsed.text) // max(1, self._tokenizer.longest_token)
            if fewest >= self.max_model_len:
                self._refuse_length(f"at least {fewest}", sampling)

    def _refuse_length(self, prompt_tokens: str, sampling: SamplingParams) -> NoReturn:
        output = "output up to the limit was" if sampling.max_tokens is None else f"{sampling.max_tokens} output tokens were"
        raise InvalidRequest(
            f"This model's context length is {self.max_model_len} tokens, but the prompt has {prompt_tokens} tokens and {output} "
            f"asked for. Shorten the prompt to at most {self.max_model_len - 1} tokens (or use truncate_prompt_tokens).",
            param="prompt",
            code="context_length_exceeded",
        )


def check_generates(config: EngineConfig) -> None:
    """Raises InvalidRequest when the engine runs its model for something else than generating."""
    if config.model.pooling is not None:
        raise InvalidRequest(
            f"{config.model.shown} runs for pooling: it makes embeddings, classes or scores and does not generate. "
            "If it can generate, start it with --runner generate."
        )


def _check_names(request_id: str, priority: int) -> None:
    if not isinstance(request_id, str) or not 1 <= len(request_id) <= MAX_REQUEST_ID:
        raise InvalidRequest(f"request_id must be a string of 1 to {MAX_REQUEST_ID} characters.", param="request_id")
    if isinstance(priority, bool) or not isinstance(priority, int) or not -MAX_INT64 <= priority < MAX_INT64:
        raise InvalidRequest(f"priority must be an integer, got {priority!r}.", param="priority")


def _check_salt(salt: Any) -> str:
    if salt is None:
        return ""
    if not isinstance(salt, str) or not 1 <= len(salt) <= MAX_CACHE_SALT:
        raise InvalidRequest(f"cache_salt must be a string of 1 to {MAX_CACHE_SALT} characters.", param="cache_salt")
    return salt


def default_sampling_params(checkpoint: Checkpoint, args: EngineArgs) -> dict[str, Any]:
    """The sampling parameters that a request gets for what it leaves open: field of `SamplingParams` -> value.

    From the model's generation_config.json (or the folder in --generation-config, or nothing for `vllm` and `none`), then
    --override-generation-config on top. What is in neither has SamplingParams' own default.

    Raises:
        ConfigError: a value that SamplingParams refuses.
    """
    if args.generation_config == "auto":
        source, where = checkpoint.generation_config, "the model's generation_config.json"
    elif args.generation_config in ("vllm", "none"):
        source, where = {}, ""
    else:
        source, where = _read_generation_config(args.generation_config), args.generation_config
    found = {**source, **args.override_generation_config}
    defaults = {ours: found[theirs] for theirs, ours in _GENERATION_KEYS.items() if found.get(theirs) is not None}
    try:
        SamplingParams(**defaults)
    except InvalidRequest as e:
        where = "--override-generation-config" if e.param in args.override_generation_config else where
        raise ConfigError(f"{where}: {e} Correct it, or start with --generation-config none.") from None
    return defaults


def _read_generation_config(folder: str) -> dict[str, Any]:
    path = Path(folder)
    path = path / "generation_config.json" if path.is_dir() else path
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError) as e:
        raise ConfigError(
            f"--generation-config {folder}: cannot read {path} ({e}). Give auto, none, or a folder with a generation_config.json."
        ) from None
    if not isinstance(data, dict):
        raise ConfigError(f"--generation-config {folder}: {path} does not hold a JSON object.")
    return data
