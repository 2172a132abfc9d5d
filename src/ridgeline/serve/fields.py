"""What request bodies are made of: bounded numbers, texts and prompts, and a strict base.

A field that is not known is refused by name, and null stands for one that is left out.
"""

from __future__ import annotations

import json
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
    model_validator,
)
from pydantic_core import PydanticCustomError

from ridgeline.serve.request import SHORTEN, TOO_LONG, Invalid

MAX_PROMPTS, MAX_INPUTS = 256, 2048
"""Largest number of prompts in one body, and of inputs that are read only."""
MAX_BIASES, MAX_STOP_IDS, MAX_BAD_WORDS, MAX_LOGPROB_IDS = 16384, 1024, 256, 128
"""Limits on options that are evaluated for every token."""
UNKNOWN = "unknown_field"

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
Text = Annotated[str, StringConstraints(min_length=0)]
"""A constraint makes pydantic look inside: half a surrogate pair, which JSON can spell, is no text."""
StopText = Annotated[str, StringConstraints(min_length=1, max_length=1024)]
Side = Literal["left", "right"]
Salt = StopText
"""Prompts share cached blocks only with those of the same salt (and the same API key)."""


def whole(value: Any) -> Any:
    """5.0 is an integer in JSON, and what clients in other languages send."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Number = Annotated[int, BeforeValidator(whole), Field(ge=-(2**31), lt=2**31)]


def _bounded(value: Any, info: ValidationInfo, most: int = MAX_PROMPTS) -> Any:
    """A prompt whose numbers of prompts and tokens are within bounds, before any of them is looked at."""
    if not isinstance(value, list):
        return value
    several = bool(value) and not isinstance(value[0], int)
    if several and len(value) > most:
        what = "holds {count} prompts, of {most} at most: ask in several requests"
        raise PydanticCustomError("too_many", what, {"count": len(value), "most": most})
    context = (info.context or {}).get("tokens")
    for ids in value if several else [value]:
        if context is not None and isinstance(ids, list) and len(ids) > context:
            what = f"has {{count}} tokens, and the model's maximum context length is {{context}}: {SHORTEN}"
            raise PydanticCustomError(TOO_LONG, what, {"count": len(ids), "context": context, "code": TOO_LONG})
    return value


def _form(value: Any) -> str:
    """Which of its forms a prompt has; whatever fits none is refused as text."""
    if not isinstance(value, list):
        return "text"
    first = value[0] if value else 0
    return "texts" if isinstance(first, str) else "lists" if isinstance(first, list) else "tokens"


def _inputs(value: Any, info: ValidationInfo) -> Any:
    return _bounded(value, info, MAX_INPUTS)


_Forms = Annotated[
    Annotated[Text, Tag("text")]
    | Annotated[TokenIds, Tag("tokens")]
    | Annotated[list[Text], Field(fail_fast=True), Tag("texts")]
    | Annotated[list[TokenIds], Field(fail_fast=True), Tag("lists")],
    Discriminator(_form),
]
"""By its first element: one error says what is wrong with it, and no list is read to its end for that."""
Prompt = Annotated[_Forms, BeforeValidator(_bounded)]
Inputs = Annotated[_Forms, BeforeValidator(_inputs)]
PromptTokens = Annotated[TokenIds, Field(min_length=1), BeforeValidator(_bounded)]
"""Those of one prompt."""


def biases(value: Any) -> Any:
    """Token ids as JSON's keys, not too many."""
    if isinstance(value, dict):
        if len(value) > MAX_BIASES:
            what = "holds {count} biases, of {most} at most"
            raise PydanticCustomError("too_many", what, {"count": len(value), "most": MAX_BIASES})
        if bad := [name for name in value if not re.fullmatch("[0-9]{1,9}", name)]:
            names = ", ".join(repr(name[:100]) for name in bad[:8])
            raise PydanticCustomError("token", "holds keys that are no token ids: {names}", {"names": names})
    return value


def no_stop(value: Any) -> Any:
    """An empty stop string stops nothing, as in vLLM."""
    return None if value == "" else value


def parsed(value: Any) -> Any:
    """What a text is as JSON."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise PydanticCustomError("json", "is a text that is not JSON") from None


def few(value: Any) -> Any:
    """An object of few entries."""
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
        """Refuse the first unknown field; null stands for a field that is left out, known or not."""
        closed = isinstance(value, dict) and cls.model_config["extra"] == "forbid"
        unknown = (k for k, v in value.items() if v is not None and k not in _names(cls)) if closed else iter(())
        if (bad := next(unknown, None)) is not None:
            name = bad.encode(errors="backslashreplace").decode()  # JSON can spell what is no UTF-8
            raise PydanticCustomError(UNKNOWN, "is not known", {"name": name})
        if isinstance(value, dict) and None in value.values():
            return {k: v for k, v in value.items() if v is not None or k in _required(cls)}
        return value

    def renamed(self, param: str) -> str:
        """The field of this body that the engine's field ``param`` came from."""
        return param


def prompts_of(prompt: str | list[int] | list[str] | list[list[int]], param: str) -> Sequence[Any]:
    """The single prompts of a ``prompt`` field. Raises :class:`Invalid` for none at all."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise Invalid(param, "is an empty list", "give a text, or token ids")
    if isinstance(prompt[0], int):
        return [prompt]
    return prompt
