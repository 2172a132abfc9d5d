"""Calls of functions in a model's text, found as it is generated.

A format says how a family of models writes calls as JSON: what begins and ends them, and what is between.
"""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from ridgeline.serve.request import Finish

Tools = Mapping[str, Any]
"""Schemas of the arguments of functions, by their names."""


@dataclass(frozen=True)
class Format:
    """How calls are written: JSON objects with a ``name`` and ``arguments`` (or ``parameters``) after a marker."""

    begin: str
    """Marker before calls; empty: a text that begins with an object (behind ``optional``) is calls and nothing else."""
    end: str = ""
    """Marker after a call, behind which text may follow; empty: calls last to the end of the text."""
    between: str = ""
    """Characters that may stand around objects, beside whitespace."""
    optional: str = ""
    bare: bool = False
    """Whether a call may also be ``name{…}`` or ``name[ARGS]{…}``, the object being the arguments."""
    special: bool = False
    """Whether markers are special tokens, which the text must then contain."""
    id_length: int = 0
    """Length of an id of letters and digits, where the family's templates insist on one."""
    marks: tuple[str, ...] = ()
    """Further markers around each call."""
    separator: str = ""
    """With ``bare``: what is between the kind of call and the name, whose line has nothing else, or after the name."""
    numbered: bool = False
    """With ``bare``: whether a name is written ``functions.NAME:NUMBER``, which is the call's id then."""

    def reader(self, make_id: Callable[[], str], parallel: bool, tools: Tools) -> Calls:
        """Reads one output."""
        return Calls(self, make_id, parallel)


LIST = Format("", between="[],")
"""What the grammar of required calls lets a model write."""
_ALPHABET = string.ascii_letters + string.digits
_NAMES = ("arguments", "parameters")
LONGEST_NAME = 512
"""Characters after which what precedes an object is no name of a function."""


@dataclass(frozen=True, slots=True)
class Piece:
    """More of the text, or of the reasoning before it, or of a call: first its id and name, then its arguments."""

    text: str = ""
    call: int | None = None
    """Number of the call within the output."""
    id: str = ""
    name: str = ""
    arguments: str = ""
    reasoning: str = ""

    @property
    def delta(self) -> dict[str, Any]:
        """As a chunk of a chat completion has it."""
        if self.reasoning:
            return {"reasoning": self.reasoning, "reasoning_content": self.reasoning}
        if self.call is None:
            return {"content": self.text}
        function = {"name": self.name, "arguments": ""} if self.name else {"arguments": self.arguments}
        head = {"id": self.id, "type": "function"} if self.name else {}
        return {"tool_calls": [{"index": self.call, **head, "function": function}]}


class Reader(Protocol):
    """Reads one output."""

    ends: Finish
    """The ``finish_reason`` of an output with calls."""
    empty: str | None
    """The content of an output with nothing but calls."""

    def push(self, text: str, last: bool = False) -> list[Piece]:
        """What is certain after ``text``; with ``last`` all the rest."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What a whole output consists of."""

    content: str
    reasoning: str
    calls: list[dict[str, Any]]


def gather(reader: Reader, text: str) -> Parts:
    """The parts of a whole output: what its pieces in a stream add up to."""
    content = reasoning = ""
    calls: list[dict[str, Any]] = []
    for piece in reader.push(text, last=True):
        if piece.call is None:
            content, reasoning = content + piece.text, reasoning + piece.reasoning
        elif piece.name:
            function = {"name": piece.name, "arguments": ""}
            calls.append({"id": piece.id, "type": "function", "function": function})
        else:
            calls[-1]["function"]["arguments"] += piece.arguments
    return Parts(content, reasoning, calls)


class Named:
    """An output that is the arguments of one function, whose name is known."""

    empty: str | None = ""
    ends: Finish = "stop"

    def __init__(self, name: str, make_id: Callable[[], str]) -> None:
        self._name, self._id = name, make_id()
        self._begun = False

    def push(self, text: str, last: bool = False) -> list[Piece]:
        """As :class:`Reader`."""
        head = [] if self._begun else [Piece(call=0, id=self._id, name=self._name)]
        self._begun = True
        return [*head, Piece(call=0, arguments=text)] if text else head


