"""Requests to the engine, and its events. Token ids only; text is :mod:`ridgeline.serve.detokenize`'s."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from ridgeline.spec.errors import UserError
from ridgeline.spec.model import ModelSpec

Finish = Literal["stop", "length", "abort", "error", "tool_calls"]
"""Why an output ended: an end token (or a stop string, which text finds), ``max_tokens``, a cancel, a failure; calls of
functions, which text finds too."""


Pooling = Literal["mean", "last", "cls"]
"""What an embedding is made of: the mean of all hidden states, the last token's, or the first one's."""
Vector = list[float] | list[list[float]]
"""What is read of one prompt: of all of it, or of each of its tokens."""


class Invalid(UserError):
    """A request that cannot be served as written. ``param`` names the field, ``code`` the kind of error, where the API
    has one."""

    def __init__(self, param: str, why: str, fix: str, code: str | None = None) -> None:
        super().__init__(f"{param}: {why}", fix)
        self.param, self.code = param, code


class NotFound(Invalid):
    """A request that names what is not here."""


TOO_LONG = "context_length_exceeded"
"""The OpenAI API's code for a request that does not fit the context."""
SHORTEN = "Please reduce the length of the input prompt"
"""What to do then; clients look for these words, as vLLM has them."""
GREEDY_BELOW = 1e-5
"""Temperature below which the likeliest token is taken: logits over less leave fp32's range (vLLM's bound)."""


class Busy(UserError):
    """The queue is full, or the engine is shutting down. ``retry_after``: seconds after which to retry."""

    def __init__(self, why: str, retry_after: float) -> None:
        super().__init__(why, f"ask again in {retry_after:.0f} s")
        self.retry_after = retry_after


class Watch(Protocol):
    """Watches the text of an output for stop strings. One object per sequence."""

    stop: str | None
    """The stop string that has ended it."""

    def push(self, token: int) -> object:
        """Add one more token. Not called once ``stop`` is set."""


