"""The outputs of running requests: their events, and how each ends."""

from __future__ import annotations

from ridgeline.serve.request import OutputEvent
from ridgeline.serve.scheduler import Scheduler
from ridgeline.serve.sequence import Sequence, SequenceGroup


class Outputs:
    """The requests that have not ended, by id, and the events that the next step returns."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.groups: dict[str, SequenceGroup] = {}
        self.events: list[OutputEvent] = []
        self.generated = 0
        """Tokens generated so far, by all requests."""
        self.cached_tokens = 0
        """Prompt tokens that requests which ended found in the cache."""

    def take_events(self) -> list[OutputEvent]:
        """The events since the last call."""
        events, self.events = self.events, []
        return events

    def abort(self, request_id: str) -> bool:
        """Cancel a request; its blocks are free at once, and the next step reports its end. False: it is unknown."""
        group = self.groups.pop(request_id, None)
        if group is None:
            return False
        for seq in group.sequences:
            seq.finish = "abort"
            self.scheduler.remove(seq)
            self.events.append(OutputEvent(request_id, seq.index, finish="abort"))
        return True

    def finish(self, request_id: str, index: int) -> None:
        """End one output without an event: its reader has found that the text is complete."""
        group = self.groups.get(request_id)
        for seq in group.sequences if group else []:
            if seq.index == index:
                seq.finish = "stop"
                self.end(seq)
                return

    def emit(self, seq: Sequence) -> None:
        """Report what a sequence has generated since its last event."""
        group = seq.group
        if group.ranked:
            return
        prompt = len(group.request.prompt)
        event = OutputEvent(group.request.id, seq.index, seq.tokens[prompt + seq.emitted :])
        if group.request.sampling.logprobs is not None:
            event.logprobs, seq.logprobs = seq.logprobs, []
        if not seq.emitted and not seq.index and group.request.sampling.prompt_logprobs is not None:
            event.prompt_logprobs = group.prompt_logprobs
        seq.emitted = seq.generated
        if seq.finish is not None:
            event.finish, event.stop_token, event.cached_tokens = seq.finish, seq.stop_token, group.cached_tokens
            event.preemptions, event.unstructured = group.preemptions, _unstructured(seq)
        self.events.append(event)

    def end(self, seq: Sequence) -> None:
        """Free the blocks of an output that has ended; the last one ends its request."""
        group = seq.group
        self.scheduler.remove(seq)
        group.sequences.remove(seq)
        if group.ranked:
            group.done.append(seq)
        if group.sequences:
            return
        del self.groups[group.request.id]
        self.cached_tokens += max(0, group.cached_tokens)
        if group.ranked and not any(s.finish == "error" for s in group.done):
            self._emit_ranked(group)

    def _emit_ranked(self, group: SequenceGroup) -> None:
        """Report the best outputs of a request, now that all of them have ended."""
        best = sorted(group.done, key=lambda s: -s.logprob / max(1, s.generated))
        for index, one in enumerate(best[: group.request.sampling.n]):
            prompt = len(group.request.prompt)
            event = OutputEvent(group.request.id, index, one.tokens[prompt:], None, one.finish, one.stop_token)
            if group.request.sampling.logprobs is not None:
                event.logprobs = one.logprobs
            event.cached_tokens, event.preemptions = group.cached_tokens, group.preemptions
            event.stop_string = one.watch.stop if one.watch is not None else None
            event.unstructured = _unstructured(one)
            self.events.append(event)

    def fail(self, seq: Sequence, why: str) -> None:
        """End the request of an output that cannot go on with an error; other requests are not affected."""
        group = self.groups.pop(seq.group.request.id, None)
        for one in list(seq.group.sequences):
            one.finish, one.error = "error", why
            self.scheduler.remove(one)
            if group is not None:
                self.events.append(OutputEvent(seq.group.request.id, one.index, finish="error", error=why))
        seq.group.sequences.clear()


def _unstructured(seq: Sequence) -> str:
    """Why a sequence does not keep its grammar; "" where it does."""
    failures = getattr(seq.grammar, "failures", ())
    return failures[0] if failures else ""
