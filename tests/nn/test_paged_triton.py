"""Paged attention in Triton (its interpreter, where there is no GPU), against attention over gathered keys."""

import pytest
import torch
from tests.nn.interpreter import DEVICE
from tests.serving import ask, engine, greedy, model, run

from ridgeline.nn.kernels.paged_attention import paged_decode
from ridgeline.nn.model.attention import Mask, ScoreChanges, alibi_slopes, naive_attention


@pytest.mark.parametrize(("heads", "groups", "width"), [(4, 4, 16), (6, 2, 24), (8, 1, 64)])
@pytest.mark.parametrize("block", [1, 16])
@pytest.mark.parametrize(
    ("window", "changed"), [(0, ""), (70, ""), (-70, ""), (0, "soft cap"), (70, "alibi"), (0, "sinks")]
)
def test_pages_give_what_gathered_keys_give(heads, groups, width, block, window, changed):
    generator = torch.Generator().manual_seed(heads + block)
    lengths = torch.tensor([1, 65, 300, 17], dtype=torch.int32)
    blocks = -(-300 // block)
    count = 4 * blocks + 3
    table = torch.randperm(count, generator=generator)[: 4 * blocks].view(4, blocks).int()
    keys, values = (torch.randn(groups, count * block, width, generator=generator) for _ in range(2))
    q = torch.randn(4, heads, width, generator=generator)
    sinks = torch.randn(heads, generator=generator).to(DEVICE)
    changes = {"soft cap": ScoreChanges(1.5, None, None), "alibi": ScoreChanges(None, alibi_slopes(heads), None),
               "sinks": ScoreChanges(None, None, sinks)}.get(changed)  # fmt: skip
    got = paged_decode(*(t.to(DEVICE) for t in (q, keys, values, table, lengths)), block, window, changes).cpu()
    for b, n in enumerate(lengths.tolist()):
        at = torch.arange(max(0, n - window) if window > 0 else 0, n)
        at = at[at // 70 == (n - 1) // 70] if window < 0 else at
        slots = table[b].long()[at // block] * block + at % block
        k, v = keys[:, slots], values[:, slots]
        k, v = (t[None].double() for t in (k, v))
        own = changes and changes._replace(sinks=None if changes.sinks is None else changes.sinks.cpu())
        want = naive_attention(q[b][None, :, None].double(), k, v, Mask(None, False, changes=own))[0, :, 0]
        torch.testing.assert_close(got[b].double(), want, rtol=1e-4, atol=1e-5)


def test_an_engine_serves_through_it():
    made = model(dtype=torch.float32, sliding_window=40).to(DEVICE)
    eng = engine(made, "paged_kv:block_size=4", max_num_batched_tokens=24)
    eng.runner.layout.kernel = lambda q, k, v, s, window, changes: paged_decode(
        q, k.rows[0], v.rows[0], s.table, s.lengths, s.block, window, changes
    )
    prompts = [[(7 * i + 3 * j * j) % 300 for j in range(3 + 20 * i)] for i in range(3)]
    got, _ = run(eng, *[ask(str(i), p, 6) for i, p in enumerate(prompts)])
    assert got == {(str(i), 0): greedy(made, p, 6) for i, p in enumerate(prompts)}
