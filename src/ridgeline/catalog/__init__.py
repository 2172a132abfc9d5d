"""The catalog: models, devices and systems by name, from one TOML file per model family, device and system.

=================================  ====================================================================
``model("llama2-7b")``             a catalog name, a hub id, a ``config.json`` or a checkpoint directory
``device("a100-80g-sxm")``         a catalog name, an alias, a device TOML file, or ``local``
``cluster("4x8xa100-80g-sxm")``    ``[nodes x] [devices per node x] device``
``system("megatron_ptdp")``        a system of the literature: a named plan
=================================  ====================================================================

``local`` is this machine, as ``ridgeline probe`` measured it. Importing this module reads no file; looking up a
device reads that device's file only, looking up a model reads the model files once.
"""

from __future__ import annotations

import os
import re
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ridgeline.paths import config_dir
from ridgeline.spec.errors import UserError, unknown

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

    from ridgeline.spec.device import Cluster, Device
    from ridgeline.spec.efficiency import Efficiency
    from ridgeline.spec.model import ModelSpec
    from ridgeline.spec.system import System

DEVICE_ALIASES = {
    "a100": "a100-80g-sxm",
    "a100-40g": "a100-40g-sxm",
    "a100-80g": "a100-80g-sxm",
    "a800": "a800-80g",
    "h100": "h100-sxm",
    "h100-80g": "h100-sxm",
    "h100-80g-sxm": "h100-sxm",
    "h100-80g-pcie": "h100-pcie",
    "h200": "h200-sxm",
    "v100": "v100-32g-sxm",
    "v100-16g": "v100-16g-sxm",
    "v100-32g": "v100-32g-sxm",
    "4090": "rtx4090",
    "3090": "rtx3090",
    "rtx-4090": "rtx4090",
    "rtx-3090": "rtx3090",
    "rtx-a6000": "a6000",
    "mi250x-gcd": "mi250x",
    "xeon-8380": "xeon",
}
"""Short names, each standing for the variant most often meant."""


# ---- models -----------------------------------------------------------------------------------------------------


class Published(NamedTuple):
    """A model's published size, and how closely ModelSpec's own count must agree."""

    parameters: float
    tolerance: float
    """Largest relative difference; 0 where the publisher's exact count is known."""


class _ModelEntry(NamedTuple):
    """One model of a file: ModelSpec's fields, and the catalog's own keys."""

    fields: dict[str, Any]
    where: str
    aliases: tuple[str, ...]
    tolerance: float
    format: str


ROUNDED = 0.03
"""Relative tolerance of a published count given as a float (``13e9``); one given as an integer is exact."""


def models() -> list[str]:
    """The names of all catalog models, family by family, small to large as their files list them."""
    return list(_model_index())


def model(name: str, files: bool = True) -> ModelSpec:
    """The model called ``name``: a catalog name, a hub id, a ``config.json`` or a checkpoint directory.

    The catalog's names and hub ids win over paths; write ``./gpt2`` for a directory that is called like a catalog
    model. A path that exists wins over ids that only resemble one of these, such as ``checkpoints/gpt2``. ``files``:
    whether paths are read at all. Raises :class:`UserError` for an unknown name (with the nearest ones) or an
    unusable file.
    """
    from ridgeline.spec.model import ModelSpec

    path = Path(name).expanduser()
    if files and name.endswith(".toml"):
        raise UserError(f"{name} is a TOML file, not a model",
                        "give a catalog model's name (`ridgeline models`), a config.json or a directory that has one; "
                        "predict, explain, bench, dissect and ablate take experiment files")  # fmt: skip
    if files and _named_model(name) is None and path.exists():
        return ModelSpec.from_path(path)
    key = _resolve_model(name)
    if key is not None:
        return _catalog_model(key)
    if files and (name.startswith((".", "~", "/")) or name.endswith(".json")):
        raise UserError(f"no file or directory {name}", "give a Hugging Face config.json or a checkpoint directory")
    raise unknown("model", name, [*_model_index(), *_model_aliases().values()])


def published(name: str) -> Published | None:
    """The published parameter count of a catalog model and the tolerance within which it is meant; None: no count."""
    key = _resolve_model(name)
    if key is None:
        raise unknown("model", name, _model_index())
    entry = _model_index()[key]
    count = entry.fields.get("published_parameters")
    return None if count is None else Published(count, entry.tolerance)


