"""Activation recomputation (checkpointing): trade extra forward computation for activation memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from ridgeline.graph.graph import Block, Graph, Op, Saved, changed
from ridgeline.spec.errors import Incompatible
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.result import Result
from ridgeline.spec.sizes import Size, say_size
from ridgeline.techniques.registry import has, refuse, registry
from ridgeline.techniques.technique import Ask, Card, Phase, Technique

if TYPE_CHECKING:
    from ridgeline.runtime.train_build import TrainBuild


class Recompute(Technique):
    """Drop a block's activations after its forward pass and rebuild them just before its backward pass."""

    card: ClassVar[Card] = Card(
        name="recompute",
        title="Activation recomputation",
        paper="arXiv:1604.06174",
        taxonomy="training/model/recompute",
        tasks=frozenset({"pretrain", "finetune"}),
        lossless=True,
        validated=frozenset({"pretrain", "finetune"}),
        claim="activation memory of O(sqrt n) layers for about one third more compute; selective: arXiv:2205.05198",
        changes=frozenset({"recomputation"}),
        encoder_decoders=True,
    )
    phase: ClassVar[Phase] = "recompute"

    policy: Literal["full", "selective", "products", "budget"] = "full"
    """full: whole blocks; selective: only scores, softmax and values (the score matrix); products: all but fused
    attention, sums over ranks and every second matrix product, whose results are kept (torchtitan's selective by
    operators); budget: full, selective or neither for each block, so that the peak fits into ``budget`` with the least
    recomputation."""
    every: int = Field(default=1, ge=1)
    """With policy full: recompute one block in this many."""
    early_stop: bool = True
    """Stop recomputing a block at the last tensor that backward needs, as PyTorch does since 2.1; without, its last
    product and collective run again too, as in Megatron-LM and in all reentrant checkpoints."""
    budget: Size | None = None
    """With policy budget: bytes of device memory for the whole step on one rank, e.g. 2GB."""
    full_blocks: int | None = Field(default=None, ge=0)
    """With policy budget: how many blocks, from the first, are fully recomputed; chosen by the predictor by default.
    The first blocks run backward last, when the activations of the others have been freed."""
    selective_blocks: int | None = Field(default=None, ge=0)
    """With policy budget: how many of the following blocks recompute their score matrix; chosen with
    ``full_blocks``."""

    @classmethod
    def choices(cls, e: Experiment) -> list[Technique]:
        """Full, full in every other layer, selective."""
        return [cls(), cls(every=2), cls(policy="selective")]

    def settled(self, e: Experiment, ask: Ask) -> Technique:
        """The numbers of blocks whose predicted step is the fastest of those within the budget.

        The peak decreases with every further block that is recomputed, so the least number of selective blocks is found
        in one pass over the numbers of full ones: O(blocks) predictions.
        """
        if self.policy != "budget" or self.budget is None or self.full_blocks is not None or not e.is_training:
            return self
        blocks = _blocks(e)
        scores = 0 if has(e, "fused_attention") else blocks
        smallest = min(_peak(ask(self._with(blocks, 0).placed(e))), _peak(ask(self._with(0, scores).placed(e))))
        best: tuple[float, int, int] | None = None
        selective = scores
        for full in range(blocks + 1):
            selective = min(selective, blocks - full)
            if best is not None and _time(ask(self._with(full, 0).placed(e))) > best[0]:
                break  # more full blocks only take longer
            found = ask(self._with(full, selective).placed(e))
            if _peak(found) > self.budget:
                continue
            while selective:
                fewer = ask(self._with(full, selective - 1).placed(e))
                if _peak(fewer) > self.budget:
                    break
                found, selective = fewer, selective - 1
            if best is None or _time(found) < best[0]:
                best = _time(found), full, selective
        if best is None:
            raise Incompatible(
                f"recompute: the step does not fit into a budget of {say_size(self.budget)}: its smallest reachable"
                f" peak is {say_size(smallest)}",
                f"raise the budget, or add what else saves memory: {_advice(e)}",
            )
        return self._with(best[1], best[2])

    def _with(self, full: int, selective: int) -> Recompute:
        return self.model_copy(update={"full_blocks": full, "selective_blocks": selective})

    def lazy(self) -> bool:
        """True: it needs only shapes."""
        return True

    def check(self, e: Experiment) -> None:
        """Selective recomputation has nothing to drop when attention is fused; each policy has its own options."""
        if self.policy == "selective" or self.selective_blocks:
            refuse(self, e, "fused_attention", "policy 'selective' drops the score matrix, which {other} never stores",
                   "use policy=full, or drop one of the two")  # fmt: skip
        self.needs(
            not (self.policy in ("selective", "products") and self.every > 1),
            f"policy {self.policy!r} treats every block alike",
            "drop every=…, or use policy=full",
        )
        layers = _blocks(e)
        self.needs(self.every <= layers, f"every={self.every} exceeds the {layers} layers", f"use at most {layers}")
        if self.policy == "budget":
            self.needs(self.budget is not None or self.full_blocks is not None, "policy 'budget' has no budget",
                       "write e.g. budget=2GB")  # fmt: skip
            self.needs(self.every == 1, "policy 'budget' chooses the blocks itself", "drop every=…")
            chosen, blocks = (self.full_blocks or 0) + (self.selective_blocks or 0), _blocks(e)
            self.needs(chosen <= blocks, f"{chosen} blocks are to be recomputed of {blocks}", f"use at most {blocks}")
        else:
            given = self.budget or self.full_blocks or self.selective_blocks
            self.needs(not given, f"policy {self.policy!r} has no budget", "add policy=budget, or drop the budget")

    def kinds(self, blocks: int) -> list[str]:
        """Policy of each block in model order: full, selective, products or none."""
        if self.policy in ("selective", "products"):
            return [self.policy] * blocks
        if self.policy == "full":
            return ["none" if i % self.every else "full" for i in range(blocks)]
        full = blocks if self.full_blocks is None else self.full_blocks
        selective = self.selective_blocks or 0
        return ["full"] * full + ["selective"] * selective + ["none"] * (blocks - full - selective)

    def rewrite(self, g: Graph, e: Experiment) -> Graph:
        """Add forward operators to the backward phase; saved activations shrink to the block's input."""
        model = e.model
        first = model.encoder_layers
        order: list[int] = []
        for start, count in ((0, first), (first, model.num_layers)):  # the graph lists a stack's layers by kind
            of = model.layer_kinds(count)
            order += [start + i for i in sorted(range(count), key=of.__getitem__)]

        eager = not has(e, "compiled_pieces")

        def close(graph: Graph) -> None:
            kinds = self.kinds(len(order))
            _drop(graph, [kinds[i] for i in order], self.policy == "budget", self.early_stop, eager)

        g.closing.append(close)
        return g

    def build(self, run: TrainBuild) -> None:
        """Wrap the forward of each chosen block (or of its attention core) in ``torch.utils.checkpoint``."""
        from functools import partial

        from torch.utils.checkpoint import checkpoint

        from ridgeline.nn.model.attention import SelfAttention

        # The model has no dropout, so there is no random state to restore.
        again = partial(partial, checkpoint, use_reentrant=False, preserve_rng_state=False, early_stop=self.early_stop)
        tensor = self.policy == "products" and "tp" in run.experiment.parallel
        self.needs(not tensor, "policy 'products' in tensor parallelism, whose sums it keeps, can be predicted, not yet"
                   " run", "use policy=full")  # fmt: skip
        spec = run.model.spec
        kinds, first = self.kinds(_blocks(run.experiment)), {"encoder": 0, "layers": spec.encoder_layers}
        cores: list[SelfAttention] = []
        for name, block in run.model.blocks.items():
            stack, _, index = name.partition(".")
            kind = kinds[first[stack] + int(index)]
            if kind in ("full", "products"):
                block.forward = again(block.forward, **({"context_fn": _keeping()} if kind == "products" else {}))
            elif kind == "selective":
                cores += [m for m in block.modules() if isinstance(m, SelfAttention)]

        def wrap() -> None:  # whatever kernel a later technique has chosen
            for module in cores:
                module.backend = replace(module.backend, function=again(module.backend.function))

        run.hooks.filled.append(wrap)


