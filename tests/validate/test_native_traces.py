"""What PyTorch's own software does on each rank, traced on tensors without memory, and what the predictor counts."""

import pytest
from tests.forked import Fork

from ridgeline import experiments
from ridgeline.graph import training_graph
from ridgeline.predict.common import rewritten
from ridgeline.techniques.registry import resolve

HEADS, LENGTH, DIM = 4, 256, 128


def traced_ring(send, ranks, rank):
    """Sends calls (operator, shapes of the inputs, bytes of the output, whether waited for at once) of one rank's
    causal ring attention, forward and backward, as ``torch.compile`` traces it; first as traced, then without repeats.
    """
    import torch
    import torch.distributed as dist
    from torch._functorch.compile_utils import fx_graph_cse
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental._context_parallel import _attention as native
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    group = init_device_mesh("cpu", (ranks,)).get_group()
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    back = torch.ops.aten._scaled_dot_product_flash_attention_backward.default

    def both(q, k, v, grad):
        out, lse, *rest = native._templated_ring_attention(group, 2, flash, q, k, v, is_causal=True, dropout_p=0.0)
        names = ("cum_seq_q", "cum_seq_k", "max_q", "max_k", "philox_seed", "philox_offset")
        options = dict(zip(names, rest, strict=False), dropout_p=0.0)
        return native._templated_ring_attention_backward(
            group, 2, back, grad, "grad_out", q, k, v, out, lse, True, **options
        )

    inputs = [torch.empty(1, HEADS, LENGTH, DIM, dtype=torch.bfloat16, device="meta") for _ in range(4)]
    graph = make_fx(both)(*inputs).graph
    graph.eliminate_dead_code()

    def calls(graph):
        found = []
        for node in graph.nodes:
            name = str(node.target)
            if node.op != "call_function" or not any(w in name for w in ("c10d", "flash_attention")):
                continue
            tensors = [a.meta["val"] for a in node.args if hasattr(a, "meta")]
            value = node.meta["val"]
            size = value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0
            found.append((name, [tuple(t.shape) for t in tensors], size, "wait_tensor" in str(node.next.target)))
        return found

    send([calls(graph), calls(fx_graph_cse(graph))])


def layer(*plan, on="8xh100", batch=8, length=8 * LENGTH):
    """A rewritten layer of llama3-8b."""
    work = {"kind": "pretrain", "seq_len": length, "batch_size": batch, "micro_batch_size": 1}
    e, techniques = resolve(experiments.make("llama3-8b", on, work, list(plan)))
    return next(b for b in rewritten(training_graph(e), e, techniques).blocks if b.is_layer)


COMPILED = ("mixed_precision:weights=gathered", "flash_attention", "torch_compile:pieces=true", "recompute",
            "zero:stage=3")  # fmt: skip


def test_ring_attention_counts_what_pytorch_traces():
    ranks = 4
    traced, once = Fork(traced_ring, ranks, 1).answer()
    ours = layer(*COMPILED, f"ring_attention:degree={ranks},exchange=gather", length=ranks * LENGTH)
    scale = 32 / HEADS
    named = {o.name: o for o in ours.backward}

    def of(calls, name):
        return [c for c in calls if name in c[0]]

    def pairs(calls):  # of a query and a key, half of them masked where both are whole
        each = [(q[2], k[2]) for q, k in ((shapes[-6], shapes[-5]) if len(shapes) > 3 else shapes[:2]
                                          for _, shapes, _, _ in calls)]  # fmt: skip
        return sum(q * k * (0.5 if q == k else 1.0) for q, k in each)

    forward = of(traced, "flash_attention.default")
    assert len(forward) == ranks
    cores = [o for o in ours.forward if o.kind == "attention"]
    counted = sum(o.shape[0] * o.shape[3] * o.shape[4] / 2 for o in cores)  # causal, as many sequences as parts
    assert counted == pairs(forward)

    exchanged = of(traced, "c10d_functional.all_")
    assert all(waited for *_, waited in exchanged)
    assert not any(o.behind for o in (*ours.forward, *ours.backward) if o.axis == "cp")

    gathers = of(once, "all_gather")
    assert len(gathers) == 1 < len(of(traced, "all_gather")), "the same of both directions"
    assert [o.link_bytes for o in ours.forward if o.axis == "cp"] == [scale * gathers[0][2]]
    assert named["attention.flash.gather.again"].link_bytes == scale * gathers[0][2]
    assert "attention.flash.bwd.gather" not in named

    passed = sum(size for *_, size, _ in of(traced, "all_to_all"))
    assert named["attention.flash.bwd.exchange"].link_bytes * (ranks - 1) / ranks == pytest.approx(scale * passed)


