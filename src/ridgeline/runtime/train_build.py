"""The builder that the training engine passes to each technique in canonical order."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ridgeline.data.batches import Batch
from ridgeline.nn.memory.tiered_store import TieredStore
from ridgeline.nn.model.flash_blocks import Sequences
from ridgeline.nn.model.loss import token_loss
from ridgeline.runtime.build import Build
from ridgeline.runtime.gradients import clear, clip, global_norm
from ridgeline.runtime.mesh import Mesh
from ridgeline.runtime.optimizer import MakeOptimizer, learning_rate, make_optimizer
from ridgeline.spec.model import FROZEN

if TYPE_CHECKING:
    import numpy as np
    from tokenizers import Tokenizer
    from torch.distributed import ProcessGroup

    from ridgeline.nn.model.transformer import Transformer
    from ridgeline.nn.parallel.divide import Divider
    from ridgeline.runtime.reducer import Bucket, Waitable


class Micro(NamedTuple):
    """One rank's part of one micro-batch."""

    ids: Tensor
    """[batch, seq] token ids."""
    labels: Tensor
    """[batch, seq] the token that each position should predict, or -100 to ignore it."""
    positions: Tensor | None = None
    """[seq] or [batch, seq] position of each token in its sequence; None: 0, 1, …"""
    documents: Tensor | None = None
    """[batch, seq] index of the document that each token belongs to; it attends to no other one. None: one per row."""
    source: Tensor | None = None
    """[batch, source] token ids that an encoder reads."""
    source_mask: Tensor | None = None
    """[batch, source] bool: which of them are no padding; None: all."""
    sequences: Sequences | None = None
    """Where the documents end, for a GPU."""


class BatchSource(Protocol):
    """Source of global batches. A technique may replace or wrap it."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that produced the token ids."""

    def batch(self, step: int) -> Batch:
        """The batch of ``step``: the same on every rank, regardless of earlier requests."""

    def held_out_batch(self) -> Batch | None:
        """A batch that is never trained on; None if the corpus is too small."""


Objective = Callable[[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None], Tensor]
"""Sum over labeled tokens of what is minimized, from what the head reads [batch, seq, hidden], token ids, labels,
positions and documents, as in :class:`Micro`."""


class LossModel(nn.Module):
    """The model (or consecutive layers of it) with its loss, so that one forward call contains everything a wrapper
    must see."""

    def __init__(self, model: Transformer, loss: Callable[..., tuple[Tensor, Tensor]] = token_loss) -> None:
        super().__init__()
        self.model = model
        self.loss = loss
        """Sum of token losses from (hidden, head, labels), as :func:`ridgeline.nn.model.loss.token_loss`."""
        self.objective: Objective | None = None
        """What is minimized in place of the loss of the next tokens."""
        self.positions: Tensor | None = None
        """Positions of the tokens, where the caller cannot pass them (pipeline stages)."""
        self.autocast: torch.dtype | None = None
        """Compute dtype of matrix products; None: that of the weights."""

    def forward(
        self,
        x: Tensor,
        labels: Tensor | None = None,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        source: Tensor | None = None,
        source_mask: Tensor | None = None,
        sequences: Sequences | None = None,
    ) -> Tensor:
        """Sum of token losses (fp32 scalar) from ids [batch, seq], or from hidden states where there is no embedding.

        Without a head the result is the hidden states [batch, seq, hidden] for the next stage.
        """
        low = torch.autocast(x.device.type, self.autocast) if self.autocast else nullcontext()
        places = self.positions if positions is None else positions
        with low:
            read = {} if source is None else {"source": source, "source_mask": source_mask}
            hidden: Tensor = self.model(x, places, documents=documents, return_hidden=True, sequences=sequences, **read)
            if self.objective is not None:
                return self.objective(hidden, x, labels, places, documents)
            if self.model.head is None:
                return hidden.contiguous()  # it will be sent
            assert labels is not None
            return self.loss(hidden, self.model.head, labels)[0]

    def part(self, layers: Iterable[str], first: bool, last: bool) -> LossModel:
        """Some of the layers as a model that shares its modules with this one."""
        model = copy.copy(self.model)
        model._modules = dict(self.model._modules)
        names = set(layers)
        model.layers = nn.ModuleDict({n: b for n, b in self.model.layers.items() if n in names})
        if not first:
            model.embed = None
        if not last:
            model.norm = model.head = None
        part = LossModel(model, self.loss)
        part.autocast = self.autocast
        return part


