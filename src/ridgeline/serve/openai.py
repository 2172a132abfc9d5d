"""Request bodies: those of the OpenAI API, with vLLM's extensions. Nothing is ignored silently.

A field that is not here is refused by name, and so is one whose value cannot have its effect, but for those that
clients send by default and that the documentation lists as without effect.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    StringConstraints,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from ridgeline.serve.grammar import Grammars, Kind
from ridgeline.serve.request import TOO_LONG, Grammar, Invalid, Sampling

MAX_PROMPTS = 256
"""Largest number of prompts in one body."""
MAX_BIASES, MAX_STOP_IDS, MAX_BAD_WORDS = 16384, 1024, 256
"""Limits on options that are evaluated for every token."""
UNKNOWN = "unknown_field"

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
Text = Annotated[str, StringConstraints(min_length=0)]
"""A constraint makes pydantic look inside: half a surrogate pair, which JSON can spell, is no text."""
StopText = Annotated[str, StringConstraints(min_length=1, max_length=1024)]


def _whole(value: Any) -> Any:
    """5.0 is an integer in JSON, and what clients in other languages send."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Number = Annotated[int, BeforeValidator(_whole), Field(ge=-(2**31), lt=2**31)]


def _bounded(value: Any, info: ValidationInfo) -> Any:
    """A prompt whose numbers of prompts and tokens are within bounds, before any of them is looked at."""
    if not isinstance(value, list):
        return value
    several = bool(value) and not isinstance(value[0], int)
    if several and len(value) > MAX_PROMPTS:
        what = "holds {count} prompts, of {most} at most: ask in several requests"
        raise PydanticCustomError("too_many", what, {"count": len(value), "most": MAX_PROMPTS})
    context = (info.context or {}).get("tokens")
    for ids in value if several else [value]:
        if context is not None and isinstance(ids, list) and len(ids) > context:
            what = "has {count} tokens, and the context is {context}: send a shorter prompt"
            raise PydanticCustomError(TOO_LONG, what, {"count": len(ids), "context": context, "code": TOO_LONG})
    return value


def _form(value: Any) -> str:
    """Which of its forms a prompt has; whatever fits none is refused as text."""
    if not isinstance(value, list):
        return "text"
    first = value[0] if value else 0
    return "texts" if isinstance(first, str) else "lists" if isinstance(first, list) else "tokens"


Prompt = Annotated[
    Annotated[Text, Tag("text")]
    | Annotated[TokenIds, Tag("tokens")]
    | Annotated[list[Text], Field(fail_fast=True), Tag("texts")]
    | Annotated[list[TokenIds], Field(fail_fast=True), Tag("lists")],
    Discriminator(_form),
    BeforeValidator(_bounded),
]
"""By its first element: one error says what is wrong with it, and no list is read to its end for that."""


def _biases(value: Any) -> Any:
    if isinstance(value, dict):
        if len(value) > MAX_BIASES:
            what = "holds {count} biases, of {most} at most"
            raise PydanticCustomError("too_many", what, {"count": len(value), "most": MAX_BIASES})
        bad = next((name for name in value if not re.fullmatch("[0-9]{1,9}", name)), None)
        if bad is not None:
            what = "{name} is no token id: it must match the pattern [0-9]{{1,9}}"
            raise PydanticCustomError("token", what, {"name": repr(bad[:100])})
    return value


def _no_stop(value: Any) -> Any:
    """An empty stop string stops nothing, as in vLLM."""
    return None if value == "" else value


def _no_tools(value: Any) -> Any:
    if value:
        raise PydanticCustomError("unsupported", "holds tools, and functions are not called here: leave them out")
    return value