def _keeping() -> Callable[[], Any]:
    """What a checkpoint keeps of its forward pass: the results of fused attention and of every second product."""
    import torch
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    aten = torch.ops.aten
    products = (aten.mm.default, aten.addmm.default)
    attention = (
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        aten._flash_attention_forward.default,
    )

    def contexts() -> Any:
        seen = {False: 0, True: 0}  # products, in the first pass and when it is repeated

        def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            if op in products:
                seen[ctx.is_recompute] += 1
            kept = seen[ctx.is_recompute] % 2 == 1 if op in products else op in attention
            return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    return contexts


def _blocks(e: Experiment) -> int:
    return e.model.encoder_layers + e.model.num_layers


def _peak(r: Result) -> float:
    return r.metrics["peak_bytes"].value


def _time(r: Result) -> float:
    return r.metrics["step_time_s"].value


def _advice(e: Experiment) -> str:
    """Techniques and settings not in the plan that would lower the peak further."""
    known = [cls.saves_memory(e) for cls in registry().values()]
    known += ["a smaller micro_batch_size"] * (e.micro_batch_size > 1) + ["more devices"] * (e.data_parallel == 1)
    return ", ".join(filter(None, known))


def _drop(g: Graph, kinds: list[str], in_order: bool, early_stop: bool, eager: bool) -> None:
    """Recompute the layers named by ``kinds`` (in the order of the graph); only the input of each is kept.

    ``in_order``: layers of one kind are adjacent in the model; otherwise they alternate with the others. ``eager``: see
    :func:`_products`.
    """
    stacks: dict[str, dict[str, list[Block]]] = {}
    at = 0
    for block in g.blocks:
        found = stacks.setdefault(block.name, {kind: [] for kind in ("full", "selective", "products", "none")})
        if not block.is_layer:
            found["none"].append(block)
            continue
        mine = kinds[at : at + block.repeat]
        at += block.repeat
        for kind, blocks in found.items():
            if kind in mine:
                part = block.copy()
                part.repeat = mine.count(kind)
                blocks.append(part)
                if kind == "full":
                    _full(part, g.residual, early_stop)
                elif kind == "selective":
                    _selective(part)
                elif kind == "products":
                    _products(part, g.residual, early_stop, eager)
                if in_order and kind != "none":
                    part.name = f"{block.name}.{kind}"
    g.blocks = [b for found in stacks.values() for blocks in found.values() for b in blocks]


