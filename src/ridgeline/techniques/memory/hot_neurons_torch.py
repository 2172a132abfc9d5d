"""Feed-forward layers whose neurons are divided between device and host, with predictors of activity (PowerInfer,
arXiv:2312.12456).

Shapes: T tokens, H hidden, N neurons of a layer, R width of a predictor.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ridgeline.data.batches import own_tokenizer, token_ids
from ridgeline.data.tokenizer import load_tokenizer
from ridgeline.nn.checkpoint.checkpoint import Reader
from ridgeline.nn.memory.meter import return_freed_memory
from ridgeline.nn.memory.tiered_store import mark_host
from ridgeline.nn.model.generate import generate
from ridgeline.nn.model.mlp import MLP
from ridgeline.paths import cache_dir
from ridgeline.runtime.build import Build
from ridgeline.spec.errors import UserError
from ridgeline.techniques.memory.hot_neurons import PIECES, HotNeurons
from ridgeline.techniques.memory.neuron_placement import place_neurons

_WINDOW = 128
"""Tokens of one sequence of a profile."""
_STEPS, _BATCH, _RATE, _EVERY = 800, 256, 1e-2, 50
"""Of a predictor's training: steps, tokens per step, learning rate, and steps between looks at the held-out loss."""
_BYTES_PER_TOKEN = 16
"""Of text that is read for a profile: more than any tokenizer needs."""


@dataclass
class ComputedNeurons:
    """Neurons outside the device: how many a pass could have computed, and how many it did."""

    all: int = 0
    computed: int = 0

    @property
    def share(self) -> float:
        """Fraction that was computed."""
        return self.computed / self.all if self.all else 0.0


class Predictor(nn.Module):
    """Which neurons outside the device a token activates: σ(relu(x·P1)·P2 + b), [T, H] → [T, N]."""

    def __init__(self, hidden: int, rank: int, neurons: int) -> None:
        super().__init__()
        self.inner = nn.Linear(hidden, rank, bias=False)
        self.outer = nn.Linear(rank, neurons)

    def logits(self, x: Tensor) -> Tensor:
        """Before the sigmoid."""
        out: Tensor = self.outer(F.relu(self.inner(x)))
        return out


