"""What breaks silently when parallel techniques meet: each is provoked, and shown not to happen here.

Many are PyTorch's own (torch.distributed.tensor.parallel, torch.distributed.pipelining, FSDP2); where the trap still is
in the library, the test shows that too.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.training import MODEL, experiment, full, make_trainer, train
from tests.world import world
from torch import nn

from ridgeline.graph.schedule import actions
from ridgeline.nn.model.moe import MoE
from ridgeline.nn.parallel.collectives import local
from ridgeline.nn.quant.quantized import QuantizedLinear
from ridgeline.runtime.gradients import global_norm

SGD: dict[str, Any] = {"optimizer": "sgd", "lr": 5.0, "grad_clip": 0.05, "batch_size": 8}
TP = ("tensor_parallel:degree=2", "sequence_parallel")


# ---- frozen stays frozen --------------------------------------------------------------------------------------------


def unfrozen_by_torch(rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

    norm = nn.LayerNorm(8)
    norm.requires_grad_(False)
    parallelize_module(norm, init_device_mesh("cpu", (2,)), SequenceParallel())
    return [p.requires_grad for p in norm.parameters()]


def trainable_rank(rank, e):
    trainer = make_trainer(e, rank)
    before = {n: full(p) for n, p in trainer.run.root.named_parameters()}
    for _ in range(2):  # B is zero in the first, so A has no gradient yet
        trainer.step()
    moved = {n for n, p in trainer.run.root.named_parameters() if not torch.equal(full(p), before[n])}
    return {n for n, p in trainer.run.root.named_parameters() if p.requires_grad}, moved


def test_sequence_parallelism_does_not_unfreeze_norms(corpus):
    assert any(world(2).run(unfrozen_by_torch)[0]), "PyTorch's style no longer does: this test can go"
    for trained, moved in world(2).run(trainable_rank, experiment(corpus, *TP, "lora", ranks=2, **SGD)):
        assert moved == trained
        assert all(n.endswith(("lora_a", "lora_b")) for n in trained)


# ---- gradients are final when hooks see them, and whole when anything reads them -------------------------------------


def hooked_rank(rank, e):
    """What post-accumulate hooks saw last, against the gradient that clipping and the update then read."""
    trainer = make_trainer(e, rank)
    seen: dict[str, torch.Tensor] = {}
    for name, p in trainer.run.root.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: seen.__setitem__(name, local(p.grad).clone()))
    trainer.forward_backward(0)
    return {
        name: (seen[name], local(p.grad).clone()) for name, p in trainer.run.root.named_parameters() if name in seen
    }


def test_pipelines_do_not_scale_gradients_after_hooks(corpus):
    e = experiment(corpus, "pipeline:degree=2", ranks=2, micro_batch_size=2, **SGD)
    ranks = world(2).run(hooked_rank, e)
    assert all(seen for seen in ranks)
    for seen in ranks:
        for name, (hook, final) in seen.items():
            assert torch.equal(hook, final), name


def test_hooks_fire_on_sharded_parameters(corpus):
    """FSDP2's parameters are no autograd leaves: only post-accumulate hooks reach them."""
    for seen in world(2).run(hooked_rank, experiment(corpus, "zero:stage=3", ranks=2, **SGD)):
        assert len(seen) == len([*MODEL.parameters()])


def gradients_rank(rank, e, patched=False):
    trainer = make_trainer(e, rank)
    if patched:
        trainer.run.gradients.after_backward.clear()
    trainer.forward_backward(0)
    return {n: full(p.grad) for n, p in trainer.run.root.named_parameters() if p.grad is not None}


def test_gradients_of_replicated_parameters_are_whole(corpus):
    """Under sequence parallelism a rank's norm gradients come from its tokens only."""
    plain = gradients_rank(0, experiment(corpus, **SGD))
    e = experiment(corpus, *TP, ranks=2, **SGD)
    norms = [n for n in plain if "norm" in n]
    for got in world(2).run(gradients_rank, e):
        assert all(torch.allclose(got[n], plain[n], atol=1e-6) for n in plain)
    for got in world(2).run(gradients_rank, e, True):  # without the sum they are parts
        assert not any(torch.allclose(got[n], plain[n], atol=1e-6) for n in norms)


