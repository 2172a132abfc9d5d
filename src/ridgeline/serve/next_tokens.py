"""The next tokens of sequences whose last known token was computed: sampled, with drafts verified."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from ridgeline.serve.beam import BeamSearch
from ridgeline.serve.outputs import Outputs
from ridgeline.serve.request import TokenLogprob
from ridgeline.serve.runner import Runner
from ridgeline.serve.sampler import NOT_FINITE, Sampler, put
from ridgeline.serve.scheduler import Scheduler
from ridgeline.serve.sequence import Sequence

NO_LOGITS = "the model's logits are not finite"


class NextTokens:
    """Chooses tokens for sequences, appends them, and finds which outputs have ended by that."""

    def __init__(self, runner: Runner, sampler: Sampler, scheduler: Scheduler, outputs: Outputs) -> None:
        self.runner, self.sampler, self.scheduler, self.outputs = runner, sampler, scheduler, outputs
        self.blocks = scheduler.blocks
        self.beams = BeamSearch(sampler, scheduler, outputs)
        self.accepted = 0
        """Number of accepted draft tokens."""

    def forked(self, seq: Sequence) -> list[Sequence]:
        """The sequence, and at the prompt's end the other outputs that the request wants, which share its blocks."""
        group = seq.group
        if seq.generated or len(group.sequences) > 1 or seq.width == 1 or group.beams is not None or group.done:
            return [seq]
        for index in range(1, seq.width):
            grammar = seq.grammar.fork() if seq.grammar is not None else None
            rng = random.Random(f"{group.seed}/{index}")
            child = Sequence(group, index, list(seq.tokens), rng=rng, grammar=grammar)
            child.watch = group.request.watch() if group.request.watch is not None else None
            self.blocks.fork(seq, child)
            group.sequences.append(child)
            self.scheduler.run(child, seq)
        return list(group.sequences)

    def choose(self, ready: list[tuple[Sequence, int]], hidden: Tensor) -> None:
        """Choose the next tokens of sequences, each with its row of ``hidden``; forks share one."""
        if not ready:
            return
        device, logits = hidden.device, self.logits([row for _, row in ready], hidden)
        # A GPU's sampler looks at its rows itself, so that the host waits once.
        checked = [i for i, (seq, _) in enumerate(ready) if device.type == "cpu" or seq.group.beams is not None]
        if checked:
            good = torch.isfinite(logits.amax(1)).tolist()
            for i in checked:
                if not good[i] and ready[i][0].finish is None:
                    self.outputs.fail(ready[i][0], NO_LOGITS)
        keep = [i for i, (seq, _) in enumerate(ready) if seq.finish is None]
        sampling = [i for i in keep if ready[i][0].group.beams is None]
        beams = [i for i in keep if ready[i][0].group.beams is not None]
        if sampling:
            mine = logits if len(sampling) == len(ready) else logits[put(sampling, torch.int64, device)]
            self._sample([ready[i] for i in sampling], mine, hidden)
        if beams:
            self.beams.extend([ready[i][0] for i in beams], logits[put(beams, torch.int64, device)])

    def logits(self, wanted: list[int], hidden: Tensor) -> Tensor:
        """Logits of rows of ``hidden``, one of which may be ``wanted`` several times: [wanted, V]."""
        rows, device = list(dict.fromkeys(wanted)), hidden.device
        logits = self.runner.logits(
            hidden if rows == list(range(len(hidden))) else hidden[put(rows, torch.int64, device)]
        )
        if len(rows) < len(wanted):
            place = {row: i for i, row in enumerate(rows)}
            logits = logits[put([place[row] for row in wanted], torch.int64, device)]
        return logits

    def accept(self, seq: Sequence, token: int, logprob: TokenLogprob | None) -> None:
        """Append and report a first token that another server has drawn, with this sequence's next random number."""
        if not seq.group.request.sampling.greedy:
            seq.draw()
        self.append(seq, token, logprob)
        self.outputs.emit(seq)
        if seq.finish is not None:
            self.outputs.end(seq)

    def _sample(self, expanded: list[tuple[Sequence, int]], logits: Tensor, hidden: Tensor) -> None:
        """Next tokens; where drafts agree with the sampled ones, also those after them."""
        agreed = {seq: 0 for seq, _ in expanded}
        drafts = {seq: seq.draft for seq, _ in expanded}
        active = expanded
        while active:
            seqs = [seq for seq, _ in active]
            wanted = [i for i, s in enumerate(seqs) if _wants_logprobs(s)]
            # The sampler changes its rows.
            raw = logits[put(wanted, torch.int64, logits.device)] if wanted else None
            tokens = self._tokens(logits, active, hidden)
            logprobs = {} if raw is None else self._logprobs(raw, seqs, tokens, wanted)
            further: list[tuple[Sequence, int]] = []
            for i, ((seq, row), token) in enumerate(zip(active, tokens, strict=True)):
                if token < 0 or seq.finish is not None:
                    continue
                draft = drafts[seq]
                done = agreed[seq]
                ended = self.append(seq, token, logprobs.get(i))
                if not ended and done < len(draft) and draft[done] == token:
                    agreed[seq] = done + 1
                    further.append((seq, row + 1))
            active = further
            if active:
                logits = self.runner.logits(hidden[put([row for _, row in active], torch.int64, hidden.device)])
        for seq, _ in expanded:
            if seq.finish == "error":
                continue
            self.accepted += agreed[seq]
            # Of what was computed, only what agrees with the tokens is valid; the rest is overwritten.
            seq.n_computed -= len(drafts[seq]) - agreed[seq]
            seq.draft = []
            self.blocks.commit(seq)
            self.outputs.emit(seq)
            if seq.finish is not None:
                self.outputs.end(seq)

    def _logprobs(
        self, raw: Tensor, seqs: list[Sequence], tokens: list[int], wanted: list[int]
    ) -> dict[int, TokenLogprob]:
        """Log-probabilities of the tokens at the places ``wanted``, from their rows ``raw`` [wanted, vocabulary]."""
        fine = [k for k, i in enumerate(wanted) if tokens[i] >= 0]
        if not fine:
            return {}
        wanted = [wanted[k] for k in fine]
        settings = [seqs[i].group.request.sampling for i in wanted]
        picked = raw if len(fine) == len(raw) else raw[put(fine, torch.int64, raw.device)]
        found = self.sampler.logprobs(picked, [tokens[i] for i in wanted], [s.logprobs or 0 for s in settings])
        for k, s in enumerate(settings):
            if s.logprob_token_ids:
                found[k] = self.sampler.named(picked[k], found[k], s.logprob_token_ids)
        return dict(zip(wanted, found, strict=True))

    def _tokens(self, logits: Tensor, active: list[tuple[Sequence, int]], hidden: Tensor) -> list[int]:
        """The sampled tokens; if sampling fails, it is repeated row by row, so that only the faulty row gets -1."""
        try:
            tokens = self.sampler(logits, [seq for seq, _ in active])
            for (seq, _), token in zip(active, tokens, strict=True):
                if token == NOT_FINITE and seq.finish is None:
                    self.outputs.fail(seq, NO_LOGITS)
            return tokens
        except Exception as e:
            if len(active) == 1:
                self.outputs.fail(active[0][0], f"{type(e).__name__}: {e}")
                return [-1]
        # Rows may have been changed already, so they are computed again.
        return [self._tokens(self.runner.logits(hidden[[row]]), [(seq, row)], hidden)[0] for seq, row in active]

    def append(self, seq: Sequence, token: int, logprob: TokenLogprob | None) -> bool:
        """Append one token → whether it is the last."""
        s = seq.group.request.sampling
        seq.tokens.append(token)
        seq.counts[token] = seq.counts.get(token, 0) + 1
        self.outputs.generated += 1
        if self.scheduler.fair is not None:
            self.scheduler.fair.generated(seq.group.request.client)
        if logprob is not None:
            seq.logprob += logprob.logprob
            if s.logprobs is not None:
                seq.logprobs.append(logprob)
        if seq.grammar is not None:
            try:
                seq.grammar.accept(token)
            except Exception as e:
                self.outputs.fail(seq, f"{type(e).__name__}: {e}")
                return True
        if token in s.stop_token_ids and seq.generated > s.min_tokens:
            seq.finish, seq.stop_token = "stop", token
        elif token in self.sampler.ends and not s.ignore_eos and seq.generated > s.min_tokens:
            seq.finish = "stop"
        else:
            if seq.watch is not None:
                seq.watch.push(token)
            if seq.watch is not None and seq.watch.stop is not None:
                seq.finish = "stop"
            elif seq.generated >= s.max_tokens:
                seq.finish = "length"
        return seq.finish is not None


def _wants_logprobs(seq: Sequence) -> bool:
    return seq.group.request.sampling.logprobs is not None or seq.group.ranked