def published_format(name: str) -> str:
    """The technique whose format the published weights of catalog model ``name`` are in; empty: 16 bits, or unknown."""
    entry = _model_index().get(name)
    return entry.format if entry else ""


def model_aliases(name: str) -> tuple[str, ...]:
    """The other names (mostly hub ids) that stand for catalog model ``name``."""
    if name not in _model_index():
        raise unknown("model", name, _model_index())
    return _model_index()[name].aliases


def _resolve_model(name: str) -> str | None:
    """The catalog name that ``name`` (a name, a hub id or one that resembles it, in any case) stands for."""
    return _named_model(name) or _model_stems().get(_stem(name.strip().lower()))


def _named_model(name: str) -> str | None:
    """The catalog name of which ``name`` is the name or a listed hub id, in any case."""
    low = name.strip().lower()
    return low if low in _model_index() else _model_aliases_to_names().get(low)


_VARIANT = re.compile(
    r"[-_](hf|instruct|chat|it|base|fp8|fp4|nvfp4|mxfp4|bf16|awq|gptq|int4|int8|dynamic|2507|v\d\.\d)$"
)


def _stem(name: str) -> str:
    """A hub id without its organization and without what names a variant of the same architecture."""
    organization, slash, rest = name.partition("/")
    stem = rest if slash and organization.strip(".~") and "/" not in rest else name
    while (short := _VARIANT.sub("", stem)) != stem:
        stem = short
    return stem.removeprefix("meta-")


@cache
def _model_stems() -> dict[str, str]:
    """Stem of every name and hub id → catalog name; the first model of a stem has it."""
    stems: dict[str, str] = {}
    for name, e in _model_index().items():
        for known in (name, *e.aliases):
            stems.setdefault(_stem(known.lower()), name)
    return stems


@cache
def _model_aliases_to_names() -> dict[str, str]:
    """Lower-case hub id → catalog name."""
    return {a.lower(): n for n, e in _model_index().items() for a in e.aliases}


@cache
def _catalog_model(name: str) -> ModelSpec:
    from ridgeline.catalog.toml import validate
    from ridgeline.spec.model import ModelSpec

    entry = _model_index()[name]
    return validate(ModelSpec, {"name": name, **entry.fields}, entry.where)


@cache
def _model_aliases() -> dict[str, str]:
    """Lower-case hub id → hub id."""
    return {a.lower(): a for e in _model_index().values() for a in e.aliases}


@cache
def _model_index() -> dict[str, _ModelEntry]:
    """Every model of every file: name → its family's shared fields overlaid by its own."""
    from ridgeline.catalog.toml import parse

    index: dict[str, _ModelEntry] = {}
    for file in _data_files("models"):
        document = parse(file.read_bytes(), file.name)
        for name, own in document["models"].items():
            fields = {**document.get("family", {}), **own}
            count = fields.get("published_parameters")
            if count is not None:  # ModelSpec's field is a float; that the count was exact stays in `tolerance`
                fields["published_parameters"] = float(count)
            index[name] = _ModelEntry(
                where=f"{file.name}, model {name!r}",
                aliases=tuple(fields.pop("aliases", ())),
                format=fields.pop("format", ""),
                tolerance=fields.pop("tolerance", 0.0 if isinstance(count, int) else ROUNDED),
                fields=fields,
            )
    return index


# ---- devices ----------------------------------------------------------------------------------------------------


def devices() -> list[str]:
    """The names of all catalog devices, sorted. ``local`` is not among them."""
    return list(_device_names())


@cache
def _device_names() -> tuple[str, ...]:
    return tuple(file.name.removesuffix(".toml") for file in _data_files("devices"))