# ---- what a parity test can see --------------------------------------------------------------------------------------


def scaled(corpus, factor, **workload):
    e = experiment(corpus, **workload)
    trainer = make_trainer(e)
    if factor != 1:
        trainer.run.gradients.after_backward.append(
            lambda: torch._foreach_mul_([p.grad for p in trainer.parameters], float(factor))
        )
    return [trainer.step().loss for _ in range(20)]


def test_adamw_hides_gradients_of_a_wrong_scale_and_sgd_does_not(corpus):
    def apart(**workload):
        right, wrong = (scaled(corpus, f, grad_clip=0, **workload) for f in (1, 4))
        return max(abs(a - b) for a, b in zip(right, wrong, strict=True))

    assert apart(optimizer="adamw", lr=1e-3) < 1e-3
    assert apart(optimizer="sgd", lr=0.1) > 1e-2


def clipped_per_stage_rank(rank, e):
    trainer = make_trainer(e, rank)
    stages = trainer.run.mesh.group("pp")
    assert dist.get_world_size(stages) == 2
    trainer.run.gradients.norm = lambda parameters, copies, world: global_norm(parameters, copies, 1)
    return [trainer.step().loss for _ in range(5)]


def test_clipping_each_stage_by_its_own_norm_is_another_training(corpus):
    e = experiment(corpus, "pipeline:degree=2", ranks=2, micro_batch_size=2, **SGD)
    right, wrong = train(e).losses, world(2).run(clipped_per_stage_rank, e)[0]
    assert train(experiment(corpus, **SGD)).losses == pytest.approx(right, rel=1e-6)
    assert max(abs(a - b) for a, b in zip(right, wrong, strict=True)) > 1e-3


def test_unequal_token_counts_weigh_by_tokens(corpus):
    """Ranks and micro-batches with other numbers of labels: a mean of their means would be another loss."""
    whole = train(experiment(corpus, micro_batch_size=None, **SGD))
    parts = train(experiment(corpus, "data_parallel", ranks=2, micro_batch_size=1, **SGD))
    assert parts.losses == pytest.approx(whole.losses, rel=1e-5)


# ---- integers --------------------------------------------------------------------------------------------------------


def codes_rank(rank, e):
    trainer = make_trainer(e, rank)
    found = {}
    for name, module in trainer.run.root.named_modules():
        if isinstance(module, QuantizedLinear):
            codes, scales = local(module.codes), local(module.scales)
            found[name] = (
                codes.dtype,
                tuple(codes.shape),
                tuple(scales.shape),
                module.out_features,
                module.in_features,
            )
    trainer.step()
    return found


