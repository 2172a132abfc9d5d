"""Outputs of prompts other than a next token: embeddings, classes, and log-probabilities of the prompt itself."""

from __future__ import annotations

import math
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from ridgeline.serve.changes import put
from ridgeline.serve.likelihoods import Likelihoods, OneCopy, likelihoods
from ridgeline.serve.outputs import Outputs
from ridgeline.serve.request import OutputEvent
from ridgeline.serve.runner import Runner
from ridgeline.serve.sampler import Sampler
from ridgeline.serve.sequence import Sequence, SequenceGroup


def pool(seq: Sequence, hidden: Tensor, runner: Runner) -> None:
    """Add the prompt tokens of this step, ``hidden`` [tokens, hidden], to an embedding's sum, or keep the one that it
    is, or all; a classifier reads the first one."""
    group = seq.group
    if not group.request.embed:
        return
    if group.request.each:
        projected = group.request.classify or runner.model.spec.head == "project"
        rows = runner.logits(hidden) if projected else hidden
        group.hidden = (group.hidden or []) + rows.float().tolist()
    elif group.request.classify:
        if seq.n_computed == 0:
            group.hidden = runner.logits(hidden[:1])[0].tolist()
    elif group.request.pooling == "cls":
        if seq.n_computed == 0:
            group.hidden = hidden[0].tolist()
    elif group.request.pooling == "last":
        group.hidden = hidden[-1].tolist()
    else:
        total = hidden.double().sum(0)
        before = group.hidden
        group.hidden = (total if before is None else total + total.new_tensor(before)).tolist()


def prompt_logprobs(
    seq: Sequence, hidden: Tensor, runner: Runner, sampler: Sampler, rows_at_once: int, copy: OneCopy
) -> None:
    """Log-probabilities of prompt tokens from ``hidden`` [tokens, hidden] of this step, where they are requested, once
    ``copy`` brings them."""
    group, prompt = seq.group, seq.group.request.prompt
    start, known = seq.n_computed, len(group.prompt_logprobs)
    tops = group.request.sampling.prompt_logprobs
    if tops is None or known < start:  # the prompt of a preempted sequence is computed again
        return
    stop = min(start + len(hidden), len(prompt) - 1)
    for at in range(known, stop, rows_at_once):
        end = min(stop, at + rows_at_once)
        logits = runner.logits(hidden[at - start : end - start])
        tokens = [int(t) for t in prompt[at + 1 : end + 1]]
        asked = put(tokens, torch.int64, logits.device)
        found = likelihoods(logits, asked, [tops] * len(tokens), sampler.search, ranked=True)
        copy.add(found.numbers, partial(_report, group, tokens, found))


def _report(group: SequenceGroup, tokens: list[int], found: Likelihoods, numbers: list[float]) -> None:
    group.prompt_logprobs += found.read(tokens, numbers)


def end_pooled(seq: Sequence, outputs: Outputs) -> None:
    """Return the embedding or the class logits of a computed prompt, and end its request."""
    group = seq.group
    assert group.hidden is not None
    each = group.request.each
    summed = group.request.pooling == "mean" and not (group.request.classify or each)
    found = [v / len(seq.tokens) for v in group.hidden] if summed else group.hidden
    if not all(map(math.isfinite, chain.from_iterable(found) if each else found)):
        outputs.fail(seq, "the model's hidden states are not finite")
        return
    event = OutputEvent(
        group.request.id,
        0,
        finish="stop",
        embedding=found,
        cached_tokens=group.cached_tokens,
        preemptions=group.preemptions,
    )
    outputs.events.append(event)
    seq.finish = "stop"
    outputs.end(seq)
