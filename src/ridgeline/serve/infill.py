"""Prompts with a gap, as models that were trained to fill one read them: what is before it, and what is after it.

Each family has marks of its own, which are tokens of its vocabulary (arXiv:2207.14255).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ridgeline.serve.detokenize import Vocabulary
from ridgeline.serve.request import Invalid

if TYPE_CHECKING:
    from ridgeline.serve.openai import Completion
    from ridgeline.serve.service import Service


@dataclass(frozen=True)
class Marks:
    """How a family writes a gap, as tokens' texts."""

    before: str
    after: str
    fill: str = ""
    """Begins what is filled in; empty: the text before the gap comes last, and is continued."""
    ends: tuple[str, ...] = ()
    """Tokens that end it, beside the end-of-sequence token."""


MARKS = (
    Marks("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", ("<|endoftext|>", "<|file_separator|>")),  # Qwen, Gemma
    Marks("<fim_prefix>", "<fim_suffix>", "<fim_middle>", ("<|endoftext|>",)),  # StarCoder, Granite
    Marks("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    Marks("▁<PRE>", "▁<SUF>", "▁<MID>", ("▁<EOT>",)),  # Code Llama
    Marks("[PREFIX]", "[SUFFIX]"),  # Codestral
)


class Infill:
    """Fills gaps with the marks that a vocabulary has."""

    def __init__(self, vocabulary: Vocabulary, before: int, after: int, fill: list[int], ends: Sequence[str]) -> None:
        """``before``, ``after``, ``fill``: the tokens of a family's :class:`Marks`."""
        token = vocabulary.tokenizer.token_to_id
        self._vocabulary, self._before, self._after, self._fill = vocabulary, before, after, fill
        self.ends = tuple(i for text in ends if (i := token(text)) is not None)

    @classmethod
    def of(cls, vocabulary: Vocabulary) -> Infill | None:
        """That of a tokenizer; None where it has no marks."""
        known = vocabulary.tokenizer.token_to_id
        for marks in MARKS:
            wanted = [known(text) for text in (marks.before, marks.after, marks.fill) if text]
            found = [i for i in wanted if i is not None and i < vocabulary.size]
            if len(found) == len(wanted):
                return cls(vocabulary, found[0], found[1], found[2:], marks.ends)
        return None

    def prompt(self, before: str | Sequence[int], after: list[int], special: bool) -> list[int]:
        """The tokens of a prompt whose continuation fills the gap between a text and the tokens ``after`` it; with
        ``special`` also those that the tokenizer begins a text with."""
        encode = self._vocabulary.encode
        first = encode(before, False) if isinstance(before, str) else list(before)
        begin = encode("") if special else []
        if not self._fill:
            return [*begin, self._after, *after, self._before, *first]
        return [*begin, self._before, *first, self._after, *after, *self._fill]

    def alone(self, text: str) -> list[int]:
        """The tokens of a text that goes on, without the space that SentencePiece begins every text with."""
        plain, anchor = self._vocabulary.encode(text, False), self._vocabulary.encode("\n", False)
        joined = self._vocabulary.encode("\n" + text, False)
        spaced = self._vocabulary.decode(plain, False) == f" {text}"
        return joined[len(anchor) :] if spaced and joined[: len(anchor)] == anchor else plain


def gaps(
    service: Service, body: Completion, given: Sequence[str | list[int]]
) -> tuple[list[list[int]], tuple[int, ...]]:
    """The prompts of a completion with a ``suffix``, and the tokens that end what is filled in. Raises
    :class:`Invalid`."""
    if service.infill is None:
        raise Invalid("suffix", "needs a model with tokens for a gap, which this one lacks", "leave it out")
    for name, refused in (("echo", body.echo), ("truncate_prompt_tokens", body.truncate_prompt_tokens is not None)):
        if refused:
            raise Invalid(name, "does not go with suffix", "leave it out")
    suffix, prompts = body.suffix or "", []
    service.short(suffix, "suffix")
    after = service.infill.alone(suffix)
    service.fits(after, "suffix")
    for before in given:
        if isinstance(before, str):
            service.short(before, "prompt")
        else:
            service.known(before, "prompt")
        prompts.append(service.infill.prompt(before, after, body.add_special_tokens))
        service.fits(prompts[-1], "prompt")
    return prompts, service.infill.ends