def device(name: str) -> Device:
    """The device called ``name``: a catalog name, an alias, the path of a device TOML file, or ``local``.

    A profile that `ridgeline calibrate` saved under the same name overrides the catalog's entry.

    Raises :class:`UserError` for an unknown name (with the nearest ones), an unusable file, or a ``local`` that was
    never probed.
    """
    low = name.strip().lower()
    if low == "local":
        return local_device()
    key = DEVICE_ALIASES.get(low, low)
    if key not in _device_names():  # "H100_SXM" is accepted too
        spelled = re.sub(r"[_ ]+", "-", low)
        spelled = DEVICE_ALIASES.get(spelled, spelled)
        key = spelled if spelled in _device_names() else key
    own = profile_path(key)
    if own.is_file():
        return _profile(own, own.stat().st_mtime_ns)
    if key in _device_names():
        return _catalog_device(key)
    if name.endswith(".toml") or name.startswith((".", "~", "/")):
        return _read_device(Path(name).expanduser())
    from ridgeline.catalog import chips

    if key in chips.chips():
        from ridgeline.hardware.device import chip_device

        return chip_device(chips.chip(key))
    error = unknown("device", name, [*devices(), *DEVICE_ALIASES, *chips.chips(), "local"])
    raise UserError(
        error.what,
        f"{error.fix} Or describe it in a TOML file and give its path: `ridgeline devices {devices()[0]} --toml` prints"
        " one to start from (peak_flops per dtype, memory_bytes and memory_bandwidth are enough)",
    )


def cluster(text: str) -> Cluster:
    """``"rtx4090"``, ``"8xa800-80g"`` (one node of eight), ``"4x8xa100-80g-sxm"`` (four nodes of eight), or several
    joined by ``+``.

    Raises :class:`UserError` as :func:`device` does, and for a count below 1.
    """
    from ridgeline.spec.device import Cluster, split_cluster_name

    if not text.strip():
        raise UserError("the cluster has no name", "write for example 'local', '8xa800-80g' or '4x8xa100-80g-sxm'")
    # A path may start with digits and an x ("2x/box.toml"), so an existing file is used as is.
    whole = _is_file(text)
    names = [text] if whole else _joined(text)
    if len(names) > 1:
        parts = tuple(cluster(part) for part in names)
        if any(part.device.kind != "gpu" for part in parts):
            raise UserError(f"cluster {text!r}: only GPUs can be combined in a cluster", "name one of its parts")
        return parts[0].model_copy(update={"parts": parts})
    nodes, per_node, name = (1, 1, text) if whole else split_cluster_name(text)
    if nodes < 1 or per_node < 1:
        raise UserError(f"cluster {text!r} has no devices", "counts start at 1, as in '8xa800-80g'")
    return Cluster(device=device(name), devices_per_node=per_node, nodes=nodes)


def _joined(text: str) -> list[str]:
    """The parts of a cluster's name; a ``+`` in the path of an existing file joins none."""
    from ridgeline.spec.device import split_cluster_name

    pieces, parts = text.split("+"), []
    while pieces:
        starts = ("+".join(pieces[:n]) for n in range(1, len(pieces) + 1))
        part = next((s for s in starts if s.strip() and _is_file(split_cluster_name(s)[2])), pieces[0])
        parts.append(part)
        del pieces[: 1 + part.count("+")]
    return parts


def _is_file(name: str) -> bool:
    return name.endswith(".toml") and Path(name).expanduser().is_file()


@cache
def _catalog_device(name: str) -> Device:
    from ridgeline.catalog.toml import device_from, parse

    file = files(__name__) / "devices" / f"{name}.toml"
    return device_from(parse(file.read_bytes(), file.name), file.name)


def _read_device(path: Path) -> Device:
    from ridgeline.catalog.chips import chip, is_chip
    from ridgeline.catalog.toml import device_from, parse

    try:
        data = path.read_bytes()
    except OSError as e:
        raise UserError(f"cannot read device file {path}: {e.strerror}", "give a device TOML file") from None
    document = parse(data, str(path))
    if is_chip(document):
        from ridgeline.hardware.device import chip_device

        return chip_device(chip(str(path)))
    return device_from({"name": path.stem, **document}, str(path))


# ---- systems ----------------------------------------------------------------------------------------------------


def systems() -> list[str]:
    """The names of all systems of the literature, sorted."""
    return list(_system_names())


@cache
def _system_names() -> tuple[str, ...]:
    return tuple(file.name.removesuffix(".toml") for file in _data_files("systems"))


