"""Outputs that must match a JSON schema, a regular expression or a grammar, by llguidance (extra ``serve``)."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np

from ridgeline.serve.request import Invalid
from ridgeline.spec.errors import UserError

if TYPE_CHECKING:
    from ridgeline.serve.detokenize import Vocabulary

Kind = Literal["json", "regex", "choice", "grammar"]
MAX_SIZE, MAX_DEPTH, KEPT = 64 * 1024, 64, 64
"""Limits on the characters and nesting of a constraint, and on the number of compiled grammars kept."""
SPACE = r"\n? {0,16}"
"""Whitespace between the parts of a JSON text: bounded, as an uncertain model may otherwise write blanks forever."""


class Matcher:
    """A :class:`Grammar` over llguidance's matcher.

    It never raises: a matcher that gives up (a grammar may turn out too complex only while it runs) lets nothing but an
    end follow, and ``failures``, which all forks share, says why: the request has failed.
    """

    def __init__(
        self, matcher: Any, size: int, ends: Sequence[int], source: tuple[Kind, Any], failures: list[str] | None = None
    ) -> None:
        """``source``: what it was compiled from, as :meth:`Grammars.compile` takes it."""
        self._matcher, self._size, self._ends, self.source = matcher, size, ends, source
        self.failures: list[str] = [] if failures is None else failures

    def allowed(self) -> Sequence[int] | None:
        """Token ids that may come next, ascending, as an int64 array."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        found = np.flatnonzero(np.unpackbits(bits, bitorder="little")[: self._size])
        if self._matcher.is_error() or not found.size:
            self.failures.append((self._matcher.get_error() or "nothing can follow").splitlines()[0])
            return self._ends
        return cast("Sequence[int]", found)

    def accept(self, token: int) -> None:
        """Advance by one token."""
        self._matcher.consume_token(token)

    def fork(self) -> Matcher:
        """An independent copy."""
        return Matcher(self._matcher.deep_copy(), self._size, self._ends, self.source, self.failures)

    def fresh(self) -> Matcher:
        """A copy for another request."""
        return Matcher(self._matcher.deep_copy(), self._size, self._ends, self.source)


class Grammars:
    """Compiles the constraints of requests over one vocabulary; caches the most recent ones."""

    def __init__(self, vocabulary: Vocabulary, eos: frozenset[int]) -> None:
        self._vocabulary, self._eos = vocabulary, eos
        self._tokenizer: Any = None
        self._kept: OrderedDict[tuple[str, str], Matcher] = OrderedDict()

    def compile(self, kind: Kind, source: Any, param: str) -> Matcher:
        """A fresh machine for ``source``. Raises :class:`Invalid` naming ``param`` for what cannot be compiled."""
        try:
            import llguidance
        except ImportError:
            raise UserError(
                "structured output needs the `llguidance` package", "pip install 'ridgeline[serve]'"
            ) from None
        if not self._eos:
            raise Invalid(param, "the model has no end token, without which nothing can be complete", "leave it out")
        if depth(source) > MAX_DEPTH:
            raise Invalid(param, f"is nested more than {MAX_DEPTH} deep", "make it flatter")
        key = (kind, json.dumps(source, sort_keys=True))
        if len(key[1]) > MAX_SIZE:
            raise Invalid(param, f"has {len(key[1])} characters, of {MAX_SIZE} at most", "make it smaller")
        if key not in self._kept:
            matcher = llguidance.LLMatcher(self._tokens(), _written(llguidance.LLMatcher, kind, source, param))
            if matcher.is_error():
                reason = matcher.get_error().strip().splitlines()[0]
                raise Invalid(param, f"cannot be compiled: {reason}", "see the llguidance documentation for what can")
            first = Matcher(matcher, self._vocabulary.size, sorted(self._eos), (kind, source))
            first.allowed()
            if first.failures:
                raise Invalid(param, f"nothing can match it ({first.failures[0]})", "write one that some text matches")
            self._kept[key] = first
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return self._kept[key].fresh()

    def _tokens(self) -> Any:
        """llguidance's view of the vocabulary, created on first use."""
        if self._tokenizer is None:
            import llguidance

            table = _Table(self._vocabulary, self._eos)
            self._tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(table), eos_token=sorted(self._eos))
        return self._tokenizer


class _Table:
    """Our table of bytes as ``llguidance.TokenizerWrapper`` wants it."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, eos: frozenset[int]) -> None:
        self._vocabulary = vocabulary
        self.tokens = vocabulary.bytes
        self.eos_token_id = min(eos)
        self.special_token_ids = sorted(vocabulary.special | eos)

    def __call__(self, text: bytes) -> list[int]:
        return self._vocabulary.encode(text.decode("utf-8", "replace"), special=False)


def _written(matcher: Any, kind: Kind, source: Any, param: str) -> str:
    """The request as llguidance's own grammar text."""
    try:
        if kind == "json":
            return str(matcher.grammar_from_json_schema(source, overrides={"whitespace_pattern": SPACE}))
        if kind == "choice":
            return str(matcher.grammar_from_lark("start: " + " | ".join(json.dumps(text) for text in source)))
        if kind == "regex":
            return str(matcher.grammar_from_regex(source))
        return str(matcher.grammar_from_lark(_lark(source)))
    except ValueError as e:
        fix = "write a JSON schema, a regular expression, or a grammar in GBNF or Lark's form"
        raise Invalid(param, f"cannot be read: {e}", fix) from e


def _lark(source: str) -> str:
    """A grammar in Lark's form, of llama.cpp's GBNF where it is none yet. Raises :class:`ValueError`."""
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return str(any_to_lark(source))
    except Exception as e:  # the converter raises plain exceptions for what is no grammar
        raise ValueError(str(e)) from None


def depth(value: Any) -> int:
    """How deep a JSON value is nested, without recursion: it may be an attacker's."""
    depth, level = 0, [value]
    while level and depth <= MAX_DEPTH + 1:
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer if isinstance(outer, list) else ())
        ]
        depth += 1
    return depth - 1
