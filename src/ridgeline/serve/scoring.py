"""Bodies of requests that compare texts: ``/score`` and ``/rerank``, as vLLM has them."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from ridgeline.serve.fields import MAX_INPUTS, Body, Number, Text
from ridgeline.serve.pooled_bodies import Read
from ridgeline.serve.request import Invalid

Texts = Annotated[list[Text], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)]

PAIRS = (("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2"), ("queries", "items"))


class ScoreRequest(Read):
    """``POST /v1/score``: how similar texts are, each of the first to each of the second, or one to all.

    The pairs of names are those that vLLM has had for the same two fields."""

    text_1: Text | Texts | None = None
    text_2: Text | Texts | None = None
    data_1: Text | Texts | None = None
    data_2: Text | Texts | None = None
    queries: Text | Texts | None = None
    documents: Text | Texts | None = None
    items: Text | Texts | None = None

    @property
    def names(self) -> tuple[str, str]:
        """The fields that texts come from. Raises :class:`Invalid` where they are no pair."""
        given = {name for pair in PAIRS for name in pair if getattr(self, name) is not None}
        found = next((pair for pair in PAIRS if set(pair) == given), None)
        if found is None:
            raise Invalid("text_1", "and text_2 are needed, and nothing else to compare", "give both")
        return found

    def texts(self) -> tuple[list[str], list[str]]:
        """The first texts and the second ones. Raises :class:`Invalid` where they do not pair up."""
        name = self.names[1]
        first, second = ([v] if isinstance(v := getattr(self, n), str) else list(v) for n in self.names)
        if len(first) not in (1, len(second)):
            what = f"holds {len(second)} texts for {len(first)} first ones"
            raise Invalid(name, what, "give as many, or one first text")
        if len(first) + len(second) > MAX_INPUTS:
            raise Invalid(name, f"makes more than {MAX_INPUTS} texts in all", "ask in several requests")
        return first, second


class Document(Body):
    """A document in an object."""

    text: Text


class RerankRequest(Read):
    """``POST /v1/rerank``: documents by how similar they are to a query."""

    query: Text
    documents: Annotated[
        list[Text | Document], Field(min_length=1, max_length=MAX_INPUTS - 1, fail_fast=True)
    ]  # fmt: skip
    top_n: Annotated[Number, Field(ge=0)] | None = None
    """Number of results to return, the best; 0: all."""
    max_tokens_per_doc: Number = 0
    """Read only the first tokens of each document, at most this number; 0: all."""
    return_documents: bool = True

    @property
    def names(self) -> tuple[str, str]:
        """The fields that texts come from."""
        return "query", "documents"

    @field_validator("max_tokens_per_doc")
    @classmethod
    def _not_negative(cls, value: int) -> int:
        if value < 0:
            raise PydanticCustomError("negative", "max_tokens_per_doc must be a non-negative integer")
        return value

    def texts(self) -> tuple[list[str], list[str]]:
        """The query, and the documents."""
        return [self.query], [d if isinstance(d, str) else d.text for d in self.documents]