def _again(ops: list[Op]) -> list[Op]:
    return [
        changed(
            o, name=f"{o.name}.again", direction="backward", recompute=True, behind=o.behind and f"{o.behind}.again"
        )
        for o in ops
    ]


def _full(b: Block, kept: float, early_stop: bool) -> None:
    """Repeat the whole forward pass; with ``early_stop`` except what comes after the last tensor that backward needs.

    A matrix multiplication saves only its inputs, so the last one of a pre-norm layer is not run again.
    """
    end = _end(b) if early_stop else len(b.forward)
    b.recomputed = _rebuilt(b)
    again = frozenset({"recompute"})
    read = {k: Saved(s.bytes, again) for k, s in b.saved.items() if k == "encoder_output"}
    b.saved = {"input": Saved(kept, again), **read}
    b.backward = _again([o for o in b.forward[:end] if o.role != "entry"]) + b.backward


def _end(b: Block) -> int:
    """How many operators of the forward pass rebuild all that backward needs."""
    needed = {o.name.rpartition(".")[0] for o in b.backward if o.kind != "residual"}
    end = max((i for i, o in enumerate(b.forward) if o.name in needed and o.kind != "residual"), default=-1)
    quantized = any(o.kind == "cast" and o.param == b.forward[end].param for o in b.forward[:end])
    return end if b.forward[end].kind == "gemm" and not quantized else end + 1