class Grammar(Protocol):
    """A constraint on an output, as an automaton over tokens. One object per sequence."""

    def allowed(self) -> Sequence[int] | None:
        """Token ids that may come next (the end token among them where it may end); None: any."""

    def accept(self, token: int) -> None:
        """Advance by one token."""

    def fork(self) -> Grammar:
        """An independent copy."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. Names and ranges are those of the OpenAI API and vLLM's extensions."""

    max_tokens: int = 16
    temperature: float = 1.0
    top_k: int = 0
    """Only the k likeliest tokens; 0: all."""
    top_p: float = 1.0
    """Only the likeliest tokens that together have at least this probability."""
    min_p: float = 0.0
    """Only tokens at least this likely relative to the likeliest."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    """Makes the output a function of the request alone, whatever else is in the batch; None: drawn by the engine."""
    n: int = 1
    """Outputs to return."""
    best_of: int | None = None
    """Outputs to generate, of which the ``n`` of highest mean log-probability are returned; None: ``n``."""
    beam_width: int = 0
    """Number of beams, of which ``n`` are returned; 0: sample."""
    length_penalty: float = 1.0
    """A finished beam's score is its log-probability over length ** length_penalty."""
    early_stopping: bool = False
    """Beam search ends as soon as ``beam_width`` beams have finished."""
    stop_token_ids: tuple[int, ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    """Only these tokens; empty: all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that are never completed."""
    min_tokens: int = 0
    """Minimum number of output tokens."""
    ignore_eos: bool = False
    logprobs: int | None = None
    """Report the log-probability of each token, and of this many most likely ones."""
    logprob_token_ids: tuple[int, ...] = ()
    """Report those of these tokens instead of the most likely ones'."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens, from its second on."""
    grammar: Grammar | None = None

    @property
    def sequences(self) -> int:
        """Number of sequences generated from a prompt: beams, or outputs."""
        return self.beam_width or (self.n if self.best_of is None else self.best_of)

    @property
    def ranked(self) -> bool:
        """Whether outputs are reported only when all have ended."""
        return self.beam_width > 0 or (self.best_of is not None and self.best_of > self.n)

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.temperature < GREEDY_BELOW

    def check(self, vocab_size: int) -> None:
        """Raise :class:`Invalid` for a value out of its range."""

        def needs(ok: bool, param: str, why: str, fix: str) -> None:
            if not ok:
                raise Invalid(param, why, fix)

        def within(param: str, low: float, high: float, open_low: bool = False) -> None:
            value = getattr(self, param)
            fine = math.isfinite(value) and (low < value if open_low else low <= value) and value <= high
            edge = "above" if open_low else "from"
            needs(fine, param, f"is {value}, outside {edge} {low:g} to {high:g}", "give a value inside")

        needs(self.max_tokens >= 1, "max_tokens", f"is {self.max_tokens}", "give at least 1")
        within("temperature", 0, 100)
        within("top_p", 0, 1, open_low=True)
        within("min_p", 0, 1)
        within("presence_penalty", -2, 2)
        within("frequency_penalty", -2, 2)
        within("repetition_penalty", 0.01, 100)
        within("length_penalty", -10, 10)
        needs(self.top_k >= 0, "top_k", f"is {self.top_k}", "give a positive number, or 0 for all tokens")
        needs(1 <= self.n <= 128, "n", f"is {self.n}, outside 1 to 128", "ask for fewer outputs")
        drawn = self.best_of if self.best_of is not None else self.n
        needs(self.n <= drawn <= 128, "best_of", f"is {drawn}, outside n to 128", f"give {self.n} or more")
        needs(0 <= self.beam_width <= 64, "beam_width", f"is {self.beam_width}, outside 0 to 64", "use fewer beams")
        if self.beam_width:
            needs(self.n <= self.beam_width, "n", f"{self.n} outputs of {self.beam_width} beams", "use more beams")
            needs(self.best_of is None, "best_of", "does not go with beam search", "leave it out")
            no_effect = "has no effect on beam search, which draws nothing"
            needs(self.greedy or self.temperature == 1, "temperature", no_effect, "leave it out, or give 0")
            needs(self.top_p == 1, "top_p", no_effect, "leave it out")
            needs(self.top_k == 0, "top_k", no_effect, "leave it out")
            needs(self.min_p == 0, "min_p", no_effect, "leave it out")
            needs(self.seed is None, "seed", no_effect, "leave it out")
            for param in ("logprobs", "prompt_logprobs"):
                needs(getattr(self, param) is None, param, "are not kept of beams", "leave it out, or sample")
        needs(0 <= self.min_tokens <= self.max_tokens, "min_tokens", f"is {self.min_tokens}", "give 0 to max_tokens")
        for param in ("logprobs", "prompt_logprobs"):
            count = getattr(self, param)
            fine = count is None or 0 <= count <= vocab_size
            needs(fine, param, f"is {count}, of a vocabulary of {vocab_size}", "ask for fewer")
        fields = ("logit_bias", "stop_token_ids", "allowed_token_ids", "logprob_token_ids")
        named = {name: getattr(self, name) for name in fields}
        for param, ids in named.items():
            bad = next((i for i in ids if not 0 <= i < vocab_size), None)
            needs(bad is None, param, f"names token {bad} of a vocabulary of {vocab_size}", "use its ids")
        needs(all(math.isfinite(b) and abs(b) <= 100 for b in self.logit_bias.values()), "logit_bias",
              "holds a bias outside -100 to 100", "give biases inside")  # fmt: skip


@dataclass(frozen=True)
class EngineRequest:
    """One prompt and its options."""

    id: str
    prompt: Sequence[int]
    sampling: Sampling = Sampling()
    adapter: str = ""
    """Name of a loaded adapter; empty: the base model."""
    salt: bytes = b""
    """Prompts share cached blocks only with prompts of the same salt."""
    priority: int = 0
    """Of waiting requests, lower values go first."""
    embed: bool = False
    """Return the prompt's hidden state, pooled, instead of generating."""
    pooling: Pooling = "mean"
    classify: bool = False
    """With ``embed``: return the logits of the model's classes instead."""
    each: bool = False
    """With ``embed``: of every token of the prompt, not pooled."""
    watch: Callable[[], Watch] | None = None
    """Makes what finds the stop strings of one output; of outputs that are ranked, whose text nobody reads before."""
    token_types: Sequence[int] = ()
    """The kind of each token (BERT's segments); empty: all are of kind 0."""
    prefill_at: str = ""
    """Address (host:port) of the server that computes the prompt; empty: this one."""
    client: bytes = b""
    """Who asks, where the engine is shared fairly between clients."""


def check_served(
    request: EngineRequest, spec: ModelSpec, context: int, adapters: Container[str] | None, ordered: bool
) -> None:
    """Raise :class:`Invalid`, naming the field, for a request that an engine with these adapters could never serve.
    ``ordered``: its plan orders the queue."""
    if request.adapter and (adapters is None or request.adapter not in adapters):
        raise Invalid("model", f"there is no adapter {request.adapter!r}", "load it, or name another")
    if request.priority and ordered:
        raise Invalid("priority", "has no effect: the plan orders the queue by batches' cost", "leave it out")
    check_request(request, spec, context)


def check_request(request: EngineRequest, spec: ModelSpec, context: int) -> None:
    """Raise :class:`Invalid` for a request that no engine of ``spec`` with this context length can serve."""
    s, n = request.sampling, len(request.prompt)
    if not n:
        raise Invalid("prompt", "is empty", "give at least one token")
    if n > context or (not request.embed and n == context):
        what = f"has {n} tokens, and the model's maximum context length is {context}"
        raise Invalid("prompt", what, SHORTEN, TOO_LONG)
    bad = next((t for t in request.prompt if not 0 <= t < spec.vocab_size), None)
    if bad is not None:
        raise Invalid("prompt", f"holds token {bad}, out of vocabulary", f"give ids below {spec.vocab_size}")
    if request.classify and not (request.embed and spec.head == "classify"):
        raise Invalid("model", f"{spec.name} has no classes", "serve a checkpoint for sequence classification")
    if request.token_types and (len(request.token_types) != n or max(request.token_types) >= spec.token_types):
        raise Invalid("prompt", f"has kinds of tokens that {spec.name} does not know", "serve a cross-encoder")
    if request.embed and spec.head == "project" and not request.each:
        what = f"{spec.name} makes a vector of each token, none of a text"
        raise Invalid("model", what, "ask /pooling for token_embed, or /score and /rerank")
    if request.embed:
        return
    if not spec.causal:
        raise Invalid("model", f"family {spec.family!r} is an encoder and cannot generate", "ask for embeddings")
    s.check(spec.vocab_size)
    if n + s.max_tokens > context:
        raise Invalid(
            "max_tokens",
            f"is {s.max_tokens}; with the prompt's {n} tokens that exceeds the context of {context}",
            f"ask for at most {context - n}",
            TOO_LONG,
        )
    if s.grammar is not None and s.beam_width:
        raise Invalid("beam_width", "does not go with a grammar", "sample instead")


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of a token, before temperature and filters, and those of the likeliest tokens at its place."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 0
    """How many tokens are at least as likely, 1 for the likeliest; 0: not counted (only the prompt's are)."""


@dataclass(slots=True)
class OutputEvent:
    """An update of one output of a request: its new tokens, and how it ended if it did.

    Outputs that are ranked against others (``best_of``, beams) are reported once, complete, at their end.
    """

    request: str
    index: int
    """Which of the request's outputs, 0 to n - 1."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    """As many as ``tokens``, where they were requested."""
    finish: Finish | None = None
    stop_token: int | None = None
    """The token of ``stop_token_ids`` that ended it (None for the end-of-sequence token)."""
    stop_string: str | None = None
    """The stop string that ended it, where the engine itself watched the text."""
    error: str = ""
    """With finish "error": what went wrong."""
    cached_tokens: int = 0
    """Prompt tokens that were found in the cache; on an output's last event."""
    preemptions: int = 0
    """How often the request was put back for want of blocks; on an output's last event."""
    prompt_logprobs: list[TokenLogprob] | None = None
    """On the first event of output 0, where they were requested."""
    embedding: Vector | None = None
    """With ``embed``: the pooled hidden state [H], or with ``classify`` the logits [labels]; with ``each`` of every
    token [tokens, H or labels]."""
    score: float | None = None
    """Of a beam: its penalized log-probability."""
    unstructured: str = ""
    """Why the output does not keep its grammar; on its last event."""


@dataclass(frozen=True)
class Stats:
    """The engine's state and totals since it started."""

    waiting: int
    running: int
    blocks: int
    """Blocks of the pool."""
    blocks_used: int
    """Blocks that sequences hold."""
    blocks_cached: int
    """Blocks that no sequence holds, kept for their contents."""
    prompt_tokens: int
    """Prompt tokens that were computed."""
    cached_tokens: int
    """Prompt tokens that were not computed, having been found in the cache."""
    generated_tokens: int
    preemptions: int
    steps: int
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    saved_blocks: int = 0
    """Blocks that the pool dropped and a store kept."""
    restored_blocks: int = 0
    """Blocks that came back from it."""
    pending_prompt_tokens: int = 0
    """Prompt tokens of requests here that are still to be computed."""