def _few(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > 16:
        raise PydanticCustomError("too_many", "holds {count} entries, of 16 at most", {"count": len(value)})
    return value


@cache
def _names(model: type[BaseModel]) -> frozenset[str]:
    return frozenset(field.alias or name for name, field in model.model_fields.items())


@cache
def _required(model: type[BaseModel]) -> frozenset[str]:
    return frozenset(field.alias or name for name, field in model.model_fields.items() if field.is_required())


class Body(BaseModel):
    """Strict: no unknown fields, no strings for numbers, no NaN. Where faults may be many, the first is the last."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _known(cls, value: Any) -> Any:
        """Refuse the first unknown field; null stands for an optional field that is left out."""
        if isinstance(value, dict) and (bad := next((k for k in value if k not in _names(cls)), None)) is not None:
            name = bad.encode(errors="backslashreplace").decode()  # JSON can spell what is no UTF-8
            raise PydanticCustomError(UNKNOWN, "is not known", {"name": name})
        if isinstance(value, dict) and None in value.values():
            return {k: v for k, v in value.items() if v is not None or k in _required(cls)}
        return value


class StreamOptions(Body):
    """Whether a last chunk (or each) contains the token usage."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None
    """Without effect."""


class JsonSchema(Body):
    """A named JSON schema."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """``text``, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Body):
    """One of: a JSON schema, a regular expression, a list of choices, a Lark grammar."""

    json_: dict[str, Any] | bool | None = Field(default=None, alias="json")
    regex: Text | None = None
    choice: Annotated[list[StopText], Field(min_length=1, max_length=1024, fail_fast=True)] | None = None
    grammar: Text | None = None


class Sampled(Body):
    """The fields that completions and chat completions share."""

    model: Text | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Number | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], BeforeValidator(_biases)] | None = None
    seed: Annotated[int, BeforeValidator(_whole), Field(ge=-(2**63), lt=2**63)] | None = None
    n: Number | None = None
    best_of: Number | None = None
    use_beam_search: bool | None = None
    """``best_of`` (or ``n``) beams."""
    length_penalty: float | None = None
    early_stopping: bool | None = None
    max_tokens: Number | None = None
    min_tokens: Number | None = None
    stop: Annotated[
        StopText | Annotated[list[StopText], Field(max_length=16, fail_fast=True)] | None, BeforeValidator(_no_stop)
    ] = None
    stop_token_ids: Annotated[TokenIds, Field(max_length=MAX_STOP_IDS)] | None = None
    allowed_token_ids: Annotated[TokenIds, Field(min_length=1, max_length=MAX_BIASES)] | None = None
    bad_words: Annotated[list[StopText], Field(max_length=MAX_BAD_WORDS, fail_fast=True)] | None = None
    """Texts that are never generated, as tokens spell them alone and after a space."""
    truncate_prompt_tokens: Annotated[Number, Field(ge=-1)] | None = None
    """Keep only so many tokens of the prompt, its last ones; -1: as many as the context takes."""
    include_stop_str_in_output: bool = False
    ignore_eos: bool | None = None
    skip_special_tokens: bool = True
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Number = 0
    cache_salt: Annotated[str, StringConstraints(min_length=1, max_length=1024)] | None = None
    """Prompts share cached blocks only with those of the same salt (and the same API key)."""
    user: Text | None = None
    """Without effect, like the next five: they name users, caches and tiers of OpenAI's own service."""
    metadata: Annotated[dict[str, str], BeforeValidator(_few)] | None = None
    store: bool | None = None
    service_tier: Text | None = None
    safety_identifier: Text | None = None
    prompt_cache_key: Text | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def outputs(self) -> int:
        """Outputs per prompt."""
        return 1 if self.n is None else self.n

    def beams(self) -> dict[str, Any]:
        """``n``, ``best_of`` and beams, as the engine calls them."""
        if self.use_beam_search:
            if self.stops:
                raise Invalid("stop", "is not looked for in beams", "leave it out, or sample; stop_token_ids works")
            return {"n": self.outputs, "beam_width": self.best_of if self.best_of is not None else max(self.outputs, 1)}
        for name in ("length_penalty", "early_stopping"):
            if getattr(self, name) is not None:
                raise Invalid(name, "has an effect with use_beam_search only", "leave it out, or search with beams")
        return {"n": self.outputs, "best_of": self.best_of}

    def sampling(self, max_tokens: int, logprobs: int | None, vocab_size: int, **more: Any) -> Sampling:
        """The engine's, whose values are in range, without a grammar. Raises :class:`Invalid`."""
        if (options := self.stream_options) is not None:
            if not self.stream:
                raise Invalid("stream_options", "has an effect with stream only", "leave it out, or set stream")
            if options.continuous_usage_stats and not options.include_usage:
                what = "continuous_usage_stats has an effect with include_usage only"
                raise Invalid("stream_options", what, "leave it out, or set include_usage")
        own = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed",
               "length_penalty", "early_stopping", "min_tokens", "ignore_eos")  # fmt: skip
        given = {name: value for name in own if (value := getattr(self, name)) is not None}
        if self.top_k is not None:
            given["top_k"] = 0 if self.top_k == -1 else self.top_k
        sampling = Sampling(
            max_tokens=max_tokens,
            logprobs=logprobs,
            logit_bias={int(token): bias for token, bias in (self.logit_bias or {}).items()},
            stop_token_ids=tuple(self.stop_token_ids or ()),
            allowed_token_ids=tuple(self.allowed_token_ids or ()),
            **self.beams(),
            **given,
            **more,
        )
        sampling.check(vocab_size)
        return sampling

    def renamed(self, param: str) -> str:
        """The field of this body that the engine's field ``param`` came from."""
        return {"beam_width": "n" if self.best_of is None else "best_of"}.get(param, param)

    def grammar(self, grammars: Grammars) -> Grammar | None:
        """The requested constraint, compiled. Raises :class:`Invalid`."""
        structures: list[tuple[Kind, Any, str]] = []
        if self.response_format is not None and self.response_format.type != "text":
            form = self.response_format
            if form.type == "json_schema" and form.json_schema is None:
                raise Invalid("response_format", "of type json_schema has no json_schema", "give one")
            schema = form.json_schema.schema_ if form.json_schema is not None else {"type": "object"}
            structures.append(("json", schema, "response_format"))
        if (outputs := self.structured_outputs) is not None:
            fields: tuple[tuple[Kind, Any], ...] = (
                ("json", outputs.json_), ("regex", outputs.regex), ("choice", outputs.choice),
                ("grammar", outputs.grammar),
            )  # fmt: skip
            structures += [(kind, value, "structured_outputs") for kind, value in fields if value is not None]
            if not structures:
                raise Invalid("structured_outputs", "asks for nothing", "give json, regex, choice or grammar")
        if len(structures) > 1:
            raise Invalid(structures[1][2], "asks for a second structure of the same output", "ask for one")
        for name in ("ignore_eos", "min_tokens"):
            if structures and getattr(self, name):
                raise Invalid(name, "does not go with a structure, which says itself where it ends", "leave it out")
        return grammars.compile(*structures[0]) if structures else None


