"""The body of ``/v1/responses``, and the chat completion that it asks for."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, StringConstraints, Tag

from ridgeline.serve.chat import (
    MAX_PARTS,
    MAX_TOOLS,
    Arguments,
    CalledFunction,
    ChatCompletion,
    Function,
    FunctionChoice,
    Message,
    Tool,
    ToolCall,
    ToolChoice,
)
from ridgeline.serve.fields import Body, Number, Salt, StopText, Text, biases, few, no_stop, whole
from ridgeline.serve.openai import JsonSchema, ResponseFormat
from ridgeline.serve.request import Invalid

Status = Literal["in_progress", "completed", "incomplete"]
PASSED = (
    "model", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias", "seed", "stop", "min_tokens", "ignore_eos", "priority", "cache_salt", "chat_template_kwargs",
    "parallel_tool_calls", "truncate_prompt_tokens",
)  # fmt: skip
"""Fields of the same name and meaning in a chat completion."""


class Part(Body):
    """A part of a message: text, given or generated."""

    type: Literal["input_text", "output_text", "text"]
    text: Text
    annotations: list[Any] | None = None
    """Without effect, like the next one: they come with generated text."""
    logprobs: list[Any] | None = None


Parts = Text | Annotated[list[Part], Field(max_length=MAX_PARTS, fail_fast=True)]


class InputMessage(Body):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Parts
    id: Text | None = None
    """Without effect, like the next two: they come with generated messages."""
    status: Status | None = None
    phase: Text | None = None


class InputCall(Body):
    """A call that the model has made."""

    type: Literal["function_call"]
    call_id: Text
    name: Text
    arguments: Arguments
    id: Text | None = None
    status: Status | None = None
    namespace: None = None


class InputResult(Body):
    """What a called function has returned."""

    type: Literal["function_call_output"]
    call_id: Text
    output: Parts
    id: Text | None = None
    status: Status | None = None


class ReasoningText(Body):
    """A part of reasoning."""

    type: Literal["reasoning_text"]
    text: Text


class InputReasoning(Body):
    """Reasoning that the model has written before the item that follows."""

    type: Literal["reasoning"]
    content: Annotated[list[ReasoningText], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None
    summary: list[Any] | None = None
    """Without effect, like the next two."""
    id: Text | None = None
    status: Status | None = None
    encrypted_content: None = None


def _kind(value: Any) -> str:
    """A tag, which no field is named like: faults are told by the names of fields."""
    return f"{value.get('type') or 'message'} item" if isinstance(value, dict) else "message item"


Item = Annotated[
    Annotated[InputMessage, Tag("message item")]
    | Annotated[InputCall, Tag("function_call item")]
    | Annotated[InputResult, Tag("function_call_output item")]
    | Annotated[InputReasoning, Tag("reasoning item")],
    Discriminator(
        _kind,
        custom_error_type="item",
        custom_error_message="holds an item that is no message, function_call, function_call_output or reasoning",
    ),
]


class FunctionTool(Function):
    """A function that the model may call."""

    type: Literal["function"]


class NamedFunction(FunctionChoice):
    """The function to call."""

    type: Literal["function"]


class Format(Body):
    """The structure of the text."""

    type: Literal["text", "json_object", "json_schema"]
    name: Text | None = None
    description: Text | None = None
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextOptions(Body):
    """Options of the text."""

    format: Format | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    """Without effect."""


class Reasoning(Body):
    """Options of reasoning."""

    effort: Annotated[str, StringConstraints(min_length=1, max_length=32)] | None = None
    """A variable of the chat template."""
    summary: Text | None = None
    """Without effect, like the next one: no reasoning is summarized."""
    generate_summary: Text | None = None


class ResponseStreamOptions(Body):
    """Options of a stream."""

    include_obfuscation: bool | None = None
    """Without effect."""


class ResponseRequest(Body):
    """``POST /v1/responses``."""

    input: Text | Annotated[list[Item], Field(min_length=1, fail_fast=True)]
    model: Text | None = None
    instructions: Text | None = None
    """A system message before the conversation, of this response only."""
    previous_response_id: Text | None = None
    store: bool | None = None
    """False: do not keep it for ``previous_response_id``."""
    max_output_tokens: Number | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: Number | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    """Reasoning is not encrypted: without effect."""
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    truncation: Literal["disabled", "auto"] | None = None
    """``auto``: of what does not fit the context with the output only the end is read."""
    background: bool | None = None
    """Answer at once, and make the response without a client that waits for it."""
    enable_response_messages: bool = False
    """Also report the prompt and the output as text and tokens (vLLM's extension)."""
    top_k: Number | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], BeforeValidator(biases)] | None = None
    seed: Annotated[int, BeforeValidator(whole), Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Annotated[
        StopText | Annotated[list[StopText], Field(max_length=16, fail_fast=True)] | None, BeforeValidator(no_stop)
    ] = None
    min_tokens: Number | None = None
    ignore_eos: bool | None = None
    priority: Number = 0
    cache_salt: Salt | None = None
    truncate_prompt_tokens: Annotated[Number, Field(ge=-1)] | None = None
    chat_template_kwargs: Annotated[dict[str, Any], BeforeValidator(few)] | None = None
    max_tool_calls: Number | None = None
    """Without effect, like the next six: it counts calls of OpenAI's own tools."""
    user: Text | None = None
    metadata: Annotated[dict[str, str], BeforeValidator(few)] | None = None
    service_tier: Text | None = None
    safety_identifier: Text | None = None
    prompt_cache_key: Text | None = None
    prompt_cache_retention: Text | None = None

    def messages(self) -> list[Message]:
        """The input as messages of a chat; calls join the assistant's message before them."""
        if isinstance(self.input, str):
            return [Message(role="user", content=self.input)]
        found: list[Message] = []
        for item in self.input:
            if isinstance(item, InputReasoning):
                text = "\n".join(part.text for part in item.content or ())
                found.append(Message(role="assistant", content=None, reasoning_content=text))
            elif isinstance(item, InputCall):
                call = ToolCall(id=item.call_id, function=CalledFunction(name=item.name, arguments=item.arguments))
                if not found or found[-1].role != "assistant":
                    found.append(Message(role="assistant", content=None, tool_calls=[]))
                found[-1].tool_calls = [*(found[-1].tool_calls or []), call]
            elif isinstance(item, InputResult):
                found.append(Message(role="tool", content=_text(item.output), tool_call_id=item.call_id))
            elif item.role == "assistant" and found and _open(found[-1]):
                found[-1].content = _text(item.content)  # what the reasoning led to
            else:
                found.append(Message(role=item.role, content=_text(item.content)))
        return found

    def chat(self, talk: list[Message], context: int) -> ChatCompletion:
        """The chat completion of the conversation ``talk``; ``context``: tokens of the context window. Raises
        :class:`Invalid`."""
        system = [] if self.instructions is None else [Message(role="system", content=self.instructions)]
        given: dict[str, Any] = {name: value for name in PASSED if (value := getattr(self, name)) is not None}
        if self.wants_logprobs:
            given.update(logprobs=True, top_logprobs=self.top_logprobs)
        if self.tools:
            given["tools"] = [
                Tool(type="function", function=Function(**tool.model_dump(exclude={"type"}))) for tool in self.tools
            ]
        choice = self.tool_choice
        if choice is not None:
            given["tool_choice"] = (
                ToolChoice(type="function", function=FunctionChoice(name=choice.name))
                if isinstance(choice, NamedFunction)
                else choice
            )
        if self.text is not None and self.text.format is not None:
            given["response_format"] = _format(self.text.format)
        if self.truncation == "auto" and self.truncate_prompt_tokens is None:
            given["truncate_prompt_tokens"] = max(1, context - (self.max_output_tokens or 1))
        if self.reasoning is not None:
            given["reasoning_effort"] = self.reasoning.effort
        return ChatCompletion(
            messages=[*system, *talk], max_completion_tokens=self.max_output_tokens, stream=self.stream, **given
        )

    @property
    def wants_logprobs(self) -> bool:
        """Whether log-probabilities are reported."""
        return self.top_logprobs is not None or "message.output_text.logprobs" in (self.include or ())

    def renamed(self, param: str) -> str:
        """The field of this body that the engine's field ``param`` came from."""
        names = {"messages": "input", "prompt": "input", "max_tokens": "max_output_tokens",
                 "response_format": "text", "logprobs": "top_logprobs"}  # fmt: skip
        return names.get(param, param)


def items_of(talk: list[Message], name: str) -> list[dict[str, Any]]:
    """The items of a conversation, of the response ``name``."""
    found: list[dict[str, Any]] = []

    def add(kind: str, prefix: str, **more: Any) -> None:
        found.append({"id": f"{prefix}_{name.partition('_')[2]}_{len(found)}", "type": kind, **more})

    for m in talk:
        plain = m.plain()
        if m.role == "tool":
            add("function_call_output", "fco", call_id=m.tool_call_id, output=plain["content"], status="completed")
            continue
        if m.reasoning_content:
            part = {"type": "reasoning_text", "text": m.reasoning_content}
            add("reasoning", "rs", summary=[], content=[part])
        if plain["content"] or not (m.tool_calls or m.reasoning_content or m.role == "assistant"):
            made = m.role == "assistant"
            more: dict[str, Any] = {"annotations": []} if made else {}
            said = {"type": "output_text" if made else "input_text", "text": plain["content"], **more}
            add("message", "msg", role=m.role, status="completed", content=[said])
        for call in m.tool_calls or ():
            add("function_call", "fc", call_id=call.id, name=call.function.name, arguments=call.function.arguments,
                status="completed")  # fmt: skip
    return found


def _open(message: Message) -> bool:
    """Whether it is reasoning that has led to nothing yet."""
    return message.role == "assistant" and message.content is None and not message.tool_calls


def _text(content: str | list[Part]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def _format(form: Format) -> ResponseFormat:
    if form.type != "json_schema":
        return ResponseFormat(type=form.type)
    if form.schema_ is None:
        raise Invalid("text", "has a format of type json_schema without a schema", "give one")
    return ResponseFormat(type=form.type, json_schema=JsonSchema(name=form.name, schema=form.schema_))
