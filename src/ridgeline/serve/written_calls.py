"""Calls of functions that a model writes as Python or in tags, not as JSON."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ridgeline.serve.request import Finish
from ridgeline.serve.tool_calls import Piece, Tools, certain

_CLOSED = {"(": ")", "[": "]", "{": "}"}


@dataclass(frozen=True)
class PythonFormat:
    """Calls as in Python, with keywords only: ``name(argument=value)``."""

    begin: str
    """Before the calls; "[": the text is a list of calls and nothing else."""
    end: str
    optional: tuple[str, ...] = ()
    """Markers that may stand around them."""
    special: bool = False
    id_length: int = 0

    def reader(self, make_id: Callable[[], str], parallel: bool, tools: Tools) -> WrittenCalls:
        """Reads one output."""
        return WrittenCalls(
            self.begin, self.end, PythonCalls().read, make_id, parallel, "(", ")", self.begin == "[", self.optional
        )


@dataclass(frozen=True)
class TagFormat:
    """Calls in tags: ``<function=NAME>``, in it ``<parameter=NAME>VALUE</parameter>`` for each argument."""

    begin: str = "<tool_call>"
    end: str = "</tool_call>"
    special: bool = True
    id_length: int = 0

    def reader(self, make_id: Callable[[], str], parallel: bool, tools: Tools) -> WrittenCalls:
        """Reads one output. Values are of the types that ``tools`` say."""

        def read(text: str) -> tuple[int, str, dict[str, Any]] | None:
            return _tags(text, tools)

        return WrittenCalls(self.begin, self.end, read, make_id, parallel, "<function=", ">")


@dataclass(frozen=True)
class EscapedFormat:
    """Calls as FunctionGemma writes them: ``call:NAME{argument:<escape>text<escape>,argument:2}``."""

    begin: str = "<start_function_call>"
    end: str = "<end_function_call>"
    special: bool = True
    id_length: int = 0

    def reader(self, make_id: Callable[[], str], parallel: bool, tools: Tools) -> WrittenCalls:
        """Reads one output. Texts are of the types that ``tools`` say."""

        return WrittenCalls(self.begin, self.end, EscapedCalls(tools).read, make_id, parallel, "{", "}")


class WrittenCalls:
    """An output in which calls may occur; each is given out when it is complete."""

    empty: str | None = None
    ends: Finish = "tool_calls"

    def __init__(
        self, begin: str, end: str, read: Callable[[str], tuple[int, str, dict[str, Any]] | None],
        make_id: Callable[[], str], parallel: bool, opens: str, closing: str, alone: bool = False,
        optional: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        """``read``: one call at the beginning of a text → its length, name and arguments; None: more must follow. It
        raises ValueError where none is. ``opens``, ``closing``: of a call. ``alone``: calls are all
        of the text."""
        self._begin, self._end, self._read, self._make_id = begin, end, read, make_id
        self._parallel, self._alone, self._optional = parallel, alone, optional
        self._held, self._opened = "", ""
        self._count = 0
        self._state = "start" if alone else "text"
        self._opens, self._closing = opens, closing
        self._seen = ""
        """What was read of a call that is not complete."""

    def push(self, text: str, last: bool = False) -> list[Piece]:
        """As :class:`ridgeline.serve.tool_calls.Reader`."""
        self._held += text
        found: list[Piece] = []
        steps = {"start": self._start, "text": self._text, "calls": self._calls}
        while steps[self._state](found, last):
            pass
        return found

    def _start(self, found: list[Piece], last: bool) -> bool:
        held = self._held.lstrip()
        for marker in (*self._optional, self._begin):
            if held.startswith(marker):
                self._opened += self._held[: len(self._held) - len(held) + len(marker)]
                self._held = held[len(marker) :]
                self._state = "calls" if marker == self._begin else "start"
                return True
            if not last and marker.startswith(held):
                return False
        return self._give_up(found)

    def _text(self, found: list[Piece], last: bool) -> bool:
        after = self._held.lstrip() if self._alone and self._count else ""
        for marker in self._optional if after else ():
            if after.startswith(marker):
                self._held = after[len(marker) :]
                return True
            if not last and marker.startswith(after):
                return False
        at = -1 if self._alone else self._held.find(self._begin)
        if at < 0:
            size = len(self._held) if last or self._alone else certain(self._held, self._begin)
            plain, self._held = self._held[:size], self._held[size:]
        else:
            plain, end = self._held[:at].rstrip(), at + len(self._begin)
            self._opened, self._held, self._state = self._held[len(plain) : end], self._held[end:], "calls"
        if plain and not (self._count and plain.isspace()):
            found.append(Piece(plain))
        return at >= 0

    def _calls(self, found: list[Piece], last: bool) -> bool:
        held = self._held.lstrip(", \t\r\n")
        if held.startswith(self._end) and self._opened:
            return self._give_up(found)  # none at all
        if held.startswith(self._end):
            self._held, self._opened, self._state = held[len(self._end) :], "", "text"
            return True
        if not last and self._end.startswith(held):
            return False
        if (
            self._seen
            and self._opens in held
            and not last
            and not any(c in held[len(self._seen) :] for c in self._closing)
        ):
            self._seen = held
            return False
        try:
            made = self._read(held)
            written = "" if made is None else json.dumps(made[2], ensure_ascii=False, allow_nan=False)
            written.encode()
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            return self._give_up(found)
        if made is None:
            self._seen = held
            return self._give_up(found) if last else False
        self._seen = ""
        size, name, _ = made
        if self._parallel or not self._count:
            found.append(Piece(call=self._count, id=self._make_id(), name=name))
            found.append(Piece(call=self._count, arguments=written))
        self._count += 1
        self._held, self._opened = held[size:], ""
        return True

    def _give_up(self, found: list[Piece]) -> bool:
        """What looked like a call is text; calls may follow."""
        if self._opened:
            found.append(Piece(self._opened))
        self._opened, self._seen, self._state = "", "", "text"
        return True


class PythonCalls:
    """Reads calls as in Python. Of one that is not complete, what was there before is not looked at again."""

    def __init__(self) -> None:
        self._begin("", 0)

    def _begin(self, seen: str, at: int) -> None:
        self._seen, self._at = seen, at
        self._open: list[str] = []
        """What closes the brackets that are open at :attr:`_at`."""
        self._quote = ""
        """Of the string that it is in."""

    def read(self, text: str) -> tuple[int, str, dict[str, Any]] | None:
        """A call at the beginning of ``text``; JSON's literals stand for Python's."""
        name = re.match(r"[A-Za-z_][\w.\-]*", text)
        if name is None or text[name.end() : name.end() + 1] not in ("", "("):
            raise ValueError("no call")
        if not (self._seen and text.startswith(self._seen)):
            self._begin(text, name.end())
        self._seen = text
        size = self._closed(text)
        if size is None:
            return None
        self._begin("", 0)
        call = ast.parse(f"f{text[name.end() : size]}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or any(keyword.arg is None for keyword in call.keywords):
            raise ValueError("not only keywords")
        return size, name[0], {str(keyword.arg): _value(keyword.value) for keyword in call.keywords}

    def _closed(self, text: str) -> int | None:
        """Where the first bracket of ``text`` has closed; None: not yet."""
        while self._at < len(text):
            c = text[self._at]
            self._at += 1
            if self._quote:
                if c == "\\":
                    self._at += 1
                elif c == self._quote:
                    self._quote = ""
            elif c in "'\"":
                self._quote = c
            elif c in _CLOSED:
                self._open.append(_CLOSED[c])
            elif self._open and c == self._open[-1]:
                self._open.pop()
                if not self._open:
                    return self._at
        return None


def _value(node: ast.expr) -> Any:
    literals = {"null": None, "true": True, "false": False}
    if isinstance(node, ast.Name) and node.id in literals:
        return literals[node.id]
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_value(element) for element in node.elts]
    if isinstance(node, ast.Dict):
        if None in node.keys:
            raise ValueError("not a literal")
        return {str(_value(k)): _value(v) for k, v in zip(node.keys, node.values, strict=True) if k is not None}
    return ast.literal_eval(node)


_FUNCTION = re.compile(r"<function=([^>\s]+)>(.*?)</function>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>(.*?)(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL)


def _tags(text: str, tools: Tools) -> tuple[int, str, dict[str, Any]] | None:
    """A call at the beginning of ``text``."""
    opening = "<function="
    if not text.startswith(opening[: len(text)]):
        raise ValueError("no call")
    made = _FUNCTION.match(text) if "</function>" in text else None
    if made is None:
        return None
    properties = _properties(tools.get(made[1]))
    arguments = {
        name: _typed(value.removeprefix("\n").removesuffix("\n"), properties.get(name))
        for name, value in _PARAMETER.findall(made[2])
    }
    return made.end(), made[1], arguments


def _properties(schema: Any) -> dict[str, Any]:
    found = schema.get("properties") if isinstance(schema, dict) else None
    return found if isinstance(found, dict) else {}


def _typed(text: str, schema: Any) -> Any:
    """A value as ``schema`` has it: a text stays one."""
    kinds: Any = "string"
    if isinstance(schema, dict):
        kinds, values, parts = (schema.get(name) for name in ("type", "enum", "anyOf"))
        if kinds is None and not (isinstance(values, list) and not all(isinstance(v, str) for v in values)):
            kinds = [p.get("type") for p in parts if isinstance(p, dict)] if isinstance(parts, list) else "string"
    if kinds == "string" or (isinstance(kinds, list) and "string" in kinds and text != "null"):
        return text
    try:
        return json.loads(text)
    except ValueError:
        return {"True": True, "False": False, "None": None}.get(text.strip(), text)


_ESCAPE = "<escape>"
_CALL = re.compile(r"call:([\w.\-]+)(?=\{)")
_MARK = re.compile(r"<escape>|[{}\[\]]")
_CALL_BEGUN = re.compile(r"c(a(l(l(:[\w.\-]*)?)?)?)?")


class EscapedCalls:
    """Reads calls as FunctionGemma writes them. Of one that is not complete, what was there before is not looked at
    again."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._begin("", 0)

    def _begin(self, seen: str, at: int) -> None:
        self._seen, self._at, self._depth, self._inside = seen, at, 0, False

    def read(self, text: str) -> tuple[int, str, dict[str, Any]] | None:
        """A call at the beginning of ``text``."""
        made = _CALL.match(text)
        if made is None:
            if _CALL_BEGUN.fullmatch(text):
                return None
            raise ValueError("no call")
        if not (self._seen and text.startswith(self._seen)):
            self._begin(text, made.end())
        self._seen = text
        if not self._closed(text):
            return None
        self._begin("", 0)
        end, arguments = _members(text, made.end(), "}", _properties(self._tools.get(made[1])))
        return end, made[1], dict(arguments)

    def _closed(self, text: str) -> bool:
        """Whether the first brace of ``text`` has closed."""
        for mark in _MARK.finditer(text, self._at):
            self._at = mark.end()
            if mark[0] == _ESCAPE:
                self._inside = not self._inside
            elif not self._inside:
                self._depth += 1 if mark[0] in "{[" else -1
                if not self._depth:
                    return True
        self._at = max(self._at, len(text) - len(_ESCAPE) + 1)  # of which the rest may follow
        return False


