"""Recomputation without fused attention and every second product: what is kept, what is run again."""

import pytest
from tests.training import MODEL, experiment, make_trainer, train

from ridgeline import experiments
from ridgeline.graph import training_graph
from ridgeline.measure.cells.training_cell import metered_step
from ridgeline.predict import predict
from ridgeline.predict.common import rewritten
from ridgeline.spec.errors import Incompatible
from ridgeline.techniques.registry import require_runnable, resolve

WIDER = MODEL.model_copy(
    update={"hidden_size": 64, "head_dim": 16, "num_layers": 6, "intermediate_size": 160, "max_positions": 128}
)
PRODUCTS = "recompute:policy=products"


@pytest.mark.parametrize("others", [[], ["mixed_precision", "flash_attention"]], ids="+".join)
def test_measured_memory_is_the_predicted(others, corpus):
    def run(*plan):
        return experiment(corpus, *plan, *others, model=WIDER, seq_len=128, batch_size=8, steps=2)

    trainer = make_trainer(run(PRODUCTS), uneven=False)
    trainer.step(), trainer.step()
    measured = metered_step(trainer).total
    full, said, none = (predict(run(*p)).metrics["peak_bytes"].value for p in (["recompute"], [PRODUCTS], []))
    print(f"measured {measured}, predicted {said:.0f}; full {full:.0f}, without {none:.0f}")
    assert measured == pytest.approx(said, rel=0.05)
    assert full < said < none


def test_it_trains_the_same(corpus):
    fields = {"model": MODEL, "optimizer": "sgd", "lr": 1.0, "grad_clip": 0.05}
    plain, again = (train(experiment(corpus, *plan, **fields)) for plan in ([], [PRODUCTS]))
    assert again.losses == pytest.approx(plain.losses, rel=1e-6)


def layer(*plan):
    e = experiments.make("llama3-8b", "8xh100", {"kind": "pretrain", "batch_size": 16, "micro_batch_size": 2}, plan)
    e, techniques = resolve(e)
    g = rewritten(training_graph(e), e, techniques)
    return next(b for b in g.blocks if b.is_layer)


def test_what_is_kept_of_a_layer():
    """The input, queries, values and gates; of attention its result. Eager code keeps the last product too."""
    plan = ["mixed_precision:weights=low", "flash_attention", PRODUCTS]
    kept = layer(*plan).saved
    again = {o.name.removesuffix(".again") for o in layer(*plan).backward if o.recompute and o.kind == "gemm"}
    assert again == {"attention.k_proj", "attention.o_proj", "mlp.up_proj"}
    widths = {"input": 4096, "attention.q_proj": 4096, "attention.v_proj": 1024, "attention.flash.out": 4096,
              "mlp.gate_proj": 14336, "mlp.down_proj": 4096}  # fmt: skip
    tokens = 2 * 2048
    assert {k: s.bytes for k, s in kept.items() if k != "attention.lse"} == {
        k: 2.0 * tokens * width for k, width in widths.items()
    }
    compiled = layer(*plan, "torch_compile:pieces=true").saved
    assert set(kept) - set(compiled) == {"mlp.down_proj"}


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        (["mixed_precision:weights=gathered"], "shards, and gathered to be used"),
        (["zero:stage=2", "mixed_precision:weights=gathered"], "shards, and gathered to be used"),
        (["torch_compile", "zero:stage=3"], "parameters are whole"),
        (["mixed_precision:loss=copies", "fused_layers"], "leave the loss out of fused_layers"),
        (["recompute:policy=products,every=2"], "treats every block alike"),
        (["mixed_precision", "fp8:gathered=codes"], "nothing here is divided"),
    ],
)
def test_refusals(plan, says):
    with pytest.raises(Incompatible) as told:
        layer(*plan)
    assert says in str(told.value)


@pytest.mark.parametrize(
    "plan",
    [
        ["mixed_precision:weights=gathered", "zero:stage=3"],
        ["mixed_precision:loss=copies"],
        ["mixed_precision", "fp8:gathered=codes", "zero:stage=3"],
        ["torch_compile:pieces=true"],
        ["flash_attention", "ring_attention:degree=2,exchange=gather"],
    ],
    ids="+".join,
)
def test_what_is_predicted_only_does_not_run(plan):
    e = experiments.make("llama3-8b", "8xh100", {"kind": "pretrain", "seq_len": 8192, "batch_size": 8}, plan)
    assert predict(e).metrics["tokens_per_s"].value > 0
    with pytest.raises(Incompatible):
        require_runnable(e)


def test_gathered_codes_are_half_the_bytes():
    values, codes = (
        layer("mixed_precision:weights=gathered", f"fp8:gathered={what}", "zero:stage=3")
        for what in ("values", "codes")
    )
    assert sum(o.link_bytes for o in codes.gather_forward) == pytest.approx(
        sum(o.link_bytes for o in values.gather_forward) / 2, rel=0.001
    )
