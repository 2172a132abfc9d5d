"""The body of ``/v1/messages``, Anthropic's Messages API, and the chat completion that it asks for."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, StringConstraints, Tag

from ridgeline.serve.chat import (
    MAX_PARTS,
    MAX_TOOLS,
    CalledFunction,
    ChatCompletion,
    Function,
    FunctionChoice,
    FunctionName,
    Message,
    Tool,
    ToolCall,
    ToolChoice,
    flat,
)
from ridgeline.serve.fields import Body, Number, Salt, StopText, Text, few
from ridgeline.serve.openai import JsonSchema, ResponseFormat

Ignored = Annotated[dict[str, Any], BeforeValidator(few)]


class Block(Body):
    """A part of a message."""

    cache_control: Ignored | None = None
    """Without effect: beginnings of prompts are always cached."""


class TextBlock(Block):
    """Text."""

    type: Literal["text"]
    text: Text
    citations: Annotated[list[Any], Field(max_length=0)] | None = None


TextBlocks = Text | Annotated[list[TextBlock], Field(max_length=MAX_PARTS, fail_fast=True)]


class ThinkingBlock(Block):
    """Reasoning that the model has written."""

    type: Literal["thinking"]
    thinking: Text
    signature: Text | None = None
    """Without effect: reasoning is not signed."""


class ToolUse(Block):
    """A call that the model has made."""

    type: Literal["tool_use"]
    id: Text
    name: Text
    input: dict[str, Any]
    caller: Ignored | None = None


class ToolResult(Block):
    """What a called function has returned."""

    type: Literal["tool_result"]
    tool_use_id: Text
    content: TextBlocks | None = None
    is_error: bool | None = None
    """Without effect: templates have no place for it."""


def _kind(value: Any) -> str:
    """A tag, which no field is named like: faults are told by the names of fields."""
    return f"{value.get('type')} block" if isinstance(value, dict) else ""


Content = Annotated[
    Annotated[TextBlock, Tag("text block")]
    | Annotated[ThinkingBlock, Tag("thinking block")]
    | Annotated[ToolUse, Tag("tool_use block")]
    | Annotated[ToolResult, Tag("tool_result block")],
    Discriminator(
        _kind,
        custom_error_type="block",
        custom_error_message="holds a block that is no text, thinking, tool_use or tool_result",
    ),
]


class Turn(Body):
    """A message."""

    role: Literal["user", "assistant"]
    content: Text | Annotated[list[Content], Field(max_length=MAX_PARTS, fail_fast=True)]

    def messages(self) -> list[Message]:
        """As messages of a chat: results of calls are messages of their own, before the text."""
        if isinstance(self.content, str):
            return [Message(role=self.role, content=self.content)]
        text = "\n".join(block.text for block in self.content if isinstance(block, TextBlock))
        if self.role == "assistant":
            thoughts = "\n".join(block.thinking for block in self.content if isinstance(block, ThinkingBlock))
            calls = [
                ToolCall(id=b.id, function=CalledFunction(name=b.name, arguments=json.dumps(b.input)))
                for b in self.content
                if isinstance(b, ToolUse)
            ]
            return [Message(role="assistant", content=text, reasoning_content=thoughts or None,
                            tool_calls=calls or None)]  # fmt: skip
        results = [
            Message(role="tool", content=_plain(block.content), tool_call_id=block.tool_use_id)
            for block in self.content
            if isinstance(block, ToolResult)
        ]
        given = not results or any(isinstance(block, TextBlock) for block in self.content)
        return [*results, *([Message(role="user", content=text)] if given else [])]


class MessageTool(Body):
    """A function that the model may call."""

    name: FunctionName
    description: Text | None = None
    input_schema: Annotated[dict[str, Any], AfterValidator(flat)]
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: Ignored | None = None


class Choice(Body):
    """How functions are called."""

    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    """Whether to reason, a variable of the chat template (``enable_thinking``)."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Number | None = None
    """Without effect, like the next one: reasoning ends where the model ends it, and is shown whole."""
    display: Text | None = None


class OutputFormat(Body):
    """The structure of the text."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    """Options of the answer."""

    format: OutputFormat | None = None
    effort: Annotated[str, StringConstraints(min_length=1, max_length=32)] | None = None
    """A variable of the chat template (``reasoning_effort``)."""


class Counted(Body):
    """``POST /v1/messages/count_tokens``: what a prompt consists of."""

    messages: Annotated[list[Turn], Field(min_length=1, fail_fast=True)]
    model: Text | None = None
    system: TextBlocks | None = None
    tools: Annotated[list[MessageTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Choice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: Ignored | None = None
    """Without effect."""
    chat_template_kwargs: Ignored | None = None

    def chat(self, **more: Any) -> ChatCompletion:
        """The chat completion. Raises :class:`Invalid`."""
        system = [] if self.system is None else [Message(role="system", content=_plain(self.system))]
        talk = [message for turn in self.messages for message in turn.messages()]
        last = talk[-1]
        if last.role == "assistant" and not last.tool_calls and last.content:  # whose text the answer continues
            more.update(add_generation_prompt=False, continue_final_message=True)
        if self.tools:
            more["tools"] = [
                Tool(type="function", function=Function(name=t.name, description=t.description,
                                                        parameters=t.input_schema, strict=t.strict))
                for t in self.tools
            ]  # fmt: skip
        if (choice := self.tool_choice) is not None:
            named = ToolChoice(type="function", function=FunctionChoice(name=choice.name or "tool"))
            more["tool_choice"] = {"auto": "auto", "any": "required", "none": "none", "tool": named}[choice.type]
            more["parallel_tool_calls"] = False if choice.disable_parallel_tool_use else None
        variables = dict(self.chat_template_kwargs or {})
        if self.thinking is not None:
            variables.setdefault("enable_thinking", self.thinking.type != "disabled")
        if self.output_config is not None:
            more["reasoning_effort"] = self.output_config.effort
            if (form := self.output_config.format) is not None:
                schema = JsonSchema(schema=form.schema_)
                more["response_format"] = ResponseFormat(type="json_schema", json_schema=schema)
        return ChatCompletion(
            messages=[*system, *talk], model=self.model, chat_template_kwargs=variables or None, **more
        )


class MessageRequest(Counted):
    """``POST /v1/messages``."""

    max_tokens: Number
    temperature: float | None = None
    top_p: float | None = None
    top_k: Number | None = None
    stop_sequences: Annotated[list[StopText], Field(max_length=16, fail_fast=True)] | None = None
    stream: bool | None = None
    metadata: Ignored | None = None
    """Without effect, like the next one."""
    service_tier: Text | None = None
    priority: Number = 0
    cache_salt: Salt | None = None

    def completion(self) -> ChatCompletion:
        """The chat completion that it asks for. Raises :class:`Invalid`."""
        return self.chat(
            max_completion_tokens=self.max_tokens, temperature=self.temperature, top_p=self.top_p, top_k=self.top_k,
            stop=self.stop_sequences, stream=self.stream, priority=self.priority, cache_salt=self.cache_salt,
        )  # fmt: skip

    def renamed(self, param: str) -> str:
        """The field of this body that the engine's field ``param`` came from."""
        return {"max_completion_tokens": "max_tokens", "prompt": "messages", "stop": "stop_sequences",
                "response_format": "output_config"}.get(param, param)  # fmt: skip


def _plain(content: str | list[TextBlock] | None) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content or ())
