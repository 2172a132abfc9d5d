"""Requests that a server has to survive: valid ones, mutated at random places, and raw rubbish."""

from __future__ import annotations

import json
import random
from typing import Any

VALID: dict[str, list[dict[str, Any]]] = {
    "/v1/completions": [
        {"prompt": "a", "max_tokens": 2},
        {"prompt": ["a", "b"], "max_tokens": 2, "n": 2, "stop": ["x"], "seed": 1, "logprobs": 2, "echo": True},
        {"prompt": [[1, 2], [3]], "max_tokens": 2, "stream": True, "stream_options": {"include_usage": True}},
        {"prompt": [5], "max_tokens": 4, "structured_outputs": {"regex": "a+b"}, "top_k": 5, "min_p": 0.1},
        {"prompt": "a", "max_tokens": 2, "use_beam_search": True, "n": 2, "best_of": 3, "length_penalty": 1.0},
        {"prompt": "a", "max_tokens": 2, "logit_bias": {"7": 3.0}, "presence_penalty": 1.0, "stop_token_ids": [4]},
    ],
    "/v1/chat/completions": [
        {"messages": [{"role": "user", "content": "a"}], "max_completion_tokens": 2, "logprobs": True},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "max_tokens": 2, "stream": True},
        {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3, "response_format": {"type": "json_object"}},
        {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3,
         "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "array", "maxItems": 2}}}},
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{\"a\": 1}"}}]},
            {"role": "tool", "content": "b", "tool_call_id": "c"}], "max_tokens": 3, "tool_choice": "required",
         "tools": [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {
             "type": "object", "properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"type": "integer"}}}}}]},
    ],
    "/v1/responses": [
        {"input": "a", "max_output_tokens": 2, "instructions": "b", "stream": True, "top_logprobs": 1},
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]},
                   {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                   {"type": "function_call_output", "call_id": "c", "output": "d"}], "max_output_tokens": 3,
         "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
         "tool_choice": {"type": "function", "name": "f"}},
    ],
    "/v1/embeddings": [{"input": ["a", "b"], "encoding_format": "base64"}],
    "/pooling": [{"input": ["a", "b"], "encoding_format": "base64", "normalize": False, "task": "embed"}],
    "/v1/score": [{"text_1": "a", "text_2": ["b", "c"]}],
    "/v1/rerank": [{"query": "a", "documents": ["b", {"text": "c"}], "top_n": 1}],
    "/tokenize": [{"prompt": "a"}, {"messages": [{"role": "user", "content": "a"}]}],
    "/detokenize": [{"tokens": [1, 2]}],
    "/v1/load_lora_adapter": [{"lora_name": "x", "lora_path": "/nowhere"}],
}  # fmt: skip

ODD: list[Any] = [
    None, True, False, 0, -1, 1, 3, 2**31, 2**63, -(2**63) - 1, 10**400, 0.5, -0.0, 1e308, float("nan"), float("inf"),
    "", "a", "\x00", "\ud800", "猫" * 50, "x" * 5000, [], [[]], [[[]]], {}, {"a": {"b": 1}}, [1, "a"], [None], [-1],
    [300], [2**70], "NaN", "1", {"type": "nothing"}, [{"role": "user"}], {"regex": "("}, {"regex": "(a*)*" * 20},
    {"type": "json_schema"}, {"json": {"$ref": "#"}}, {"grammar": "start: start"}, {"choice": []},
]  # fmt: skip


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(p for key, v in inner for p in _places(v, (*path, key)))]


def _change(value: Any, rng: random.Random) -> Any:
    """``value`` with something odd, doubled, missing or new somewhere in it."""
    value = json.loads(json.dumps(value))
    path = rng.choice(_places(value)[1:] or [()])
    if not path:
        return rng.choice(ODD)
    outer = value
    for key in path[:-1]:
        outer = outer[key]
    what = rng.randrange(6)
    if what == 0:
        del outer[path[-1]]
    elif what == 1 and isinstance(outer, dict):
        outer[rng.choice(["x", "temprature", "", "\ud800", "schema", "a" * 3000])] = rng.choice(ODD)
    else:
        outer[path[-1]] = rng.choice(ODD)
    return value


def _deep(rng: random.Random) -> bytes:
    opening, closing = rng.choice([(b"[", b"]"), (b'{"a":', b"}")])
    depth = rng.choice([50, 900, 50_000])
    return opening * depth + b"1" + closing * depth


def request(seed: int) -> tuple[str, str, bytes, dict[str, str]]:
    """(method, path, body, headers) number ``seed``."""
    rng = random.Random(seed)
    path = rng.choice(list(VALID))
    headers = {"content-type": "application/json"}
    body = rng.choice(VALID[path])
    for _ in range(rng.choice([0, 1, 1, 1, 2, 5])):
        body = _change(body, rng) if isinstance(body, (dict, list)) else body
    raw = json.dumps(body).encode()
    kind = rng.randrange(20)
    if kind == 0:
        raw = raw[: rng.randrange(len(raw) + 1)]
    elif kind == 1:
        raw = bytes(rng.randrange(256) for _ in range(rng.randrange(200)))
    elif kind == 2:
        raw = _deep(rng)
    elif kind == 3:
        raw = raw.replace(
            b'"a"', rng.choice([b'"\xff\xfe"', b'"\\ud800"', b"1e999", b"-", b'"' + b"y" * 20_000 + b'"'])
        )
    elif kind == 4:
        headers["content-type"] = rng.choice(
            ["text/plain", "", "application/json; charset=utf-16", "multipart/form-data"]
        )
    elif kind == 5:
        return rng.choice(["GET", "PUT", "DELETE", "PATCH", "OPTIONS"]), path, raw, headers
    elif kind == 6:
        return "POST", rng.choice(["/v1/nothing", "/v1/completions/", "/%00", "/v1/models/%ff%00", "//"]), raw, headers
    return "POST", path, raw, headers
