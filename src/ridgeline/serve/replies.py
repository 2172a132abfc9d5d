"""Responses and chunks in the OpenAI API's format."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from ridgeline.serve.detokenize import Delta, Detokenizer, Entry, Vocabulary
from ridgeline.serve.harmony import ChannelCount
from ridgeline.serve.http import error_body
from ridgeline.serve.openai import Sampled
from ridgeline.serve.output_stream import Failed, OutputStream
from ridgeline.serve.prepared_request import PreparedRequest
from ridgeline.serve.reasoning import ReasoningCount
from ridgeline.serve.request import Busy, TokenLogprob
from ridgeline.serve.tool_calls import Reader, gather

Choice = dict[str, Any]


def usage(prepared: PreparedRequest, generated: int, cached: int, reasoning: int) -> dict[str, Any]:
    """Tokens of a request; a prompt counts once, however many outputs it has."""
    details = {} if prepared.reasoning is None else {"completion_tokens_details": {"reasoning_tokens": reasoning}}
    return {
        "prompt_tokens": prepared.prompt_tokens,
        "completion_tokens": generated,
        "total_tokens": prepared.prompt_tokens + generated,
        "prompt_tokens_details": {"cached_tokens": cached},
        **details,
    }


async def whole(prepared: PreparedRequest, stream: OutputStream, chat: bool) -> dict[str, Any]:
    """The answer to a request that does not stream. Raises :class:`Failed` if an output failed."""
    outputs: dict[tuple[int, int], Delta] = {}
    async for delta in stream:
        key = (delta.job, delta.index)
        if key in outputs:
            outputs[key].add(delta)
        else:
            outputs[key] = delta
        if delta.finish == "error":
            raise Failed(delta.error or "the output failed")
    writer = Writer(prepared, chat)
    choices = [writer.choice(outputs[key]) for key in sorted(outputs)]
    return {
        "id": prepared.id, "object": "chat.completion" if chat else "text_completion", "created": prepared.created,
        "model": prepared.model, "choices": choices, "usage": writer.usage(), **(writer.of_prompt(0) if chat else {}),
        **_timing(prepared, stream, writer), **_handed_over(prepared),
    }  # fmt: skip


async def chunks(
    prepared: PreparedRequest, stream: OutputStream, body: Sampled, chat: bool, force_usage: bool = False
) -> AsyncGenerator[dict[str, Any], None]:
    """The chunks of a request that streams; an error in midstream is the last one. ``force_usage``: each has the usage
    so far, asked for or not."""
    writer = Writer(prepared, chat)
    options = body.stream_options
    with_usage = force_usage or (options is not None and bool(options.include_usage))
    running = force_usage or (with_usage and options is not None and bool(options.continuous_usage_stats))
    kind = "chat.completion.chunk" if chat else "text_completion"
    head = {"id": prepared.id, "object": kind, "created": prepared.created, "model": prepared.model}
    of_prompt = writer.of_prompt(0, streamed=True) if chat else {}
    try:
        async for delta in stream:
            if delta.finish == "error":
                yield error_body(500, delta.error or "the output failed")
                return
            for choice in writer.pieces(delta):
                extra = {"usage": writer.usage() if running else None} if with_usage else {}
                last = _handed_over(prepared) if choice["finish_reason"] else {}
                yield {**head, "choices": [choice], **extra, **of_prompt, **last}
                of_prompt = {}
        if with_usage:
            yield {**head, "choices": [], "usage": writer.usage(), **_timing(prepared, stream, writer)}
    except (Failed, Busy) as e:
        yield error_body(503 if isinstance(e, Busy) else 500, str(e))


def _handed_over(prepared: PreparedRequest) -> dict[str, Any]:
    return {} if prepared.handed_over is None else {"kv_transfer_params": prepared.handed_over}


def _timing(prepared: PreparedRequest, stream: OutputStream, writer: Writer) -> dict[str, Any]:
    """When tokens came of a request for one output, as vLLM reports it; empty unless the server does."""
    if not prepared.timed or len(prepared.jobs) > 1 or prepared.jobs[0].sequences > 1 or not stream.first:
        return {}
    first, tokens = next(iter(stream.first.values())), max(1, writer.generated)
    total, decoding = stream.last - stream.submitted, stream.last - first
    found = {"time_to_first_token_ms": first - stream.submitted, "generation_time_ms": decoding,
             "queue_time_ms": (stream.scheduled or first) - stream.submitted}  # fmt: skip
    if tokens > 1:
        found["mean_itl_ms"] = decoding / (tokens - 1)
    return {"metrics": {**{name: 1e3 * max(0.0, s) for name, s in found.items()}, "tokens_per_second": tokens / total}}


class Writer:
    """Choices of one request; keeps count."""

    def __init__(self, prepared: PreparedRequest, chat: bool) -> None:
        self.prepared, self.chat = prepared, chat
        self._outputs = prepared.jobs[0].request.sampling.n
        self._vocabulary = prepared.jobs[0].vocabulary
        self._name: Callable[[int], str] = _by_id if prepared.named_by_id else self._vocabulary.name
        self._generated: dict[int, int] = {}
        self._reasoning: dict[int, ReasoningCount | ChannelCount] = {}
        self._cached: dict[int, int] = {}
        self._begun: set[int] = set()
        self._readers: dict[int, Reader] = {}
        self._called: set[int] = set()
        """Outputs with calls of functions."""
        self._late: dict[int, Delta] = {}
        """Tokens whose text is still held back."""
        self._prompts: dict[int, Sequence[TokenLogprob]] = {}
        """Log-probabilities of prompts, which come with their first output."""

    @property
    def generated(self) -> int:
        """Tokens so far."""
        return 0 if self.prepared.silent else sum(self._generated.values())

    def usage(self) -> dict[str, Any]:
        """Token usage so far."""
        reasoning = sum(count.tokens for count in self._reasoning.values())
        return usage(self.prepared, self.generated, sum(self._cached.values()), reasoning)

    def choice(self, delta: Delta) -> Choice:
        """A complete output."""
        index = self._count(delta)
        if self.chat:
            message: Choice = {"role": "assistant", "content": delta.text, "refusal": None}
            if self.prepared.reader is not None:
                reader = self.prepared.reader()
                parts = gather(reader, delta.text)
                if self.prepared.reasoning is not None:  # without the markers
                    message.update(content=parts.content or (None if parts.reasoning else ""))
                if parts.reasoning and not self.prepared.hides_reasoning:
                    message.update(reasoning=parts.reasoning, reasoning_content=parts.reasoning)
                if parts.calls:
                    message.update(content=parts.content or reader.empty, tool_calls=parts.calls)
                    delta.finish = reader.ends if delta.finish == "stop" else delta.finish
            if self.prepared.echo:
                message.update(content=self.prepared.texts[delta.job] + (message["content"] or ""))
            body: Choice = {"message": message, "logprobs": self._chat_logprobs(delta)}
        else:
            body = {**self._completion(delta, first=True), **self.of_prompt(delta.job)}
        return {"index": index, **body, "token_ids": None, **self._ids(delta), **_end(delta, self.prepared.silent)}

    def of_prompt(self, job: int, streamed: bool = False) -> Choice:
        """What is reported of a prompt: ids, log-probabilities."""
        prepared = self.prepared
        found: Choice = {} if streamed else {"prompt_token_ids": None, "prompt_logprobs": None}
        if prepared.token_ids:
            found["prompt_token_ids"] = list(prepared.jobs[job].request.prompt)
        if prepared.prompt_logprobs is not None and job in self._prompts:
            rows = [self._places(e, prepared.prompt_logprobs) for e in self._prompts[job]]
            found["prompt_logprobs"] = [None, *rows]
        return found

    def _places(self, entry: TokenLogprob, count: int) -> dict[str, Any]:
        """A token of the prompt and the likeliest ones, by their ids, as vLLM has them."""
        ranked = [(t, p, i + 1) for i, (t, p) in enumerate(entry.top[:count])]
        own = [] if any(t == entry.token for t, _, _ in ranked) else [(entry.token, entry.logprob, entry.rank)]
        return {
            str(t): {"logprob": _finite(p), "rank": rank, "decoded_token": self._vocabulary.name(t)}
            for t, p, rank in [*own, *ranked]
        }

    def _ids(self, delta: Delta) -> Choice:
        if not self.prepared.token_ids:
            return {}
        tokens, delta.tokens = delta.tokens, []
        return {"token_ids": [] if self.prepared.silent else tokens}

    def pieces(self, delta: Delta) -> Iterator[Choice]:
        """An output's news as the choices of as many chunks; at each, :meth:`usage` is that of the chunks so far."""
        index = delta.job * self._outputs + delta.index
        first = index not in self._begun
        self._begun.add(index)
        open_end = {"logprobs": None, "finish_reason": None}
        if self.chat and first:
            yield {"index": index, "delta": {"role": "assistant", "content": ""}, **open_end}
            if self.prepared.echo:
                yield {"index": index, "delta": {"content": self.prepared.texts[delta.job]}, **open_end}
        self._count(delta)
        if not self.chat:
            if delta.text or delta.entries or delta.finish or self._ids_of(delta) or (first and self.prepared.echo):
                of_prompt = self.of_prompt(delta.job, streamed=True) if first else {}
                yield {"index": index, **self._completion(delta, first), **of_prompt, **self._ids(delta),
                       **_end(delta, self.prepared.silent)}  # fmt: skip
            return
        found: list[Choice] = []
        if self.prepared.reader is not None:
            found += self._called_pieces(index, delta, open_end)
        elif delta.text or delta.entries or self._ids_of(delta):
            piece = {"index": index, "delta": {"content": delta.text}, **open_end}
            found.append({**piece, "logprobs": self._chat_logprobs(delta), **self._ids(delta)})
        if delta.finish:  # with the last text, as vLLM has it
            last = found.pop() if found else {"index": index, "delta": {}, "logprobs": None}
            found.append({**last, **_end(delta)})
        yield from found

    def _called_pieces(self, index: int, delta: Delta, open_end: Choice) -> Iterator[Choice]:
        """The news of an output in which functions may be called."""
        assert self.prepared.reader is not None
        if index not in self._readers:
            self._readers[index], self._late[index] = self.prepared.reader(), Delta(delta.job, delta.index)
        reader, late = self._readers[index], self._late[index]
        late.entries, late.tokens = late.entries + delta.entries, late.tokens + delta.tokens
        hidden = self.prepared.hides_reasoning
        pieces = [p.delta for p in reader.push(delta.text, last=bool(delta.finish)) if not (hidden and p.reasoning)]
        if any("tool_calls" in p for p in pieces):
            self._called.add(index)
        if delta.finish and (late.entries or self._ids_of(late)) and not pieces:
            pieces = [{"content": ""}]
        for piece in pieces:
            choice = {"index": index, "delta": piece, **open_end, **self._ids(late)}
            if late.entries:
                choice["logprobs"], late.entries = self._chat_logprobs(late), []
            yield choice
        if delta.finish == "stop" and index in self._called:
            delta.finish = reader.ends

    def _ids_of(self, delta: Delta) -> bool:
        return self.prepared.token_ids and bool(delta.tokens)

    def _count(self, delta: Delta) -> int:
        index = delta.job * self._outputs + delta.index
        self._generated[index] = delta.generated
        if self.prepared.reasoning is not None:
            if index not in self._reasoning:
                self._reasoning[index] = self.prepared.reasoning_count()
            self._reasoning[index].push(delta.tokens)
        if delta.prompt_logprobs is not None:
            self._prompts[delta.job] = delta.prompt_logprobs
        self._cached[delta.job] = max(self._cached.get(delta.job, 0), delta.cached_tokens)
        return index

    def _chat_logprobs(self, delta: Delta) -> dict[str, Any] | None:
        job = self.prepared.jobs[delta.job]
        if job.request.sampling.logprobs is None:
            return None

        return {"content": chat_logprobs(self._vocabulary, delta.entries, self._name), "refusal": None}

    def _completion(self, delta: Delta, first: bool) -> Choice:
        prepared, job = self.prepared, self.prepared.jobs[delta.job]
        echoed = prepared.texts[delta.job] if prepared.echo else ""
        text = (echoed if first else "") + ("" if prepared.silent else delta.text)
        logprobs: dict[str, Any] | None = None
        if job.request.sampling.logprobs is not None:
            logprobs = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
            if first and prepared.echo:
                count = job.request.sampling.logprobs
                self._prompt_logprobs(logprobs, job.request.prompt, self._prompts.get(delta.job, ()), count)
            for entry in [] if prepared.silent else delta.entries:
                self._row(logprobs, entry, len(echoed))
        return {"text": text, "logprobs": logprobs}

    def _row(self, table: dict[str, Any], entry: Entry, shift: int = 0) -> None:
        name, chosen = self._name, entry.logprob
        table["tokens"].append(name(chosen.token))
        table["token_logprobs"].append(_finite(chosen.logprob))
        top = {name(t): _finite(p) for t, p in chosen.top}
        table["top_logprobs"].append({**top, name(chosen.token): _finite(chosen.logprob)})
        table["text_offset"].append(shift + entry.offset)

    def _prompt_logprobs(
        self, table: dict[str, Any], prompt: Sequence[int], known: Sequence[TokenLogprob], count: int
    ) -> None:
        """Rows of the prompt, with ``count`` likeliest tokens; its first token has no probability."""
        for offset, i in zip(_offsets(prompt, self._vocabulary), range(len(prompt)), strict=True):
            if i == 0:
                table["tokens"].append(self._name(prompt[0]))
                table["token_logprobs"].append(None)
                table["top_logprobs"].append(None)
                table["text_offset"].append(0)
            else:
                row = known[i - 1]
                self._row(table, Entry(replace(row, top=row.top[:count]), offset))


def chat_logprobs(
    vocabulary: Vocabulary, entries: Sequence[Entry], name: Callable[[int], str] | None = None
) -> list[dict[str, Any]]:
    """Log-probabilities of tokens as chats have them. ``name``: how tokens are written."""
    written = vocabulary.name if name is None else name

    def one(token: int, logprob: float) -> dict[str, Any]:
        raw = list(vocabulary.bytes[token])
        return {"token": written(token), "logprob": _finite(logprob), "bytes": raw}

    return [
        {**one(e.logprob.token, e.logprob.logprob), "top_logprobs": [one(t, p) for t, p in e.logprob.top]}
        for e in entries
    ]


def _by_id(token: int) -> str:
    return f"token_id:{token}"


def _offsets(tokens: Sequence[int], vocabulary: Vocabulary) -> list[int]:
    """Where each token's text begins."""
    text, found = Detokenizer(vocabulary), []
    for token in tokens:
        found.append(text.length)
        text.push(token)
    return found


def _finite(logprob: float) -> float:
    """JSON has no infinity."""
    return max(logprob, -9999.0) if not math.isnan(logprob) else -9999.0


def _end(delta: Delta, silent: bool = False) -> dict[str, Any]:
    return {"finish_reason": "length" if silent and delta.finish else delta.finish, "stop_reason": delta.stop_reason}