class Stateful(Protocol):
    """What a checkpoint stores in addition to model and optimizer: small, the same on every rank, and
    JSON-serializable."""

    def state_dict(self) -> dict[str, Any]:
        """For checkpoints."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore from a checkpoint."""


class Scaler(Stateful, Protocol):
    """Dynamic loss scaling: a factor on the loss, updated after each step."""

    scale: float

    def update(self, finite: bool) -> None:
        """Update after a step, whose gradients were ``finite`` or not (in which case it is skipped)."""


@dataclass
class Data:
    """Sources of a run's batches and texts; set by the engine before it builds."""

    batches: BatchSource = field(init=False)
    """Source of batches; set by the engine before it builds."""
    ahead: bool = True
    """Whether a batch may be asked for while the step before it runs: not where it follows from that step's losses, or
    where checkpoints store what was asked for."""
    tokens_of: Callable[[str, int], np.ndarray] = field(init=False)
    """Token ids (int32 [tokens]) of up to this many bytes of another text, by the run's tokenizer."""
    loss_of: Callable[[Batch], float] = field(init=False)
    """Mean loss over all ranks of a batch, without training on it."""


@dataclass
class Gradients:
    """How gradients are reduced, measured, scaled and dropped."""

    after_backward: list[Callable[[], None]] = field(default_factory=list)
    """Run in order before the norm is computed: they reduce and complete gradients."""
    tied: tuple[nn.Module, str, ProcessGroup] | None = None
    """A parameter, as (module, name), that another pipeline stage holds too, and the group of both."""
    send_bucket: Callable[[Bucket], Waitable] | None = None
    """How data parallelism sums a bucket of gradients over its ranks; None: by one all-reduce in their own dtype."""
    experts_divided: bool = False
    """Whether each rank of an inner data-parallel group holds different experts."""
    keep: bool = False
    """Zero gradients after the update instead of dropping them: they are in buffers that a technique owns."""
    partial: list[tuple[nn.Module, str]] = field(default_factory=list)
    """Replicated parameters, as (module, name), whose gradients are summed over the tensor-parallel ranks."""
    norm: Callable[[list[nn.Parameter], dict[nn.Parameter, int], int], Tensor] = global_norm
    """Global norm of the gradients, wherever they are stored."""
    clip: Callable[[list[nn.Parameter], Tensor, float, float], None] = clip
    """Scales the gradients, wherever they are stored."""
    clear: Callable[[list[nn.Parameter], bool], None] = clear
    """Drops the gradients, or zeroes them in place, wherever they are stored."""


@dataclass
class Update:
    """The optimizer, its learning rate and the dtype in which its weights are stored."""

    schedule: Callable[[int], float]
    """Learning rate of a step."""
    weights_16bit: torch.dtype | None = None
    """16-bit dtype in which parameters are stored in addition to the fp32 values that are updated; None: there is one
    copy."""
    masters: dict[nn.Parameter, Tensor] = field(default_factory=dict)
    """Those fp32 values, for this rank's part of each trained parameter, until the optimizer takes them."""
    lr: float = 0.0
    """Learning rate of the current step, known before its forward pass (for updates within the backward)."""
    make_optimizer: MakeOptimizer = make_optimizer
    """Builds the optimizer from parameter groups and the workload."""
    optimizer: torch.optim.Optimizer | None = None
    """The result of ``make_optimizer``, once the engine has called it."""
    scaler: Scaler | None = None
    """Dynamic loss scaling; None: the loss is not scaled."""


