"""Bodies that hold a conversation: chat completions, with functions that the model may call, and ``/tokenize``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
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

from ridgeline.data.examples import BadRecord, Template
from ridgeline.serve.fields import Body, Number, Text, few
from ridgeline.serve.grammar import MAX_DEPTH, Kind, depth
from ridgeline.serve.openai import Sampled
from ridgeline.serve.request import Invalid

MAX_TOOLS = 256
"""Largest number of functions in one body."""
MAX_BATCH = 128
"""Largest number of conversations in one body."""
MAX_PARTS = 1024
"""Largest number of parts of a message."""
MAX_FURTHER = 16
"""Largest number of fields of a message that only its template knows."""
FunctionName = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


def is_object(text: str) -> bool:
    """Whether ``text`` is a JSON object, or nothing at all."""
    try:
        return not text.strip() or isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _object(value: str) -> str:
    if not is_object(value):
        raise PydanticCustomError("arguments", "must be a JSON object, as text")
    return value


Arguments = Annotated[Text, AfterValidator(_object)]


def flat(value: dict[str, Any]) -> dict[str, Any]:
    """A schema that is not nested too deeply."""
    if depth(value) > MAX_DEPTH:
        what = "holds a schema that is nested more than {most} deep"
        raise PydanticCustomError("deep", what, {"most": MAX_DEPTH})
    return value


class Function(Body):
    """A function that the model may call."""

    name: FunctionName
    description: Text | None = None
    parameters: Annotated[dict[str, Any], AfterValidator(flat)] | None = None
    """A JSON schema; none: it takes no arguments."""
    strict: bool | None = None
    """Arguments of required and named calls always fit the schema; without effect on calls of the model's own."""


class Tool(Body):
    """A tool: functions are the only ones."""

    type: Literal["function"]
    function: Function


class FunctionChoice(Body):
    """A function's name."""

    name: FunctionName


class ToolChoice(Body):
    """The function to call."""

    type: Literal["function"]
    function: FunctionChoice


class CalledFunction(Body):
    """A function and its arguments, as JSON."""

    name: Text
    arguments: Arguments


class ToolCall(Body):
    """A call in an assistant's message."""

    id: Text | None = None
    type: Literal["function"] = "function"
    index: Number | None = None
    """Without effect: clients that put streams together leave it there."""
    function: CalledFunction

    def plain(self) -> dict[str, Any]:
        """As templates take it: the arguments as an object."""
        arguments = json.loads(self.function.arguments.strip() or "{}")
        return {"id": self.id, "type": "function", "function": {"name": self.function.name, "arguments": arguments}}


def _bounded_further(cls: type[Body], value: Any) -> Any:
    """``value``, where it has no more fields than a template may be given."""
    given = value.items() if isinstance(value, dict) else ()
    further = sum(v is not None and k not in cls.model_fields for k, v in given)
    if further > MAX_FURTHER:
        raise PydanticCustomError("too_many", "has {count} unknown fields, of {most} at most",
                                  {"count": further, "most": MAX_FURTHER})  # fmt: skip
    return value


class TextPart(Body):
    """A part of a message; fields that are not known here are for the chat template, if it reads parts."""

    model_config = ConfigDict(extra="allow")
    type: Literal["text", "input_text", "output_text"]
    text: Text

    @model_validator(mode="before")
    @classmethod
    def _few(cls, value: Any) -> Any:
        return _bounded_further(cls, value)

    def plain(self) -> dict[str, Any]:
        """As templates take it."""
        return {**(self.model_extra or {}), "type": "text", "text": self.text}


class RefusalPart(Body):
    """A part of an assistant's message that says why there is no other."""

    type: Literal["refusal"]
    refusal: Text

    def plain(self) -> dict[str, Any]:
        """As templates take it."""
        return {"type": "text", "text": self.refusal}


def _kind_of_part(value: Any) -> str:
    """A tag, which no field is named like: faults are told by the names of fields."""
    if isinstance(value, str):
        return "plain text"
    return "refusal part" if isinstance(value, dict) and value.get("type") == "refusal" else "other part"


Part = Annotated[
    Annotated[Text, Tag("plain text")]
    | Annotated[TextPart, Tag("other part")]
    | Annotated[RefusalPart, Tag("refusal part")],
    Discriminator(_kind_of_part),
]


Nothing = Annotated[list[Any], Field(max_length=0)] | None
"""What replies may hold and nothing here reads, as long as there is nothing in it."""


