"""What crosses between a server and its engine's process comes back as it was, however it is cut."""

import pickle
import random

import pytest

from ridgeline.serve.engine_messages import Frames, Kind, framed
from ridgeline.serve.request import Busy, Invalid, NotFound, OutputEvent, Stats, TokenLogprob
from ridgeline.serve.step_report import StepReport, pack, unpack
from ridgeline.spec.errors import Incompatible, UserError


def test_a_report_comes_back_as_it_was():
    rng = random.Random(5)

    def entry():
        top = tuple((rng.randrange(300), -rng.random()) for _ in range(rng.randrange(4)))
        return TokenLogprob(rng.randrange(300), -rng.random(), top, rng.randrange(9))

    def event(i):
        tokens = [rng.randrange(1 << 17) for _ in range(rng.randrange(4))]
        made = OutputEvent(f"cmpl-{i}", rng.randrange(4), tokens)
        if rng.random() < 0.5:
            made.logprobs = [entry() for _ in tokens]
        if rng.random() < 0.5:
            made.finish = rng.choice(["stop", "length", "abort", "error"])
            made.stop_token, made.cached_tokens, made.preemptions = rng.choice([None, 0, 7]), rng.randrange(99), 2
            made.stop_string, made.error = rng.choice([None, "e"]), rng.choice(["", "not finite"])
            made.unstructured, made.score = rng.choice(["", "too complex"]), rng.choice([None, -0.25])
        if rng.random() < 0.2:
            made.embedding = rng.choice([[0.1, -2.0], [[0.3], [0.1]]])
            made.prompt_logprobs = [entry(), entry()]
        return made

    names = Stats.__dataclass_fields__
    for size in (0, 1, 60):
        report = StepReport([event(i) for i in range(size)], Stats(*(rng.randrange(1 << 40) for _ in names)), 12.5,
                            0.25, [f"é{i}" for i in range(size // 2)], 1 << 33, bool(size))  # fmt: skip
        assert unpack(pack(report)) == report


def test_messages_may_be_cut_anywhere():
    sent = [(Kind.ADD, b""), (Kind.REPORT, bytes(range(256)) * 9), (Kind.STOP, b"x")]
    stream, rng = b"".join(framed(*message) for message in sent), random.Random(1)
    for _ in range(50):
        frames, got, at = Frames(), [], 0
        while at < len(stream):
            size = rng.choice([1, 2, 7, 900])
            got += frames.feed(stream[at : at + size])
            at += size
        assert got == sent


@pytest.mark.parametrize(
    "e", [UserError("a", "b"), UserError("a"), Incompatible("a", "b"), Invalid("n", "is 3", "give 2", "code"),
          NotFound("n", "is 3", "give 2"), Busy("full", 2.5)]
)  # fmt: skip
def test_a_users_mistake_crosses_whole(e):
    back = pickle.loads(pickle.dumps(e))
    assert type(back) is type(e)
    assert (str(back), vars(back)) == (str(e), vars(e))
