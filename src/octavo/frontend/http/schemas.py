"""What the generating routes accept. Unknown fields are accepted; a field that is null counts as not given.

Only types and relations between fields are checked here; ranges are checked by `SamplingParams`, and what needs the model by
the engine's door. Prompts are checked by hand (prompts.py): a union of list types would report one error an element.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


def _number(value: Any) -> Any:
    """Texts and truth values are none, even if they could be read as one."""
    if isinstance(value, str | bool):
        raise ValueError("Input should be a number")
    return value


Bool = Annotated[bool, Field(strict=True)]
Int = Annotated[int, BeforeValidator(_number)]
Float = Annotated[float, Field(strict=True)]
Int32 = Annotated[Int, Field(ge=-(2**31), le=2**31 - 1)]
Ints = Annotated[list[Int], Field(fail_fast=True)]
Strings = Annotated[list[str], Field(fail_fast=True)]
Items = Annotated[list[Any], Field(fail_fast=True)]
Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True)]


VERBOSITIES = ("low", "medium", "high")


class Schema(BaseModel):
    model_config = ConfigDict(extra="allow", protected_namespaces=(), hide_input_in_errors=True)

    def unknown_fields(self) -> list[str]:
        return list(self.model_extra or ())


class StreamOptions(Schema):
    include_usage: Bool | None = None
    continuous_usage_stats: Bool | None = None
    include_obfuscation: Bool | None = Field(None, description="Without an effect: chunks are not padded.")


class GenerationRequest(Schema):
    """The fields that completions and chat share."""

    model: str | None = None
    n: Int | None = None
    stream: Bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None

    # Sampling
    temperature: Float | None = None
    top_p: Float | None = None
    top_k: Int | None = None
    min_p: Float | None = None
    presence_penalty: Float | None = None
    frequency_penalty: Float | None = None
    repetition_penalty: Float | None = None
    seed: Int | None = None
    logit_bias: dict[str, Any] | None = None
    allowed_token_ids: Ints | None = None
    bad_words: Strings | None = None
    use_beam_search: Bool | None = None
    length_penalty: Float | None = None
    best_of: Int | None = None

    # When to stop
    max_tokens: Int | None = None
    min_tokens: Int32 | None = None
    stop: str | Strings | None = None
    stop_token_ids: Ints | None = None
    ignore_eos: Bool | None = None
    include_stop_str_in_output: Bool | None = None

    # Text
    add_special_tokens: Bool | None = None
    skip_special_tokens: Bool | None = None
    spaces_between_special_tokens: Bool | None = None
    truncate_prompt_tokens: Int32 | None = None
    truncation_side: str | None = None
    echo: Bool | None = None

    # What comes back
    prompt_logprobs: Int32 | None = None
    logprob_token_ids: Ints | None = None
    return_tokens_as_token_ids: Bool | None = None
    return_token_ids: Bool | None = None
    stream_interval: Int32 | None = None
    return_progress: Bool | None = Field(None, description="Streams say how much of the prompt has been computed.")

    # Constraints on the output
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | Bool | None = None
    guided_regex: str | None = None
    guided_choice: Strings | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    guided_decoding_backend: str | None = Field(None, description="Ignored: there is one grammar engine.")
    thinking_token_budget: Int | None = None
    repetition_detection: dict[str, Any] | None = None

    # How it is served
    request_id: str | None = None
    priority: Int32 | None = None
    cache_salt: str | None = None
    kv_transfer_params: dict[str, Any] | None = None
    vllm_xargs: dict[str, Any] | None = None


class CompletionRequest(GenerationRequest):
    prompt: Any = Field(None, description="A string, a list of strings, a list of token ids, or a list of such lists.")
    prompt_embeds: Any = None
    suffix: str | None = None
    logprobs: Int32 | None = None


class ChatRequest(GenerationRequest):
    messages: Items
    max_completion_tokens: Int | None = None
    logprobs: Bool | None = None
    top_logprobs: Int32 | None = None
    tools: Objects | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: Bool | None = None
    functions: Objects | None = Field(None, description="The older form of tools; the reply then has function_call.")
    function_call: str | dict[str, Any] | None = Field(None, description="The older form of tool_choice.")
    add_generation_prompt: Bool | None = None
    continue_final_message: Bool | None = None
    documents: Objects | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    include_reasoning: Bool | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    media_io_kwargs: dict[str, Any] | None = None
    return_prompt_text: Bool | None = None

    # OpenAI's, without an effect here: their types are checked all the same
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    store: Bool | None = None
    verbosity: str | None = None
    prediction: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None

    # OpenAI's, refused where they ask for something
    modalities: Strings | None = None
    audio: dict[str, Any] | None = None
    web_search_options: dict[str, Any] | None = None


class TokenizeRequest(Schema):
    """Text (`prompt`) or a conversation (`messages`)."""

    model: str | None = None
    prompt: str | None = None
    messages: Items | None = None
    add_special_tokens: Bool | None = None
    return_token_strs: Bool | None = None
    add_generation_prompt: Bool | None = None
    continue_final_message: Bool | None = None
    tools: Objects | None = None
    documents: Objects | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class PooledRequest(Schema):
    """What the pooling routes share."""

    model: str | None = None
    user: str | None = None
    request_id: str | None = None
    priority: Int32 | None = None
    truncate_prompt_tokens: Int32 | None = None
    add_special_tokens: Bool | None = None
    use_activation: Bool | None = None
    stream: Bool | None = Field(None, description="false: there is nothing to stream.")


_INPUT = "A string, a list of strings, a list of token ids, or a list of such lists."


class PooledInputRequest(PooledRequest):
    """Text (`input`), or a conversation (`messages`), rendered by the model's chat template."""

    input: Any = Field(None, description=_INPUT)
    messages: Items | None = None
    add_generation_prompt: Any = Field(None, description="true or false; with messages.")
    continue_final_message: Any = Field(None, description="true or false; with messages.")
    documents: Any = Field(None, description="A list of objects; with messages.")
    chat_template: Any = Field(None, description="A string; with messages.")
    chat_template_kwargs: Any = Field(None, description="An object; with messages.")


