"""The loader that prepares batches while steps run: the same batches in the same order, its errors, its end."""

import gc
import threading
import weakref

import pytest
import torch
from tests.training import experiment, small_domains

from ridgeline.data.batches import Batch
from ridgeline.train import loader, trainer
from ridgeline.train.loader import Loader, prepared, send
from ridgeline.train.trainer import Trainer

CPU = torch.device("cpu")


def batch(step):
    return Batch(torch.full((4, 3), step), torch.ones(4, 3, dtype=torch.long))


@pytest.fixture
def asked():
    return []


@pytest.fixture
def ahead(asked):
    """Batches of 4 rows, ahead; ``asked`` lists the steps that were prepared, and whether in the main thread."""

    def prepare(step):
        asked.append((step, threading.current_thread() is threading.main_thread()))
        if step == 3:
            raise OSError("the disk is gone")
        return prepared(batch(step), slice(0, 4), 2, CPU)

    return Loader(prepare, CPU, ahead=True)


def ids(sent):
    return [m.ids.unique().tolist() for m in sent[0]]


def test_the_next_batch_is_prepared_meanwhile(ahead, asked):
    assert ids(ahead.take(0, more=True)) == [[0], [0]]
    ahead.queue(1)  # waits for it
    assert asked == [(0, True), (1, False)]
    assert ids(ahead.take(1)) == [[1], [1]]
    assert asked == [(0, True), (1, False)]
    assert ids(ahead.take(2)) == [[2], [2]]


def test_other_steps_are_prepared_when_asked_for(ahead):
    """As after a restart from a copy."""
    ahead.take(0, more=True)
    ahead.queue(1)
    assert ids(ahead.take(5, more=True)) == [[5], [5]]
    assert ids(ahead.take(1)) == [[1], [1]]
    assert ids(ahead.take(6)) == [[6], [6]]


def test_what_fails_ahead_is_raised_at_its_step(ahead):
    ahead.take(2, more=True)
    ahead.queue(3)
    with pytest.raises(OSError, match="the disk is gone"):
        ahead.take(3)
    assert ids(ahead.take(4)) == [[4], [4]]


def test_documents_of_a_gpu_come_with_their_ends(monkeypatch):
    """Of each micro-batch of two rows."""
    monkeypatch.setattr(loader, "pinned", lambda t, device: t)
    documents = torch.tensor([[0, 0, 1], [0, 1, 2], [0, 0, 0], [0, 0, 1]])
    given = prepared(batch(0)._replace(documents=documents), slice(0, 4), 2, torch.device("cuda"))
    micros, _ = send(given, CPU)
    assert [m.sequences.ends.tolist() for m in micros] == [[0, 2, 3, 4, 5, 6], [0, 3, 5, 6]]
    assert [m.sequences.longest for m in micros] == [2, 3]
    assert [m.documents.tolist() for m in micros] == [documents[:2].tolist(), documents[2:].tolist()]


def losses(e, monkeypatch, now):
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "Loader", lambda prepare, device, ahead: Loader(prepare, device, now))
        t = Trainer(e)
    return [t.step().loss for _ in range(e.training.steps)]


def test_a_trainer_prepares_and_queues_while_steps_run(corpus, monkeypatch):
    """All but the first batch, in the thread; and nothing after the last."""
    threads, queued, plain = [], [], Loader.queue

    def made(prepare, device, ahead):
        def counted(step):
            threads.append((step, threading.current_thread() is threading.main_thread()))
            return prepare(step)

        return Loader(counted, device, True)

    def queue(self, step):
        plain(self, step)
        queued.append((step, self._sent is not None))

    monkeypatch.setattr(trainer, "Loader", made)
    monkeypatch.setattr(Loader, "queue", queue)
    t = Trainer(experiment(corpus, batch_size=4, steps=3))
    for _ in range(3):
        t.step()
    assert threads == [(0, True), (1, False), (2, False)]
    assert queued == [(1, True), (2, True), (3, False)]


@pytest.mark.parametrize("plan", [(), ("growlength:lengths=4+8,shares=0.25+0.25",)])
def test_losses_are_the_same_ahead(corpus, monkeypatch, plan):
    e = experiment(corpus, *plan, batch_size=4, steps=5, document_mask=True)
    assert losses(e, monkeypatch, True) == losses(e, monkeypatch, False)


def test_batches_that_follow_from_losses_are_never_ahead(corpus):
    e = experiment(corpus, "dynamic_batch_loading:every=2")
    assert not Trainer(e.model_copy(update={"plan": small_domains(e.plan, corpus)})).run.data.ahead
    assert Trainer(experiment(corpus)).run.data.ahead


def test_a_copy_that_fails_is_raised_by_its_step(ahead, monkeypatch):
    """The step before is complete, and counted."""
    ahead.take(0, more=True)
    with monkeypatch.context() as m:
        m.setattr(loader, "send", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("full")))
        ahead.queue(1)
        with pytest.raises(torch.OutOfMemoryError, match="full"):
            ahead.take(1)
    assert ids(ahead.take(1)) == [[1], [1]]


def test_a_loader_and_what_it_prepares_with_are_freed():
    class Owner:
        def prepare(self, step):
            return prepared(batch(step), slice(0, 4), 2, CPU)

        def __init__(self):
            self.loader = Loader(lambda step: self.prepare(step), CPU, ahead=True)

    owner = Owner()
    owner.loader.take(0, more=True)
    owner.loader.queue(1)
    gone = weakref.ref(owner)
    del owner
    gc.collect()
    assert gone() is None