@pytest.mark.parametrize(
    ("plan", "how"), [(("zero:stage=3",), "rows"), (TP, "tensor")], ids=["sharded", "tensor parallel"]
)
def test_codes_are_divided_along_whole_groups(plan, how, corpus):
    e = experiment(corpus, *plan, "lora", "rtn:bits=4,group_size=16", ranks=2, **SGD)
    for found in world(2).run(codes_rank, e):
        assert len(found) == 7 * MODEL.num_layers
        for name, (dtype, codes, scales, out, width) in found.items():
            assert dtype == torch.uint8, "a cast policy would reinterpret codes that pose as floats"
            by_row = how == "tensor" and name.endswith(("o_proj.base", "down_proj.base", "o_proj", "down_proj"))
            assert codes == ((out, width // 4) if by_row else (out // 2, width // 2)), name
            assert codes[1] * 2 == scales[1] * 16, "a group is never cut"


# ---- layout changes nothing ------------------------------------------------------------------------------------------


def start_rank(rank, e):
    trainer = make_trainer(e, rank)
    return {n: full(p) for n, p in trainer.run.root.named_parameters()}


def test_every_layout_starts_from_the_same_weights(corpus):
    want = start_rank(0, experiment(corpus))
    layouts = [(*TP, "zero:stage=3"), ("pipeline:degree=2", "zero:stage=1"), ("pipeline:degree=2", TP[0])]
    for plan in layouts:
        seen = set()
        for got in world(4).run(start_rank, experiment(corpus, *plan, ranks=4, batch_size=8, micro_batch_size=2)):
            seen |= set(got)
            assert all(torch.equal(t, want[n]) for n, t in got.items())
        assert seen == set(want), "and has every parameter of the plain model by its own name"


def test_a_merged_norm_counts_every_copy_once(corpus):
    """Mixed meshes, replicated and divided parameters, stages: one number on all ranks."""
    want = train(experiment(corpus, **SGD)).norms
    for plan in ((*TP, "zero:stage=2"), ("pipeline:degree=2", "data_parallel")):
        got = train(experiment(corpus, *plan, ranks=4, micro_batch_size=2, **SGD)).norms
        assert got == pytest.approx(want, rel=1e-6)


def test_a_tied_head_on_another_stage_stays_the_embedding(corpus):
    model = MODEL.model_copy(update={"tie_embeddings": True})
    plain = train(experiment(corpus, model=model, **SGD))
    e = experiment(corpus, "pipeline:degree=2", ranks=2, micro_batch_size=2, model=model, **SGD)
    assert train(e).losses == pytest.approx(plain.losses, rel=1e-6)


# ---- schedules -------------------------------------------------------------------------------------------------------


def order_rank(rank, e):
    """The passes that PyTorch's runtime really ran on this rank, in order."""
    trainer = make_trainer(e, rank)
    trainer.step()
    (runtime,) = trainer.run.execute.__self__._runtimes.values()
    kinds = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "B", "BACKWARD_WEIGHT": "W"}
    listed = runtime.pipeline_order_with_comms[trainer.run.mesh.at("pp")]
    named = [(kinds.get(a.computation_type.name), a.stage_index, a.microbatch_index) for a in listed]
    return [a for a in named if a[0]]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero_bubble"])
def test_the_runtime_works_off_the_predictors_list(schedule, corpus):
    e = experiment(corpus, f"pipeline:degree=2,schedule={schedule}", ranks=2, batch_size=8, micro_batch_size=2)
    for rank, done in enumerate(world(2).run(order_rank, e)):
        assert done == [tuple(a) for a in actions(schedule, rank, 2, 4)]


def evaluate_rank(rank, e):
    trainer = make_trainer(e, rank)
    first = trainer.evaluate()
    trainer.step()
    return first, trainer.evaluate()


def test_evaluation_between_steps_changes_nothing(corpus):
    """Gathered parameters must not outlive it, and stages must hand hidden states on without gradients."""
    want = evaluate_rank(0, experiment(corpus, **SGD))
    assert want[0] != want[1]
    for plan in (("pipeline:degree=2", "zero:stage=3"), (*TP, "zero:stage=3"), ("pipeline:degree=2", *TP)):
        for got in world(4).run(evaluate_rank, experiment(corpus, *plan, ranks=4, micro_batch_size=2, **SGD)):
            assert got == pytest.approx(want, rel=1e-5)


def idle_rank(rank, e):
    """Every weight's gradient where the first half of the batch goes to expert 0, the second to expert 1."""
    trainer = make_trainer(e, rank)

    def route(x):
        chosen = torch.arange(len(x)) * 2 // len(x) if e.world == 1 else torch.full((len(x),), rank // 2)
        return torch.ones(len(x), 1), chosen.unsqueeze(1)

    for module in trainer.run.root.modules():
        if isinstance(module, MoE):
            module.route = route
    trainer.forward_backward(0)
    return {n: full(p.grad) for n, p in trainer.run.root.named_parameters() if "router" not in n}


@pytest.mark.parametrize("plan", [("zero:stage=3",), ("zero:stage=2",), ("data_parallel",)], ids=" ".join)
def test_experts_without_a_token_still_take_part_in_the_sums(plan, corpus):
    """A rank whose experts no token chose has no gradient of them: those it shares them with would wait for it."""
    experts = MODEL.model_copy(update={"num_experts": 2, "experts_per_token": 1})
    want = idle_rank(0, experiment(corpus, model=experts, **SGD))
    e = experiment(corpus, "expert_parallel:degree=2", *plan, ranks=4, model=experts, **SGD)
    for got in world(4).run(idle_rank, e):
        for name, grad in want.items():
            assert torch.allclose(got[name], grad, atol=1e-6), name
