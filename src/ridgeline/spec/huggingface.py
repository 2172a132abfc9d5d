"""ModelSpec → Hugging Face ``config.json``: the inverse of :meth:`ModelSpec.from_config`."""

from __future__ import annotations

from ridgeline.spec.errors import UserError
from ridgeline.spec.families import FAMILIES
from ridgeline.spec.families.family import Config
from ridgeline.spec.model import ModelSpec


def to_hf_config(spec: ModelSpec) -> Config:
    """The Hugging Face ``config.json`` of ``spec``: the inverse of :meth:`ModelSpec.from_config`.

    Dropout is written as 0, because the twin has none. Raises :class:`UserError` for a spec that its family's
    configuration cannot express, or of an unknown family.
    """
    if spec.family not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise UserError(f"family {spec.family!r} has no Hugging Face config writer", f"families that have: {known}")
    write = FAMILIES[spec.family].write
    config = {"model_type": spec.family, "tie_word_embeddings": spec.tie_embeddings, **write(spec)}
    restored = spec.from_config(config, name=spec.name)
    kept = set(type(spec).model_fields) - {"published_parameters", "source"}
    lost = sorted(f for f in kept if getattr(restored, f) != getattr(spec, f))
    if lost:
        wanted = ", ".join(f"{f} = {getattr(spec, f)!r}" for f in lost)
        raise UserError(
            f"a Hugging Face {spec.family} model cannot have {wanted}", "use a family whose configuration has this"
        )
    return config