@dataclass
class Hooks:
    """Callbacks at certain points of training, and the state that checkpoints store for them."""

    filled: list[Callable[[], None]] = field(default_factory=list)
    """Run in order once this rank's parts of the parameters have their values; nothing is offloaded yet."""
    after_evaluation: Callable[[], None] = lambda: None
    """Cleanup after a forward pass without a backward."""
    before_step: list[Callable[[int], None]] = field(default_factory=list)
    """Before each step, with its number."""
    finished: Callable[[], bool] | None = None
    """Whether training should end after this step although steps are left (a budget is spent); only rank 0's answer
    counts. None: it should not."""
    states: dict[str, Stateful] = field(default_factory=dict)
    """State that checkpoints store for techniques, by name."""
    resident: Callable[[bool], AbstractContextManager[object]] = lambda changed: nullcontext()
    """Context in which parameters and optimizer states are in memory, for checkpoints and exports; argument: whether
    they are overwritten."""
    after_update: list[Callable[[], None]] = field(default_factory=list)
    """Run in order after the optimizer's step (e.g. to distribute new weights)."""
    write: Callable[[dict[str, Tensor], Path], None] | None = None
    """Writes what was trained to a folder, from the model's whole state, where that is neither a model nor an
    adapter."""


@dataclass
class TrainBuild(Build):
    """The training engine's interface for techniques. ``root`` holds the parameters, ``chunks`` are what is called."""

    rank: int = 0
    world: int = 1
    mesh: Mesh | None = None
    """The ranks on their axes; None with one process."""
    trainable: Callable[[str], bool] = lambda name: True
    """Which parameters train, by name; asserted again after every phase."""
    divider: Divider | None = None
    """How layers are divided over the tensor-parallel ranks."""
    sync: Callable[[bool], AbstractContextManager[object]] = lambda last: nullcontext()
    """Context of one micro-batch's forward and backward; argument: whether it is the step's last."""
    cut: list[Callable[[Micro], Micro]] = field(default_factory=list)
    """Select this rank's part of a micro-batch, in order."""
    execute: Callable[[list[Micro], float], Tensor] = field(init=False)
    """Forward and backward of all micro-batches, with the factor on the loss; returns the sum of losses times it."""
    score: Callable[[list[Micro]], Tensor] = field(init=False)
    """Sum of the losses of all micro-batches without gradients."""
    store: TieredStore | None = None
    """Store of what is kept in host memory or on disk, with its traffic."""
    root: LossModel = field(init=False)
    chunks: list[LossModel] = field(init=False)
    """This rank's consecutive parts of the model: one, or several smaller pipeline stages."""
    call: nn.Module = field(init=False)
    """The callable for a micro-batch without a pipeline: the whole model, possibly wrapped."""
    data: Data = field(default_factory=Data)
    gradients: Gradients = field(default_factory=Gradients)
    update: Update = field(init=False)
    hooks: Hooks = field(default_factory=Hooks)

    def __post_init__(self) -> None:
        self.root = LossModel(self.model)
        self.chunks = [self.root]
        self.call = self.root
        self.execute = self._execute
        self.score = self._score
        self.update = Update(functools.partial(learning_rate, self.experiment.training))

    def before_micro_batch(self, hook: Callable[[bool], None]) -> None:
        """Call ``hook`` before each micro-batch with whether it is the step's last."""
        inner = self.sync

        def sync(last: bool) -> AbstractContextManager[object]:
            hook(last)
            return inner(last)

        self.sync = sync

    def _execute(self, micros: list[Micro], factor: float) -> Tensor:
        total = torch.zeros((), device=self.device)
        for i, micro in enumerate(micros):
            with self.sync(i + 1 == len(micros)):
                loss = self.call(*micro) * factor
                loss.backward()
            total += loss.detach()
        return total

    def _score(self, micros: list[Micro]) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for micro in micros:
            total += self.call(*micro).double()
        return total

    def assert_trainable(self) -> None:
        """Set ``requires_grad`` of every parameter from ``trainable``; some wrappers silently reset it. Those that no
        gradient reaches never train."""
        for name, p in self.root.named_parameters():
            if p.is_floating_point():
                p.requires_grad_(self.trainable(name) and not name.endswith(FROZEN))
        for chunk in self.chunks:
            chunk.autocast = self.compute_dtype