class Completion(Sampled):
    """``POST /v1/completions``."""

    prompt: Prompt
    echo: bool = False
    logprobs: Number | None = None
    suffix: Literal[""] | None = None
    add_special_tokens: bool = True


class TextPart(Body):
    """A part of a message."""

    type: Literal["text"]
    text: Text


Nothing = Annotated[list[Any], Field(max_length=0)] | None
"""What replies may hold and nothing here reads, as long as there is nothing in it."""


class Message(Body):
    """One message of a conversation. What comes back in replies, by us or through LiteLLM, may be sent again."""

    role: Annotated[str, StringConstraints(min_length=1, max_length=64)]
    content: Text | Annotated[list[TextPart], Field(fail_fast=True)] | None = Field(default=None, validate_default=True)
    """Null in a reply without text."""
    name: Text | None = None
    reasoning: Text | None = None
    reasoning_content: Text | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    tool_calls: Nothing = None
    annotations: Nothing = None
    images: Nothing = None
    thinking_blocks: Nothing = None
    provider_specific_fields: dict[str, Any] | None = None
    """Without effect: LiteLLM's own."""

    @field_validator("content")
    @classmethod
    def _given(cls, value: Any, info: ValidationInfo) -> Any:
        if value is None and info.data.get("role") != "assistant":
            raise PydanticCustomError("missing", "is needed in every message but the assistant's")
        return value

    def plain(self) -> dict[str, str]:
        """As templates take it."""
        parts = self.content or []
        content = parts if isinstance(parts, str) else "\n".join(part.text for part in parts)
        more = {"name": self.name, "reasoning": self.reasoning, "reasoning_content": self.reasoning_content}
        return {"role": self.role, "content": content, **{k: v for k, v in more.items() if v is not None}}


