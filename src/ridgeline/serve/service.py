"""Translates clients' requests into the engine's: models by name, prompts as tokens, templates, salts."""

from __future__ import annotations

import asyncio
import hashlib
import math
import os
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from ridgeline.data.examples import BadRecord, Template
from ridgeline.serve.call_formats import CallFormat
from ridgeline.serve.chat import ChatBatch, ChatCompletion, ChatOptions, Message, Tokenize, rendered
from ridgeline.serve.detokenize import ServeJob, Vocabulary
from ridgeline.serve.engine_loop import ASLEEP, EngineLoop
from ridgeline.serve.fields import Side, prompts_of
from ridgeline.serve.grammar import Grammars, Matcher
from ridgeline.serve.harmony import ChannelReader
from ridgeline.serve.infill import Infill, gaps
from ridgeline.serve.openai import Completion, Sampled
from ridgeline.serve.prepared_request import PreparedRequest
from ridgeline.serve.reasoning import BEGIN, END, Reasoned, ReasoningGrammar
from ridgeline.serve.request import SHORTEN, TOO_LONG, Busy, EngineRequest, Invalid, NotFound, Pooling, Sampling
from ridgeline.serve.tool_calls import LIST, Calls, Named, Reader, id_maker
from ridgeline.serve.transfer.handover import FIELD
from ridgeline.spec.errors import UserError


class Conversation(Protocol):
    """How a body has its conversation rendered."""

    @property
    def add_generation_prompt(self) -> bool:
        """Whether to begin the answer."""

    @property
    def continue_final_message(self) -> bool:
        """Whether to leave the last message open."""

    @property
    def variables(self) -> dict[str, Any]:
        """Variables of the chat template."""


class NoModel(UserError):
    """A model that is not served."""


@dataclass(frozen=True)
class Labels:
    """The labels of a classifier."""

    names: tuple[str, ...]
    apart: bool
    """Whether classes are independent (sigmoid) instead of exclusive (softmax)."""

    @classmethod
    def of(cls, config: Mapping[str, Any], count: int) -> Labels:
        """As a checkpoint's ``config.json`` names ``count`` classes."""
        named = {str(k): str(v) for k, v in (config.get("id2label") or {}).items()}
        apart = count == 1 or config.get("problem_type") == "multi_label_classification"
        return cls(tuple(named.get(str(i), f"LABEL_{i}") for i in range(count)), apart)

    def probabilities(self, logits: Sequence[float]) -> list[float]:
        """Of each class."""
        if self.apart:
            return [1 / (1 + math.exp(-x)) if x > -700 else 0.0 for x in logits]
        largest = max(logits)
        shares = [math.exp(x - largest) for x in logits]
        return [s / sum(shares) for s in shares]