class Calls:
    """An output in which calls of one format may occur."""

    ends: Finish = "tool_calls"

    def __init__(self, form: Format, make_id: Callable[[], str], parallel: bool = True) -> None:
        self._form, self._make_id, self._parallel = form, make_id, parallel
        self._held = ""
        self._count = 0
        """Calls that have begun."""
        self._object: _Object | None = None
        self._opened = ""
        """Markers and whitespace before what may be a call."""
        self.empty = "" if form is LIST else None
        self._inside = not form.begin
        """Whether calls are expected rather than text."""

    def push(self, text: str, last: bool = False) -> list[Piece]:
        """As :class:`Reader`."""
        self._held += text
        found: list[Piece] = []
        while self._advance(found, last):
            pass
        if self._parallel:
            return found
        return [piece for piece in found if not piece.call]  # text, and the first call

    def _advance(self, found: list[Piece], last: bool) -> bool:
        """Go on by one part of what is held → whether more may follow from it."""
        if self._object is not None:
            return self._call(self._object, found, last)
        return self._between(found, last) if self._inside else self._text(found, last)

    def _text(self, found: list[Piece], last: bool) -> bool:
        marker = self._form.begin
        at = self._held.find(marker) if marker else -1
        plain = self._held[:at].rstrip() if at >= 0 else self._held
        if at < 0 and marker and not last:
            plain = plain[: certain(plain, marker)]
        if plain and not (self._count and plain.isspace()):
            found.append(Piece(plain))
        if at < 0:
            self._held = self._held[len(plain) :]
            return False
        self._opened = self._held[len(plain) : at + len(marker)]
        self._held, self._inside = self._held[at + len(marker) :], True
        return True

    def _between(self, found: list[Piece], last: bool) -> bool:
        form, held = self._form, self._held.lstrip()
        markers = [m for m in (form.begin, form.end, form.optional, *form.marks) if m]
        while held and held[0] in form.between and not any(m.startswith(held[: len(m)]) for m in markers):
            held = held[1:].lstrip()
        for marker in markers:
            if held.startswith(marker):
                self._opened += self._held[: len(self._held) - len(held) + len(marker)]
                self._held, self._inside = held[len(marker) :], marker != form.end
                return True
            if not last and marker.startswith(held):
                return False
        name, brace, rest = held.partition("{")
        if brace and (not name or form.bare):
            self._opened += self._held[: len(self._held) - len(held)]
            if form.separator:
                kind, _, after = name.partition(form.separator)
                name = (after.strip() or kind).partition("\n")[0]
            name = name.partition("[")[0].strip()
            short = name.rpartition(":")[0].removeprefix("functions.") if form.numbered else ""
            self._held, self._object = "{" + rest, _Object(short or name, name if short else "")
            return True
        if not last and (not held or (form.bare and len(held) < LONGEST_NAME)):
            return False
        return self._give_up(found, self._held if held or not self._count else "")

    def _call(self, call: _Object, found: list[Piece], last: bool) -> bool:
        self._held = call.push(self._held)
        ended = call.done or last
        if ended and call.sent < 0 and not call.sound and not call.fresh():
            self._object = None
            return self._give_up(found, call.raw + self._held)
        arguments = call.fresh()
        if call.sent < 0 and (arguments or call.sound):
            found.append(Piece(call=self._count, id=call.id or self._make_id(), name=call.name))
            self._count, self._opened, call.sent = self._count + 1, "", 0
        if arguments:
            found.append(Piece(call=self._count - 1, arguments=arguments))
            call.sent += len(arguments)
        if call.done:
            self._object = None
        return call.done

    def _give_up(self, found: list[Piece], text: str) -> bool:
        """What looked like a call is text; calls may follow in ``text``."""
        if self._opened:
            found.append(Piece(self._opened))
        self._held, self._opened, self._inside = text, "", False
        return True


class _Object:
    """One JSON object, character by character; ``name``: it is the arguments of that function, in a call ``id``."""

    def __init__(self, name: str = "", id: str = "") -> None:
        self.raw, self.done, self.sound, self.name, self.id = "", False, False, name, id
        self.sent = -1
        """Characters of the arguments that were given out; -1: not even the name."""
        self._whole = bool(name)
        self._span: list[int | None] = [0 if name else None, None]
        """Where the arguments begin and end in ``raw``."""
        self._other: str | None = None
        """Arguments that are written as anything but an object."""
        self._depth, self._quoted, self._escaped, self._value = 0, False, False, False
        self._key, self._from = "", -1

    def push(self, text: str) -> str:
        """Read on → what follows the object."""
        begin = len(self.raw)
        self.raw += text
        for at in range(begin, len(self.raw)):
            self._step(self.raw[at], at)
            if self.done:
                left, self.raw = self.raw[at + 1 :], self.raw[: at + 1]
                self._finish()
                return left
        return ""

    def fresh(self) -> str:
        """Arguments that were not given out, once the name is known."""
        if not self.name:
            return ""
        if self._other is not None:
            return self._other[max(0, self.sent) :]
        begin, end = self._span
        return "" if begin is None else self.raw[begin + max(0, self.sent) : end]

    def _step(self, c: str, at: int) -> None:
        if self._quoted:
            if self._escaped or c == "\\":
                self._escaped = not self._escaped
            elif c == '"':
                self._quoted = False
                if self._depth == 1:
                    self._text(self.raw[self._from : at + 1])
        elif c == '"':
            self._quoted = True
            self._begin(at)
        elif c in "{[":
            self._begin(at)
            self._depth += 1
        elif c in "}]":
            self._depth -= 1
            self.done = self._depth == 0
            if self._depth == 1 and self._span[0] is not None and not self._whole and self._span[1] is None:
                self._span[1] = at + 1
        elif c in ":," and self._depth == 1:
            self._value, self._from = c == ":", -1

    def _begin(self, at: int) -> None:
        if self._depth == 1 and self._from < 0:
            self._from = at
            if self._value and self._key in _NAMES and self.raw[at] == "{" and self._span[0] is None:
                self._span[0] = at

    def _text(self, quoted: str) -> None:
        """A text directly within the object."""
        try:
            text = json.loads(quoted, strict=False)
        except ValueError:
            return  # what it is will be told at the end
        if not self._value:
            self._key = text
        elif self._key == "name" and not self._whole:
            self.name = text

    def _finish(self) -> None:
        try:
            value = json.loads(self.raw, strict=False)
        except (ValueError, RecursionError):
            return
        self.sound = self._whole or (bool(self.name) and any(name in value for name in _NAMES))
        if self.sound and self._span[0] is None:
            given: Any = next((value[name] for name in _NAMES if value.get(name) is not None), {})
            self._other = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)


def certain(text: str, marker: str) -> int:
    """How much of ``text`` cannot be the beginning of ``marker``, or whitespace before it."""
    size = next((n for n in range(min(len(marker) - 1, len(text)), 0, -1) if marker.startswith(text[-n:])), 0)
    return len(text[: len(text) - size].rstrip())


def id_maker(length: int) -> Callable[[], str]:
    """Makes ids of calls; of ``length`` letters and digits, where it is not 0."""
    if length:
        return lambda: "".join(secrets.choice(_ALPHABET) for _ in range(length))
    return lambda: f"call_{secrets.token_hex(12)}"
