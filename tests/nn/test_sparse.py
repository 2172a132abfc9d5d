"""The bitmask archive of pruned weights."""

import pytest
import torch

from ridgeline.nn.checkpoint.formats import reader, writer
from ridgeline.nn.quant.packed import Packed
from ridgeline.nn.quant.sparse import Sparse


@pytest.mark.parametrize("shape", [(5, 70), (1, 32), (3, 1)])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_nothing_is_lost_and_every_bit_is_counted(shape, share):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator) * (torch.rand(shape, generator=generator) >= share)
    record = Sparse.of(weight)
    assert torch.equal(record.dense(), weight)
    words = -(-shape[1] // 32)
    bits = 32 * words * shape[0] + 32 * int((weight != 0).sum())
    assert record.bits_per_weight == pytest.approx(bits / weight.numel())
    for start, stop in ((0, 1), (shape[0] // 2, shape[0]), (0, shape[0])):
        assert torch.equal(record.rows(start, stop).dense(), weight[start:stop])
    form = writer("ridgeline")
    tensors, config = form.write("m", record), form.config({"m": record}, [], {})
    assert config["modules"] == {"bitmask": 1}
    assert torch.equal(reader(config).read("m", tensors.get).dense(), weight)
    assert not isinstance(reader(config).read("m", tensors.get), Packed)
