"""What counts launches and waits on a fake GPU."""

import torch

from ridgeline.measure.fake.tables import fake_trace_tables
from ridgeline.measure.fake.trace import StepTrace
from ridgeline.measure.fake.tracer import Tracer


def test_memory_that_is_gone_is_not_pinned():
    """A new tensor may have the address of one that was pinned."""
    tracer = Tracer()
    for _ in range(50):
        pinned = tracer.pin(torch.empty(3))
        assert tracer._from_pinned(pinned[1:])
        del pinned
        later = [torch.empty(3) for _ in range(4)]
        assert not any(map(tracer._from_pinned, later))
    assert len(tracer._pinned) <= 1


def test_launches_are_listed_by_line_and_by_operator_up_to_their_sum():
    operators = {f"operator {i}": 20 - i for i in range(15)}
    step = StepTrace(sum(operators.values()), operators, {"nn/a.py:1": 195}, [], [])
    _, places, found = fake_trace_tables({"step": step}, 4e-6, 0.01)
    assert places.rows == [["nn/a.py:1", "195"], ["total", "195"]]
    assert found.title == "step: launches by operator"
    *listed, rest, total = ((name, int(n)) for name, n in found.rows)
    assert listed == list(operators.items())[:12]
    assert rest == ("(3 others)", 8 + 7 + 6)
    assert total == ("total", step.launches)
