"""The user's description of a load → workloads and prompts."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from pydantic import ValidationError

from ridgeline.measure.load.endpoint import Api
from ridgeline.measure.load.prompts import Characters, Prompts, RandomIds, TextIds
from ridgeline.spec.errors import UserError, unknown
from ridgeline.spec.workload import Serve

BURST, EVEN = 0.25, 1e4
"""Shape of the gaps between arrivals: bursts with twice a Poisson process' coefficient of variation, and one of 1 %."""
SECONDS, LEAST = 60, 100
"""Default length of a run, and its fewest requests: p99 needs a hundred."""
_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "": 1.0}
_TEXT = 1_000_000
"""Number of characters of text that prompts are cut from."""


def workloads(
    rate: str | None,
    arrival: str,
    input_len: str,
    output_len: str,
    requests: int | None,
    slo: str | None,
    seed: int,
    shared_prefix: int = 0,
) -> list[Serve]:
    """One workload per rate. Raises :class:`UserError` for what cannot be read."""
    fields = {**_lengths(input_len, output_len), **_limits(slo), "seed": seed, "requests": requests,
              "shared_prefix": shared_prefix}  # fmt: skip
    kind, _, detail = arrival.partition(":")
    if kind != "trace" and shared_prefix >= fields["prompt_len"]:
        raise UserError(f"--shared-prefix {shared_prefix} is the beginning of every prompt, and --input-len {input_len}"
                        " is not longer", f"give an --input-len above {shared_prefix}")  # fmt: skip
    rates: list[float | None] = [_number("--rate", r) for r in rate.split(",")] if rate else []
    if kind == "closed":
        if rates:
            raise UserError("--arrival closed sends when answers come", "leave out --rate, or use poisson")
        clients = [_clients(c) for c in detail.split(",")]
        return [_serve({**fields, "concurrency": c, "requests": requests or LEAST}) for c in clients]
    if kind == "trace":
        return [_serve({**fields, "trace": detail, "rate": r}) for r in rates or [None]]
    if kind == "burst":
        fields["burstiness"] = _number("--arrival burst", detail) if detail else BURST
    elif kind in ("poisson", "even"):
        if detail:
            raise UserError(f"--arrival {kind} takes nothing after it, and got {detail!r}", "give the rate with --rate")
        fields["burstiness"] = 1.0 if kind == "poisson" else EVEN
    else:
        raise unknown("arrival", arrival, ("poisson", "burst", "even", "trace:FILE", "closed:N"))
    return [
        _serve({**fields, "rate": r, "requests": requests or max(LEAST, math.ceil(SECONDS * (r or 1)))})
        for r in rates or [1.0]
    ]


def make_prompts(
    api: Api, data: str | None, tokenizer: str | None, vocab_size: int, shared: int, seed: int, run: int = 0
) -> tuple[Prompts, str]:
    """Prompts for an API, and their kind. Chat takes text; completions take token ids.
    Different ``run`` numbers give different prompts."""
    known = None
    if tokenizer:
        from ridgeline.data.tokenizer import load_tokenizer

        known = load_tokenizer(tokenizer)
    if api == "completions" and data is None:
        below = known.get_vocab_size() if known else vocab_size
        return RandomIds(below, seed, shared, run), f"random token ids below {below}"
    from ridgeline.data.text import documents

    source, text = data or "stdlib", ""
    for document in documents(source):
        text += document
        if len(text) >= _TEXT:
            break
    if known is None:
        return Characters(text[:_TEXT], seed, shared, run), f"4 characters a token of {source}"
    return TextIds(text[:_TEXT], known, api == "chat", seed, shared, run), f"pieces of {source}"


def extra_fields(text: str) -> dict[str, Any]:
    """A JSON object."""
    try:
        found = json.loads(text)
    except ValueError as e:
        raise UserError(f"--extra-body is no JSON: {e}", 'write {"top_k": 1}') from None
    if not isinstance(found, dict):
        raise UserError("--extra-body is no JSON object", 'write {"top_k": 1}')
    return found


def _lengths(prompt: str, output: str) -> dict[str, Any]:
    mean, cv, shape = _length("--input-len", prompt)
    out_mean, out_cv, out_shape = _length("--output-len", output)
    if shape and out_shape and shape != out_shape:
        raise UserError(f"--input-len is {shape}, --output-len {out_shape}", "draw both from one kind of distribution")
    return {"prompt_len": mean, "length_cv": cv, "output_len": out_mean, "output_cv": out_cv,
            "length_shape": shape or out_shape or "gamma"}  # fmt: skip


def _length(option: str, text: str) -> tuple[int, float, str]:
    """(mean, coefficient of variation, shape; empty when all are equal)."""
    if text.isdigit() and int(text):
        return int(text), 0.0, ""
    if found := re.fullmatch(r"uniform:(\d+)-(\d+)", text):
        low, high = int(found[1]), int(found[2])
        if 1 <= low < high:
            mean = (low + high) / 2
            return round(mean), (high - low) / 12**0.5 / mean, "uniform"
    if found := re.fullmatch(r"(lognormal|gamma):(\d+),(\d*\.?\d+)", text):
        return int(found[2]), float(found[3]), found[1]
    raise UserError(f"{option} {text!r} is no length", "write 512, uniform:100-900, lognormal:512,0.8 or gamma:512,0.8")


def _limits(slo: str | None) -> dict[str, float]:
    found = {}
    for part in (slo or "").split(",") if slo else []:
        name, _, value = part.partition("=")
        read = re.fullmatch(r"(\d*\.?\d+)\s*(ms|us|µs|s|)", value.strip())
        if name.strip() not in ("ttft", "tpot") or read is None:
            raise UserError(f"--slo {part!r} is no limit", "write ttft=500ms,tpot=50ms")
        found[f"slo_{name.strip()}"] = float(read[1]) * _UNITS[read[2]]
    return found


def _number(option: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise UserError(f"{option} {text!r} is no positive number", "write 8, or 1,2,4,8")
    return value


def _clients(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise UserError(f"--arrival closed:{text}: the number of clients is no whole number above 0", "write closed:16")
    return int(text)


def _serve(fields: dict[str, Any]) -> Serve:
    try:
        return Serve(**fields)
    except ValidationError as e:
        first = e.errors()[0]
        raise UserError(f"{'.'.join(map(str, first['loc'])) or 'the load'}: {first['msg']}") from None