class ChatCompletion(Sampled):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Number | None = None
    logprobs: bool | None = None
    top_logprobs: Number | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    """Let the output continue the last message instead of beginning another one."""
    reasoning_effort: Annotated[str, StringConstraints(min_length=1, max_length=32)] | None = None
    """A variable of the chat template: without effect where the template does not read it."""
    chat_template_kwargs: Annotated[dict[str, Any], BeforeValidator(_few)] | None = None
    """More variables of the chat template, such as ``enable_thinking``."""
    tools: Annotated[list[Any], BeforeValidator(_no_tools)] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    """Without effect, like the next four: there are no tools, and only text is generated."""
    parallel_tool_calls: bool | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    modalities: Annotated[list[Literal["text"]], Field(max_length=1)] | None = None
    prediction: Annotated[dict[str, Any], BeforeValidator(_few)] | None = None

    @property
    def variables(self) -> dict[str, Any]:
        """Variables of the chat template. Raises :class:`Invalid` for those that it has from elsewhere."""
        given = dict(self.chat_template_kwargs or {})
        if taken := sorted({"messages", "add_generation_prompt", "tools"} & set(given)):
            raise Invalid("chat_template_kwargs", f"holds {taken[0]}, which is a field of its own", "leave it out")
        return given if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort, **given}

    def logprob_count(self) -> int | None:
        """How many likeliest tokens to report, None: not even the chosen one's."""
        if self.logprobs:
            return self.top_logprobs or 0
        if self.top_logprobs is not None:
            raise Invalid("top_logprobs", "has an effect with logprobs only", "leave it out, or set logprobs")
        return None

    def renamed(self, param: str) -> str:
        """As :meth:`Sampled.renamed`."""
        if param == "max_tokens" and self.max_completion_tokens is not None:
            return "max_completion_tokens"
        if param == "logprobs" and self.top_logprobs is not None:
            return "top_logprobs"
        return super().renamed(param)


class EmbeddingRequest(Body):
    """``POST /v1/embeddings``."""

    model: Text | None = None
    input: Prompt
    encoding_format: Literal["float", "base64"] = "float"
    user: Text | None = None
    cache_salt: Annotated[str, StringConstraints(min_length=1, max_length=1024)] | None = None
    priority: Number = 0


class Classification(Body):
    """``POST /classify``, as vLLM has it."""

    model: Text | None = None
    input: Prompt
    user: Text | None = None
    priority: Number = 0


class Tokenize(Body):
    """``POST /tokenize``: of a text, or of a conversation."""

    model: Text | None = None
    prompt: Text | None = None
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True


class Detokenize(Body):
    """``POST /detokenize``."""

    model: Text | None = None
    tokens: TokenIds


class LoadAdapter(Body):
    """``POST /v1/load_lora_adapter``."""

    lora_name: Annotated[str, StringConstraints(min_length=1, max_length=256)]
    lora_path: Annotated[str, StringConstraints(min_length=1)]


class UnloadAdapter(Body):
    """``POST /v1/unload_lora_adapter``."""

    lora_name: str


BODIES = (Completion, ChatCompletion, EmbeddingRequest, Classification)
"""Those whose fields are suggested where one is misspelt."""


def prompts_of(prompt: str | list[int] | list[str] | list[list[int]], param: str) -> Sequence[Any]:
    """The single prompts of a ``prompt`` field. Raises :class:`Invalid` for none at all."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise Invalid(param, "is an empty list", "give a text, or token ids")
    if isinstance(prompt[0], int):
        return [prompt]
    return prompt
