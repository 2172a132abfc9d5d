"""Shared analytic code of the techniques that freeze the base model and train a small addition to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, ClassVar

from ridgeline.graph.graph import Block, Graph, Op, Param, Saved, changed
from ridgeline.spec.device import DTYPE_BYTES
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.model import ModelSpec
from ridgeline.spec.targets import chosen, linears, matching, shortest
from ridgeline.techniques.registry import refuse, registry
from ridgeline.techniques.technique import Technique

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ridgeline.nn.adapters.adapter import Adapter
    from ridgeline.runtime.train_build import TrainBuild

Adapt = Callable[[Block, Op, str], None]
"""Adds an adapter's operators to a block, given the block, the layer's forward operator and the saved activation that
is its input."""


class Adapting(Technique):
    """A technique that puts an adapter around linear layers and trains it alone."""

    leaves: ClassVar[tuple[str, ...]]
    """Names of the adapter's tensors at each layer."""
    from_zero: ClassVar[bool] = True
    """Whether the tensor that determines the adapter's effect starts at zero."""
    in_peft: ClassVar[bool] = False
    """Whether its checkpoints use the format of the ``peft`` library."""

    if TYPE_CHECKING:  # every adapter has this option; each class declares it at its own position
        targets: tuple[str, ...]

    @classmethod
    def choices(cls, e: Experiment) -> list[Technique]:
        """The defaults only: the other options change quality, not speed."""
        return [cls.model_validate({})]

    def around(self, base: nn.Module, seed: int = 0, layer: int = 0) -> Adapter:
        """Create the adapter around one linear layer, initialized so that it has no effect."""
        raise NotImplementedError

    @property
    def reads_weight(self) -> bool:
        """Whether its effect depends on the layer's weight itself, so that codes in place of it will not do."""
        return False

    def check_whole(self, e: Experiment) -> None:
        """Refuse tensor parallelism, which only LoRA supports."""
        self.needs("tp" not in e.parallel, "tensor_parallel divides linear layers, and of adapters only those of lora",
                   "use lora, or zero or pipeline instead of tensor_parallel")  # fmt: skip

    def build(self, run: TrainBuild) -> None:
        """Insert the adapters and freeze the rest."""
        from ridgeline.nn.adapters.adapter import put

        for i, name in enumerate(chosen(run.model.spec, self.targets)):
            base = run.model.get_submodule(name)
            put(run.model, name, self.around(base, run.experiment.training.seed, i))
        run.trainable = lambda name: name.rpartition(".")[2] in self.leaves

    def compact(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """A model's full training state → the tensors that a checkpoint stores."""
        return {n: t for n, t in state.items() if n.rpartition(".")[2] in self.leaves}

    def expand(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """The inverse of :meth:`compact`: the adapter's tensors in the form in which they train."""
        return state


def peft_kind() -> type[Adapting]:
    """The plain adapter type that a checkpoint of the ``peft`` library holds."""
    return next(cls for cls in registry().values() if issubclass(cls, Adapting) and vars(cls).get("in_peft"))


def check_targets(technique: Adapting, e: Experiment, targets: Iterable[str]) -> None:
    """Every target must name a linear layer, a pipeline's first stage must have something to train, and the optimizer
    must be able to update the adapter."""
    known = linears(e.model)
    for t in targets:
        if not matching(t, known):
            names = ", ".join(sorted(shortest(known, known)))
            technique.needs(False, f"target {t!r} matches no linear layer of {e.model.name}",
                            f"its linear layers: {names}")  # fmt: skip
    if technique.from_zero:
        refuse(technique, e, "relative_updates", "{other} sizes its updates by the parameters, and an adapter that"
               " starts at zero would hardly move", "use another optimizer")  # fmt: skip
    first = next(iter(chosen(e.model, targets)))
    technique.needs(not e.model.is_encoder_decoder or first.startswith("encoder."),
                    f"the first layer to adapt is {first}, and below it the encoder would have nothing to train",
                    "adapt layers of the encoder too")  # fmt: skip
    technique.needs(first.startswith(("layers.0.", "encoder.0.")) or "pp" not in e.parallel,
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
    lowest = next(i for i, layer in enumerate(order) if layer in found)
    blocks: list[Block] = []
    for b in g.blocks:
        sources, shared = _sources(b), b.saved.get("encoder_output")  # one tensor, of which each layer has a share
        _freeze(b)
        if not b.is_layer:
            if not b.is_head:
                b.drop_users([o.name for o in b.backward])
            blocks.append(b)
            continue
        kinds: dict[tuple[int, frozenset[str]], int] = {}
        for place, layer in enumerate(order):
            stack, _, index = layer.partition(".")
            if stack == b.name and m.layer_kind(int(index)) == b.kind:
                begins = m.is_encoder_decoder and layer == "layers.0"
                side = _BEGINS if begins else max(-1, min(1, place - lowest))
                kind = (side, frozenset(found.get(layer, ())))
                kinds[kind] = kinds.get(kind, 0) + 1
        for (side, inside), count in kinds.items():
            part = b.copy()
            part.repeat = count
            for op in b.forward:
                if op.kind == "gemm" and op.name in inside:
                    add(part, op, sources[op.name])
            if shared is not None and "encoder_output" in part.saved:
                users = part.saved["encoder_output"].users
                part.saved["encoder_output"] = Saved(shared.bytes, users)
            if side < 0:
                part.drop_users([o.name for o in part.backward])
            elif side == _BEGINS:
                part.drop_users(_needless_where_it_begins(inside, m))
            elif side == 0:
                part.drop_users(_needless({n.rpartition(".")[2] for n in inside}, m))
            blocks.append(part)
    g.blocks = blocks
    return g


_BEGINS = 2
"""Side of a decoder's first layer, where an encoder has adapters: -1, 0 and 1 are layers below the first adapter, with
it, and above."""


def _sources(b: Block) -> dict[str, str]:
    """Linear layer → the saved activation that is its input (linears that read the same tensor share one)."""
    return {user.removesuffix(".dw"): key for key, s in b.saved.items() for user in s.users if user.endswith(".dw")}


def _freeze(b: Block) -> None:
    for p in b.params:
        p.trainable = False
    gone = [o.name for o in b.backward if o.role in ("weight_gradient", "bias_gradient")]
    b.drop_users(gone)


def _linear(name: str) -> list[str]:
    return [f"{name}.dx", f"{name}.lora_a.dx", f"{name}.accumulate"]


def _needless_where_it_begins(inside: frozenset[str], m: ModelSpec) -> list[str]:
    """Backward operators that a decoder's first layer skips: before it attends to the encoder's output, which needs a
    gradient, nothing depends on an adapter but its own attention's."""
    own = {name.rpartition(".")[2] for name in inside if name.startswith("attention.")}
    gone = [name for name in _needless(own, m) if name.startswith("attention")]
    if not own & {"q_proj", "k_proj", "v_proj", "o_proj"}:
        gone += ["cross_norm.bwd", "cross_residual.bwd", *_linear("cross_attention.q_proj")]
        gone += [] if "cross_attention.q_proj" in inside else ["cross_attention.scores.dq"]
    return gone


def _needless(targets: set[str], m: ModelSpec) -> list[str]:
    """Backward operators that the first layer skips: those of tensors that depend on no adapter."""
    if m.is_latent:
        q_a, kv_a = "q_a_proj" in targets, "kv_a_proj" in targets
        q, v = q_a or bool({"q_proj", "q_b_proj"} & targets), kv_a or "kv_b_proj" in targets
        k = v
    else:
        q, k, v = ("q_proj" in targets, "k_proj" in targets, "v_proj" in targets)
    attended = q or k or v
    added = attended or "o_proj" in targets
    inner = added or bool({"gate_proj", "up_proj"} & targets)
    gone = ["attention_residual.bwd", *_linear("attention.q_proj"), *_linear("attention.k_proj")]
    gone += _linear("attention.v_proj")
    if not m.post_norm:
        gone.append("attention_norm.bwd")
    for part, needed, product in (("q", q, "scores.dq"), ("k", k, "scores.dk"), ("v", v, "values.dv")):
        if not needed:
            gone += [f"attention.{name}" for name in (f"{part}_norm.bwd", f"{part}_rope.bwd", product)]
    if m.is_latent:
        gone += [*_linear("attention.q_a_proj"), *_linear("attention.kv_a_proj")]
        gone += [] if q_a else ["attention.q_a_norm.bwd", *_linear("attention.q_b_proj")]
        gone += [] if kv_a else ["attention.kv_a_norm.bwd", "attention.k_rope.bwd", *_linear("attention.kv_b_proj")]
        gone += [] if attended else ["attention.join.bwd"]
    if not (q or k):
        gone += ["attention.softmax.bwd", "attention.soft_cap.bwd", "attention.values.dprobs"]
    if not attended:
        gone += _linear("attention.o_proj")
    if not added:
        gone += ["attention_out_norm.bwd", "attention_norm.bwd" if m.post_norm else "mlp_norm.bwd", "mlp_residual.bwd"]
    if not added or m.parallel_residual:  # nothing that the MLP reads depends on an adapter
        inner = bool({"gate_proj", "up_proj"} & targets)
        gone += ["mlp_norm.bwd", *_linear("mlp.gate_proj"), *_linear("mlp.up_proj")]
    if not inner:
        gone += ["mlp.act.bwd", *_linear("mlp.down_proj")]
    if not inner and "down_proj" not in targets:
        gone.append("mlp_out_norm.bwd")
    return gone


def unwrapped(state: dict[str, Tensor], leaves: Iterable[str]) -> dict[str, Tensor]:
    """A model's state without the adapters' tensors, with the base's parameters under their original names."""
    gone = set(leaves)
    adapted = {n.rpartition(".")[0] for n in state if n.rpartition(".")[2] in gone}
    out: dict[str, Tensor] = {}
    for name, value in state.items():
        prefix, _, leaf = name.rpartition(".")
        if prefix in adapted and leaf in gone:
            continue
        bare = prefix.removesuffix(".base")
        out[f"{bare}.{leaf}" if bare in adapted else name] = value
    return out


def train_matrix(b: Block, op: Op, source: str, leaf: str, tensors: tuple[str, ...], work: float, back: float) -> None:
    """Add ``tensors`` of the weight's shape that train through the layer's product: the weight gradient is computed as
    if the base were trained. ``work`` and ``back`` are the extra matrices computed in forward and backward."""
    m, n, k = op.shape
    w = DTYPE_BYTES[op.dtype]
    size = float(n * k) * w
    make = Op(f"{op.name}.{leaf}", op.module, "cast", bytes=(2.0 + len(tensors)) * size, dtype=op.dtype)
    again = changed(make, name=f"{make.name}.again_made", direction="backward")
    dw = changed(
        op,
        name=f"{make.name}.dw",
        direction="backward",
        shape=(n, k, m),
        param=f"{op.name}.{tensors[0]}",
        role="weight_gradient",
    )
    split = changed(make, name=f"{make.name}.bwd", direction="backward", bytes=(2.0 + 2.0 * len(tensors)) * size)
    b.forward.insert(b.forward.index(op), make)
    b.backward += [again, dw, split]
    for name in tensors:
        b.params.append(Param(f"{op.name}.{name}", n * k, "fp32", True, 4.0, shape=(n, k), grad_bytes=4.0))
    old = b.saved.get(source)
    b.saved[source] = Saved(m * k * w, (old.users if old else frozenset()) | {dw.name})
    b.workspace = max(b.workspace, work * size)
    b.backward_workspace = max(b.backward_workspace, back * size)
