"""Request bodies: those of the OpenAI API, with vLLM's extensions. Nothing is ignored silently.

A field that is not here is refused by name, and so is one whose value cannot have its effect, but for those that
clients send by default and that the documentation lists as without effect.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StringConstraints, field_validator
from pydantic_core import PydanticCustomError

from ridgeline.serve.fields import (
    MAX_BAD_WORDS,
    MAX_BIASES,
    MAX_LOGPROB_IDS,
    MAX_STOP_IDS,
    Body,
    Number,
    Prompt,
    Salt,
    Side,
    StopText,
    Text,
    TokenIds,
    biases,
    few,
    no_stop,
    parsed,
    whole,
)
from ridgeline.serve.grammar import Grammars, Kind
from ridgeline.serve.request import Grammar, Invalid, Sampling
from ridgeline.serve.transfer.handover import KvTransfer


class StreamOptions(Body):
    """Whether a last chunk (or each) contains the token usage."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """Without effect unless the last chunk has it too."""
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
    """One of: a JSON schema (also as text), any JSON object, a regular expression, a list of choices, a grammar in GBNF
    or Lark's form."""

    json_object: bool | None = None
    json_: Annotated[dict[str, Any] | bool | None, BeforeValidator(parsed)] = Field(default=None, alias="json")
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
    logit_bias: Annotated[dict[str, float], BeforeValidator(biases)] | None = None
    seed: Annotated[int, BeforeValidator(whole), Field(ge=-(2**63), lt=2**63)] | None = None
    n: Number | None = None
    best_of: Number | None = None
    use_beam_search: bool | None = None
    """``best_of`` (or ``n``) beams."""
    length_penalty: float | None = None
    early_stopping: bool | None = None
    max_tokens: Number | None = None
    min_tokens: Number | None = None
    stop: Annotated[
        StopText | Annotated[list[StopText], Field(max_length=16, fail_fast=True)] | None, BeforeValidator(no_stop)
    ] = None
    stop_token_ids: Annotated[TokenIds, Field(max_length=MAX_STOP_IDS)] | None = None
    allowed_token_ids: Annotated[TokenIds, Field(min_length=1, max_length=MAX_BIASES)] | None = None
    bad_words: Annotated[list[StopText], Field(max_length=MAX_BAD_WORDS, fail_fast=True)] | None = None
    """Texts that are never generated, as tokens spell them alone and after a space."""
    truncate_prompt_tokens: Annotated[Number, Field(ge=-1)] | None = None
    """Keep only this number of the prompt's tokens; -1: as many as the context takes."""
    truncation_side: Side | None = None
    """Which end of the prompt is cut off then; None: its beginning."""
    include_stop_str_in_output: bool = False
    ignore_eos: bool | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    """Without effect: text is what the tokens' bytes spell."""
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    prompt_logprobs: Number | None = None
    """Report the log-probabilities of the prompt's tokens, and this number of the likeliest at each place."""
    logprob_token_ids: Annotated[TokenIds, Field(max_length=MAX_LOGPROB_IDS)] | None = None
    """Report the log-probabilities of these tokens instead of the likeliest ones."""
    request_id: StopText | None = None
    """The answer's id ends with it."""
    return_token_ids: bool | None = None
    """Report the ids of the prompt's tokens and of the output's."""
    return_tokens_as_token_ids: bool | None = None
    """In log-probabilities, write a token as ``token_id:`` and its id."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Number = 0
    cache_salt: Salt | None = None
    kv_transfer_params: KvTransfer | None = None
    """Where the prompt's cache comes from, or that it will be fetched."""
    user: Text | None = None
    """Without effect, like the next six: they name users, caches and tiers of OpenAI's own service."""
    metadata: Annotated[dict[str, str], BeforeValidator(few)] | None = None
    store: bool | None = None
    service_tier: Text | None = None
    safety_identifier: Text | None = None
    prompt_cache_key: Text | None = None
    prompt_cache_retention: Text | None = None

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
        if self.stream_options is not None and not self.stream:
            raise Invalid("stream_options", "has an effect with stream only", "leave it out, or set stream")
        if self.logprob_token_ids is not None and logprobs is None:
            what = "has an effect with log-probabilities only"
            raise Invalid("logprob_token_ids", what, "leave it out, or ask for logprobs")
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
            logprob_token_ids=tuple(self.logprob_token_ids or ()),
            **self.beams(),
            **given,
            **more,
        )
        sampling.check(vocab_size)
        return sampling

    def renamed(self, param: str) -> str:
        """As :meth:`Body.renamed`."""
        return {"beam_width": "n" if self.best_of is None else "best_of"}.get(param, param)

    def structures(self) -> list[tuple[Kind, Any, str]]:
        """The structures that are requested, and the fields that they come from. Raises :class:`Invalid`."""
        structures: list[tuple[Kind, Any, str]] = []
        if self.response_format is not None and self.response_format.type != "text":
            form = self.response_format
            if form.type == "json_schema" and form.json_schema is None:
                raise Invalid("response_format", "of type json_schema has no json_schema", "give one")
            schema = form.json_schema.schema_ if form.json_schema is not None else {"type": "object"}
            structures.append(("json", schema, "response_format"))
        if (outputs := self.structured_outputs) is not None:
            fields: tuple[tuple[Kind, Any], ...] = (
                ("json", outputs.json_), ("json", {"type": "object"} if outputs.json_object else None),
                ("regex", outputs.regex), ("choice", outputs.choice),
                ("grammar", outputs.grammar),
            )  # fmt: skip
            structures += [(kind, value, "structured_outputs") for kind, value in fields if value is not None]
            if not structures:
                raise Invalid(
                    "structured_outputs", "asks for nothing", "give json, json_object, regex, choice or grammar"
                )
        return structures

    def grammar(self, grammars: Grammars) -> Grammar | None:
        """The requested constraint, compiled. Raises :class:`Invalid`."""
        structures = self.structures()
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
    suffix: Text | None = None
    """What comes after the output, of a model that fills gaps."""
    add_special_tokens: bool = True

    @field_validator("kv_transfer_params")
    @classmethod
    def _no_second_prompt(cls, value: KvTransfer | None) -> KvTransfer | None:
        if value is not None and value.prompt_token_ids is not None:
            raise PydanticCustomError("twice", "holds prompt_token_ids, which are the prompt here")
        return value


class Detokenize(Body):
    """``POST /detokenize``."""

    model: Text | None = None
    tokens: TokenIds


class LoadAdapter(Body):
    """``POST /v1/load_lora_adapter``."""

    lora_name: Annotated[str, StringConstraints(min_length=1, max_length=256)]
    lora_path: Annotated[str, StringConstraints(min_length=1)]
    load_inplace: bool = False
    """Replace the adapter of that name, once no request uses it."""


class UnloadAdapter(Body):
    """``POST /v1/unload_lora_adapter``."""

    lora_name: str
