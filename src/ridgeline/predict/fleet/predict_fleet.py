"""predict_fleet(FleetSpec, experiments) → Result: latencies, throughput, cost and power of a fleet."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from ridgeline.predict.common import metric, source_of
from ridgeline.predict.fleet.churn import Churn
from ridgeline.predict.fleet.members import PoolModel
from ridgeline.predict.fleet.simulation import FleetOutcome, FleetSimulation
from ridgeline.predict.interval import add_intervals
from ridgeline.predict.known import known_of
from ridgeline.predict.serving.arrivals import Arrival, requests
from ridgeline.predict.serving.iteration_time import Iterations
from ridgeline.predict.serving.kv_budget import LESS, Room
from ridgeline.predict.serving.kv_transfer import bytes_per_layer
from ridgeline.predict.serving.simulate import (
    SHARES,
    iteration_rows,
    latencies_of,
    percentile,
    serving_metrics,
    setup_of,
    surface_of,
    waiting_share,
)
from ridgeline.predict.settle import ask
from ridgeline.spec.device import Cluster, Device
from ridgeline.spec.errors import Incompatible
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.fleet import FleetSpec, Pool
from ridgeline.spec.result import Metric, Result, Traffic
from ridgeline.spec.workload import Serve
from ridgeline.techniques.registry import remaining_model, resolve, techniques_of


def predict_fleet(spec: FleetSpec, experiments: Mapping[str, Experiment]) -> Result:
    """The predicted Result of a fleet. ``experiments``: by the name of the pool, one replica's model, cluster and plan;
    all have the fleet's workload.

    Raises :class:`Incompatible` for a pool whose replica cannot serve.
    """
    first = next(iter(experiments.values()))
    w = first.workload
    assert isinstance(w, Serve)
    arrivals = requests(w)
    models = [model_of(p, spec, experiments[p.name], arrivals) for p in spec.pools]
    outcome = simulate_fleet(spec, models, w, arrivals)
    result = _result(spec, experiments, w)
    if outcome.requests.rejected == len(arrivals):
        result.status, result.reason = "infeasible", "no replica has room for the shortest request"
        return result
    latencies = latencies_of(outcome.requests)
    result.metrics = fleet_metrics(outcome, models, w, latencies)
    result.distributions = {
        f"{name}_s": [percentile(values, q) for q in SHARES] for name, values in latencies.items() if values
    }
    sent = outcome.sent
    if sent.count:
        result.traffic = [Traffic(kind="kv_transfer", ranks=2, calls=sent.count, bytes=sent.bytes)]
    if outcome.requests.rejected:
        result.notes.append(
            f"{outcome.requests.rejected} of {len(arrivals)} requests are longer than a cache or the context and were"
            " rejected"
        )
    _add_intervals(result, spec, models, experiments)
    return result


def _add_intervals(
    result: Result, spec: FleetSpec, models: Sequence[PoolModel], experiments: Mapping[str, Experiment]
) -> None:
    """The widest interval of the pools, each as one engine's, and the reasons for a wider one; what follows from the
    file alone is exact."""
    metrics = result.metrics
    steady = all(p.autoscale is None and p.spot is None for p in spec.pools)
    exact = [n for n in metrics if n.endswith("_replicas") or n in ("dollars_per_hour", "watts")] if steady else []
    exact += [n for n in ("kv_transfer_bytes",) if n in metrics]
    batch = round(max(1.0, metrics["batch_mean"].value))
    for m in models:
        surface = m.costs
        assert isinstance(surface, Iterations)
        prompt, longest = surface.contexts
        prompts = m.pool.role == "prefill"
        rows = iteration_rows(surface, *(("prefill", 1, prompt, prompt) if prompts else ("decode", batch, 1, longest)))
        waiting = waiting_share(surface, prompt, metrics["ttft_s"].value)
        known, notes = known_of(surface.e, techniques_of(experiments[m.pool.name].plan), waiting)
        own = {n: x.model_copy() for n, x in metrics.items() if n not in exact}
        add_intervals(own, rows, "serve", known)
        for name, x in own.items():
            if metrics[name].high is None or (x.high or 0.0) > (metrics[name].high or 0.0):
                metrics[name] = x
        result.notes += [f"pool {m.pool.name}: {note}" for note in notes]
    for name in exact:
        metrics[name].low = metrics[name].high = metrics[name].value


def simulate_fleet(spec: FleetSpec, models: Sequence[PoolModel], w: Serve, arrivals: Sequence[Arrival]) -> FleetOutcome:
    """Simulate ``arrivals`` on a fleet, with its changes."""
    sim = FleetSimulation(spec, models, arrivals, w.concurrency, w.shared_prefix)
    Churn(sim).begin()
    return sim.run()


# ---- one replica -----------------------------------------------------------------------------------------------------


def model_of(pool: Pool, spec: FleetSpec, e: Experiment, arrivals: Sequence[Arrival]) -> PoolModel:
    """A pool's replica as it is simulated. Raises :class:`Incompatible` if it is no single engine, or has no room."""
    e = e.model_copy(update={"cluster": capped(e.cluster, pool.power_cap)})
    e, techniques = resolve(e, ask)
    if e.data_parallel > 1:
        raise Incompatible(
            f"pool {pool.name}: the plan splits the model over {e.world // e.data_parallel} of the {e.world} devices of"
            f" {e.cluster.label}",
            "make a replica as large as the plan's tensor and pipeline parallelism, and have more replicas",
        )
    w = e.workload
    assert isinstance(w, Serve)
    surface = surface_of(e, techniques, list(arrivals))
    made, space = setup_of(surface, techniques, w, arrivals)
    _require_room(pool, made.blocks, space)
    device, link = surface.cluster.device, surface.cluster.device.network or surface.cluster.device.host_link
    bandwidth = spec.transfer.bandwidth or (link.bandwidth if link else float("inf"))
    latency = spec.transfer.latency if spec.transfer.latency is not None else (link.latency if link else 0.0)
    m = remaining_model(e)
    copies = max(1.0, e.parallel.get("tp", 1) / m.cached_heads)  # ranks with the same heads send them each
    return PoolModel(
        pool, surface, made, surface.engine.request_s, surface.engine.admission_s, e.world, m.num_layers,
        m.num_layers * bytes_per_layer(e) * copies, bandwidth * e.world, latency, _price(pool, e, device),
        _watts(pool, e, device),
    )  # fmt: skip


