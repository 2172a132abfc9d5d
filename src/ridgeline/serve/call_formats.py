"""How families of models write calls of functions, by the names of vLLM's ``--tool-call-parser``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ridgeline.serve.harmony import Channels
from ridgeline.serve.tool_calls import Format, Reader, Tools
from ridgeline.serve.written_calls import EscapedFormat, PythonFormat, TagFormat


class CallFormat(Protocol):
    """How calls are written."""

    @property
    def special(self) -> bool:
        """Whether markers are special tokens, which the text must then contain."""

    @property
    def id_length(self) -> int:
        """Length of an id of letters and digits, where the family's templates insist on one; 0: any."""

    def reader(self, make_id: Callable[[], str], parallel: bool, tools: Tools) -> Reader:
        """Reads one output. ``parallel``: more than one call; ``tools``: schemas of arguments by function."""


_DEEPSEEK = Format("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", between="`", bare=True, special=True,
                   marks=("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"), separator="<｜tool▁sep｜>")  # fmt: skip
_KIMI = Format("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", bare=True, special=True, numbered=True,
               marks=("<|tool_call_begin|>", "<|tool_call_end|>"),
               separator="<|tool_call_argument_begin|>")  # fmt: skip
_HERMES = Format("<tool_call>", "</tool_call>", special=True)
_LLAMA = Format("", between=";,", optional="<|python_tag|>")
_PYTHON = PythonFormat("[", "]", ("<|python_start|>", "<|python_end|>"), special=True)
FORMATS: dict[str, CallFormat] = {
    "hermes": _HERMES, "granite4": _HERMES, "llama3_json": _LLAMA, "llama4_json": _LLAMA,
    "mistral": Format("[TOOL_CALLS]", between="[],", bare=True, special=True, id_length=9),
    "granite": Format("<|tool_call|>", between="[],", special=True),
    "phi4_mini_json": Format("functools", between="[],"),
    "deepseek_v3": _DEEPSEEK, "deepseek_v31": _DEEPSEEK, "pythonic": _PYTHON, "llama4_pythonic": _PYTHON,
    "olmo3": PythonFormat("<function_calls>", "</function_calls>"),
    "kimi_k2": _KIMI, "functiongemma": EscapedFormat(),
    "internlm": Format("<|action_start|>", "<|action_end|>", marks=("<|plugin|>",), special=True),
    "qwen3_coder": TagFormat(), "qwen3_xml": TagFormat(), "openai": Channels(),
}  # fmt: skip
CHANNELS = "openai"
"""The format in which reasoning is told apart by the same markers."""
