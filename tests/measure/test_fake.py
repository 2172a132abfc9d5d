"""What counts launches and waits on a fake GPU."""

import torch

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
