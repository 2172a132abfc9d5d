"""Prometheus metrics of many servers as one text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from ridgeline.fleet.members import Member

_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?(\s.*)$")


def merged(texts: Iterable[tuple[str, str]], members: Sequence[Member], retries: int, broken: int) -> str:
    """The router's counts, then the members' samples, metric by metric, each with the label ``member``."""
    help_: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for url, text in texts:
        family = ""
        for line in text.splitlines():
            if line.startswith("#"):
                words = line.split(maxsplit=3)
                family = words[2] if len(words) > 2 else family
                if line not in (known := help_.setdefault(family, [])) and len(known) < 2:
                    known.append(line)
            elif found := _SAMPLE.match(line):
                name, labels, value = found.groups()
                own = f'member="{_escaped(url)}"'
                key = family if family and name.startswith(family) else name
                samples.setdefault(key, []).append(f"{name}{{{own}{',' + labels if labels else ''}}}{value}")
    lines = list(_own(members, retries, broken))
    for family, rows in samples.items():
        lines += [*help_.get(family, []), *rows]
    return "\n".join(lines) + "\n"


def _own(members: Sequence[Member], retries: int, broken: int) -> Iterable[str]:
    yield from ("# TYPE ridgeline_router_retries counter", f"ridgeline_router_retries {retries}")
    yield from ("# TYPE ridgeline_router_broken counter", f"ridgeline_router_broken {broken}")
    for name, kind, read in (
        ("up", "gauge", lambda m: int(m.state == "up")), ("running", "gauge", lambda m: m.running),
        ("sent", "counter", lambda m: m.sent), ("failed", "counter", lambda m: m.failed),
    ):  # fmt: skip
        yield f"# TYPE ridgeline_router_member_{name} {kind}"
        for m in members:
            yield f'ridgeline_router_member_{name}{{member="{_escaped(m.url)}"}} {read(m)}'


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
