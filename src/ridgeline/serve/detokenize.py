"""Incremental detokenization: partial characters and partial stop strings are held back.

A token is its bytes; text is what an incremental UTF-8 decoder makes of them, so that the pieces of a stream put
together are the whole text, whatever the tokens are. Of the decoded text the longest end that may yet become a stop
string is held back.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ridgeline.serve.request import EngineRequest, Finish, OutputEvent, TokenLogprob, Vector
from ridgeline.spec.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def _byte_of() -> dict[str, int]:
    """The letters that byte-level BPE writes bytes as (GPT-2): printable ones as themselves, others from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = (b for b in range(256) if b not in plain)
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(rest)}


def _parts(decoder: dict[str, Any] | None) -> dict[str, dict[str, Any]]:
    """A tokenizer's decoders by kind."""
    if decoder is None:
        return {}
    parts = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    return {part["type"]: part for part in parts}


class Vocabulary:
    """A tokenizer, and the exact bytes that each token id below ``size`` stands for (none: it stands for nothing).

    A tokenizer that pads or cuts what it is given no longer does. Raises :class:`UserError` for one whose tokens have
    no bytes of their own.
    """

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self.tokenizer = tokenizer
        self.size = size
        added = tokenizer.get_added_tokens_decoder()
        self.special = frozenset(i for i, token in added.items() if token.special)
        parts = _parts(None if tokenizer.decoder is None else json.loads(tokenizer.decoder.__getstate__()))
        self.bytes: list[bytes] = [b""] * size
        for text, i in tokenizer.get_vocab(with_added_tokens=True).items():
            if i < size:
                self.bytes[i] = text.encode() if i in added else _bytes_of(text, parts)
        self.longest = max(LONGEST_WORD, *map(len, self.bytes))
        """Largest number of bytes of a token."""

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Token ids of ``text``; with ``special`` also those that the tokenizer puts around one (as ``<s>``)."""
        # Of a batch of one: unlike ``Tokenizer.encode`` it lets other threads run meanwhile.
        return list(self.tokenizer.encode_batch([text], add_special_tokens=special)[0].ids)

    def offsets(self, text: str) -> list[tuple[int, int]]:
        """The characters (first, end) that each token of :meth:`encode` stands for; none of a special one."""
        return list(self.tokenizer.encode_batch([text])[0].offsets)

    def pair(self, first: str, second: str, most: int | None = None) -> tuple[list[int], list[int]]:
        """Token ids of two texts as one prompt, and the kind of each; no more than ``most`` of them, cut from the end
        of the longer text, or of both (Hugging Face's ``longest_first``)."""
        a, b = self.tokenizer.encode_batch([first, second], add_special_tokens=False)
        if most is not None:
            room = max(0, most - self.tokenizer.num_special_tokens_to_add(True))
            short = min(len(a), len(b))
            long = short if short > room else max(short, room - short)
            if short + long > room:
                short, long = room // 2, room - room // 2
            a.truncate(min(len(a), long if len(a) > len(b) else short))
            b.truncate(min(len(b), short if len(a) > len(b) else long))
        whole = self.tokenizer.post_process(a, b)
        return list(whole.ids), list(whole.type_ids)

    def decode(self, tokens: Iterable[int], skip_special: bool = True) -> str:
        """The text of whole ``tokens``."""
        skipped = self.special if skip_special else frozenset()
        return b"".join(self.bytes[i] for i in tokens if i not in skipped).decode("utf-8", "replace")

    def entries(self, tokens: Iterable[int]) -> list[str]:
        """What the tokenizer's vocabulary has for ``tokens``; "" where it has nothing."""
        return [self.tokenizer.id_to_token(t) or "" for t in tokens]

    def name(self, token: int) -> str:
        """A token's own text; bytes that are no text are spelled out, as the OpenAI API does."""
        raw = self.bytes[token] if 0 <= token < self.size else b""
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{b:02x}" for b in raw)


_LETTERS = _byte_of()
LONGEST_WORD = 128
"""Bytes that a token has room for in any case: WordPiece makes a word of more than 100 letters one unknown token."""


def _bytes_of(text: str, parts: dict[str, dict[str, Any]]) -> bytes:
    if "ByteLevel" in parts:
        return b"".join(bytes([_LETTERS[c]]) if c in _LETTERS else c.encode() for c in text)
    if "WordPiece" in parts:
        prefix = parts["WordPiece"]["prefix"]
        return text.removeprefix(prefix).encode() if text.startswith(prefix) else f" {text}".encode()
    if "ByteFallback" in parts and len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        return bytes([int(text[3:5], 16)])
    if "Metaspace" in parts or "Replace" in parts:
        return text.replace(parts.get("Metaspace", {}).get("replacement", "▁"), " ").encode()
    if not parts:
        return f" {text}".encode()  # words
    raise UserError(f"a tokenizer with decoder {', '.join(parts)} is not known", "use byte-level BPE or SentencePiece")


class Detokenizer:
    """The text of one output, token by token.

    Of several stop strings the one that is complete first ends the text, and of those the longest: the result does not
    depend on how the text was cut into tokens. Tokens before ``min_tokens`` end nothing.
    """

    def __init__(
        self, vocabulary: Vocabulary, stops: Sequence[str] = (), include_stop: bool = False,
        skip_special: bool = True, min_tokens: int = 0,
    ) -> None:  # fmt: skip
        self._bytes = vocabulary.bytes
        self._skipped = vocabulary.special if skip_special else frozenset()
        self._stops, self._include, self._min = tuple(stops), include_stop, min_tokens
        self._longest = max(map(len, self._stops), default=0)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self.tokens = 0
        """Tokens seen."""
        self.sent = 0
        """Number of characters returned."""
        self.stop: str | None = None
        """The stop string that ended the text."""

    @property
    def length(self) -> int:
        """Characters known of so far, given out or held."""
        return self.sent + len(self._held)

    def push(self, token: int) -> str:
        """The text that is certain after ``token``. Nothing may be pushed once ``stop`` is set."""
        self.tokens += 1
        if token not in self._skipped:
            self._held += self._utf8.decode(self._bytes[token])
        return self._certain()

    def skip(self) -> None:
        """Count a token without text, such as the one that ends the output."""
        self.tokens += 1

    def flush(self) -> str:
        """The rest of the text, after the last token."""
        self._held += self._utf8.decode(b"", final=True)
        return self._certain(last=True)

    def _certain(self, last: bool = False) -> str:
        if not self._stops or self.tokens < self._min:
            return self._give(len(self._held))
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            end, start, self.stop = min(found)
            self._held = self._held[: end if self._include else start]
            return self._give(len(self._held))
        return self._give(len(self._held) - (0 if last else self._open()))

    def _open(self) -> int:
        """How many characters at the end may be the beginning of a stop string."""
        for size in range(min(self._longest - 1, len(self._held)), 0, -1):
            end = self._held[-size:]
            if any(stop.startswith(end) for stop in self._stops):
                return size
        return 0

    def _give(self, size: int) -> str:
        text, self._held = self._held[:size], self._held[size:]
        self.sent += len(text)
        return text


@dataclass(slots=True)
class Entry:
    """A token's log-probabilities, and where in the text it begins."""

    logprob: TokenLogprob
    offset: int


@dataclass(slots=True)
class Delta:
    """The new part of one output, as text. Deltas of the same output add up."""

    job: int
    """Index of the prompt within its request."""
    index: int
    text: str = ""
    entries: list[Entry] = field(default_factory=list)
    finish: Finish | None = None
    stop_reason: str | int | None = None
    """The stop string or stop token that ended it."""
    tokens: list[int] = field(default_factory=list)
    """New tokens, also those whose text is held back."""
    generated: int = 0
    """Tokens so far."""
    cached_tokens: int = 0
    preemptions: int = 0
    error: str = ""
    prompt_logprobs: list[TokenLogprob] | None = None
    embedding: Vector | None = None

    def add(self, later: Delta) -> None:
        """Append the delta that follows this one."""
        self.text += later.text
        self.entries += later.entries
        self.tokens += later.tokens
        self.finish, self.stop_reason, self.error = later.finish, later.stop_reason, later.error
        self.generated, self.cached_tokens = later.generated, max(self.cached_tokens, later.cached_tokens)
        self.preemptions = later.preemptions
        self.prompt_logprobs = self.prompt_logprobs or later.prompt_logprobs
        self.embedding = self.embedding or later.embedding


@dataclass
class ServeJob:
    """A request of the engine and how its outputs are detokenized."""

    request: EngineRequest
    vocabulary: Vocabulary
    ordinal: int = 0
    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special: bool = True

    def __post_init__(self) -> None:
        if self.stops and self.request.sampling.ranked:
            self.request = replace(self.request, watch=self._detokenizer())
        self._outputs: dict[int, tuple[Detokenizer, list[Entry]]] = {}
        self.open = set(range(1 if self.request.embed else self.request.sampling.n))
        """Number of outputs that have not ended."""

    @property
    def sequences(self) -> int:
        """Sequences that the engine makes for it."""
        return 1 if self.request.embed else self.request.sampling.sequences

    def read(self, event: OutputEvent) -> Delta | None:
        """The event as text; None for an output that has ended. Raises nothing.

        When a stop string ended the output before the engine knew, ``finish`` is "stop", the event's is not: the engine
        has to be told, with ``generated`` as the number of tokens that count.
        """
        if event.index not in self.open:
            return None
        text, entries = self._outputs.setdefault(event.index, (self._detokenizer()(), []))
        delta = Delta(self.ordinal, event.index, finish=event.finish, stop_reason=event.stop_token, error=event.error,
                      cached_tokens=event.cached_tokens, prompt_logprobs=event.prompt_logprobs,
                      embedding=event.embedding, preemptions=event.preemptions)  # fmt: skip
        ended = event.finish == "stop" and event.stop_string is None  # by a token
        ends = len(event.tokens) - 1 if ended and not self.include_stop else -1
        for i, token in enumerate(event.tokens):
            delta.tokens.append(token)
            if event.logprobs is not None:
                entries.append(Entry(event.logprobs[i], text.length))
            if i == ends:
                text.skip()
                break
            delta.text += text.push(token)
            if text.stop is not None:
                break
        if delta.finish and text.stop is None:
            delta.text += text.flush()
        if delta.finish and event.unstructured:
            delta.finish, delta.error = "error", f"the structure could not be kept: {event.unstructured}"
        if text.stop is not None:
            delta.finish, delta.stop_reason = "stop", text.stop
        known = len(entries)
        if not delta.finish or text.stop is not None:  # tokens whose text is held back (or was cut off) stay here
            known = next((i for i, entry in enumerate(entries) if entry.offset >= text.sent), known)
        delta.entries, entries[:] = entries[:known], entries[known:]
        delta.generated = text.tokens
        if delta.finish:
            self.open.discard(event.index)
        return delta

    def _detokenizer(self) -> Callable[[], Detokenizer]:
        """Makes what detokenizes one output; without a reference to this job, as it may go to another process."""
        smallest = self.request.sampling.min_tokens
        return partial(Detokenizer, self.vocabulary, self.stops, self.include_stop, self.skip_special, smallest)