@dataclass
class Service:
    """One model, its adapters and its texts."""

    loop: EngineLoop
    vocabulary: Vocabulary
    name: str
    template: Template | None
    special: dict[str, str] = field(default_factory=dict)
    """Texts of special tokens, as the checkpoint's ``tokenizer_config.json`` names them."""
    labels: Labels | None = None
    """Of a model for sequence classification."""
    calls: CallFormat | None = None
    """How the model writes calls of functions."""
    auto_calls: bool = False
    """Whether the model may call functions on its own."""
    reasons: bool = False
    """Whether what the model writes between ``<think>`` and ``</think>`` is told apart from its answer."""
    channels: bool = False
    """Whether it writes in channels (Harmony), of which reasoning is one."""
    pooling: Pooling = "mean"
    """What an embedding is made of."""
    dimensions: frozenset[int] | None = frozenset()
    """Lengths to which embeddings may be cut; None: any."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Sampling parameters of requests that do not give them."""
    most_tokens: int | None = None
    """Most tokens of an output; None: as many as the context takes."""
    max_logprobs: int = 20
    """Most log-probabilities that a request may ask for at each place; -1: of the whole vocabulary."""
    force_usage: bool = False
    """Whether every chunk of a stream has the usage so far, asked for or not."""
    request_metrics: bool = False
    """Whether answers tell when their tokens came."""
    tokens_as_ids: bool = False
    """Whether log-probabilities name tokens by their ids, unless a request says otherwise."""
    prompt_names: Mapping[str, str] = field(default_factory=dict)
    """What goes before texts that are embedded, by the kind of text."""
    tokenizer_class: str | None = None
    """As the checkpoint's ``tokenizer_config.json`` names it."""
    started: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        engine = self.loop.engine
        self.max_model_len, self.vocab_size = engine.max_model_len, engine.spec.vocab_size
        self.grammars = Grammars(self.vocabulary, engine.eos)
        self.infill = Infill.of(self.vocabulary)
        self.adapters: dict[str, str] = {}
        """Adapters that are loaded, with where they came from."""

    def adapter(self, model: str | None) -> str:
        """The adapter that ``model`` names, "" for the base. Raises :class:`NoModel`."""
        if model is None or model == self.name:
            return ""
        if model not in self.adapters:
            raise NoModel(f"the model {model!r} is not served here", "see /v1/models")
        return model

    def models(self) -> list[dict[str, Any]]:
        """The list of ``/v1/models``."""

        def entry(name: str, root: str, parent: str | None) -> dict[str, Any]:
            return {"id": name, "object": "model", "created": self.started, "owned_by": "ridgeline", "root": root,
                    "parent": parent, "max_model_len": self.max_model_len}  # fmt: skip

        return [entry(self.name, self.name, None), *(entry(n, p, self.name) for n, p in self.adapters.items())]

    def tokenizer_info(self) -> dict[str, Any]:
        """What clients need to render prompts without the tokenizer's files; None if it is unknown."""
        named = {name: self.special.get(name) or None for name in ("bos_token", "eos_token", "pad_token")}
        ends = sorted(self.loop.engine.eos)
        if named["eos_token"] is None and ends:
            named["eos_token"] = self.vocabulary.name(ends[0])
        template = self.template.source if self.template is not None else None
        return {**named, "tokenizer_class": self.tokenizer_class, "chat_template": template}

    def load_all(self, folder: Path) -> None:
        """Serve every adapter in ``folder``, by the names of its folders; before the loop has started."""
        found = sorted(p for p in folder.iterdir() if p.is_dir()) if folder.is_dir() else []
        if not found:
            raise UserError(f"no adapters in {folder}", "give a directory that holds a folder for each adapter")
        for path in found:
            if path.name == self.name:
                raise UserError(f"{path} has the name of the model that is served", "rename it, or --served-model-name")
            self.loop.engine.load_adapter(path.name, path)
            self.adapters[path.name] = str(path)
        self.loop.engine.warm_up_adapters()

    async def load(self, name: str, path: str, replace: bool = False) -> None:
        """Serve the adapter in folder ``path`` as ``name``; ``replace``: in place of one of that name. Raises
        :class:`UserError`."""
        self._awake()
        if name == self.name or (name in self.adapters and not replace):
            fix = "choose another name" if name == self.name else "set load_inplace, unload it, or choose another name"
            raise Invalid("lora_name", f"{name!r} has already been loaded", fix)
        if not await asyncio.to_thread(os.path.isdir, path):
            raise NotFound("lora_path", f"No adapter found for {name!r}: there is no folder {path}", "give its folder")
        await self.loop.ask(lambda engine: engine.load_adapter(name, Path(path), replace))
        self.adapters[name] = path

    async def unload(self, name: str) -> None:
        """Unload adapter ``name`` once the requests that use it have ended. Raises :class:`NoModel`."""
        self._awake()
        if name not in self.adapters:
            raise NoModel(f"no adapter {name!r} is loaded", "see /v1/models")
        path = self.adapters.pop(name)  # no new requests after this
        try:
            await self.loop.ask(lambda engine: engine.unload_adapter(name))
        except Exception:
            self.adapters[name] = path
            raise

    async def wake(self) -> None:
        """Load the model and its adapters again, after the server slept."""
        for name in await self.loop.wake(self.adapters):
            del self.adapters[name]

    def _awake(self) -> None:
        if self.loop.asleep:
            raise Busy(*ASLEEP)

    # Everything below may take long for long prompts, and runs off the event loop.

    def completion(self, body: Completion, key: bytes) -> PreparedRequest:
        """The jobs of a completion. Raises :class:`Invalid`."""
        silent = body.max_tokens == 0 and body.echo
        given = prompts_of(body.prompt, "prompt")
        if body.echo and body.logprobs is not None and (body.use_beam_search or (body.best_of or 0) > body.outputs):
            raise Invalid("echo", "with logprobs does not go with ranked outputs", "leave out best_of and beams")
        sampling = self._sampling(
            body,
            1 if silent else 16 if body.max_tokens is None else body.max_tokens,
            body.logprobs,
            len(given),
            prompt_logprobs=self._most_likely(
                (("logprobs", body.logprobs if body.echo else None), ("prompt_logprobs", body.prompt_logprobs))
            ),
        )  # fmt: skip
        if body.suffix:
            prompts, ends = gaps(self, body, given)
            sampling = replace(sampling, stop_token_ids=(*sampling.stop_token_ids, *ends))
        else:
            prompts = self.prompts(given, "prompt", body.add_special_tokens, body.truncate_prompt_tokens,
                                   body.truncation_side)  # fmt: skip
        prepared = self._prepared("cmpl", body, prompts, sampling, key)
        prepared.echo, prepared.silent = body.echo, silent
        if body.echo:
            prepared.texts = [
                text if isinstance(text, str) else self.vocabulary.decode(ids, body.skip_special_tokens)
                for text, ids in zip(given, prompts, strict=True)
            ]
        return prepared

    def chat(self, body: ChatCompletion, key: bytes) -> PreparedRequest:
        """The job of a chat completion. Raises :class:`Invalid`."""
        wanted = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        longest = self.max_model_len if wanted is None else wanted
        reader = self._reader(body)
        if self.channels or (body.choice == "auto" and self.calls is not None and self.calls.special):
            body = body.model_copy(update={"skip_special_tokens": False})
        of_prompt = self._most_likely([("prompt_logprobs", body.prompt_logprobs)])
        sampling = self._sampling(body, longest, body.logprob_count(), prompt_logprobs=of_prompt)
        if (handed := body.kv_transfer_params) is not None and handed.prompt_token_ids is not None:
            (prompt,) = self.prompts([handed.prompt_token_ids], FIELD, False)
        else:
            prompt = self.chat_prompt(body, body.messages, body.truncate_prompt_tokens, body.truncation_side,
                                      body.add_special_tokens)  # fmt: skip
        if wanted is None:
            room = max(1, self.max_model_len - len(prompt))
            sampling = replace(sampling, max_tokens=min(sampling.max_tokens, room))
        structure = sampling.grammar is not None
        begun = self._begun(prompt, structure)
        if body.thinking_token_budget is not None or (structure and begun is not None):
            sampling = self._with_reasoning(sampling, begun, body.thinking_token_budget)
        prepared = self._prepared("chatcmpl", body, [prompt], sampling, key)
        prepared.reader = reader
        if self._in_channels(structure):
            prepared.reader = reader if reader is not None else lambda: ChannelReader(id_maker(0))
            prepared.reasoning, prepared.channels, prepared.hides_reasoning = False, True, not body.include_reasoning
        elif begun is not None:
            prepared.reader = lambda: Reasoned(begun, reader() if reader is not None else None)
            prepared.reasoning, prepared.hides_reasoning = begun, not body.include_reasoning
        last = body.messages[-1]
        if body.echo and last.role == "assistant":
            prepared.echo, prepared.texts = True, [last.plain()["content"]]
        return prepared

    def _in_channels(self, structure: bool) -> bool:
        """Whether the output comes in channels, of which a ``structure`` has none."""
        return self.channels and not structure

    def _begun(self, prompt: Sequence[int], structure: bool) -> bool | None:
        """Whether the prompt ends within reasoning; None where none is told apart. A ``structure`` comes after it, and
        has none before it where the prompt has ended it."""
        if self.channels or not self.reasons:
            return None
        end = self.vocabulary.decode(prompt[-16:], skip_special=False).rstrip()
        return None if structure and end.endswith(END) else end.endswith(BEGIN)

    def chats(self, body: ChatBatch, key: bytes) -> PreparedRequest:
        """The jobs of several chats. Raises :class:`Invalid`."""
        each = body.each()
        self.loop.bound(len(each))
        first, *rest = (self.chat(one, key) for one in each)
        if any(other.reasoning != first.reasoning for other in rest):
            raise Invalid("messages", "ends within reasoning in some conversations only", "send them one by one")
        for i, other in enumerate(rest, 1):
            first.jobs += [replace(job, ordinal=i) for job in other.jobs]
        if body.echo:
            first.echo, first.texts = True, [text for one in (first, *rest) for text in one.texts or ("",)]
        return first

    def _reader(self, body: ChatOptions) -> Callable[[], Reader] | None:
        """What finds calls in the outputs. Raises :class:`Invalid` where the model cannot make any on its own."""
        make_id = id_maker(self.calls.id_length if self.calls is not None else 0)
        choice, parallel = body.choice, body.parallel_tool_calls is not False
        if choice == "none":
            return None
        if choice.startswith(":"):
            return lambda: Named(choice[1:], make_id)
        if choice == "required":
            return lambda: Calls(LIST, make_id, parallel)
        form = self.calls
        if form is None or not self.auto_calls:
            what = "with tool_choice auto need a server with --enable-auto-tool-choice and --tool-call-parser"
            raise Invalid("tools", what, 'start it so, or set tool_choice to "none", "required" or a function')
        if self.template is not None and "tools" not in self.template.source:
            raise Invalid("tools", "are not shown to the model by its chat template", "give another --chat-template")
        schemas = {tool.function.name: tool.function.parameters for tool in body.tools or ()}
        return lambda: form.reader(make_id, parallel, schemas)

    def _sampling(
        self, body: Sampled, max_tokens: int, logprobs: int | None, prompts: int = 1, **more: Any
    ) -> Sampling:
        """Sampling parameters for this many prompts. Raises for invalid or excessive ones before any work is done."""
        self.adapter(body.model)
        if not body.use_beam_search:
            unsaid = {name: value for name, value in self.defaults.items() if getattr(body, name) is None}
            body = body.model_copy(update=unsaid)
        longest = max_tokens if self.most_tokens is None else min(max_tokens, self.most_tokens)
        logprobs = self._most_likely([("logprobs", logprobs)])
        sampling = body.sampling(longest, logprobs, self.vocab_size, bad_words=self._bad_words(body), **more)
        self.loop.bound(prompts * sampling.sequences)
        if body.prompt_logprobs is not None and (body.stream or sampling.ranked):
            what = f"does not go with {'stream' if body.stream else 'ranked outputs'}"
            raise Invalid("prompt_logprobs", what, "leave it out, or ask for one output that is not streamed")
        return replace(sampling, grammar=body.grammar(self.grammars))

    def _most_likely(self, given: Iterable[tuple[str, int | None]]) -> int | None:
        """The largest of these numbers of log-probabilities, -1 meaning all. Raises :class:`Invalid`."""
        most, found = self.vocab_size if self.max_logprobs == -1 else self.max_logprobs, None
        for param, count in given:
            if count is None:
                continue
            count = self.vocab_size if count == -1 else count
            if not 0 <= count <= most:
                fix = "ask for fewer" if most else "leave it out"
                raise Invalid(param, f"asks for {count} log-probabilities at each place, of {most} at most", fix)
            found = max(count, found or 0)
        return found

    def _with_reasoning(self, sampling: Sampling, begun: bool | None, budget: int | None) -> Sampling:
        """With reasoning that ends after ``budget`` tokens, and before what the answer must be. Raises :class:`Invalid`
        where no reasoning is told apart, or its end may not be written."""
        if budget is not None and budget < 0:
            raise Invalid("thinking_token_budget", f"is {budget}", "give 0 or more")
        if begun is None:
            what = "needs a server with --reasoning-parser, and a prompt that has not ended the reasoning"
            raise Invalid("thinking_token_budget", what, "leave it out")
        begin, end = (tuple(self.vocabulary.encode(mark, special=False)) for mark in (BEGIN, END))
        allowed, bad = sampling.allowed_token_ids, {word[-1] for word in sampling.bad_words}
        for name, refused in (("allowed_token_ids", bool(allowed) and not set(end) <= set(allowed)),
                              ("bad_words", not bad.isdisjoint(end))):  # fmt: skip
            if refused:
                raise Invalid(name, f"does not let {END} be written, which ends the reasoning", "change it")
        made = ReasoningGrammar(self.vocabulary.bytes, begin, end, begun, budget, sampling.grammar)
        return replace(sampling, grammar=made)

    def _bad_words(self, body: Sampled) -> tuple[tuple[int, ...], ...]:
        """The token sequences of the words, alone and after a space."""
        words = [form for word in body.bad_words or () for form in (word, f" {word.lstrip()}")]
        return tuple(dict.fromkeys(tuple(self._encode(word, "bad_words", special=False)) for word in words))

    def tokens(self, body: Tokenize) -> list[int]:
        """Token ids of a text, or of a conversation. Raises :class:`Invalid`."""
        if (body.prompt is None) == (body.messages is None):
            raise Invalid("prompt", "give a prompt, or messages, and not both", "leave one out")
        if body.messages is not None:
            return self.chat_prompt(body, body.messages, special=bool(body.add_special_tokens))
        return self._encode(body.prompt or "", "prompt", body.add_special_tokens is not False)

    def chat_prompt(
        self, body: Conversation, messages: Sequence[Message], most: int | None = None, side: Side | None = None,
        special: bool = False,
    ) -> list[int]:  # fmt: skip
        """The prompt of a chat. Raises :class:`Invalid`."""
        if body.continue_final_message and body.add_generation_prompt:
            what = "Cannot set both `continue_final_message` and `add_generation_prompt` to True."
            raise Invalid("continue_final_message", what, "set add_generation_prompt to false")
        return self.conversation(
            messages, body.add_generation_prompt, body.continue_final_message, most, side, special, **body.variables
        )

    def conversation(
        self, messages: Sequence[Message], prompt: bool, open_end: bool = False, most: int | None = None,
        side: Side | None = None, special: bool = False, **variables: Any,
    ) -> list[int]:  # fmt: skip
        """A conversation rendered by the checkpoint's template; with ``open_end`` it ends with the last message's text.
        ``most``, ``side``: as for :meth:`_cut`; ``special``: add the tokenizer's special tokens too. Raises
        :class:`Invalid`."""
        if self.template is None:
            raise Invalid("messages", "the checkpoint has no chat template", "use /v1/completions, or --chat-template")
        try:
            text = rendered(self.template, messages, prompt, open_end, variables)
        except BadRecord as e:
            raise Invalid("messages", str(e), "write messages that the template takes") from None
        tokens = self._cut(self._encode(text, "messages", special), most, side)
        self.fits(tokens, "messages")
        return tokens

    def longest_kept(self, most: int | None) -> int | None:
        """How many tokens of a prompt are kept where a request asks for ``most`` (-1: as many as the context takes
        with one to generate; of an encoder all that it takes). Raises :class:`Invalid` for more than those."""
        if most == -1:
            return self.max_model_len - 1 if self.loop.engine.spec.causal else self.max_model_len
        if most is not None and most > self.max_model_len:
            what = f"is {most}, and the context is {self.max_model_len}"
            raise Invalid("truncate_prompt_tokens", what, "Please request a smaller truncation size.")
        return most

    def _cut(self, tokens: list[int], most: int | None, side: Side | None = None) -> list[int]:
        """What is kept of ``tokens``: the last ones, or with ``side`` "right" the first."""
        kept = self.longest_kept(most)
        if kept is None:
            return tokens
        return tokens[:kept] if side == "right" else tokens[max(0, len(tokens) - kept) :]

    def prompts(
        self, given: Sequence[str | list[int]], param: str, special: bool, most: int | None = None,
        side: Side | None = None,
    ) -> list[list[int]]:  # fmt: skip
        """Token ids of texts (or token ids), cut where that is asked for. Raises :class:`Invalid`."""
        for text in given:
            if isinstance(text, str):
                self.short(text, param)
        prompts = []
        for one in given:
            prompt = self._cut(self._encode(one, param, special) if isinstance(one, str) else one, most, side)
            if not prompt:
                raise Invalid(param, "has no tokens", "give at least one")
            self.fits(prompt, param)
            self.known(prompt, param)
            prompts.append(prompt)
        return prompts

    def _encode(self, text: str, param: str, special: bool) -> list[int]:
        self.short(text, param)
        return self.vocabulary.encode(text, special)

    def short(self, text: str, param: str) -> None:
        """Raise :class:`Invalid` for a text that no tokens of one context can stand for, before it is tokenized."""
        most = self.max_model_len * self.vocabulary.longest
        try:
            size = len(text) if len(text) > most else len(text.encode())
        except UnicodeEncodeError:
            raise Invalid(param, "makes a text with half a surrogate pair in it", "send whole characters") from None
        if size > most:
            what = f"has {size} bytes of text, where the context of {self.max_model_len} tokens takes {most} at most"
            raise Invalid(param, what, SHORTEN, TOO_LONG)

    def fits(self, tokens: Sequence[int], param: str) -> None:
        """Raise :class:`Invalid` for more tokens than the context has."""
        if len(tokens) > self.max_model_len:
            what = f"has {len(tokens)} tokens, and the model's maximum context length is {self.max_model_len}"
            raise Invalid(param, what, SHORTEN, TOO_LONG)

    def known(self, tokens: Sequence[int], param: str) -> None:
        """Raise :class:`Invalid` for a token that the model does not have."""
        if (bad := next((t for t in tokens if t >= self.vocab_size), None)) is not None:
            raise Invalid(param, f"holds token {bad}, out of vocabulary", f"give ids below {self.vocab_size}")

    def _prepared(
        self, kind: str, body: Sampled, prompts: Sequence[Sequence[int]], sampling: Sampling, key: bytes
    ) -> PreparedRequest:
        as_ids = body.return_tokens_as_token_ids
        adapter, base, salt = self.adapter(body.model), f"{kind}-{uuid.uuid4().hex}", salt_of(key, body.cache_salt)
        first = sampling.grammar
        grammars = [first.fresh() if isinstance(first, Matcher) else first and first.fork() for _ in prompts]
        jobs = [
            ServeJob(
                EngineRequest(f"{base}-{i}", prompt, replace(sampling, grammar=grammar), adapter, salt, body.priority,
                              client=salt_of(key, None)),
                self.vocabulary, i, body.stops, body.include_stop_str_in_output, body.skip_special_tokens,
            )
            for i, (prompt, grammar) in enumerate(zip(prompts, grammars, strict=True))
        ]  # fmt: skip
        return PreparedRequest(
            base if body.request_id is None else f"{kind}-{body.request_id}", body.model or self.name, jobs,
            prompt_logprobs=self.vocab_size if body.prompt_logprobs == -1 else body.prompt_logprobs,
            timed=self.request_metrics, token_ids=bool(body.return_token_ids),
            named_by_id=self.tokens_as_ids if as_ids is None else as_ids,
        )  # fmt: skip


def salt_of(key: bytes, own: str | None) -> bytes:
    """Clients share cached prompts only with themselves; without keys, all share. ``own`` narrows it further."""
    if not key and own is None:
        return b""
    return hashlib.sha256(hashlib.sha256(key).digest() + (own or "").encode()).digest()
