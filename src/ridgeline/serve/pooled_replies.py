"""Answers of requests whose prompts are pooled, not continued: embeddings, classes, scores."""

from __future__ import annotations

import base64
import json
import math
import sys
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from starlette.responses import Response

from ridgeline.serve.http import Json
from ridgeline.serve.pooled_bodies import Classification, EmbeddingRequest, Encoded, PoolingRequest, Read
from ridgeline.serve.prepared_request import PreparedRequest
from ridgeline.serve.request import Vector
from ridgeline.serve.scoring import RerankRequest, ScoreRequest
from ridgeline.serve.service import Service

Vectors = Sequence[Any]
"""Of all inputs, in order: [H] or [labels] each; or [tokens, H or labels]."""


def embeddings(prepared: PreparedRequest, found: Vectors, body: EmbeddingRequest) -> Response:
    """The answer of ``/v1/embeddings``: vectors of length 1, as numbers, base64 or bytes; one of each input, or of each
    of its chunks."""
    if not prepared.chunks:
        return _encoded(prepared, [_cut(v, body) for v in found], body, ("embedding", "embedding"))
    pooled = (chunks.pooled(v) for chunks, v in zip(prepared.chunks, found, strict=True))
    vectors = [[_cut(v, body) for v in one] for one in pooled]
    return _encoded(prepared, vectors, body, ("embedding", "embedding"))


def classes(prepared: PreparedRequest, found: Vectors, body: Classification, service: Service) -> Response:
    """The answer of ``/classify``, as vLLM writes it: the likeliest label of each input, and all probabilities."""
    assert service.labels is not None
    data = []
    for i, logits in enumerate(found):
        probs = _activated(logits, body, service)
        label = service.labels.names[probs.index(max(probs))]
        data.append({"index": i, "label": label, "probs": probs, "num_classes": len(probs)})
    return Json(_listed(prepared, data))


def pooled(prepared: PreparedRequest, found: Vectors, body: PoolingRequest, service: Service) -> Response:
    """The answer of ``/pooling``: an embedding, or probabilities of classes, of each input or each of its tokens."""
    request = prepared.jobs[0].request

    def one(vector: list[float]) -> list[float]:
        return _activated(vector, body, service) if request.classify else _cut(vector, body)

    made = [list(map(one, v)) if request.each else one(v) for v in found]
    return _encoded(prepared, made, body, ("pooling", "data"))


def scores(prepared: PreparedRequest, found: Vectors, body: ScoreRequest, service: Service) -> Response:
    """The answer of ``/score``."""
    made = _compared(prepared, found, body, service)
    return Json(_listed(prepared, [{"index": i, "object": "score", "score": score} for i, score in enumerate(made)]))


def ranks(prepared: PreparedRequest, found: Vectors, body: RerankRequest, service: Service) -> Response:
    """The answer of ``/rerank``, the most similar first."""
    texts, made = body.texts()[1], _compared(prepared, found, body, service)
    order = sorted(range(len(made)), key=lambda i: -made[i])[: body.top_n or None]
    results = [
        {"index": i, **({"document": {"text": texts[i]}} if body.return_documents else {}), "relevance_score": made[i]}
        for i in order
    ]
    return Json({"id": prepared.id, "model": prepared.model, "usage": _read(prepared), "results": results})


def _activated(logits: list[float], body: Read, service: Service) -> list[float]:
    assert service.labels is not None
    return logits if body.use_activation is False else service.labels.probabilities(logits)


def _compared(
    prepared: PreparedRequest, found: Vectors, body: ScoreRequest | RerankRequest, service: Service
) -> list[float]:
    """A cross-encoder's score of each pair, the cosine similarity of its embeddings, or that of its tokens' (each of
    the first text's beside the most similar one of the second's, summed: MaxSim, arXiv:2004.12832)."""
    if prepared.jobs[0].request.classify:
        return [_activated(logits, body, service)[0] for logits in found]
    count = len(body.texts()[0])
    late = prepared.jobs[0].request.each
    units: list[Any] = [_units(v) for v in found] if late else [unit(v) for v in found]
    first, second = units[:count], units[count:]
    pairs = zip(first * (len(second) if count == 1 else 1), second, strict=True)
    if late:
        return [float((x @ y.T).max(1).sum()) for x, y in pairs]
    return [sum(a * b for a, b in zip(x, y, strict=True)) for x, y in pairs]


def _units(vectors: list[list[float]]) -> Any:
    """Vectors of length 1, as an array [tokens, width]."""
    import numpy as np

    rows = np.asarray(vectors)
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)


def _cut(vector: list[float], body: Encoded) -> list[float]:
    vector = vector[: body.dimensions]
    return vector if body.normalize is False or body.use_activation is False else unit(vector)


def unit(vector: list[float]) -> list[float]:
    """A vector of length 1 in the same direction."""
    norm = math.sqrt(sum(x * x for x in vector)) or 1.0
    return [x / norm for x in vector]


def _encoded(prepared: PreparedRequest, vectors: Vectors, body: Encoded, names: tuple[str, str]) -> Response:
    """Vectors as the body asks for them; ``names``: of an entry, and of the vector in it."""
    form = body.encoding_format
    kind, field = names
    if form in ("float", "base64"):
        written: list[Any] = list(vectors)
        if form == "base64":
            written = [base64.b64encode(_bytes(v, body)).decode() for v in vectors]
        data = [{"index": i, "object": kind, field: v, **_chunked(prepared, i)} for i, v in enumerate(written)]
        return Json(_listed(prepared, data))
    parts = [_bytes(v, body) for v in vectors]
    if form == "bytes_only":
        return Response(b"".join(parts), media_type="application/octet-stream")
    ends = list(accumulate(map(len, parts)))
    items = [
        {"index": i, "embed_dtype": body.embed_dtype, "endianness": body.endianness, "start": end - len(part),
         "end": end, "shape": _shape(vectors[i]), **_chunked(prepared, i)}
        for i, (part, end) in enumerate(zip(parts, ends, strict=True))
    ]  # fmt: skip
    about = json.dumps(_listed(prepared, items), separators=(",", ":"))
    return Response(b"".join(parts), media_type="application/octet-stream", headers={"metadata": about})


def _chunked(prepared: PreparedRequest, i: int) -> dict[str, Any]:
    """What an entry says of its input's chunks, where it has any."""
    return {"late_chunking": prepared.chunks[i].described()} if prepared.chunks else {}


def _shape(vector: Vector) -> list[int]:
    return [len(vector), *([len(vector[0])] if isinstance(vector[0], list) else [])]


def _bytes(vector: Vector, body: Encoded) -> bytes:
    """A vector's numbers one after the other."""
    import torch

    dtype = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16,
             "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}[body.embed_dtype]  # fmt: skip
    made = torch.tensor(vector, dtype=torch.float32).to(dtype)
    array = made.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[made.itemsize]).numpy()
    wanted = sys.byteorder if body.endianness == "native" else body.endianness
    return (array if wanted == sys.byteorder else array.byteswap()).tobytes()


def _listed(prepared: PreparedRequest, data: list[dict[str, Any]]) -> dict[str, Any]:
    return {"id": prepared.id, "object": "list", "created": prepared.created, "model": prepared.model, "data": data,
            "usage": _read(prepared)}  # fmt: skip


def _read(prepared: PreparedRequest) -> dict[str, int]:
    return {"prompt_tokens": prepared.prompt_tokens, "total_tokens": prepared.prompt_tokens}
