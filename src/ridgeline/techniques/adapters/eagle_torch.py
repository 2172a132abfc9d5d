"""Training a draft head beside a frozen model (EAGLE, arXiv:2401.15077)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ridgeline.nn.checkpoint.draft_head_files import save_head
from ridgeline.nn.model.draft_head import DraftHead, draft_loss, features_before

if TYPE_CHECKING:
    from ridgeline.runtime.train_build import TrainBuild


def attach(run: TrainBuild, member: str, regression: float, classification: float) -> None:
    """Add a head, as the model's ``member``, which alone trains, and its loss."""
    model, training = run.model, run.experiment.training
    like = next(p for p in model.parameters() if p.is_floating_point())
    draft = DraftHead.empty(model.spec, run.device, like.dtype)
    draft.init(training.seed)
    draft.body.set_attention(model.backend)
    draft.body.rotary = model.rotary  # whose tables are the same
    model.add_module(member, draft)
    run.trainable = lambda name: name.startswith((f"model.{member}.", f"{member}."))

    def objective(hidden: Tensor, ids: Tensor, labels: Tensor | None, positions: Tensor | None,
                  documents: Tensor | None) -> Tensor:  # fmt: skip
        assert model.embed is not None
        assert model.head is not None
        assert labels is not None
        features = hidden.detach()
        with torch.no_grad():
            embedded = model.embed(ids, positions, None)
        guess = draft(embedded, features_before(features, documents), positions, documents)
        return draft_loss(guess, features, model.head, labels, regression, classification)

    run.root.objective = objective

    def write(state: dict[str, Tensor], folder: Path) -> None:
        mine = {name.removeprefix(f"{member}."): t for name, t in state.items() if name.startswith(f"{member}.")}
        save_head(folder, model.spec, mine, training.checkpoint or "")

    run.hooks.write = write