def _require_room(pool: Pool, blocks: int, space: Room) -> None:
    if blocks < 1:
        raise Incompatible(
            f"pool {pool.name}: {space.reason}",
            LESS,
        )


def _price(pool: Pool, e: Experiment, device: Device) -> float:
    return device.price_per_hour * e.world if pool.price_per_hour is None else pool.price_per_hour


def _watts(pool: Pool, e: Experiment, device: Device) -> float:
    return device.watts * e.world if pool.watts is None else pool.watts


def capped(cluster: Cluster, cap: float) -> Cluster:
    """The cluster with its devices' power limited to the share ``cap``: clocks, and with them peaks, fall with its cube
    root, as dynamic power is f·V² and V is about proportional to f; the memory's bandwidth stays.

    SplitwiseSim's measurements of an H100 at half of its power have prompts 1.30 times slower (here 1.26 for what is
    bound by arithmetic), and tokens as fast as before.
    """
    if cap == 1:
        return cluster
    d, slow = cluster.device, cap ** (1 / 3)
    slower = {"peak_flops": {k: v * slow for k, v in d.peak_flops.items()}, "clock": d.clock * slow,
              "watts": d.watts * cap}  # fmt: skip
    return cluster.model_copy(update={"device": d.model_copy(update=slower)})


# ---- metrics ---------------------------------------------------------------------------------------------------------


