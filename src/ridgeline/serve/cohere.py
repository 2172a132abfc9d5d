"""Cohere's Embed API: ``/v2/embed``."""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from ridgeline.serve.fields import MAX_INPUTS, Body, Number, Text
from ridgeline.serve.http import Json
from ridgeline.serve.pooled_bodies import EmbeddingRequest
from ridgeline.serve.pooled_replies import unit
from ridgeline.serve.prepared_request import PreparedRequest
from ridgeline.serve.reading import Reading
from ridgeline.serve.request import Invalid, Vector

Kind = Literal["float", "base64", "binary", "ubinary"]


class Part(Body):
    """A text among the contents of an input."""

    type: Literal["text"]
    text: Text


class Input(Body):
    """An input of several contents, which are read as one text."""

    content: Annotated[list[Part], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)]


class EmbedRequest(Body):
    """``POST /v2/embed``."""

    model: Text | None = None
    texts: Annotated[list[Text], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)] | None = None
    inputs: Annotated[list[Input], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)] | None = None
    """Instead of ``texts``."""
    images: list[Any] | None = None
    """Refused: models here read text."""
    input_type: Text | None = None
    """The name of a prompt of the checkpoint (``config_sentence_transformers.json``), which goes before each text."""
    embedding_types: Annotated[list[Kind], Field(min_length=1, max_length=4)] | None = None
    """``binary``: a bit for each number, 1 unless it is negative, in signed bytes; ``ubinary``: in unsigned ones."""
    output_dimension: Number | None = None
    truncate: Literal["NONE", "START", "END"] = "END"
    """Which end of a text that is too long is cut off; ``NONE``: it is refused."""
    max_tokens: Annotated[Number, Field(ge=1)] | None = None
    """Most tokens of each text."""
    priority: Number = 0

    def renamed(self, param: str) -> str:
        """As :meth:`Body.renamed`."""
        given = "inputs" if self.texts is None else "texts"
        return {"dimensions": "output_dimension", "truncate_prompt_tokens": "max_tokens", "input": given}.get(
            param, param
        )

    def written(self) -> list[str]:
        """The texts. Raises :class:`Invalid` unless there is one of ``texts`` and ``inputs``."""
        if self.images is not None:
            raise Invalid("images", "are not read by this model", "give texts")
        if (self.texts is None) == (self.inputs is None):
            raise Invalid("texts", "either texts or inputs are needed", "give one of them")
        if self.texts is not None:
            return self.texts
        return ["\n".join(part.text for part in one.content) for one in self.inputs or ()]


class Embed:
    """The requests of one service."""

    def __init__(self, reading: Reading) -> None:
        self.reading = reading

    def prepare(self, body: EmbedRequest, key: bytes) -> PreparedRequest:
        """The jobs of embeddings. Raises :class:`Invalid`."""
        texts, prompts = body.written(), self.reading.service.prompt_names
        if body.input_type is not None and body.input_type not in prompts:
            known = f"give one of {', '.join(sorted(prompts))}" if prompts else "leave it out"
            raise Invalid("input_type", f"Unsupported input_type {body.input_type[:100]!r}", known)
        before = prompts[body.input_type] if body.input_type is not None else ""
        width = body.output_dimension or self.reading.service.loop.engine.spec.hidden_size
        if packed := next((kind for kind in body.embedding_types or () if kind.endswith("binary") and width % 8), None):
            raise Invalid("embedding_types", f"{packed} packs eight numbers a byte, of {width}", "ask for float")
        most = body.max_tokens
        if body.truncate != "NONE" and (most is None or most > self.reading.service.max_model_len):
            most = -1
        prepared = self.reading.embedding(EmbeddingRequest(
            model=body.model, input=[before + text for text in texts], dimensions=body.output_dimension,
            priority=body.priority, truncate_prompt_tokens=None if body.truncate == "NONE" else most,
            truncation_side="left" if body.truncate == "START" else "right",
        ), key)  # fmt: skip
        if body.truncate == "NONE" and most is not None:
            long = next((job for job in prepared.jobs if len(job.request.prompt) > most), None)
            if long is not None:
                what = f"a text has {len(long.request.prompt)} tokens, more than max_tokens={most}"
                raise Invalid(body.renamed("input"), what, "shorten it, or set truncate")
        return prepared

    def answer(self, prepared: PreparedRequest, found: Sequence[Vector], body: EmbedRequest) -> Json:
        """The vectors, of length 1, in each of the forms that are asked for."""
        vectors = [unit(v[: body.output_dimension]) for v in found]  # type: ignore[arg-type]
        made = {kind: [_written(v, kind) for v in vectors] for kind in body.embedding_types or ["float"]}
        units = {"input_tokens": prepared.prompt_tokens, "image_tokens": 0}
        return Json({"id": prepared.id, "embeddings": made, "texts": body.written(),
                     "meta": {"api_version": {"version": "2"}, "billed_units": units},
                     "response_type": "embeddings_by_type"})  # fmt: skip


def _written(vector: list[float], kind: Kind) -> Any:
    if kind == "float":
        return vector
    if kind == "base64":
        return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
    shift = 128 if kind == "binary" else 0
    return [
        sum((x >= 0) << (7 - i) for i, x in enumerate(vector[at : at + 8])) - shift for at in range(0, len(vector), 8)
    ]