@cache
def system(name: str) -> System:
    """The system called ``name``. Raises :class:`UserError` for an unknown one, with the nearest names."""
    from ridgeline.catalog.toml import parse, validate
    from ridgeline.spec.system import System

    if name not in systems():
        raise unknown("system", name, systems())
    file = files(__name__) / "systems" / f"{name}.toml"
    return validate(System, {"name": name, **parse(file.read_bytes(), file.name)}, file.name)


# ---- efficiency -------------------------------------------------------------------------------------------------


def efficiency(device: Device) -> Efficiency:
    """The constants of the device's architecture; generic ones where it has no file of its own."""
    name = device.architecture.lower()
    return architecture(name if name in architectures() else "generic")


def architectures() -> list[str]:
    """The architectures whose constants are known, and ``generic``."""
    return list(_architecture_names())


@cache
def _architecture_names() -> tuple[str, ...]:
    return tuple(file.name.removesuffix(".toml") for file in _data_files("efficiency"))


@cache
def architecture(name: str) -> Efficiency:
    """The constants of one architecture, such as ``ampere``. Raises :class:`UserError` for an unknown one."""
    from ridgeline.catalog.toml import validate
    from ridgeline.spec.efficiency import Efficiency

    if name not in architectures():
        raise unknown("architecture", name, architectures())
    return validate(Efficiency, architecture_document(name), f"{name}.toml")


def architecture_document(name: str) -> dict[str, Any]:
    """The values of an architecture's file, on top of those of the one that it is ``like``."""
    from ridgeline.catalog.toml import parse

    file = files(__name__) / "efficiency" / f"{name}.toml"
    given = parse(file.read_bytes(), file.name)
    like = given.pop("like", "")
    if not like:
        return given
    return merged({k: v for k, v in architecture_document(like).items() if k not in _OWN}, given)


_OWN = ("fitted_on", "source", "data", "spread")


def merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """``below`` overridden by ``above``, table by table."""
    both = {k: merged(below[k], v) for k, v in above.items() if isinstance(v, dict) and isinstance(below.get(k), dict)}
    return {**below, **above, **both}


# ---- profiles: this machine, and calibrated devices -------------------------------------------------------------


def profile_path(name: str) -> Path:
    """Path of a measured profile: ``devices/NAME.toml`` in :func:`ridgeline.paths.config_dir`."""
    return config_dir() / "devices" / f"{name}.toml"


@cache
def _profile(path: Path, modified: int) -> Device:
    return _read_device(path)


def local_device_path() -> Path:
    """Path of this machine's profile."""
    return profile_path("local")


class NoProfile(UserError):
    """This machine has not been probed."""


_unprobed: list[Device] = []


def local_device() -> Device:
    """This machine as ``ridgeline probe`` measured it. Raises :class:`NoProfile` if it was not."""
    path = local_device_path()
    if path.is_file():
        return _read_device(path)
    if _unprobed:
        return _unprobed[0]
    raise NoProfile("no profile of this machine yet", "run `ridgeline probe` first (about a minute)")


def allow_unprobed() -> None:
    """From now on ``local`` stands for this machine even if it was never measured: enough to run, not to predict."""
    import psutil

    from ridgeline.spec.device import Device

    memory = float(psutil.virtual_memory().total)
    host = Device(name="local", kind="cpu", peak_flops={"fp32": 1e11}, memory_bytes=memory, memory_bandwidth=1e10,
                  source="not probed: placeholders")  # fmt: skip
    _unprobed[:] = [host]


def device_toml(device: Device) -> str:
    """The device as a TOML file that :func:`device` reads."""
    import tomli_w

    return tomli_w.dumps(device.model_dump(exclude_none=True, exclude_defaults=True))


def save_device(device: Device, by: str = "calibrate") -> Path:
    """Save ``device`` as the profile of its name, replacing an earlier one atomically; returns the file's path."""
    import tempfile

    path = profile_path(device.name)
    text = f"# Written by `ridgeline {by}`; SI units.\n" + device_toml(device)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{device.name}-", suffix=".toml")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as f:
                f.write(text)
                f.flush()
                os.fsync(f.fileno())
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as e:
        raise UserError(f"cannot write {path}: {e.strerror}", "set RIDGELINE_HOME to a writable directory") from None
    return path


def _data_files(folder: str) -> list[Traversable]:
    return sorted((f for f in (files(__name__) / folder).iterdir() if f.name.endswith(".toml")), key=lambda f: f.name)
