"""Answers of requests whose prompts are pooled, not continued: embeddings, classes, scores."""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Sequence
from typing import Any

from ridgeline.serve.openai import Classification, EmbeddingRequest
from ridgeline.serve.scoring import PoolingRequest, RerankRequest, ScoreRequest
from ridgeline.serve.service import PreparedRequest, Service

Vectors = Sequence[list[float]]
"""Of all inputs, in order."""


def embeddings(prepared: PreparedRequest, found: Vectors, body: EmbeddingRequest) -> dict[str, Any]:
    """The answer of ``/v1/embeddings``: vectors of length 1, as floats or as the base64 of little-endian fp32."""
    data = [
        {"object": "embedding", "index": i, "embedding": _written(_cut(v, body), body)} for i, v in enumerate(found)
    ]
    return {"object": "list", "model": prepared.model, "data": data, "usage": _read(prepared)}


def classes(prepared: PreparedRequest, found: Vectors, body: Classification, service: Service) -> dict[str, Any]:
    """The answer of ``/classify``, as vLLM writes it: the likeliest label of each input, and all probabilities."""
    assert service.labels is not None
    data = []
    for i, logits in enumerate(found):
        probs = _activated(logits, body, service)
        label = service.labels.names[probs.index(max(probs))]
        data.append({"index": i, "label": label, "probs": probs, "num_classes": len(probs)})
    return _listed(prepared, data)


def pooled(prepared: PreparedRequest, found: Vectors, body: PoolingRequest, service: Service) -> dict[str, Any]:
    """The answer of ``/pooling``: an embedding, or probabilities of classes, of each input."""
    if prepared.jobs[0].request.classify:
        made = [_activated(logits, body, service) for logits in found]
    else:
        made = [_cut(v, body) for v in found]
    return _listed(prepared, [{"index": i, "object": "pooling", "data": _written(v, body)} for i, v in enumerate(made)])


def scores(prepared: PreparedRequest, found: Vectors, body: ScoreRequest) -> dict[str, Any]:
    """The answer of ``/score``."""
    made = _similar(found, body)
    return _listed(prepared, [{"index": i, "object": "score", "score": score} for i, score in enumerate(made)])


def ranks(prepared: PreparedRequest, found: Vectors, body: RerankRequest) -> dict[str, Any]:
    """The answer of ``/rerank``, the most similar first."""
    texts, made = body.texts()[1], _similar(found, body)
    order = sorted(range(len(made)), key=lambda i: -made[i])[: body.top_n or None]
    results = [
        {"index": i, **({"document": {"text": texts[i]}} if body.return_documents else {}), "relevance_score": made[i]}
        for i in order
    ]
    return {"id": prepared.id, "model": prepared.model, "usage": _read(prepared), "results": results}


def _activated(logits: list[float], body: Classification | PoolingRequest, service: Service) -> list[float]:
    assert service.labels is not None
    return logits if body.use_activation is False else service.labels.probabilities(logits)


def _similar(found: Vectors, body: ScoreRequest | RerankRequest) -> list[float]:
    """Cosine similarity of each pair."""
    count = len(body.texts()[0])
    units = [_unit(v) for v in found]
    first, second = units[:count], units[count:]
    pairs = zip(first * (len(second) if count == 1 else 1), second, strict=True)
    return [sum(a * b for a, b in zip(x, y, strict=True)) for x, y in pairs]


def _cut(vector: list[float], body: EmbeddingRequest | PoolingRequest) -> list[float]:
    vector = vector[: body.dimensions]
    return vector if body.normalize is False else _unit(vector)


def _unit(vector: list[float]) -> list[float]:
    norm = math.sqrt(sum(x * x for x in vector)) or 1.0
    return [x / norm for x in vector]


def _written(vector: list[float], body: EmbeddingRequest | PoolingRequest) -> Any:
    if body.encoding_format == "float":
        return vector
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


def _listed(prepared: PreparedRequest, data: list[dict[str, Any]]) -> dict[str, Any]:
    return {"id": prepared.id, "object": "list", "created": prepared.created, "model": prepared.model, "data": data,
            "usage": _read(prepared)}  # fmt: skip


def _read(prepared: PreparedRequest) -> dict[str, int]:
    return {"prompt_tokens": prepared.prompt_tokens, "total_tokens": prepared.prompt_tokens}
