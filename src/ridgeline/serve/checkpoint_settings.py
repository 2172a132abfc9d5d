"""What a checkpoint says of how it is served: default sampling parameters, and what its embeddings are made of."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_args

from ridgeline.serve.call_formats import CHANNELS, FORMATS
from ridgeline.serve.reasoning import CHANNEL_REASONING, PARSERS
from ridgeline.serve.request import Invalid, Pooling, Sampling
from ridgeline.spec.errors import UserError, unknown
from ridgeline.spec.json_file import read_json

_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""What vLLM takes from ``generation_config.json`` too, beside ``max_new_tokens``."""
_MODES = {"pooling_mode_mean_tokens": "mean", "pooling_mode_lasttoken": "last", "pooling_mode_cls_token": "cls"}
"""Of sentence-transformers' ``1_Pooling/config.json``."""


@dataclass(frozen=True)
class Options:
    """How a model is served, where its checkpoint does not say."""

    tool_parser: str | None = None
    """How the model writes calls of functions: a name of :data:`FORMATS`."""
    auto_tools: bool = False
    """Whether it may make calls on its own."""
    pooling: str | None = None
    """What embeddings are made of; None: as the checkpoint says."""
    reasoning_parser: str | None = None
    """How the model writes its reasoning: a name of :data:`PARSERS`; None: it is part of the answer."""
    generation_config: str = "auto"
    """Where default sampling parameters come from: ``auto``, the checkpoint; ``vllm``, nowhere; or a folder."""
    max_logprobs: int = 20
    """Most log-probabilities that a request may ask for at each place; -1: of the whole vocabulary."""
    force_usage: bool = False
    """Whether every chunk of a stream has the usage so far, asked for or not."""
    request_metrics: bool = False
    """Whether answers tell when their tokens came."""
    tokens_as_ids: bool = False
    """Whether log-probabilities name tokens by their ids, unless a request says otherwise."""

    def check(self) -> None:
        """Raise :class:`UserError` for a name that is not known."""
        if self.tool_parser is not None and self.tool_parser not in FORMATS:
            raise unknown("tool parser", self.tool_parser, FORMATS, "--tool-call-parser")
        if self.auto_tools and self.tool_parser is None:
            raise UserError("--enable-auto-tool-choice needs to know how the model calls", "give --tool-call-parser")
        if self.reasoning_parser is not None and self.reasoning_parser not in PARSERS:
            raise unknown("reasoning parser", self.reasoning_parser, PARSERS, "--reasoning-parser")
        if self.pooling is not None and self.pooling not in get_args(Pooling):
            raise unknown("pooling", self.pooling, get_args(Pooling), "--pooling")


def writes_channels(checkpoint: Path, options: Options) -> bool:
    """Whether a model writes in channels: gpt-oss, or what the options say. Raises :class:`UserError` where they name
    another format beside."""
    named = (options.tool_parser, options.reasoning_parser)
    if CHANNELS not in named and CHANNEL_REASONING not in named:
        return read_json(checkpoint / "config.json").get("model_type") == "gpt_oss" and named == (None, None)
    if options.tool_parser not in (None, CHANNELS) or options.reasoning_parser not in (None, CHANNEL_REASONING):
        what = f"--tool-call-parser {CHANNELS} and --reasoning-parser {CHANNEL_REASONING} read one format"
        raise UserError(what, "give both, or neither")
    return True


def sampling_defaults(checkpoint: Path, where: str, vocab_size: int) -> tuple[dict[str, Any], int | None]:
    """Sampling parameters that requests have unless they say otherwise, and the most tokens that an output may have.

    Raises :class:`UserError` for a folder without the file, and for values that no request could have.
    """
    if where == "vllm":
        return {}, None
    file = (checkpoint if where == "auto" else Path(where)) / "generation_config.json"
    if where != "auto" and not file.is_file():
        raise UserError(
            f"--generation-config {where}: there is no {file}", "give auto, vllm, or a folder with the file"
        )
    found = read_json(file)
    given = {name: found[name] for name in _DEFAULTS if found.get(name) is not None}
    most = found.get("max_new_tokens")
    try:
        for name, value in (*given.items(), ("max_new_tokens", most)):
            whole = name in ("top_k", "max_new_tokens")
            if value is not None and (isinstance(value, bool) or not isinstance(value, int if whole else (int, float))):
                raise TypeError(f"{name} = {value!r} is no {'whole ' if whole else ''}number")
        if "top_k" in given:
            given["top_k"] = max(0, given["top_k"])
        Sampling(max_tokens=1 if most is None else most, **given).check(vocab_size)
    except (Invalid, TypeError) as e:
        why = e.what if isinstance(e, Invalid) else str(e)
        raise UserError(f"{file}: {why}", "correct it, or serve with --generation-config vllm") from None
    return given, most


def pooling_of(checkpoint: Path, named: str | None) -> Pooling:
    """What embeddings are made of: as named, as ``1_Pooling/config.json`` says, or the mean. Raises
    :class:`UserError` for a kind that is not known."""
    if named is not None:
        return cast("Pooling", named)
    file = checkpoint / "1_Pooling" / "config.json"
    modes = [mode for mode, on in read_json(file).items() if mode.startswith("pooling_mode_") and on is True]
    if not modes:
        return "mean"
    if len(modes) > 1 or modes[0] not in _MODES:
        raise UserError(f"{file} asks for {' and '.join(modes)}", "give --pooling mean, last or cls")
    return cast("Pooling", _MODES[modes[0]])


def dimensions_of(checkpoint: Path) -> frozenset[int] | None:
    """Lengths to which embeddings may be cut, as vLLM reads them of ``config.json``; None: any."""
    config = read_json(checkpoint / "config.json")
    if (lengths := config.get("matryoshka_dimensions")) is not None:
        if not isinstance(lengths, list) or not all(isinstance(n, int) and n > 0 for n in lengths):
            raise UserError(f"{checkpoint}: matryoshka_dimensions are no list of lengths", "correct config.json")
        if lengths:
            return frozenset(lengths)
    return None if config.get("is_matryoshka") else frozenset()


def prompts_of(checkpoint: Path) -> dict[str, str]:
    """What goes before a text of each kind, as sentence-transformers reads it of the checkpoint."""
    found = read_json(checkpoint / "config_sentence_transformers.json").get("prompts") or {}
    return {str(name): str(text) for name, text in found.items()} if isinstance(found, dict) else {}
