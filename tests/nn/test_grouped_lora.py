"""Adapters of a step's rows at once, against each row by itself in fp64."""

from dataclasses import replace

import pytest
import torch
from tests.nn.interpreter import DEVICE
from tests.serving import LORAS, adapters_in, ask, engine, in_slots, model, run

from ridgeline.nn.kernels.grouped_lora import add_lora
from ridgeline.nn.kernels.lora_stack import Stack, cut, most_cut, tile
from ridgeline.nn.model.served import join_served

WIDTHS = {"one": (40,), "gate and up": (144, 144), "queries, keys, values": (136, 24, 24)}
NAN = float("nan")


def stacked(ranks, widths, width, capacity, dtype):
    """Slots with ``ranks`` of each slice; what is behind a rank is never read."""
    g, slots, slices = torch.Generator().manual_seed(3), len(ranks), len(widths)
    a = torch.randn(slots, slices, capacity, width, generator=g) / width**0.5
    b = torch.randn(slots, capacity, sum(widths), generator=g)
    for slot, of in enumerate(ranks):
        for i, rank in enumerate(of):
            a[slot, i, rank:] = NAN
            b[slot, rank:, sum(widths[:i]) : sum(widths[: i + 1])] = NAN
    scales = torch.rand(slots, slices, generator=g) + 0.5
    stack = Stack(a.flatten(1, 2).to(dtype), b.to(dtype), torch.tensor(ranks, dtype=torch.int32), scales, widths)
    for name in ("a", "b", "ranks", "scales"):
        setattr(stack, name, getattr(stack, name).to(DEVICE))
    return stack


def one_by_one(x, y, segments, stack):
    """[m, n] in fp64, and what it may be off by: the rounding of the middle and of the sum."""
    out, room = y.double().cpu(), torch.zeros(y.shape, dtype=torch.float64)
    for slot, first, end in segments:
        begin = 0
        for i, (rank, n) in enumerate(zip(stack.ranks[slot].tolist(), stack.widths, strict=True)):
            a = stack.a[slot, i * stack.capacity :][:rank].double().cpu()
            b = stack.b[slot, :rank, begin : begin + n].double().cpu()
            mid = float(stack.scales[slot, i]) * (x[first:end].double().cpu() @ a.t())
            out[first:end, begin : begin + n] += mid @ b
            room[first:end, begin : begin + n] += mid.abs() @ b.abs()
            begin += n
    return out, (room + out.abs()) * 2 * torch.finfo(y.dtype).eps + 1e-12


def given(rows, width, widths, dtype):
    g = torch.Generator().manual_seed(rows)
    return tuple(torch.randn(rows, n, generator=g).to(dtype).to(DEVICE) for n in (width, sum(widths)))


def items_of(segments, rows, more=2):
    """With blocks that are not there."""
    return torch.tensor(cut(segments, rows) + [(0, 0, 0)] * more, dtype=torch.int32, device=DEVICE)


CASES = {
    "a row each": (5, [(2, 1, 2), (0, 2, 3), (3, 3, 4), (1, 4, 5)]),
    "one row": (1, [(3, 0, 1)]),
    "a prompt beside rows": (70, [(0, 3, 4), (3, 4, 63), (1, 66, 67)]),
    "prompts": (300, [(1, 0, 130), (2, 131, 300)]),
    "nobody's": (9, []),
}
"""Rows of a step and whose they are."""


@pytest.mark.parametrize("slices", WIDTHS)
@pytest.mark.parametrize("case", CASES)
def test_every_row_takes_its_adapter(slices, case):
    """Of ranks 0 to 20 in slots for 32, in bf16 and with odd numbers of inputs."""
    (rows, segments), widths = CASES[case], WIDTHS[slices]
    ranks = [[(5 * s + 8 * i + 3) % 21 for i in range(len(widths))] for s in range(4)]
    ranks[2][0] = 0
    stack = stacked(ranks, widths, 83, 32, torch.bfloat16)
    x, y = given(rows, 83, widths, torch.bfloat16)
    want, room = one_by_one(x, y, segments, stack)
    add_lora(x, y, items_of(segments, rows), stack)
    assert ((y.double().cpu() - want).abs() <= room).all()
    mine = torch.zeros(rows, dtype=torch.bool)
    for _, first, end in segments:
        mine[first:end] = True
    assert torch.equal(y.cpu()[~mine], given(rows, 83, widths, torch.bfloat16)[1].cpu()[~mine])


@pytest.mark.parametrize(("capacity", "width", "dtype"), [
    (16, 64, torch.float16), (64, 256, torch.bfloat16), (128, 96, torch.float32), (16, 4224, torch.bfloat16),
])  # fmt: skip
def test_ranks_dtypes_and_parts_of_the_inputs(capacity, width, dtype):
    segments = [(0, 0, 3), (1, 3, 4)]
    stack = stacked([[capacity], [capacity // 2 + 1]], (72,), width, capacity, dtype)
    x, y = given(6, width, (72,), dtype)
    want, room = one_by_one(x, y, segments, stack)
    add_lora(x, y, items_of(segments, 6), stack)
    assert ((y.double().cpu() - want).abs() <= room).all()


def test_a_row_is_the_same_whatever_others_are_in_the_step():
    stack = stacked([[16], [8], [16]], (40,), 2100, 16, torch.bfloat16)
    x, y = given(40, 2100, (40,), torch.bfloat16)
    alone, among = y[7:8].clone(), y.clone()
    add_lora(x[7:8].contiguous(), alone, items_of([(1, 0, 1)], 1), stack)
    add_lora(x, among, items_of([(0, 0, 7), (1, 7, 8), (2, 8, 40)], 40), stack)
    assert torch.equal(alone[0], among[7])
    again = y.clone()
    x[:7], x[8:] = NAN, NAN
    add_lora(x, again, items_of([(0, 0, 7), (1, 7, 8), (2, 8, 40)], 40), stack)
    assert torch.equal(again[7], alone[0])


@pytest.mark.skipif(DEVICE == "cuda", reason="the model is on the CPU")
def test_served_tokens_are_those_of_one_adapter_after_the_other(tmp_path):
    """By the kernels, behind merged projections, in fp32."""
    folders = adapters_in(tmp_path, kinds=LORAS)

    def served(in_them):
        made = model(dtype=torch.float32)
        if in_them:
            join_served(made)
        eng = engine(made, "multi_adapter")
        eng = in_slots(eng, add=add_lora) if in_them else eng
        for name, folder in folders.items():
            eng.load_adapter(name, folder)
        prompts = {n: list(range(3 + 4 * i, 12 + 6 * i)) for i, n in enumerate(["", *folders])}
        return run(eng, *[replace(ask(n, prompt, 3), adapter=n) for n, prompt in prompts.items()])[0]

    assert served(True) == served(False)


@pytest.mark.parametrize(("rows", "segments"), [(1, 4), (8, 4), (64, 16), (65, 300), (512, 3), (1000, 64)])
def test_no_more_blocks_than_that_can_be(rows, segments):
    reached, size = min(rows, segments), tile(rows)
    worst = [1] * reached
    worst[0] += rows - reached
    spread = [1 + size * (i < (rows - reached) // size) for i in range(reached)]
    for counts in (worst, spread):
        ends = torch.tensor(counts).cumsum(0).tolist()
        found = cut([(i, end - n, end) for i, (n, end) in enumerate(zip(counts, ends, strict=True))], rows)
        assert len(found) <= most_cut(rows, segments)
        assert all(0 < end - first <= size for _, first, end in found)
        assert sum(end - first for _, first, end in found) == ends[-1]