class Message(Body):
    """One message of a conversation. What comes back in replies, by us or through LiteLLM, may be sent again; fields
    that are not known here are for the chat template."""

    model_config = ConfigDict(extra="allow")

    @model_validator(mode="before")
    @classmethod
    def _few(cls, value: Any) -> Any:
        return _bounded_further(cls, value)

    role: Annotated[str, StringConstraints(min_length=1, max_length=64)]
    content: Text | Annotated[list[Part], Field(max_length=MAX_PARTS, fail_fast=True)] | None = Field(
        default=None, validate_default=True
    )
    """Null in a reply without text."""
    name: Text | None = None
    reasoning: Text | None = None
    reasoning_content: Text | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None
    tool_call_id: Text | None = None
    """In a ``tool`` message: the call that it answers."""
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

    def plain(self, in_parts: bool = False) -> dict[str, Any]:
        """As templates take it; with ``in_parts`` a user's or an assistant's content that came in parts stays so."""
        content: str | list[dict[str, Any]] = ""
        if isinstance(self.content, str):
            content = self.content
        elif self.content:
            parts = [{"type": "text", "text": p} if isinstance(p, str) else p.plain() for p in self.content]
            as_list = in_parts and self.role in ("user", "assistant")
            content = parts if as_list else "\n".join(part["text"] for part in parts)
        more = {"name": self.name, "reasoning": self.reasoning, "reasoning_content": self.reasoning_content,
                "tool_call_id": self.tool_call_id,
                "tool_calls": [call.plain() for call in self.tool_calls] if self.tool_calls else None}  # fmt: skip
        known = {"role": self.role, "content": content, **{k: v for k, v in more.items() if v is not None}}
        return {**(self.model_extra or {}), **known}


class ChatOptions(Sampled):
    """What an answer to a conversation may be like."""

    max_completion_tokens: Number | None = None
    logprobs: bool | None = None
    top_logprobs: Number | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    """Let the output continue the last message instead of beginning another one."""
    add_special_tokens: bool = False
    """Put the tokenizer's special tokens around the prompt, which templates write themselves."""
    echo: bool = False
    """Begin the answer with the last message's text, where that is the assistant's."""
    include_reasoning: bool = True
    """False: leave the reasoning out of the answer."""
    thinking_token_budget: Number | None = None
    """Tokens of reasoning after which its end is written, whatever the model would."""
    documents: Annotated[list[dict[str, str]], Field(max_length=1024)] | None = None
    """A variable of the chat template, for models that answer from texts."""
    reasoning_effort: Annotated[str, StringConstraints(min_length=1, max_length=32)] | None = None
    """A variable of the chat template: without effect where the template does not read it."""
    chat_template_kwargs: Annotated[dict[str, Any], BeforeValidator(few)] | None = None
    """More variables of the chat template, such as ``enable_thinking``."""
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    """None: ``auto`` where there are tools."""
    parallel_tool_calls: bool | None = None
    """False: one call at most."""
    verbosity: Literal["low", "medium", "high"] | None = None
    """Without effect, like the next two."""
    modalities: Annotated[list[Literal["text"]], Field(max_length=1)] | None = None
    prediction: Annotated[dict[str, Any], BeforeValidator(few)] | None = None

    @property
    def choice(self) -> Literal["none", "auto", "required"] | str:
        """How functions are called: or the name of the one to call, after a colon. Raises :class:`Invalid`."""
        if not self.tools:
            if self.tool_choice not in (None, "none", "auto"):
                raise Invalid("tool_choice", "asks for a call, and there are no tools", "give tools")
            return "none"
        names = [tool.function.name for tool in self.tools]
        if len(set(names)) < len(names):
            raise Invalid("tools", "holds two functions of the same name", "rename one")
        if isinstance(self.tool_choice, ToolChoice):
            if (name := self.tool_choice.function.name) not in names:
                raise Invalid("tool_choice", f"names {name!r}, which is not among the tools", "name one of them")
            return f":{name}"
        return self.tool_choice or "auto"

    def structures(self) -> list[tuple[Kind, Any, str]]:
        """With the structure of required and named calls."""
        found, choice, tools = super().structures(), self.choice, self.tools or []
        if choice == "auto" and found:
            what = "does not go with tools that the model may call on its own"
            raise Invalid(found[0][2], what, 'leave it out, or set tool_choice to "none" or "required"')
        if choice in ("none", "auto"):
            return found
        if self.response_format is not None:  # says how an answer in text is written, and there is none
            found = [form for form in found if form[2] != "response_format"]
        schemas = {f"f{i}": _moved(_arguments(tool.function), f"#/$defs/f{i}") for i, tool in enumerate(tools)}
        if choice.startswith(":"):
            at = next(i for i, tool in enumerate(tools) if tool.function.name == choice[1:])
            return [*found, ("json", _arguments(tools[at].function), "tool_choice")]
        calls = [
            {"type": "object", "required": ["name", "parameters"], "additionalProperties": False,
             "properties": {"name": {"const": tool.function.name}, "parameters": {"$ref": f"#/$defs/f{i}"}}}
            for i, tool in enumerate(tools)
        ]  # fmt: skip
        most = {"maxItems": 1} if self.parallel_tool_calls is False else {}
        schema = {"type": "array", "minItems": 1, **most, "items": {"anyOf": calls}, "$defs": schemas}
        return [*found, ("json", schema, "tool_choice")]

    @property
    def variables(self) -> dict[str, Any]:
        """Variables of the chat template. Raises :class:`Invalid` for those that it has from elsewhere."""
        given = template_variables(self.chat_template_kwargs, self.tools)
        if self.documents is not None:
            given["documents"] = self.documents
        return given if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort, **given}

    def logprob_count(self) -> int | None:
        """How many likeliest tokens to report, None: not even the chosen one's."""
        if self.logprobs:
            return self.top_logprobs or 0  # -1: all
        if self.top_logprobs is not None:
            raise Invalid("top_logprobs", "has an effect with logprobs only", "leave it out, or set logprobs")
        return None

    def renamed(self, param: str) -> str:
        """As :meth:`Body.renamed`."""
        if param == "max_tokens" and self.max_completion_tokens is not None:
            return "max_completion_tokens"
        if param == "logprobs" and self.top_logprobs is not None:
            return "top_logprobs"
        return super().renamed(param)


