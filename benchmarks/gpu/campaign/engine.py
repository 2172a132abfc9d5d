"""A serving engine driven step by step, without HTTP."""

from __future__ import annotations

import time
from typing import Any

import torch

from ridgeline.nn.model.init import DTYPES, allocate
from ridgeline.nn.model.transformer import Transformer
from ridgeline.serve.engine import Engine
from ridgeline.serve.request import EngineRequest, Sampling
from ridgeline.spec.experiment import Experiment


def clock() -> float:
    """Seconds, when everything that was asked of the device is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def random_model(e: Experiment, device: torch.device) -> Transformer:
    """A model with random weights, drawn on the device: their values do not matter here."""
    with torch.device("meta"):
        model = Transformer(e.model)
    allocate(model, device, DTYPES[e.dtype])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0) if name.endswith("norm.weight") else parameter.normal_(0.0, 0.02)
    return model


def prompts(vocabulary: int, lengths: list[int]) -> list[list[int]]:
    """Random prompts, the same every time."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(2, vocabulary, (n,), generator=generator).tolist() for n in lengths]


def add(engine: Engine, lengths: list[int], new: int, prefix: str = "") -> None:
    """Queue a greedy request for each length, of the loaded adapters in turn."""
    names = sorted(engine.adapters.held) if engine.adapters is not None else []
    names = names or [""]
    sampling = Sampling(max_tokens=new, temperature=0.0, ignore_eos=True)
    for i, ids in enumerate(prompts(engine.spec.vocab_size, lengths)):
        engine.add(EngineRequest(f"{prefix}{i}", ids, sampling, adapter=names[i % len(names)]))


def finished(engine: Engine, lengths: list[int], new: int) -> list[list[int]]:
    """Tokens of all requests."""
    add(engine, lengths, new)
    said: dict[str, list[int]] = {str(i): [] for i in range(len(lengths))}
    while engine.has_work():
        for event in engine.step():
            if event.error:
                raise RuntimeError(event.error)
            said[event.request] += event.tokens
    return list(said.values())


def steps(engine: Engine, lengths: list[int], new: int, prefix: str = "") -> tuple[list[float], list[float], int]:
    """(seconds of steps with prompts, of steps that only decode with every request running, tokens of the latter).

    A step ends when its tokens are on the host; the device may be at the next one then, as in a server.
    """
    add(engine, lengths, new, prefix)
    prompt: list[float] = []
    decode: list[float] = []
    told: dict[str, int] = {}
    tokens = 0
    while engine.has_work():
        decoding = len(told) == len(lengths)
        start = time.perf_counter()
        events: list[Any] = engine.step()
        seconds = time.perf_counter() - start
        whole = decoding and len(engine.groups) == len(lengths)
        for event in events:
            if event.error:
                raise RuntimeError(event.error)
            told[event.request] = told.get(event.request, 0) + len(event.tokens)
            tokens += len(event.tokens) if whole else 0
        (decode if whole else prompt if not decoding else []).append(seconds)
    return prompt, decode, tokens
