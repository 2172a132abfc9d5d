"""The mesh of ranks: pipeline stages outermost, then data-parallel ranks, sequence parts, tensor parts innermost."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch.distributed as dist

from ridgeline.spec.experiment import Experiment

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

AXES = ("pp", "outer", "inner", "cp", "tp")
"""Mesh axes, outermost first. Data parallelism is ``outer`` × ``inner``: inner is the group that shares one sharded
copy (hybrid ZeRO) or one set of experts. When serving, ranks that share only experts use ``inner`` alone."""


@dataclass(frozen=True)
class Mesh:
    """The ranks of a job on their axes; every axis exists, possibly with one rank."""

    mesh: DeviceMesh
    _flat: dict[str, DeviceMesh] = field(default_factory=dict)
    _groups: dict[str, ProcessGroup | None] = field(default_factory=dict)

    @classmethod
    def make(cls, e: Experiment, device_type: str, inner: int = 1) -> Mesh:
        """Create the mesh over all ranks of the process group. ``inner``: ranks of an inner group, among data-parallel
        ranks or those of an axis ``ep``."""
        from torch.distributed.device_mesh import init_device_mesh

        sizes = {a: e.parallel.get(a, 1) for a in ("pp", "ep", "cp", "tp")}
        outer = e.data_parallel * sizes["ep"] // inner
        shape = (sizes["pp"], outer, inner, sizes["cp"], sizes["tp"])
        # Process groups are never freed, and each of gloo's has a thread that wakes a hundred times a second: a
        # process that trains several models must not create them anew for each.
        key = (id(dist.group.WORLD), device_type, shape)
        if key not in _MESHES:
            _MESHES[key] = cls(init_device_mesh(device_type, shape, mesh_dim_names=AXES))
        return _MESHES[key]

    def size(self, *axes: str) -> int:
        """Number of ranks along one or several axes together."""
        return math.prod(self.mesh[a].size() for a in axes)

    def at(self, axis: str) -> int:
        """This rank's index on an axis."""
        return int(self.mesh.get_local_rank(axis))

    @property
    def data_rank(self) -> int:
        """Which part of the batch this rank works on."""
        return self.at("outer") * self.size("inner") + self.at("inner")

    def sub(self, *axes: str) -> DeviceMesh:
        """One-dimensional mesh over one axis, or over several taken together."""
        wide = tuple(a for a in axes if self.mesh[a].size() > 1) or axes[:1]
        if len(wide) == 1:
            return self.mesh[wide[0]]
        name = "_".join(wide)
        if name not in self._flat:
            self._flat[name] = self.mesh[wide]._flatten(name)
        return self._flat[name]

    def pair(self, outer: tuple[str, ...], inner: tuple[str, ...]) -> DeviceMesh:
        """Two-dimensional mesh: several axes taken together, within several others taken together."""
        names = [self.sub(*axes).mesh_dim_names for axes in (outer, inner)]
        return self.mesh[tuple(n for group in names if group for n in group)]

    def group(self, *axes: str) -> ProcessGroup:
        """Process group over one axis, or over several taken together."""
        return self.sub(*axes).get_group()

    def ends(self) -> ProcessGroup | None:
        """This rank's counterparts on the first and the last pipeline stage; None on stages between. All ranks call."""
        if "ends" not in self._groups:
            found = None
            stages = self.mesh.mesh.reshape(self.size("pp"), -1)
            for first, last in zip(stages[0].tolist(), stages[-1].tolist(), strict=True):
                group = dist.new_group([first, last])
                if dist.get_rank() in (first, last):
                    found = group
            self._groups["ends"] = found
        return self._groups["ends"]


_MESHES: dict[tuple[object, ...], Mesh] = {}
"""Meshes of this process by process group, device and shape, for reuse."""


def forget() -> None:
    """Drop the meshes of a process group that is about to be destroyed: another may get its identity."""
    _MESHES.clear()