class EmbeddingRequest(PooledInputRequest):
    encoding_format: str | None = Field(None, description="float or base64 (float32, little-endian).")
    dimensions: Int32 | None = None
    normalize: Bool | None = None


class PoolingRequest(EmbeddingRequest):
    task: str | None = Field(None, description="embed, token_embed or classify. Default: what the model is for.")


class ClassifyRequest(PooledInputRequest):
    pass


class ScoreRequest(PooledRequest):
    """One text with each of many, or one by one."""

    text_1: str | Strings | None = None
    text_2: str | Strings | None = None
    queries: str | Strings | None = None
    documents: str | Strings | None = None


class RerankRequest(PooledRequest):
    query: str
    documents: Items
    top_n: Int32 | None = None
    return_documents: Bool | None = Field(None, description="false leaves the texts out of the results. Default: true.")


class DetokenizeRequest(Schema):
    model: str | None = None
    tokens: Ints
    skip_special_tokens: Bool | None = None


class AbortRequest(Schema):
    """Ids as they stand in replies (`chatcmpl-...`)."""

    request_id: str | Strings | None = None
    request_ids: Strings | None = None


def body_schema(model: type[BaseModel]) -> dict[str, Any]:
    """The OpenAPI entry of a body that a route reads by itself, with nested definitions put in place."""
    schema = model.model_json_schema()
    definitions = schema.pop("$defs", {})

    def inline(node: Any) -> Any:
        if isinstance(node, dict):
            if "$ref" in node:
                return inline(definitions[node["$ref"].rsplit("/", 1)[-1]])
            return {key: inline(value) for key, value in node.items()}
        return [inline(value) for value in node] if isinstance(node, list) else node

    return {"requestBody": {"required": True, "content": {"application/json": {"schema": inline(schema)}}}}
