"""A fleet of serving replicas as data: pools of equal replicas, how requests reach them, and how they come and go.

::

    [fleet]
    policy = "shortest-queue"

    [transfer]
    bandwidth = 50e9                # bytes/s of one device's card; default: the slower network of the two pools

    [[pools]]
    name = "prompt"
    role = "prefill"
    on = "8xh100-sxm"
    replicas = 25
    plan = ["tensor_parallel:degree=8", "continuous_batching", "flash_attention"]

    [[pools]]
    name = "token"
    role = "decode"
    on = "8xa100-80g-sxm"
    replicas = 26
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Role = Literal["mixed", "prefill", "decode"]
Policy = Literal["prefix", "least-loaded", "random", "round-robin", "shortest-queue"]


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Autoscale(_Table):
    """Replicas of a pool by its load, as Kubernetes' horizontal pod autoscaler computes them: ceil(replicas × load /
    target), at most as few as in the last ``down_after_s`` seconds."""

    target: float = Field(gt=0)
    """Requests per replica, running and waiting."""
    min: int = Field(default=1, ge=1)
    max: int = Field(ge=1)
    interval_s: float = Field(default=15.0, gt=0)
    """Seconds between decisions."""
    start_s: float = Field(default=120.0, ge=0)
    """Seconds until a new replica takes requests (the machine, the weights); they are paid."""
    down_after_s: float = Field(default=300.0, ge=0)

    @model_validator(mode="after")
    def _bounds(self) -> Autoscale:
        if self.min > self.max:
            raise ValueError(f"min = {self.min} is more than max = {self.max}")
        return self


class Spot(_Table):
    """Interruptions of a pool's replicas, each independent of the others."""

    interruptions_per_hour: float = Field(gt=0, le=3600)
    """Mean of one replica; times between them are exponential."""
    notice_s: float = Field(default=0.0, ge=0)
    """Seconds before, in which a replica gets no new requests and goes on with its own."""
    restart_s: float = Field(default=120.0, ge=0)
    """Seconds from the interruption until a replacement takes requests."""


class Transfer(_Table):
    """How keys and values pass from a prefill replica to a decode replica."""

    bandwidth: float | None = Field(default=None, gt=0)
    """Bytes/s of one device's card; None: the slower network of the two pools' devices. All devices of a replica send
    their part at once."""
    latency: float | None = Field(default=None, ge=0)
    """Seconds of one message; None: the network's."""
    layerwise_from: int = Field(default=512, ge=1)
    """Shortest prompt, in tokens, of which each layer is sent while the next ones compute; shorter ones are sent whole
    after the first token (Splitwise, arXiv:2311.18677, section IV-C)."""


class Flip(_Table):
    """When replicas of one phase take requests of the other (Splitwise, section IV-A)."""

    prompt_tokens: int = Field(default=8192, ge=1)
    """A prompt goes beyond the prefill pool when the shortest queue there would be longer than this."""
    memory_share: float = Field(default=1.0, gt=0, le=1)
    """A request decodes beyond the decode pool when the caches there would be promised beyond this share."""


class Pool(_Table):
    """Equal replicas. A replica is one engine on the cluster ``on``."""

    name: str = Field(min_length=1, pattern=r"^[A-Za-z][A-Za-z0-9_]*$")
    role: Role = "mixed"
    on: str = "local"
    replicas: int | None = Field(default=None, ge=1)
    """None: ``ridgeline plan`` finds it."""
    plan: list[str] | None = None
    """Techniques; None: the default ones of serving, with tensor parallelism over the replica's devices."""
    engine: str = ""
    """Serving software, as in a workload."""
    max_num_seqs: int | None = Field(default=None, ge=1)
    max_num_batched_tokens: int | None = Field(default=None, ge=1)
    kv_cache_bytes: int | None = Field(default=None, ge=1)
    max_model_len: int | None = Field(default=None, ge=2)
    price_per_hour: float | None = Field(default=None, ge=0)
    """Dollars per replica and hour; None: the catalog's, of its devices."""
    watts: float | None = Field(default=None, gt=0)
    """Of a replica; None: the rated power of its devices, which leaves out the rest of the machine."""
    power_cap: float = Field(default=1.0, gt=0.1, le=1)
    """Share of the devices' rated power that they may draw."""
    autoscale: Autoscale | None = None
    spot: Spot | None = None


class FleetTable(_Table):
    """``[fleet]``."""

    policy: Policy = "prefix"
    """Which replica gets a request. ``prefix`` and ``least-loaded``: the one with the fewest requests (recorded
    requests carry no text to compare prefixes of); ``shortest-queue``: that with the fewest tokens to compute, and for
    decoding that with the fewest tokens promised."""
    router_s: float = Field(default=0.0, ge=0)
    """Seconds that the router adds to a request's way to its replica, and its answer's way back."""
    seed: int = 0
    """Of random routing and of interruptions."""


class FleetSpec(_Table):
    """A fleet."""

    fleet: FleetTable = FleetTable()
    transfer: Transfer = Transfer()
    flip: Flip | None = None
    """None: each pool keeps to its phase."""
    pools: list[Pool] = Field(min_length=1)

    @model_validator(mode="after")
    def _complete(self) -> FleetSpec:
        names = [p.name for p in self.pools]
        if len(set(names)) < len(names):
            raise ValueError("two pools have the same name")
        roles = {p.role for p in self.pools}
        if len(roles & {"prefill", "decode"}) == 1:
            raise ValueError("a prefill pool needs a decode pool, and the other way round")
        return self

    @property
    def split(self) -> bool:
        """Whether prompts and decoding have pools of their own."""
        return any(p.role != "mixed" for p in self.pools)

    @property
    def label(self) -> str:
        """The short form: 25x(8xh100-sxm) prefill + 26x(8xa100-80g-sxm) decode."""
        return " + ".join(_pool_label(p) for p in self.pools)

    def sized(self, replicas: dict[str, int]) -> FleetSpec:
        """This fleet with other numbers of ``replicas``, by pool name."""
        pools = [p.model_copy(update={"replicas": replicas.get(p.name, p.replicas)}) for p in self.pools]
        return self.model_copy(update={"pools": pools})

    def canonical(self) -> dict[str, Any]:
        """Its part of a result's identity, without what is left at its default."""
        return self.model_dump(exclude_defaults=True)


def _pool_label(p: Pool) -> str:
    cap = f" at {p.power_cap:.0%} power" if p.power_cap < 1 else ""
    return f"{p.replicas or '?'}x({p.on}{cap})" + ("" if p.role == "mixed" else f" {p.role}")
