"""Searches in several processes."""

from __future__ import annotations

import os
import sys
import time

import pytest

from ridgeline import catalog
from ridgeline.search import Question, search
from ridgeline.search.nodes import in_order
from ridgeline.search.workers import _shared, in_processes
from ridgeline.spec.workload import Pretrain

FEW = frozenset({"zero", "recompute", "flash_attention", "mixed_precision", "data_parallel"})


def question(more=frozenset(), **fields) -> Question:
    work = Pretrain(seq_len=2048, batch_size=32)
    model, cluster = catalog.model("llama2-7b"), catalog.cluster("8xa100-80g-sxm")
    return Question(model, cluster, work, only=FEW | more, **fields)


def test_a_worker_that_is_killed_costs_nothing_but_time(monkeypatch):
    module, here = sys.modules[search.__module__], os.getpid()
    plans = {str(t.experiment.plan) for t in search(question(), workers=1).best}
    nodes = module.nodes

    def dies(*args):
        if os.getpid() != here:
            os._exit(9)
        return nodes(*args)

    monkeypatch.setattr(module, "nodes", dies)
    assert {str(t.experiment.plan) for t in search(question(), workers=2).best} == plans


def test_a_process_without_nodes_takes_those_that_another_has_left(monkeypatch):
    monkeypatch.setattr("ridgeline.search.workers.divide", lambda shapes, _: [shapes, []])
    module = sys.modules[search.__module__]
    parts = []

    def merged(run, shapes, workers, say):
        parts[:] = in_processes(run, shapes, workers, say)
        return parts

    def waits(q, bases, nodes, *more):
        for node in in_order(q, bases, nodes, *more):
            while _shared and not any(_shared[0].taken.get_obj()):  # until the other one has begun
                time.sleep(0.01)
            yield node

    monkeypatch.setattr(module, "in_processes", merged)
    monkeypatch.setattr(module, "in_order", waits)
    q = question({"tensor_parallel", "pipeline"}, free_micro_batch=True)
    answer, alone = search(q, workers=2), search(q, workers=1)
    assert [t.calls for t in answer.best[:1]] == [t.calls for t in alone.best[:1]]
    assert answer.found.counts["considered"] == alone.found.counts["considered"]
    assert parts[1].counts["considered"] > 0


def test_a_process_that_fails_ends_the_search(monkeypatch):
    """The other one has nothing to do but to wait for what this one leaves."""
    monkeypatch.setattr("ridgeline.search.workers.divide", lambda shapes, _: [shapes, []])

    def fails(q, bases, nodes, *_):
        if nodes:
            raise ZeroDivisionError
        return nodes

    monkeypatch.setattr(sys.modules[search.__module__], "in_order", fails)
    with pytest.raises(ZeroDivisionError):
        search(question(), workers=2)
