"""Bodies of requests that read texts and compare them: ``/pooling``, ``/score``, ``/rerank``, as vLLM has them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ridgeline.serve.fields import MAX_INPUTS, Body, Inputs, Number, Salt, Text
from ridgeline.serve.request import Invalid

Texts = Annotated[list[Text], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)]


class PoolingRequest(Body):
    """``POST /pooling``."""

    model: Text | None = None
    input: Inputs
    task: Literal["embed", "classify"] | None = None
    """None: what the model is for."""
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Number | None = None
    normalize: bool | None = None
    use_activation: bool | None = None
    """False: logits instead of probabilities of classes."""
    truncate_prompt_tokens: Annotated[Number, Field(ge=-1)] | None = None
    user: Text | None = None
    cache_salt: Salt | None = None
    priority: Number = 0


class ScoreRequest(Body):
    """``POST /v1/score``: how similar texts are, each of the first to each of the second, or one to all."""

    model: Text | None = None
    text_1: Text | Texts | None = None
    text_2: Text | Texts | None = None
    queries: Text | Texts | None = None
    """vLLM's newer name of ``text_1``."""
    documents: Text | Texts | None = None
    """That of ``text_2``."""
    truncate_prompt_tokens: Annotated[Number, Field(ge=-1)] | None = None
    user: Text | None = None
    priority: Number = 0

    @property
    def names(self) -> tuple[str, str]:
        """The fields that texts come from."""
        return ("text_1", "text_2") if self.text_1 is not None else ("queries", "documents")

    def texts(self) -> tuple[list[str], list[str]]:
        """The first texts and the second ones. Raises :class:`Invalid` where they do not pair up."""
        named = {"text_1": self.text_1, "text_2": self.text_2, "queries": self.queries, "documents": self.documents}
        given = {name: [v] if isinstance(v, str) else v for name, v in named.items() if v is not None}
        if set(given) not in ({"text_1", "text_2"}, {"queries", "documents"}):
            raise Invalid("text_1", "and text_2 are needed, and nothing else to compare", "give both")
        (_, first), (name, second) = given.items()
        if len(first) not in (1, len(second)):
            what = f"holds {len(second)} texts for {len(first)} first ones"
            raise Invalid(name, what, "give as many, or one first text")
        if len(first) + len(second) > MAX_INPUTS:
            raise Invalid(name, f"makes more than {MAX_INPUTS} texts in all", "ask in several requests")
        return first, second


class Document(Body):
    """A document in an object."""

    text: Text


class RerankRequest(Body):
    """``POST /v1/rerank``: documents by how similar they are to a query."""

    model: Text | None = None
    query: Text
    documents: Annotated[
        list[Text | Document], Field(min_length=1, max_length=MAX_INPUTS - 1, fail_fast=True)
    ]  # fmt: skip
    top_n: Annotated[Number, Field(ge=0)] | None = None
    """Return only so many; 0: all."""
    return_documents: bool = True
    truncate_prompt_tokens: Annotated[Number, Field(ge=-1)] | None = None
    user: Text | None = None
    priority: Number = 0

    @property
    def names(self) -> tuple[str, str]:
        """The fields that texts come from."""
        return "query", "documents"

    def texts(self) -> tuple[list[str], list[str]]:
        """The query, and the documents."""
        return [self.query], [d if isinstance(d, str) else d.text for d in self.documents]