def fleet_metrics(
    o: FleetOutcome, models: Sequence[PoolModel], w: Serve, latencies: dict[str, list[float]]
) -> dict[str, Metric]:
    """Latencies and throughput of a fleet, its cost and power, and how busy each pool was."""
    costs = models[0].costs
    source = source_of(costs.cluster) if isinstance(costs, Iterations) else "simulation"
    end = max(t for t in o.requests.finish if t == t)
    start = min(t for t in o.requests.arrival if t == t)
    hours = {
        m: (max(start, end if m.died is None else min(m.died, end)) - min(end, max(start, m.born))) / 3600
        for m in o.members
    }
    span = (end - start) / 3600
    mean = {p.pool.name: sum(h for m, h in hours.items() if m.model is p) / span for p in models}
    devices = max(1, round(sum(mean[p.pool.name] * p.devices for p in models)))
    metrics = serving_metrics(o.requests, latencies, w, devices, source)
    metrics["busy_share"] = metric(o.requests.busy_s / 3600 / sum(hours.values()), "", "", "mean of the replicas")
    for p in models:
        own = [m for m in o.members if m.model is p]
        busy = sum(m.replica.out.busy_s for m in own) / 3600
        metrics[f"{p.pool.name}_replicas"] = metric(mean[p.pool.name], "", "", "mean over the time")
        metrics[f"{p.pool.name}_busy_share"] = metric(busy / max(1e-12, sum(hours[m] for m in own)), "", "", source)
    if o.sent.count:
        metrics["kv_transfer_bytes"] = metric(o.sent.bytes, "bytes", "", "graph")
        metrics["kv_transfer_s"] = metric(o.sent.seconds / o.sent.count, "s", "lower", "link, mean of a request")
        metrics["kv_transfer_exposed_s"] = metric(o.sent.exposed_s / o.sent.count, "s", "lower",
                                                  "after the first token, mean of a request")  # fmt: skip
    if o.recomputed:
        metrics["recomputed_requests"] = metric(o.recomputed, "", "lower", "requests that lost their replica")
    metrics |= cost_metrics(models, mean, metrics["tokens_per_s"].value)
    return metrics


def cost_metrics(models: Sequence[PoolModel], replicas: Mapping[str, float], rate: float) -> dict[str, Metric]:
    """Dollars per hour and watts of ``replicas`` (number by pool name), and both per token at ``rate`` tokens/s."""
    price = sum(p.price_per_hour * replicas[p.pool.name] for p in models)
    watts = sum(p.watts * replicas[p.pool.name] for p in models)
    found: dict[str, Metric] = {}
    if price:
        found["dollars_per_hour"] = metric(price, "$", "lower", "catalog price, or the pool's")
        found["dollars_per_million_tokens"] = metric(price / 3600 / rate * 1e6, "$", "lower", "generated tokens")
    if watts:
        found["watts"] = metric(watts, "W", "lower", "rated power, an upper bound")
        found["joules_per_token"] = metric(watts / rate, "J", "lower", "rated power, an upper bound")
    return found


def _result(spec: FleetSpec, experiments: Mapping[str, Experiment], w: Serve) -> Result:
    first = next(iter(experiments.values()))
    plans = {name: sorted(e.plan.strings()) for name, e in experiments.items()}
    identity: dict[str, Any] = {
        "model": first.model.model_dump(exclude={"source", "published_parameters"}),
        "cluster": spec.label,
        "workload": w.model_dump(),
        "plan": sorted({item for items in plans.values() for item in items}),
        "fleet": spec.canonical(),
        "plans": plans,
    }
    text = json.dumps(identity, sort_keys=True, separators=(",", ":"))
    return Result(
        source="predicted",
        experiment_id=hashlib.sha256(text.encode()).hexdigest()[:12],
        name=spec.label,
        experiment=identity,
        environment={"device": spec.label},
        notes=[f"a fleet of {spec.label}"],
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )
