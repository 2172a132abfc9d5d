"""8-bit AdamW in one kernel (in Triton's interpreter, where there is no GPU) against PyTorch's operators and fp64."""

import pytest
import torch
from tests.nn.interpreter import DEVICE
from tests.nn.trials import tried

from ridgeline.nn.kernels import coded_adamw as kernel
from ridgeline.nn.quant import coded_adamw
from ridgeline.nn.quant.codec import decode_blockwise8, encode_blockwise8
from ridgeline.nn.quant.coded_adamw import Moment, Numbers
from ridgeline.runtime.optimizers import AdamW8bitOptimizer


def numbers(step, decay=0.1):
    return Numbers(0.02, 0.9, 0.95, 1e-8, decay, step)


def moments(shape, block):
    return [Moment(*encode_blockwise8(torch.zeros(shape, device=DEVICE), signed, block)) for signed in (True, False)]


def decoded(held, block):
    return [decode_blockwise8(*of, signed, block) for of, signed in zip(held, (True, False), strict=True)]


@pytest.mark.parametrize(("rows", "width", "block"), [(7, 320, 160), (3, 512, 256), (5, 48, 16), (1, 37, 37)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_steps_are_those_of_the_operators_and_near_fp64(rows, width, block, dtype):
    """From the same codes each time: codes that lie between two are one of both."""
    g = torch.Generator().manual_seed(0)
    weight = torch.randn(rows, width, generator=g).to(DEVICE, dtype)
    held = moments((rows, width), block)
    for t in range(1, 4):
        grad = (torch.randn(rows, width, generator=g) * 10 ** (2 - t)).to(DEVICE, dtype)
        grad[:, -1] = 0  # whose second moment is zero
        want, theirs = weight.clone(), [Moment(*(x.clone() for x in of)) for of in held]
        m, v = (x.double() for x in decoded(held, block))
        exact = weight.double()
        coded_adamw.apply(exact, grad.double(), m, v, numbers(t))
        coded_adamw._by_operators(want, grad, *theirs, block, numbers(t))
        coded_adamw._by_kernel(weight, grad, *held, block, numbers(t))
        small = 1e-6 if dtype == torch.float32 else 2e-3
        for found in (weight, want):
            torch.testing.assert_close(found.double(), exact, rtol=small, atol=small)
        for mine, their, right in zip(held, theirs, (m, v), strict=True):
            torch.testing.assert_close(mine.peaks, their.peaks.view_as(mine.peaks), rtol=1e-6, atol=0)
            apart = (mine.codes.int() - their.codes.int()).abs()
            assert apart.max() <= 1
            assert apart.double().mean() < 2e-3
            peak = right.view(-1, block).abs().amax(1, True)
            off = (decode_blockwise8(*mine, mine is held[0], block) - right).view(-1, block).abs()
            assert (off <= 0.0152 * peak).all(), "half of the widest span between two codes"


def test_a_gradient_that_is_not_finite_shows_in_its_block_alone():
    weight, held = torch.ones(2, 32, device=DEVICE), moments((2, 32), 16)
    grad = torch.ones(2, 32, device=DEVICE)
    grad[0, 3] = float("nan")
    coded_adamw._by_kernel(weight, grad, *held, 16, numbers(1))
    for found in (*decoded(held, 16),):
        assert found[0, :16].isnan().all()
        assert not found[0, 16:].isnan().any()
        assert not found[1].isnan().any()
    assert weight.isnan().sum() == 1


@pytest.mark.parametrize("off", ["", "decay", "second moment"])
def test_it_is_tried_before_it_is_used(off, monkeypatch):
    def wrong(weight, grad, m, v, tables, block, numbers):
        plain(weight, grad, m, v, tables, block, (1.0, *numbers[1:]) if off == "decay" else numbers)
        if off == "second moment":
            v.peaks.mul_(1.1)

    plain = kernel.coded_adamw
    if off:
        monkeypatch.setattr(kernel, "coded_adamw", wrong)
    said = ["PyTorch's operators compute 8-bit AdamW, as our kernel is wrong"]
    assert tried(coded_adamw, monkeypatch) == said * bool(off)


def test_fp32_moments_are_updated_all_at_once_as_one_by_one():
    """By PyTorch's fused step, of which a GPU has a kernel for many tensors."""
    g = torch.Generator().manual_seed(0)
    starts = [torch.randn(n, generator=g).to(DEVICE) for n in (9, 30)]
    grads = [[torch.randn(len(s), generator=g).to(DEVICE) for s in starts] for _ in range(3)]
    ends = []
    for together in (True, False):
        ps = [torch.nn.Parameter(s.clone()) for s in starts]
        o = AdamW8bitOptimizer([{"params": ps, "weight_decay": 0.1}], 0.02, (0.9, 0.95), 256, set())
        for step in grads:
            for p, grad in zip(ps, step, strict=True):
                p.grad = grad.clone()
            with torch.no_grad():
                if together:
                    o._update_whole(ps, o.param_groups[0])
                else:
                    for p in ps:
                        o.update(p, o.param_groups[0])
        ends.append(torch.cat([*(p.detach() for p in ps), *(o.state[p]["exp_avg_sq"] for p in ps)]))
    torch.testing.assert_close(*ends, rtol=1e-6, atol=1e-7)