def _products(b: Block, kept: float, early_stop: bool, eager: bool) -> None:
    """Repeat the forward pass without fused attention, sums over ranks and the first, third, … matrix product.

    ``eager``: results are kept as they come, also those that backward does not read. A compiler keeps what is read, and
    does not repeat a product whose sum over ranks is there.
    """
    end = _end(b) if early_stop else len(b.forward)
    products = [o for o in b.forward if o.kind == "gemm"]
    last = products[-1]
    sums = [o for o in b.forward if o.axis == "tp" and o.kind in ("reduce_scatter", "all_reduce")]
    stay = {o.name for o in products[::2]} | {o.name for o in sums}
    stay |= {o.name for o in b.forward if o.kind == "attention"}
    again = frozenset({"recompute"})
    saved = {"input": Saved(kept, again)}
    for i, o in enumerate(b.forward):
        width = 4.0 if o.dtype == "fp32" else 2.0
        summed = next((x for x in b.forward[i + 1 : i + 2] if x in sums), None)
        if o in sums and (eager or i < b.forward.index(last)):
            saved[o.name] = Saved(o.link_bytes / (o.ranks if o.kind == "reduce_scatter" else 1), again)
        elif o.name in stay and o.kind == "gemm" and (eager or (o is not last and summed is None)):
            saved[o.name] = Saved(o.shape[0] * o.shape[1] * width, again)
        elif summed is not None and not eager:
            stay.add(o.name)
    for key, s in b.saved.items():
        if key == "encoder_output" or key.endswith(".lse"):
            saved[key] = Saved(s.bytes, again)
    for o in b.forward:
        if o.kind == "attention":
            batch, heads, _, length, _, dim = o.shape
            saved[f"{o.name}.out"] = Saved(batch * heads * length * dim * (4.0 if o.dtype == "fp32" else 2.0), again)
    read = sum(s.bytes for key, s in saved.items() if key != "input")
    b.recomputed = max(0.0, _rebuilt(b) - read)
    b.saved = saved
    b.backward = _again([o for o in b.forward[:end] if o.role != "entry" and o.name not in stay]) + b.backward


def _rebuilt(b: Block) -> float:
    """Rebuilt bytes at the worse of two points in time, on top of the largest workspace of the backward pass.

    The MLP's gradients are computed first, with everything rebuilt alive; when those of attention are computed, the
    MLP's part has been freed.
    """
    everything = b.saved_bytes
    mlp = b.saved_by_mlp
    act = next((o for o in b.backward if o.kind == "activation"), None)
    if act is None or not mlp:
        return everything
    gated = "mlp.gate" in b.saved
    # Of what it moves: the gradients that come in and go out, less the product's input, which is gone by then.
    in_mlp = act.bytes * (2 / 5 if gated else 1 / 3)
    at = max(everything + min(in_mlp, b.backward_workspace), everything - mlp + b.backward_workspace)
    return at - b.backward_workspace


def _selective(b: Block) -> None:
    for prefix in ("attention", "cross_attention"):
        # The product with the values reads the last rebuilt tensor, and is not run again.
        core = {f"{prefix}.{part}" for part in ("scores", "mask", "softmax")}
        again = _again([o for o in b.forward if o.name in core])
        for name in ("probs", "probs.mask", "probs.dropped"):
            dropped = b.saved.pop(f"{prefix}.{name}", None)
            b.recomputed += dropped.bytes if dropped else 0.0
        b.backward = again + b.backward
