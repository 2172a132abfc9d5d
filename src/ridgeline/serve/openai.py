"""What clients may send: the OpenAI API's bodies, with vLLM's extensions. Nothing is ignored silently.

A field that is not here is refused by name, and so is one whose value cannot have its effect.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from ridgeline.serve.grammar import Grammars, Kind
from ridgeline.serve.request import Grammar, Invalid, Sampling

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Text = Annotated[str, StringConstraints(min_length=0)]
"""A constraint makes pydantic look inside: half a surrogate pair, which JSON can spell, is no text."""
StopText = Annotated[str, StringConstraints(min_length=1, max_length=1024)]
Number = Annotated[int, Field(ge=-(2**31), lt=2**31)]
Prompt = Text | list[TokenId] | list[Text] | list[list[TokenId]]


class Body(BaseModel):
    """Strict: no unknown fields, no strings for numbers, no NaN."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(Body):
    """Whether a last chunk (or each) tells how many tokens were used."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


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
    """One of: a JSON schema, a regular expression, texts to choose from, a Lark grammar."""

    json_: dict[str, Any] | bool | None = Field(default=None, alias="json")
    regex: Text | None = None
    choice: Annotated[list[StopText], Field(min_length=1, max_length=1024)] | None = None
    grammar: Text | None = None


class Sampled(Body):
    """What completions and chat completions have in common."""

    model: Text | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Number | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[Annotated[str, StringConstraints(pattern=r"^[0-9]{1,9}$")], float] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    n: Number | None = None
    best_of: Number | None = None
    use_beam_search: bool | None = None
    """``best_of`` (or ``n``) beams."""
    length_penalty: float | None = None
    early_stopping: bool | None = None
    max_tokens: Number | None = None
    min_tokens: Number | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=16)] | None = None
    stop_token_ids: list[TokenId] | None = None
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
    """Without effect, as in the OpenAI API."""
    metadata: dict[str, str] | None = None
    """Without effect."""
    store: Literal[False] | None = None

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
            return {"n": self.outputs, "beam_width": self.best_of if self.best_of is not None else max(self.outputs, 1)}
        for name in ("length_penalty", "early_stopping"):
            if getattr(self, name) is not None:
                raise Invalid(name, "has an effect with use_beam_search only", "leave it out, or search with beams")
        return {"n": self.outputs, "best_of": self.best_of}

    def sampling(self, max_tokens: int, logprobs: int | None, grammars: Grammars, **more: Any) -> Sampling:
        """The engine's. Raises :class:`Invalid`."""
        if self.stream_options is not None and not self.stream:
            raise Invalid("stream_options", "has an effect with stream only", "leave it out, or set stream")
        own = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed",
               "length_penalty", "early_stopping", "min_tokens", "ignore_eos")  # fmt: skip
        given = {name: value for name in own if (value := getattr(self, name)) is not None}
        if self.top_k is not None:
            given["top_k"] = 0 if self.top_k == -1 else self.top_k
        return Sampling(
            max_tokens=max_tokens,
            logprobs=logprobs,
            logit_bias={int(token): bias for token, bias in (self.logit_bias or {}).items()},
            stop_token_ids=tuple(self.stop_token_ids or ()),
            grammar=self._grammar(grammars),
            **self.beams(),
            **given,
            **more,
        )

    def renamed(self, param: str) -> str:
        """The field of this body that the engine's field ``param`` came from."""
        return {"beam_width": "n" if self.best_of is None else "best_of"}.get(param, param)

    def _grammar(self, grammars: Grammars) -> Grammar | None:
        asked: list[tuple[Kind, Any, str]] = []
        if self.response_format is not None and self.response_format.type != "text":
            form = self.response_format
            if form.type == "json_schema" and form.json_schema is None:
                raise Invalid("response_format", "of type json_schema has no json_schema", "give one")
            schema = form.json_schema.schema_ if form.json_schema is not None else {"type": "object"}
            asked.append(("json", schema, "response_format"))
        if (outputs := self.structured_outputs) is not None:
            fields: tuple[tuple[Kind, Any], ...] = (
                ("json", outputs.json_), ("regex", outputs.regex), ("choice", outputs.choice),
                ("grammar", outputs.grammar),
            )  # fmt: skip
            asked += [(kind, value, "structured_outputs") for kind, value in fields if value is not None]
            if not asked:
                raise Invalid("structured_outputs", "asks for nothing", "give json, regex, choice or grammar")
        if len(asked) > 1:
            raise Invalid(asked[1][2], "asks for a second structure of the same output", "ask for one")
        for name in ("ignore_eos", "min_tokens"):
            if asked and getattr(self, name):
                raise Invalid(name, "does not go with a structure, which says itself where it ends", "leave it out")
        return grammars.compile(*asked[0]) if asked else None


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


class Message(Body):
    """One message of a conversation."""

    role: Annotated[str, StringConstraints(min_length=1, max_length=64)]
    content: Text | list[TextPart]
    name: Text | None = None

    def plain(self) -> dict[str, str]:
        """As templates take it."""
        content = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)
        return {"role": self.role, "content": content, **({"name": self.name} if self.name is not None else {})}


class ChatCompletion(Sampled):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Number | None = None
    logprobs: bool | None = None
    top_logprobs: Number | None = None
    add_generation_prompt: bool = True

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
        return {"logprobs": "top_logprobs"}.get(param, super().renamed(param))


class Embedding(Body):
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
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True


class Detokenize(Body):
    """``POST /detokenize``."""

    model: Text | None = None
    tokens: list[TokenId]


class LoadAdapter(Body):
    """``POST /v1/load_lora_adapter``."""

    lora_name: Annotated[str, StringConstraints(min_length=1, max_length=256)]
    lora_path: Annotated[str, StringConstraints(min_length=1)]


class UnloadAdapter(Body):
    """``POST /v1/unload_lora_adapter``."""

    lora_name: str


def prompts_of(prompt: Prompt, param: str) -> Sequence[str | list[int]]:
    """The single prompts of a ``prompt`` field. Raises :class:`Invalid` for none at all."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise Invalid(param, "is an empty list", "give a text, or token ids")
    if isinstance(prompt[0], int):
        return [prompt]
    return prompt