def test_eager_ring_attention_runs_beside_its_exchanges():
    eager = [t for t in COMPILED if "compile" not in t]
    ours = layer(*eager, "ring_attention:degree=4,exchange=gather", length=4 * LENGTH)
    assert all(o.behind for o in (*ours.forward, *ours.backward) if o.axis == "cp")
    assert "attention.flash.bwd.gather" in {o.name for o in ours.backward}


def traced_block(send):
    """Sends for each sum over the ranks of a block whether a product makes its input, by direction."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        parallelize_module,
    )
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    mesh = init_device_mesh("cpu", (2,))

    class FeedForward(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.up, self.down = (nn.Linear(64, 64, bias=False) for _ in range(3))

        def forward(self, x):
            return self.down(nn.functional.silu(self.gate(x)) * self.up(x))

    whole = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    divided = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel(output_layouts=Shard(1))}
    divided = {f"0.{name}": style for name, style in divided.items()}
    block = parallelize_module(nn.Sequential(FeedForward()), mesh, {"0": whole, **divided})
    found = {}

    def compiler(name):
        def see(module, _):
            sums = [n for n in module.graph.nodes if "reduce_scatter" in str(n.target)]
            made = []
            for n in sums:
                while not any(word in str(n.target) for word in ("mm", "add")):
                    n = n.all_input_nodes[0]
                made.append("mm" in str(n.target))
            found[name] = made
            return make_boxed_func(module.forward)

        return see

    backend = aot_autograd(fw_compiler=compiler("forward"), bw_compiler=compiler("backward"))
    x = torch.randn(1, 8, 64, requires_grad=True)
    torch.compile(block, backend=backend, fullgraph=True)(x).sum().backward()
    send(found)


def test_a_sum_of_two_products_is_not_pipelined():
    """torch._inductor.fx_passes.micro_pipeline_tp needs a product right before the sum over the ranks."""
    found = Fork(traced_block).answer()
    assert found == {"forward": [True], "backward": [False]}
    tensor = ("tensor_parallel:degree=8,overlap=true", "sequence_parallel")
    ours = layer(*COMPILED, *tensor, on="2x8xh100")
    sums = {o.name: bool(o.behind) for o in (*ours.forward, *ours.backward) if o.kind == "reduce_scatter"}
    assert {n: beside for n, beside in sums.items() if n.startswith("mlp.")} == {
        "mlp.reduce_scatter": found["forward"][0], "mlp.input.reduce_scatter": found["backward"][0]}  # fmt: skip
    others = layer(*(t for t in COMPILED if "compile" not in t), *tensor, on="2x8xh100")
    assert all(o.behind for o in others.backward if o.kind == "reduce_scatter"), "Transformer Engine's"


def test_pieces_pass_through_buffers():
    tensor = ("tensor_parallel:degree=8,overlap=true", "sequence_parallel")
    ours = layer(*COMPILED, *tensor, on="2x8xh100")
    stream = 8 * LENGTH * 4096 * 2
    pieces = {o.name: o.bytes for o in ours.forward if o.name.endswith(".pieces")}
    assert pieces["mlp.reduce_scatter.pieces"] == stream * (1 + 1 / 8), "read from every rank, written once"
    assert pieces["mlp.gather.pieces"] == 2 * stream / 8, "its own part is copied"


def test_stages_sum_gradients_in_fp32_and_reduce_them_at_last():
    work = {"kind": "pretrain", "seq_len": 4096, "batch_size": 64, "micro_batch_size": 1}
    plan = [*COMPILED, "pipeline:degree=2"]
    e, techniques = resolve(experiments.make("llama3-8b", "8xh100", work, plan))
    g = rewritten(training_graph(e), e, techniques)
    assert not g.overlap_reduce
    block = next(b for b in g.blocks if b.is_layer)
    sums = sum(o.bytes for o in block.backward if o.name.endswith(".dw.sum"))
    assert sums == 10.0 * sum(p.numel for p in block.params if "proj" in p.name)