class DividedMLP(nn.Module):
    """A plain ReLU layer: y = relu(x·W1ᵀ + b1)·W2ᵀ + b2, its neurons in order of frequency, the first on the device.

    Both matrices are stored by neuron, [N, H], so that those on the device are a prefix and any other is one row of
    each. A pass of up to ``rows`` tokens computes, outside the device, the neurons that are predicted for any of them.
    """

    def __init__(
        self, whole: MLP, order: Tensor, hot: int, how: HotNeurons, tally: ComputedNeurons, device: torch.device
    ) -> None:
        super().__init__()
        up, down = whole.up_proj, whole.down_proj

        def split(t: Tensor) -> tuple[nn.Parameter, Tensor]:
            host = t[order[hot:]].to("cpu", copy=True).contiguous()
            if device.type == "cuda":
                host = host.pin_memory()
            return nn.Parameter(t[order[:hot]].to(device, copy=True), requires_grad=False), mark_host(host)

        bias = up.bias if up.bias is not None else up.weight.new_zeros(up.out_features)
        self.up, self.cold_up = split(up.weight.detach())
        self.down, self.cold_down = split(down.weight.detach().t())
        self.up_bias, self.cold_bias = split(bias.detach())
        self.bias = None if down.bias is None else nn.Parameter(down.bias.detach().to(device), requires_grad=False)
        self.predictor: Predictor | None = None
        self.limit = math.log(how.threshold / (1 - how.threshold)) if how.threshold else -math.inf
        self.rows, self.tally = how.rows, tally

    def forward(self, x: Tensor) -> Tensor:
        """``x`` [..., H] → [..., H]."""
        flat = x.reshape(-1, x.shape[-1])
        few = len(self.cold_up) > 0 and len(flat) <= self.rows and not x.is_meta
        chosen = self._chosen(flat) if few else None
        host = flat.cpu() if few else flat
        out = F.relu(F.linear(flat, self.up, self.up_bias)) @ self.down  # on CUDA beside what follows
        if few:
            self.tally.all += len(self.cold_up)
            self.tally.computed += len(self.cold_up) if chosen is None else len(chosen)
            out += self._on_host(host, chosen).to(out.device)
        else:
            self._add_all(flat, out)
        return (out if self.bias is None else out + self.bias).view(x.shape)

    def _chosen(self, x: Tensor) -> Tensor | None:
        """Neurons outside the device that are predicted for any of ``x``, on the host; None: all."""
        if self.predictor is None:
            return None
        return (self.predictor.logits(x) > self.limit).any(0).nonzero()[:, 0].cpu()

    def _on_host(self, x: Tensor, chosen: Tensor | None) -> Tensor:
        """What the ``chosen`` neurons contribute, [T, H]."""
        if chosen is None:
            return F.relu(F.linear(x, self.cold_up, self.cold_bias)) @ self.cold_down
        inner = F.relu(F.linear(x, self.cold_up.index_select(0, chosen), self.cold_bias[chosen]))
        if len(x) > 1 or inner.dtype.itemsize == 2:
            return inner @ self.cold_down.index_select(0, chosen)
        active = inner[0].nonzero()[:, 0]
        return F.embedding_bag(chosen[active][None], self.cold_down, mode="sum", per_sample_weights=inner[:, active])

    def _add_all(self, x: Tensor, out: Tensor) -> None:
        """Add what all neurons outside the device contribute; their weights pass through it in pieces."""
        size = -(-len(self.cold_up) // PIECES) if out.is_cuda else len(self.cold_up)
        for first in range(0, len(self.cold_up), max(1, size)):
            part = slice(first, first + size)
            up, bias, down = (t[part].to(out.device, non_blocking=True)
                              for t in (self.cold_up, self.cold_bias, self.cold_down))  # fmt: skip
            out += F.relu(F.linear(x, up, bias)) @ down


def divide_neurons(run: Build, how: HotNeurons) -> None:
    """Profile the model of ``run``, place its neurons as ``how`` says, and train the predictors."""
    layers = {name: block.mlp for name, block in run.model.layers.items() if isinstance(block.mlp, MLP)}
    _read(run, layers)
    hidden = run.experiment.model.hidden_size
    stored = _Stored.of(run, how)
    found = stored.load(list(layers)) if stored else None
    inputs: dict[str, Tensor] = {}
    if found is None:
        active: dict[str, Tensor] = {}
        with recorded(run.device, layers, inputs, active), torch.no_grad():
            ids = profile_tokens(run, how)
            inputs.clear()  # of the generation
            active.clear()
            for window in ids.split(8):
                run.model(window.to(run.device), return_hidden=True)
        found = {name: {"frequency": active[name].float().mean(0)} for name in layers}
    frequencies = [found[name]["frequency"].numpy() for name in layers]
    element = run.experiment.model.hidden_size * 2 * next(iter(layers.values())).up_proj.weight.element_size()
    total = element * sum(len(f) for f in frequencies)
    assert how.hot != "auto", "settled before"
    hot = place_neurons(frequencies, [element] * len(layers), how.hot * total + 1, _least(run, element))
    tally = ComputedNeurons()
    for (name, whole), count, frequency in zip(layers.items(), hot, frequencies, strict=True):
        order = torch.from_numpy(np.argsort(-frequency, kind="stable").copy())
        divided = DividedMLP(whole, order, count, how, tally, run.device)
        cold = order[count:]
        if how.threshold and len(cold):
            predictor = Predictor(hidden, how.width(hidden), len(cold))
            if "outer.bias" in found[name]:
                predictor.load_state_dict({k: v for k, v in found[name].items() if k != "frequency"})
            else:
                train_predictor(predictor, inputs[name], active[name][:, cold])
                found[name] |= predictor.state_dict()
            divided.predictor = predictor.to(run.device, whole.up_proj.weight.dtype).requires_grad_(False)
        run.model.layers[name].mlp = divided
        layers[name] = None  # type: ignore[assignment]  # its weights can go
    if stored and inputs:
        stored.save(found)
    return_freed_memory()
    counts = {name: (len(f), f, n) for name, f, n in zip(layers, frequencies, hot, strict=True)}
    run.metrics["hot_share"] = lambda: sum(n for _, _, n in counts.values()) / sum(n for n, _, _ in counts.values())
    run.metrics["hot_coverage"] = lambda: _coverage([(f, n) for _, f, n in counts.values()])
    run.metrics["computed_cold_share"] = lambda: tally.share


def _coverage(layers: list[tuple[np.ndarray, int]]) -> float:
    """Share of the profile's activations that were of neurons on the device."""
    total = sum(float(f.sum()) for f, _ in layers)
    return sum(float(np.sort(f)[::-1][:n].sum()) for f, n in layers) / max(total, 1e-12)


def _least(run: Build, neuron_bytes: float) -> int:
    """Neurons of a layer that the host computes in the time of an exchange with the device."""
    cluster = run.experiment.cluster
    link = cluster.device.host_link
    if link is None:
        return 0
    host = cluster.device.host
    bandwidth = host.memory_bandwidth if host and host.memory_bandwidth else 50e9
    return math.ceil(2 * link.latency * bandwidth / neuron_bytes)


def profile_tokens(run: Build, how: HotNeurons) -> Tensor:
    """Token ids [sequences, ≤ 128] of a profile: text, or what the model itself generates at temperature 1."""
    spec = run.experiment.model
    length = min(_WINDOW, spec.max_positions)
    count = max(1, how.tokens // length)
    if how.profile is None:
        start = torch.randint(spec.vocab_size, (count, 1), generator=torch.Generator().manual_seed(0))
        return generate(run.model, start.to(run.device), length - 1, temperature=1.0, seed=0).cpu()
    checkpoint = own_tokenizer(getattr(run.experiment.workload, "checkpoint", None))
    if checkpoint is None:
        raise UserError("hot_neurons: profile=… needs a checkpoint with a tokenizer",
                        "leave it out: the model is then profiled on text that it generates")  # fmt: skip
    ids = token_ids(how.profile, _BYTES_PER_TOKEN * count * length, load_tokenizer(checkpoint))[: count * length]
    if len(ids) < length:
        raise UserError(f"hot_neurons: {how.profile} has {len(ids)} tokens, fewer than {length}", "give more text")
    return torch.from_numpy(ids[: len(ids) // length * length].astype(np.int64)).view(-1, length)


def _read(run: Build, layers: dict[str, MLP]) -> None:
    """Read the layers that are on the meta device from the checkpoint into host memory."""
    meta = {name: mlp for name, mlp in layers.items() if mlp.up_proj.weight.is_meta}
    if meta:
        source: str = run.experiment.workload.checkpoint  # type: ignore[assignment]
        reader = Reader(source, run.experiment.model)
        for name, mlp in meta.items():
            for inner, old in list(mlp.named_parameters()):
                owner, _, attribute = inner.rpartition(".")
                weight = mark_host(reader.read(f"layers.{name}.mlp.{inner}").to(old.dtype))
                setattr(mlp.get_submodule(owner), attribute, nn.Parameter(weight, requires_grad=False))


@contextmanager
def recorded(
    device: torch.device, layers: dict[str, MLP], inputs: dict[str, Tensor], active: dict[str, Tensor]
) -> Iterator[None]:
    """While this is open, passes of a model on ``device`` compute ``layers`` where their weights are, and add to each
    layer's ``inputs`` [T, H] and ``active`` neurons [T, N]."""

    def hook(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], tuple[Tensor]]:
        up = layers[name].up_proj

        def keep(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor]:
            here = args[0].to(up.weight.device)
            x = here.reshape(-1, here.shape[-1])
            for into, new in ((inputs, x.float().cpu()), (active, (F.linear(x, up.weight, up.bias) > 0).cpu())):
                into[name] = torch.cat([into[name], new]) if name in into else new
            return (here,)

        return keep

    def back(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
        return out.to(device)

    handles = [mlp.register_forward_pre_hook(hook(name)) for name, mlp in layers.items()]
    handles += [mlp.register_forward_hook(back) for mlp in layers.values()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def train_predictor(predictor: Predictor, inputs: Tensor, active: Tensor, seed: int = 0) -> None:
    """Fit to what a profile found: ``inputs`` [T, H], ``active`` [T, N]; binary cross-entropy, AdamW. Of the states on
    the way, the one with the least loss on a tenth of the tokens, which training does not see, is kept."""
    rng = torch.Generator().manual_seed(seed)
    with torch.inference_mode(False), torch.enable_grad():
        order = torch.randperm(len(inputs), generator=rng)
        x, y = inputs[order], active[order].float()
        held = max(1, len(x) // 10)
        frequency = y.mean(0).clamp(1e-4, 1 - 1e-4)
        for weight in (predictor.inner.weight, predictor.outer.weight):
            nn.init.normal_(weight, std=weight.shape[1] ** -0.5, generator=rng)
        with torch.no_grad():
            predictor.inner.weight /= x.pow(2).mean().sqrt().clamp(min=1e-6)
            predictor.outer.weight *= 0.1
            predictor.outer.bias.copy_((frequency / (1 - frequency)).log())
        optimizer = torch.optim.AdamW(predictor.parameters(), lr=_RATE, weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _RATE, total_steps=_STEPS)

        def loss_of(rows: Tensor) -> Tensor:
            return F.binary_cross_entropy_with_logits(predictor.logits(x[rows]), y[rows])

        last = torch.arange(len(x) - held, len(x))
        best, state = math.inf, predictor.state_dict()
        for step in range(_STEPS + 1):
            if step % _EVERY == 0:
                with torch.no_grad():
                    loss = float(loss_of(last))
                if loss < best:
                    best, state = loss, {k: v.clone() for k, v in predictor.state_dict().items()}
            if step < _STEPS:
                optimizer.zero_grad()
                loss_of(torch.randint(max(1, len(x) - held), (min(_BATCH, len(x)),), generator=rng)).backward()
                optimizer.step()
                schedule.step()
        predictor.load_state_dict(state)


@dataclass(frozen=True)
class _Stored:
    """A profile's results in Ridgeline's cache, for the next load of the same checkpoint with the same options."""

    file: Path

    @classmethod
    def of(cls, run: Build, how: HotNeurons) -> _Stored | None:
        """None for a model without a checkpoint."""
        source = getattr(run.experiment.workload, "checkpoint", None)
        if not source:
            return None
        weights = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in sorted(Path(source).glob("*.safetensors"))]
        options = how.model_dump(include={"hot", "rank", "profile", "tokens"}) | {"predicts": how.threshold > 0}
        facts = json.dumps([str(Path(source).resolve()), weights, options, run.experiment.dtype])
        return cls(cache_dir() / "hot-neurons" / f"{hashlib.sha256(facts.encode()).hexdigest()[:32]}.safetensors")

    def load(self, layers: list[str]) -> dict[str, dict[str, Tensor]] | None:
        """{layer: {tensor's name: tensor}}; None if there is none, or it cannot be read."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            flat = load_file(self.file)
        except (OSError, SafetensorError):
            return None
        return {n: {k.partition("/")[2]: v for k, v in flat.items() if k.startswith(f"{n}/")} for n in layers}

    def save(self, found: dict[str, dict[str, Tensor]]) -> None:
        """Write it; readers never see a part."""
        from ridgeline.nn.checkpoint.files import write_tensors

        self.file.parent.mkdir(parents=True, exist_ok=True)
        flat = {f"{n}/{k}": v for n, tensors in found.items() for k, v in tensors.items()}
        write_tensors(self.file, flat)
