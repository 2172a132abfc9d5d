"""What techniques that leave the base frozen and train a little beside it share on the analytic side."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, ClassVar

from ridgeline.graph.graph import Block, Graph, Op
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.targets import chosen, linears, matching, shortest
from ridgeline.techniques.base import Technique

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ridgeline.nn.adapters.base import Adapter

Adapt = Callable[[Block, Op, str], None]
"""Adds to a block what adapts one of its linear layers: block, the layer's forward operator, the saved activation that
is its input."""


class Adapting(Technique):
    """A technique that puts an adapter around linear layers and trains it alone."""

    leaves: ClassVar[tuple[str, ...]]
    """Names of the adapter's tensors at each layer."""

    def around(self, base: nn.Module, seed: int = 0, layer: int = 0) -> Adapter:
        """The adapter around one linear layer, at its start: as if it were not there."""
        raise NotImplementedError

    def compact(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """A model's whole state as trained → the tensors that a folder keeps."""
        return {n: t for n, t in state.items() if n.rpartition(".")[2] in self.leaves}

    def expand(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """The inverse of :meth:`compact`: the adapter's tensors as trained."""
        return state


def check_targets(technique: Technique, e: Experiment, targets: Iterable[str]) -> None:
    """Every target must name a linear layer; a pipeline's first stage must have something to train."""
    known = linears(e.model)
    for t in targets:
        names = ", ".join(sorted(shortest(known, known)))
        technique.needs(bool(matching(t, known)), f"target {t!r} matches no linear layer of {e.model.name}",
                        f"its linear layers: {names}")  # fmt: skip
    first = next(iter(chosen(e.model, targets)))
    technique.needs(first.startswith(("layers.0.", "encoder.0.")) or not e.plan.has("pipeline"),
                    f"the first layer to adapt is {first}, so stages of the pipeline may have nothing to train",
                    "adapt layer 0 too, or drop pipeline")  # fmt: skip


def adapt(g: Graph, e: Experiment, targets: Iterable[str], add: Adapt) -> Graph:
    """Freeze everything (no weight gradients, no optimizer state) and ``add`` to each targeted linear layer.

    Nothing below the first adapter needs gradients: layers before it have no backward pass, and the first layer with
    one computes no gradient for its input.
    """
    found: dict[str, set[str]] = {}
    for name in chosen(e.model, targets):
        stack, i, inner = name.split(".", 2)
        found.setdefault(f"{stack}.{i}", set()).add(inner)
    m = e.model
    order = [f"encoder.{i}" for i in range(m.encoder_layers)] + [f"layers.{i}" for i in range(m.num_layers)]
    first = next(i for i, layer in enumerate(order) if layer in found)
    blocks: list[Block] = []
    for b in g.blocks:
        sources = _sources(b)
        _freeze(b)
        if not b.name.startswith(("layers", "encoder")):
            if b.name != "head":
                b.drop_users([o.name for o in b.backward])
            blocks.append(b)
            continue
        experts = any(".experts." in p.name for p in b.params)
        kinds: dict[tuple[int, frozenset[str]], int] = {}
        for i, layer in enumerate(order):
            stack, _, at = layer.partition(".")
            if stack == b.name and m.is_moe_layer(int(at)) == experts:
                kind = (max(-1, min(1, i - first)), frozenset(found.get(layer, ())))
                kinds[kind] = kinds.get(kind, 0) + 1
        for (side, inside), count in kinds.items():
            part = b.copy()
            part.repeat = count
            for op in b.forward:
                if op.kind == "gemm" and op.name in inside:
                    add(part, op, sources[op.name])
            if side < 0:
                part.drop_users([o.name for o in part.backward])
            elif side == 0:
                part.drop_users(_needless({n.rpartition(".")[2] for n in inside}, m.post_norm))
            blocks.append(part)
    g.blocks = blocks
    return g


def _sources(b: Block) -> dict[str, str]:
    """Linear layer → the saved activation that is its input (linears that read the same tensor share one)."""
    return {user.removesuffix(".dw"): key for key, s in b.saved.items() for user in s.users if user.endswith(".dw")}


def _freeze(b: Block) -> None:
    for p in b.params:
        p.trainable = False
    gone = [o.name for o in b.backward if o.name.endswith((".dw", ".db"))]
    b.drop_users(gone)


def _needless(targets: set[str], post_norm: bool) -> list[str]:
    """Backward operators that the first layer does not run: those of tensors that depend on no adapter."""

    def linear(name: str) -> list[str]:
        return [f"{name}.dx", f"{name}.lora_a.dx", f"{name}.accumulate"]

    q, k, v = ("q_proj" in targets, "k_proj" in targets, "v_proj" in targets)
    attended = q or k or v
    added = attended or "o_proj" in targets
    inner = added or bool({"gate_proj", "up_proj"} & targets)
    gone = ["attention_residual.bwd", *linear("attention.q_proj"), *linear("attention.k_proj")]
    gone += linear("attention.v_proj")
    if not post_norm:
        gone.append("attention_norm.bwd")
    for part, needed, product in (("q", q, "scores.dq"), ("k", k, "scores.dk"), ("v", v, "values.dv")):
        if not needed:
            gone += [f"attention.{name}" for name in (f"{part}_norm.bwd", f"{part}_rope.bwd", product)]
    if not (q or k):
        gone += ["attention.softmax.bwd", "attention.values.dprobs"]
    if not attended:
        gone += linear("attention.o_proj")
    if not added:
        gone += ["attention_norm.bwd" if post_norm else "mlp_norm.bwd", "mlp_residual.bwd"]
        gone += [*linear("mlp.gate_proj"), *linear("mlp.up_proj")]
    if not inner:
        gone += ["mlp.act.bwd", *linear("mlp.down_proj")]
    return gone
