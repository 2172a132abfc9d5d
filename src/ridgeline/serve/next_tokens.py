"""The next tokens of sequences whose last known token was computed: sampled, with drafts verified."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from ridgeline.serve.beam import BeamSearch
from ridgeline.serve.changes import put
from ridgeline.serve.draft_tree import child, moves
from ridgeline.serve.likelihoods import OneCopy
from ridgeline.serve.outputs import Outputs
from ridgeline.serve.rank_channel import RankLost
from ridgeline.serve.request import TokenLogprob
from ridgeline.serve.runner import Runner
from ridgeline.serve.sampler import NOT_FINITE, Sampler, finite_rows
from ridgeline.serve.scheduler import Scheduler
from ridgeline.serve.sequence import Sequence
from ridgeline.serve.verify import Verified, reported, verified, wants_logprobs

NO_LOGITS = "the model's logits are not finite"


class _Rounds:
    """Tokens that are chosen round by round: behind the last known ones, then behind those drafted ones that agree."""

    def __init__(self, owner: NextTokens, logits: Tensor, behind: dict[int, Tensor], hidden: Tensor) -> None:
        """``logits`` [R, V] of the first round, which may be changed, and those of drafted tokens, by rows of
        ``hidden``, where they are known."""
        self.owner, self.logits, self.behind, self.hidden = owner, logits, behind, hidden
        self.begun = False

    def take(self, active: list[tuple[Sequence, int]]) -> tuple[list[int], dict[int, TokenLogprob]]:
        """The tokens of a round, and the log-probabilities of some, by their positions in ``active``."""
        logits, self.begun = self._next([row for _, row in active]) if self.begun else self.logits, True
        seqs = [seq for seq, _ in active]
        told = [i for i, s in enumerate(seqs) if wants_logprobs(s)]
        # The sampler changes its rows.
        raw = logits[put(told, torch.int64, logits.device)] if told else None
        tokens = self._tokens(logits, active)
        return tokens, {} if raw is None else self._logprobs(raw, seqs, tokens, told)

    def give_back(self) -> None:
        """Nothing was drawn that was not reached."""

    def _next(self, rows: list[int]) -> Tensor:
        if self.behind:
            return torch.stack([self.behind[row] for row in rows])
        return self.owner.logits(rows, self.hidden)

    def _logprobs(
        self, raw: Tensor, seqs: list[Sequence], tokens: list[int], wanted: list[int]
    ) -> dict[int, TokenLogprob]:
        """Log-probabilities of the tokens at the places ``wanted``, from their rows ``raw`` [wanted, vocabulary]."""
        fine = [k for k, i in enumerate(wanted) if tokens[i] >= 0]
        if not fine:
            return {}
        wanted = [wanted[k] for k in fine]
        picked = raw if len(fine) == len(raw) else raw[put(fine, torch.int64, raw.device)]
        chosen = [tokens[i] for i in wanted]
        asked = put(chosen, torch.int64, raw.device)
        found = reported([seqs[i] for i in wanted], picked, self.owner.sampler, asked)
        return dict(zip(wanted, found.read(chosen, found.numbers.flatten().tolist()), strict=True))

    def _tokens(self, logits: Tensor, active: list[tuple[Sequence, int]]) -> list[int]:
        """The sampled tokens; if sampling fails, it is repeated row by row, so that only the faulty row gets -1."""
        try:
            return self.owner.sampler(logits, [seq for seq, _ in active])
        except Exception as e:
            if len(active) == 1:
                self.owner.outputs.fail(active[0][0], f"{type(e).__name__}: {e}")
                return [-1]
        # Rows may have been changed already, so they are computed again.
        runner, hidden = self.owner.runner, self.hidden
        return [self._tokens(runner.logits(hidden[[row]]), [(seq, row)])[0] for seq, row in active]


class NextTokens:
    """Chooses tokens for sequences, appends them, and finds which outputs have ended by that."""

    def __init__(
        self, runner: Runner, sampler: Sampler, scheduler: Scheduler, outputs: Outputs, rows_at_once: int
    ) -> None:
        """``rows_at_once``: the most rows of logits."""
        self.rows_at_once = rows_at_once
        self.runner, self.sampler, self.scheduler, self.outputs = runner, sampler, scheduler, outputs
        self.blocks = scheduler.blocks
        self.beams = BeamSearch(sampler, scheduler, outputs)
        self.at_once = runner.device.type != "cpu"
        """Whether the tokens of all places are chosen before the host knows which drafts agree: what is chosen behind
        the others costs a CPU more than there is to wait for."""
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

    def choose(self, ready: list[tuple[Sequence, int]], hidden: Tensor, copy: OneCopy) -> None:
        """Choose the next tokens of sequences, each with its row of ``hidden``; forks share one. ``copy`` brings what
        else is asked for in this step, at the latest before outputs are reported."""
        plain = [(seq, row) for seq, row in ready if seq.group.beams is None]
        if self.at_once and plain and (found := self._verified(plain, hidden, copy)) is not None:
            self._sample(plain, found)
            ready = [(seq, row) for seq, row in ready if seq.group.beams is not None]
        copy.read()
        if ready:
            self._choose_by_rounds(ready, hidden)

    def _verified(self, ready: list[tuple[Sequence, int]], hidden: Tensor, copy: OneCopy) -> Verified | None:
        """The tokens of all places of this step; None where that has failed, so that what is at fault is found."""
        try:
            return verified(ready, lambda rows: self.logits(rows, hidden), self.sampler, copy, self.rows_at_once)
        except RankLost:
            raise
        except Exception:
            return None

    def _choose_by_rounds(self, ready: list[tuple[Sequence, int]], hidden: Tensor) -> None:
        """The same with a wait for each round of drafts, and of beams."""
        device = hidden.device
        drafted = [row + i for seq, row in ready for i in range(1, len(seq.draft) + 1)]
        if len(ready) + len(drafted) > self.rows_at_once:
            drafted = []
        logits = self.logits([*(row for _, row in ready), *drafted], hidden)
        behind = dict(zip(drafted, logits[len(ready) :], strict=True))
        logits = logits[: len(ready)]
        good = finite_rows(logits)
        for i, (seq, _) in enumerate(ready):
            if not good[i] and seq.finish is None:
                self.outputs.fail(seq, NO_LOGITS)
        keep = [i for i, (seq, _) in enumerate(ready) if seq.finish is None]
        sampling = [i for i in keep if ready[i][0].group.beams is None]
        beams = [i for i in keep if ready[i][0].group.beams is not None]
        if sampling:
            mine = logits if len(sampling) == len(ready) else logits[put(sampling, torch.int64, device)]
            self._sample([ready[i] for i in sampling], _Rounds(self, mine, behind, hidden))
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

    def _sample(self, expanded: list[tuple[Sequence, int]], source: _Rounds | Verified) -> None:
        """Next tokens, which ``source`` has; where drafts agree with them, also those after them."""
        kept: dict[Sequence, list[int]] = {seq: [] for seq, _ in expanded}
        active, first = expanded, dict(expanded)
        while active:
            tokens, logprobs = source.take(active)
            for (seq, _), token in zip(active, tokens, strict=True):
                if token == NOT_FINITE and seq.finish is None:
                    self.outputs.fail(seq, NO_LOGITS)
            further: list[tuple[Sequence, int]] = []
            for i, ((seq, row), token) in enumerate(zip(active, tokens, strict=True)):
                if token < 0 or seq.finish is not None:
                    continue
                ended = self.append(seq, token, logprobs.get(i))
                if ended or not seq.draft:
                    continue
                node = child(seq.draft, seq.parents, row - first[seq] - 1, token)
                if node >= 0:
                    kept[seq].append(node)
                    further.append((seq, first[seq] + 1 + node))
            active = further
        source.give_back()
        self._settle(kept)
        for seq, _ in expanded:
            if seq.finish == "error":
                continue
            self.blocks.commit(seq)
            self.outputs.emit(seq)
            if seq.finish is not None:
                self.outputs.end(seq)

    def _settle(self, kept: dict[Sequence, list[int]]) -> None:
        """Of what was computed, only what agrees with the tokens is valid: the ``kept`` nodes of drafts go where their
        tokens belong, and what is behind them is overwritten."""
        source: list[int] = []
        target: list[int] = []
        size = self.blocks.size
        for seq, nodes in kept.items():
            if seq.finish == "error":
                continue
            self.accepted += len(nodes)
            start = seq.n_computed - 1 - len(seq.draft)
            for place, own in moves(start, nodes):
                source.append(seq.blocks[place // size] * size + place % size)
                target.append(seq.blocks[own // size] * size + own % size)
            seq.n_computed = start + 1 + len(nodes)
            self.scheduler.drop_draft(seq)
        if source:
            self.runner.move(source, target)

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