def _members(text: str, at: int, close: str, properties: dict[str, Any]) -> tuple[int, list[Any]]:
    """What is between the bracket at ``at`` and the one that closes it: values, or in braces pairs → where it ends."""
    found: list[Any] = []
    at += 1
    while text[at : at + 1] != close:
        name = None
        if close == "}":
            colon = text.find(":", at)
            if colon < 0:
                raise ValueError("no call")
            name, at = text[at:colon].strip().strip("\"'"), colon + 1
        at, value = _member(text, at, properties.get(name) if name is not None else None)
        found.append(value if name is None else (name, value))
        if text[at : at + 1] == ",":
            at += 1
        elif text[at : at + 1] != close:
            raise ValueError("no call")
    return at + 1, found


def _member(text: str, at: int, schema: Any) -> tuple[int, Any]:
    """A value at ``at`` → where it ends, and what it is."""
    if text.startswith(_ESCAPE, at):
        end = text.find(_ESCAPE, at + len(_ESCAPE))
        if end < 0:
            raise ValueError("no call")
        return end + len(_ESCAPE), _typed(text[at + len(_ESCAPE) : end], schema)
    if text[at : at + 1] == "{":
        end, pairs = _members(text, at, "}", _properties(schema))
        return end, dict(pairs)
    if text[at : at + 1] == "[":
        return _members(text, at, "]", {})
    ends = (i for i in range(at, len(text)) if text[i] in ",}]")
    if (last := next(ends, None)) is None:
        raise ValueError("no call")
    return last, json.loads(text[at:last]) if schema is None else _typed(text[at:last], schema)