class ChatCompletion(ChatOptions):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]


class ChatBatch(ChatOptions):
    """``POST /v1/chat/completions/batch``: one answer to each of several conversations."""

    messages: Annotated[
        list[Annotated[list[Message], Field(min_length=1, fail_fast=True)]],
        Field(min_length=1, max_length=MAX_BATCH, fail_fast=True),
    ]

    def each(self) -> list[ChatCompletion]:
        """The conversations. Raises :class:`Invalid` for options that only one of them may have."""
        for name, given in (("stream", self.stream), ("tools", self.tools), ("use_beam_search", self.use_beam_search),
                            ("n", self.outputs > 1), ("best_of", (self.best_of or 1) > 1),
                            ("kv_transfer_params", self.kv_transfer_params)):  # fmt: skip
            if given:
                raise Invalid(name, "does not go with several conversations", "leave it out, or send them one by one")
        shared = {name: getattr(self, name) for name in self.model_fields_set - {"messages"}}
        return [ChatCompletion(messages=messages, **shared) for messages in self.messages]


class Tokenize(Body):
    """``POST /tokenize``: of a text, or of a conversation."""

    model: Text | None = None
    prompt: Text | None = None
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)] | None = None
    add_special_tokens: bool | None = None
    """By default those of the tokenizer go around a text, and not around a conversation."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: Annotated[dict[str, Any], BeforeValidator(few)] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    return_token_strs: bool | None = None
    """Also the text of each token."""

    @property
    def variables(self) -> dict[str, Any]:
        """As :attr:`ChatCompletion.variables`."""
        return template_variables(self.chat_template_kwargs, self.tools)


def template_variables(given: dict[str, Any] | None, tools: list[Tool] | None) -> dict[str, Any]:
    """Variables of the chat template, the functions among them."""
    given = dict(given or {})
    if taken := sorted({"messages", "add_generation_prompt", "tools"} & set(given)):
        raise Invalid("chat_template_kwargs", f"holds {taken[0]}, which is a field of its own", "leave it out")
    if tools:
        plain = ({name: value for name, value in tool.function if value is not None} for tool in tools)
        given["tools"] = [{"type": "function", "function": function} for function in plain]
    return given


def _arguments(function: Function) -> dict[str, Any]:
    """The schema of a function's arguments."""
    if function.parameters is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return function.parameters


def _moved(schema: Any, root: str) -> Any:
    """A schema that is no longer at the root of its text: its references from there."""
    if isinstance(schema, list):
        return [_moved(part, root) for part in schema]
    if not isinstance(schema, dict):
        return schema
    ref = schema.get("$ref")
    moved = {"$ref": root + ref[1:]} if isinstance(ref, str) and ref.startswith("#") else {}
    return {key: _moved(part, root) for key, part in schema.items()} | moved


def rendered(
    template: Template, messages: Sequence[Message], prompt: bool, open_end: bool, variables: dict[str, Any]
) -> str:
    """The text of a conversation; with ``prompt`` the beginning of an answer follows, with ``open_end`` it ends with
    the last message's text. Raises :class:`BadRecord` for messages that the template does not take."""
    plain = [m.plain(template.reads_parts) for m in messages]
    if template.reads_thinking:
        plain = [{**m, "thinking": m["reasoning_content"]} if "reasoning_content" in m else m for m in plain]
    if not template.knows_developer:
        plain = [{**m, "role": "system"} if m["role"] == "developer" else m for m in plain]
    text = template.render(plain, prompt=prompt, **variables)
    if not open_end:
        return text
    last = plain[-1]["content"]
    return _until(text, last if isinstance(last, str) else last[-1]["text"])


def _until(text: str, last: str) -> str:
    """``text`` up to the end of the ``last`` message's content, which templates may strip."""
    begins = text.rfind(last.strip())
    if begins < 0 or not last.strip():
        raise BadRecord("the chat template does not show the last message's text")
    ends = begins + len(last.lstrip())
    return text[:ends] if text[begins:ends] == last.lstrip() else text[: begins + len(last.strip())]
