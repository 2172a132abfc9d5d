"""Many prompts without a server: as many at once as fit, results written as they come, resumed where it stopped."""

from __future__ import annotations

import json
import os
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ridgeline.data.examples import BadRecord, Template, records
from ridgeline.serve.detokenize import Delta, ServeJob, Vocabulary
from ridgeline.serve.request import EngineRequest, Invalid, Sampling
from ridgeline.spec.errors import UserError

if TYPE_CHECKING:
    from ridgeline.serve.engine import Engine


@dataclass(frozen=True)
class Prompt:
    """One prompt of a batch."""

    id: str
    text: str
    max_tokens: int | None = None
    special: bool = True
    """Whether the tokenizer puts its special tokens around the text: a chat template has written its own."""

    def require_unicode(self) -> None:
        """Raise :class:`Invalid` for a text that no tokenizer takes."""
        try:
            self.text.encode()
        except UnicodeEncodeError:
            raise Invalid("prompt", "holds half a surrogate pair, or bytes that are no UTF-8",
                          "give whole characters") from None  # fmt: skip


def read_prompts(file: Path, template: Template | None) -> list[Prompt]:
    """Prompts of a JSON-lines file: ``prompt`` or ``messages``, with optional ``id`` and ``max_tokens``.

    Without an id, a record is identified by its number, from 1. Raises :class:`UserError` naming the bad line.
    """
    found: list[Prompt] = []
    for number, (place, record) in enumerate(records(file, skip_bad=True), 1):
        if isinstance(record, BadRecord):
            raise UserError(f"{place}: {record}", "fix the line")
        if not isinstance(record, dict):
            raise UserError(f"{place}: not an object", 'write {"prompt": …} on each line')
        limit = record.get("max_tokens")
        if limit is not None and (type(limit) is not int or limit < 1):
            raise UserError(f"{place}: max_tokens is {limit!r}", "give a positive number")
        text, special = _text(record, template, place), isinstance(record.get("prompt"), str)
        found.append(Prompt(str(record.get("id", number)), text, limit, special))
    most = Counter(p.id for p in found).most_common(1)
    if most and most[0][1] > 1:
        raise UserError(f"{file}: id {most[0][0]!r} occurs twice", "give each record an id of its own")
    if not found:
        raise UserError(f"{file} holds no prompts", 'write {"prompt": …} on each line')
    return found


def _text(record: dict[str, Any], template: Template | None, place: str) -> str:
    if isinstance(record.get("prompt"), str):
        return str(record["prompt"])
    messages = record.get("messages")
    if not isinstance(messages, list):
        raise UserError(f"{place}: neither a prompt nor messages", 'write {"prompt": …} or {"messages": […]}')
    if template is None:
        raise UserError(f"{place}: messages, and the checkpoint has no chat template", "give --chat-template")
    try:
        return template.render(messages, prompt=True)
    except BadRecord as e:
        raise UserError(f"{place}: {e}", "fix the messages") from None


def results_in(out: Path) -> dict[str, str]:
    """Ids that ``out`` holds outputs of, with their prompts. Half a result at its end (of a crash) is cut off. Raises
    :class:`UserError` for any other file, which stays as it is."""
    if not out.is_file():
        return {}
    raw = out.read_bytes()
    try:
        whole = raw[: len(raw) - len(_half(raw))]
        lines = [json.loads(line) for line in whole.split(b"\n") if line.strip()]
        if any("outputs" not in line and "error" not in line for line in lines):
            raise ValueError  # prompts, as where --out is --input
        found = {str(line["id"]): str(line["prompt"]) for line in lines if "outputs" in line}
    except (ValueError, LookupError, TypeError, AttributeError):
        raise UserError(f"{out} is not a file of results", "give another --out") from None
    if not raw.endswith(b"\n"):
        with out.open("r+b") as f:
            f.truncate(len(whole))
            f.seek(0, 2)
            f.write(b"\n" if whole and not whole.endswith(b"\n") else b"")
    return found


def drop_failures(out: Path, ids: Collection[str]) -> None:
    """Remove from results in ``out`` those of ``ids`` that failed, all at once."""
    lines = out.read_bytes().splitlines(keepends=True) if out.is_file() else []
    again = [bool(line.strip()) and "error" in (r := json.loads(line)) and str(r["id"]) in ids for line in lines]
    if any(again):
        file = out.resolve()  # of a link the file that it points to
        draft = file.with_name(f".{file.name}.new")
        draft.write_bytes(b"".join(line for line, dropped in zip(lines, again, strict=True) if not dropped))
        os.replace(draft, file)


_FIRST = b'{"id": "'
"""What every result begins with."""


def _half(raw: bytes) -> bytes:
    """Half a result at the end of ``raw``, or nothing. Raises ValueError where the end is something else."""
    last = raw[raw.rfind(b"\n") + 1 :]
    try:
        json.loads(last)
    except ValueError:
        if last[: len(_FIRST)] != _FIRST[: len(last)]:
            raise
        return last
    return b""


def generate(
    engine: Engine, vocabulary: Vocabulary, prompts: Iterable[Prompt], sampling: Callable[[int | None], Sampling],
    stops: tuple[str, ...] = (), ahead: int = 512, fresh: Callable[[str], None] | None = None,
    before_step: Callable[[], None] = lambda: None,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Results in the order in which they end; ``sampling`` makes the settings for a prompt's own ``max_tokens``.

    At most ``ahead`` prompts are in the engine at once. A prompt that cannot be served gets a result with ``error``.
    ``fresh``: called with each piece of text as it is generated; ``before_step`` before every step of the engine.
    """
    left = deque(prompts)
    jobs: dict[str, tuple[Prompt, ServeJob, dict[int, Delta]]] = {}
    while left or jobs:
        while left and len(jobs) < ahead:
            prompt = left.popleft()
            try:
                prompt.require_unicode()
                ids = vocabulary.encode(prompt.text, prompt.special)
                job = ServeJob(EngineRequest(prompt.id, ids, sampling(prompt.max_tokens)), vocabulary, stops=stops)
                engine.add(job.request)
            except Invalid as e:
                yield {"id": prompt.id, "error": f"{e.what}: {e.fix}"}
                continue
            jobs[prompt.id] = (prompt, job, {})
        before_step()
        for event in engine.step():
            if event.request not in jobs:
                continue
            prompt, job, outputs = jobs[event.request]
            delta = job.read(event)
            if delta is None:
                continue
            if delta.finish and event.finish is None:
                engine.finish(event.request, event.index)
            if fresh is not None:
                fresh(delta.text)
            if delta.index in outputs:
                outputs[delta.index].add(delta)
            else:
                outputs[delta.index] = delta
            if not job.open:
                del jobs[event.request]
                yield _result(prompt, job, [outputs[i] for i in sorted(outputs)])


def _result(prompt: Prompt, job: ServeJob, outputs: list[Delta]) -> dict[str, Any]:
    failed = next((d.error for d in outputs if d.finish == "error"), None)
    if failed is not None:
        return {"id": prompt.id, "error": failed}
    return {
        "id": prompt.id, "prompt": prompt.text,
        "outputs": [{"text": d.text, "finish_reason": d.finish, "tokens": d.generated} for d in outputs],
        "prompt_tokens": len(job.request.prompt), "cached_tokens": max(d.cached_tokens for d in outputs),
    }  # fmt: skip
