"""The torch implementation of pipeline parallelism: PyTorch's runtime executes the predictor's own action lists."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _Action, _batch_p2p, _ComputationType, _PipelineScheduleRuntime

from ridgeline.graph.schedule import actions

if TYPE_CHECKING:
    from ridgeline.runtime.train_build import Micro, TrainBuild

_BACKWARD = {True: _ComputationType.BACKWARD_INPUT, False: _ComputationType.FULL_BACKWARD}

_OLD = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)
"""Where weights' gradients are delayed, older releases add up the gradients of a function's outputs and count twice
those that pass two uses of a weight (:func:`_weight_gradients` does neither). A function of Python does not keep its
graph either."""


class _GraphOf(torch.autograd.Function):
    """The autograd graph of a tensor, without its values: [...] backed by one element of memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.empty_strided(x.shape, [0] * x.dim(), dtype=x.dtype, device=x.device)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class Stage(PipelineStage):
    """A stage that keeps a message only while it is needed.

    It is received into memory allocated for it and freed after its use. A sent activation is freed before this stage
    computes again, once it has been received; its graph stays for the backward pass (Megatron-LM's
    ``deallocate_pipeline_outputs``). A sent gradient is freed when the previous stage is known to have used it.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.sent: list[dist.Work] = []
        """Activations being sent."""
        self.returned: dict[int, list[dist.Work]] = {}
        """Gradients being sent, by micro-batch."""
        self.taken: dict[int, set[int]] = {}
        """Micro-batches whose gradients the previous stage has used when it sends an activation."""
        self._shapes: dict[Any, tuple[torch.Size, torch.dtype, bool]] = {}
        self._graphs: dict[int, list[Any]] = {}
        """Nodes that keep the graphs whose weights' gradients are delayed, by micro-batch."""
        self._ahead = True

    def _all(self) -> list[Any]:
        """Buffers in which messages of all micro-batches are received."""
        return [info for kind in (self.args_recv_info, self.grad_recv_info) for one in kind.values() for info in one]

    def _begin(self) -> None:
        """Free the buffers that PyTorch preallocates for every micro-batch."""
        if self._ahead:
            self._ahead = False
            for info in self._all():
                self._drop(info)

    def _drop(self, info: Any) -> None:
        if getattr(info, "buffer", None) is not None:
            self._shapes[info] = (info.buffer.shape, info.buffer.dtype, info.buffer.requires_grad)
            info.buffer = None

    def _receive(self, infos: Any) -> None:
        self._begin()
        for info in infos:
            if info in self._shapes:
                shape, dtype, trained = self._shapes[info]
                info.buffer = torch.empty(shape, dtype=dtype, device=self.device, requires_grad=trained)

    def get_fwd_recv_ops(self, chunk: int) -> list[dist.P2POp]:
        """Operations that receive an activation."""
        self._receive(self.args_recv_info[chunk])
        return super().get_fwd_recv_ops(chunk)

    def get_bwd_recv_ops(self, chunk: int) -> list[dist.P2POp]:
        """Operations that receive a gradient."""
        self._receive(self.grad_recv_info[chunk])
        return super().get_bwd_recv_ops(chunk)

    def get_fwd_send_ops(self, chunk: int) -> list[dist.P2POp]:
        """Operations that send an activation; PyTorch would keep it until the end of the step."""
        self.sent += _send(super().get_fwd_send_ops(chunk))
        outputs, inputs = self.fwd_cache[chunk]
        self.fwd_cache[chunk] = tuple(map(_GraphOf.apply, outputs)), inputs
        return []

    def get_bwd_send_ops(self, chunk: int) -> list[dist.P2POp]:
        """Operations that send a gradient."""
        self.returned[chunk] = _send(super().get_bwd_send_ops(chunk))
        return []

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **options: Any) -> Any:
        """The forward pass of a micro-batch."""
        self._begin()
        self._free_sent()
        for done in self.taken.get(fwd_chunk_id, set()) & self.returned.keys():
            _wait(self.returned.pop(done))
        out = super().forward_one_chunk(fwd_chunk_id, *args, **options)
        for info in self.args_recv_info[fwd_chunk_id]:
            self._drop(info)
        return out

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> Any:
        """The backward pass of a micro-batch."""
        self._free_sent()
        if _OLD and not full_backward:
            outputs = [loss] if self.is_last else self.fwd_cache[bwd_chunk_id][0]
            self._graphs[bwd_chunk_id] = [t.view_as(t).grad_fn for t in outputs]
        out = super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        for info in self.grad_recv_info.get(bwd_chunk_id, ()):
            self._drop(info)
        return out

    def backward_maybe_with_nosync(
        self, backward_type: Any, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        """The backward pass of a micro-batch or, of one that is split, its part for the inputs or the weights."""
        if backward_type == "weight" and _OLD:
            _weight_gradients(self.submod, bwd_kwargs["param_groups"])
            return (), None
        return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """The gradients of a micro-batch's weights. FSDP's own hook, which sums them in fp32, ran with the inputs'."""
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        self._graphs.pop(bwd_chunk_id, None)
        for module in self.submod.modules():
            group = module._get_fsdp_state()._fsdp_param_group if isinstance(module, FSDPModule) else None
            for p in group.fsdp_params if group else ():
                p.accumulate_unsharded_grad_if_needed()
                p.to_accumulated_grad_if_needed()

    def clear_runtime_states(self) -> None:
        """Before and after a step. Received activations, whose gradients PyTorch would clear too, are already freed."""
        self.fwd_cache.clear()
        self.output_chunks.clear()
        self._graphs.clear()

    def _free_sent(self) -> None:
        """Wait for the activations that were sent: in the communication order that both follow, the peer's receive
        precedes this stage's next computation, so this cannot deadlock."""
        _wait(self.sent)
        self.sent = []

    def finish(self) -> None:
        """Wait for all pending sends."""
        self._free_sent()
        for works in self.returned.values():
            _wait(works)
        self.returned = {}


def _weight_gradients(module: nn.Module, groups: list[dict[str, Any]]) -> None:
    """Add the gradients of a module's weights, from those that reached the functions in which weights and inputs meet
    (``intermediates``) during the backward pass of its inputs. ``groups``: PyTorch's; weights of one use the same."""
    weights = {get_gradient_edge(p).node: p for p in module.parameters() if p.requires_grad}
    for group in groups:
        reached = list(zip(group.pop("intermediates"), group.pop("grads", ()), strict=False))
        found = [
            (GradientEdge(node, i), g) for node, grads in reached for i, g in enumerate(grads or ()) if g is not None
        ]
        if not found:
            continue
        # One may lie behind another, whose gradients for it have been counted already.
        kept = [node.register_prehook(lambda _, own=grads: own) for node, grads in reached] if len(reached) > 1 else []
        outputs, gradients = zip(*found, strict=True)
        try:
            inputs = [GradientEdge(node, 0) for node in group["params"]]
            made = torch.autograd.grad(outputs, inputs, gradients)
        finally:
            for hook in kept:
                hook.remove()
        for node, grad in zip(group["params"], made, strict=True):
            weight = weights[node]
            weight.grad = grad if weight.grad is None else weight.grad + grad


def _send(ops: list[dist.P2POp]) -> list[dist.Work]:
    return _batch_p2p(ops)  # like PyTorch's own receives: both ends must use the same communicator


def _wait(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()


class Runtime(_PipelineScheduleRuntime):
    """PyTorch's runtime for multi-stage schedules, with the action lists of :func:`ridgeline.graph.schedule.actions`.

    Gradients are not scaled: the factor is in the loss, so that hooks see final gradients.
    """

    def __init__(self, stages: list[Stage], schedule: str, ranks: int, micros: int, chunks: int) -> None:
        self.factor = 1.0
        super().__init__(  # type: ignore[no-untyped-call]
            stages, micros, loss_fn=lambda loss, _: loss * self.factor, scale_grads=False
        )
        split = schedule == "zero_bubble"
        kinds = {"F": _ComputationType.FORWARD, "B": _BACKWARD[split], "W": _ComputationType.BACKWARD_WEIGHT}
        self.pipeline_order = {
            rank: [_Action(a.stage, kinds[a.kind], a.micro) for a in actions(schedule, rank, ranks, micros, chunks)]
            for rank in range(ranks)
        }
        self._prepare_schedule_with_comms(self.pipeline_order)
        for stage in stages:
            done: set[int] = set()
            before = stage.stage_index - 1
            for a in actions(schedule, before % ranks, ranks, micros, chunks):
                if a.stage == before and a.kind == "F":
                    stage.taken[a.micro] = set(done)
                elif a.stage == before and a.kind == "B":
                    done.add(a.micro)


class PipelineRuntime:
    """This rank's stages, taken out of the whole model, and the runtime that runs micro-batches through all of them."""

    def __init__(self, run: TrainBuild, schedule: str, layers: list[list[int]], chunks: int) -> None:
        assert run.mesh is not None
        self.run, self.schedule, self.chunks = run, schedule, chunks
        self.ranks, self.rank = run.mesh.size("pp"), run.mesh.at("pp")
        self.total = len(layers)
        self.mine = list(range(self.rank, self.total, self.ranks))
        self.ends = [part[-1] for part in layers]
        """The last layer of every virtual stage."""
        self._runtimes: dict[tuple[int, ...], Runtime] = {}
        self._cut(layers)
        run.execute, run.score = self.execute, self.score

    def _cut(self, layers: list[list[int]]) -> None:
        run, model = self.run, self.run.model
        names = [[str(i) for i in part] for part in layers]
        run.chunks = [run.root.part(names[v], v == 0, v == self.total - 1) for v in self.mine]
        here = {n for v in self.mine for n in names[v]}
        model.layers = nn.ModuleDict({n: b for n, b in model.layers.items() if n in here})
        if 0 not in self.mine:
            model.embed = None
        if self.total - 1 not in self.mine:
            model.norm = model.head = None
        if run.experiment.model.tie_embeddings:
            self._tie()

    def _tie(self) -> None:
        """A tied head on the last stage is a copy of the embedding on the first: their gradients are summed."""
        mesh, model = self.run.mesh, self.run.model
        assert mesh is not None
        ends = mesh.ends()
        if ends is None:
            return
        if model.embed is not None:
            self.run.gradients.tied = (model.embed.tokens, "weight", ends)
        elif model.head is not None:
            model.head.out.weight = nn.Parameter(model.head.out.weight.detach().clone())
            self.run.gradients.tied = (model.head.out, "weight", ends)

    # ---- running ----------------------------------------------------------------------------------------------------

    def _runtime(self, micros: list[Micro]) -> Runtime:
        shape = (*micros[0].ids.shape, len(micros))
        if shape not in self._runtimes:
            stages = []
            for v, chunk in zip(self.mine, self.run.chunks, strict=True):
                # Gradients are required so that they are sent back.
                given = self.hidden(micros[0], v - 1, "meta").requires_grad_() if v else micros[0].ids.to("meta")
                out = self.hidden(micros[0], v, "meta") if v < self.total - 1 else torch.empty((), device="meta")
                out.requires_grad_()
                stages.append(
                    Stage(chunk, v, self.total, self.run.device, given, out, group=self.run.mesh.group("pp"))  # type: ignore[union-attr]
                )
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._runtimes[shape] = Runtime(stages, self.schedule, self.ranks, len(micros), self.chunks)
        return self._runtimes[shape]

    def hidden(self, micro: Micro, stage: int, device: str | torch.device) -> Tensor:
        """An empty tensor with the shape and dtype of what virtual stage ``stage`` sends to the next."""
        run, spec = self.run, self.run.experiment.model
        dtype = next(run.root.parameters()).dtype
        if run.compute_dtype and (spec.post_norm or isinstance(run.chunks[0], FSDPModule)):
            dtype = run.compute_dtype
        batch, length = run.divider.stream(self.ends[stage], *micro.ids.shape) if run.divider else micro.ids.shape
        return torch.empty(batch, length, spec.hidden_size, dtype=dtype, device=device)

    def execute(self, micros: list[Micro], factor: float) -> Tensor:
        """Forward and backward of all micro-batches; the sum of losses is complete on the last stage, 0 elsewhere."""
        runtime = self._runtime(micros)
        runtime.factor = factor
        self._place(micros[0])
        losses: list[Tensor] = []
        given = self._cut_by_rows(micros)
        ids = (torch.cat([m.ids for m in micros]),) if 0 in self.mine else ()
        last: dict[str, Any] = {"target": given["labels"], "losses": losses} if self.total - 1 in self.mine else {}
        with self.run.sync(False), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            runtime.step(*ids, **given, return_outputs=False, **last)
            for stage in runtime._stages:
                stage.finish()  # type: ignore[attr-defined]
        total = torch.zeros((), device=self.run.device)
        return total + sum(x.detach() for x in losses) if losses else total

    def score(self, micros: list[Micro]) -> Tensor:
        """Sum of losses, without gradients: the micro-batches run through all stages one after another."""
        group = self.run.mesh.group("pp")  # type: ignore[union-attr]
        peers = dist.get_process_group_ranks(group)
        chunks = dict(zip(self.mine, self.run.chunks, strict=True))
        total = torch.zeros((), dtype=torch.float64, device=self.run.device)
        self._place(micros[0])
        for micro in micros:
            for v in sorted(chunks):
                x = micro.ids
                if v:
                    x = self.hidden(micro, v - 1, self.run.device)
                    dist.recv(x, peers[(v - 1) % self.ranks], group=group)
                out = chunks[v](x, **self._cut_by_rows([micro]))
                if v == self.total - 1:
                    total += out.double()
                else:
                    dist.send(out.contiguous(), peers[(v + 1) % self.ranks], group=group)
        return total

    def _cut_by_rows(self, micros: list[Micro]) -> dict[str, Any]:
        """Inputs that accompany the ids of several micro-batches on every stage, [all rows, seq] each."""
        columns = {"labels": [m.labels for m in micros]}
        for name in ("positions", "documents"):
            of_each = [getattr(m, name) for m in micros]
            if of_each[0] is not None and of_each[0].dim() == 2:
                columns[name] = of_each
        return {name: torch.cat(parts) for name, parts in columns.items()}

    def _place(self, micro: Micro) -> None:
        """Positions that all rows share cannot be split by rows."""
        shared = None if micro.positions is None or micro.positions.dim() == 2 else micro.positions
        for chunk in self.run.chunks:
            chunk.positions = shared
