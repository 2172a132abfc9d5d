"""A plan's adapter in a directory of its own, and back: to continue training, to evaluate, or to merge."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from ridgeline.nn.adapters.adapter import Adapter, has_only_codes, merge, put
from ridgeline.nn.checkpoint.checkpoint import load_checkpoint
from ridgeline.nn.checkpoint.peft import OWN, load_lora, load_own, read, save_lora, save_own, state_of
from ridgeline.nn.model.transformer import Transformer
from ridgeline.spec.errors import UserError
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.model import ModelSpec
from ridgeline.spec.plan import Call
from ridgeline.techniques.adapters.adapted import Adapting, peft_kind
from ridgeline.techniques.registry import make, techniques_of

if TYPE_CHECKING:
    from ridgeline.train.trainer import Trainer

_FREE = {"targets", "dropout", "penalty", "density", "start"}
"""Options that may differ from those with which an adapter was saved."""


class Loaded(NamedTuple):
    """An adapter loaded from a directory: the technique call that a plan needs for it, and its tensors by our names."""

    call: Call
    state: dict[str, Tensor]

    @property
    def technique(self) -> Adapting:
        """The call's technique object."""
        technique = make(self.call)
        assert isinstance(technique, Adapting)
        return technique


def adapting(e: Experiment) -> Adapting:
    """The technique of the plan that trains an adapter. Raises :class:`UserError` if it has none."""
    found = next((t for t in techniques_of(e.plan) if isinstance(t, Adapting)), None)
    if found is None:
        raise UserError("this plan trains no adapter: there is nothing to save but the model", "add lora, or --export")
    return found


def save_adapter(e: Experiment, state: Mapping[str, Tensor], folder: Path) -> None:
    """Write the adapter of the plan from a model's whole ``state`` (or only the adapter's tensors).

    LoRA is written in the format of ``peft``; other kinds have a format of their own, which their config names.
    """
    technique = adapting(e)
    options = technique.model_dump(mode="json")
    base = e.training.checkpoint or ""
    own = state_of(state, technique.leaves)
    if technique.in_peft:
        save_lora(folder, e.model, options, own, base)
    else:
        save_own(folder, e.model, technique.card.name, options, technique.compact(dict(state)), base)


def load_adapter(folder: Path, spec: ModelSpec) -> Loaded:
    """The adapter in ``folder`` for a model of ``spec``.

    Raises :class:`UserError` naming the first layer that does not match if it belongs to another base.
    """
    folder = Path(folder)
    kind = str(read(folder)[0].get("peft_type", ""))
    if not kind.startswith(OWN):
        options, state = load_lora(folder, spec)
        return Loaded(Call(name=peft_kind().card.name, options=options), state)
    name, options, state = load_own(folder, spec)
    technique = make(Call(name=name, options=options))
    assert isinstance(technique, Adapting)
    return Loaded(Call(name=name, options=options), technique.expand(state))


def go_on(trainer: Trainer, loaded: Loaded) -> None:
    """Initialize the trainer's adapter from a loaded one, however it is divided. Raises :class:`UserError` if its plan
    adapts other layers or has another kind."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    root = trainer.run.root
    mine = {n.removeprefix("model.") for n, p in root.named_parameters() if p.requires_grad}
    for name in sorted(mine ^ set(loaded.state)):
        here = "trains" if name in mine else "does not train"
        if trainer.experiment.parallel.get("pp", 1) > 1 and name not in mine:
            continue  # of another stage
        raise UserError(f"the loaded adapter does not fit the plan, which {here} {name}",
                        f"use --with {call_text(loaded.call)}")  # fmt: skip
    plan, saved = adapting(trainer.experiment).model_dump(), loaded.technique.model_dump()
    for key in sorted(plan.keys() - _FREE):
        if plan[key] != saved[key]:
            raise UserError(f"the loaded adapter has {key}={saved[key]}, the plan {key}={plan[key]}",
                            f"use --with {call_text(loaded.call)}")  # fmt: skip
    state: dict[str, Any] = {f"model.{n}": t for n, t in loaded.state.items() if n in mine}
    with trainer.run.hooks.resident(True):
        set_model_state_dict(root, state, options=StateDictOptions(strict=False, full_state_dict=True))


def call_text(call: Call) -> str:
    """The call in command-line syntax."""

    def value(v: Any) -> str:
        return "+".join(map(str, v)) if isinstance(v, (list, tuple)) else str(v)

    return f"{call.name}:" + ",".join(f"{k}={value(v)}" for k, v in call.options.items())


def adapters(model: Transformer, loaded: Loaded) -> dict[str, Adapter]:
    """Adapters for the linears of ``model``, left unchanged (:class:`~ridgeline.nn.adapters.adapter.Tasks`). Raises
    :class:`UserError` for those that change weights of which the model has codes."""
    out: dict[str, Adapter] = {}
    wide = next(p.dtype for p in model.parameters() if p.is_floating_point())
    for name in dict.fromkeys(n.rpartition(".")[0] for n in loaded.state):
        base = model.get_submodule(name)
        coded = has_only_codes(base)
        if coded and loaded.technique.reads_weight:
            raise UserError(
                f"{call_text(loaded.call)} changes the weight of {name}, of which the model has codes",
                "use the model without quantization, or merge the adapter before it is quantized",
            )
        adapter = loaded.technique.around(base)
        for leaf, parameter in adapter.state().items():
            dtype = wide if coded else parameter.dtype
            parameter.data = loaded.state[f"{name}.{leaf}"].to(parameter.device, dtype)
            parameter.requires_grad_(False)
        out[name] = adapter
    return out


def attach(model: Transformer, loaded: Loaded) -> None:
    """Insert the adapter into the model, for evaluation."""
    for name, adapter in adapters(model, loaded).items():
        put(model, name, adapter)


def merged_model(base: Path, folder: Path) -> Transformer:
    """The model in checkpoint ``base`` with the adapter in ``folder`` merged into its weights.

    Raises :class:`UserError` for an adapter that cannot be merged into weights, or a bias that the family's checkpoints
    cannot store.
    """
    model = load_checkpoint(base)
    found = adapters(model, load_adapter(folder, model.spec))
    for name, adapter in found.items():
        put(model, name, adapter)
    merge(model)
    for name, adapter in found.items():
        put(model, name, adapter.base)
    known = {p.name for p in model.spec.parameters()}
    for name, _ in model.named_parameters():
        if name not in known:
            raise UserError(f"{model.spec.name} has no {name}, so its checkpoint has no place for the one that was"
                            " trained", "use the adapter as it is")  # fmt: skip
    return model
