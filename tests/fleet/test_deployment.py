"""The container file and the Kubernetes manifests against the commands that they run."""

import shlex
from pathlib import Path

import pytest
import typer

from ridgeline.cli import app
from ridgeline.cli.router import DRAIN
from ridgeline.serve import routes

yaml = pytest.importorskip("yaml")
DEPLOY = Path(__file__).parents[2] / "deploy"
COMMANDS = typer.main.get_command(app).commands
OBJECTS = {
    (o["kind"], o["metadata"]["name"]): o
    for file in ("servers.yaml", "router.yaml")
    for o in yaml.safe_load_all((DEPLOY / "kubernetes/base" / file).read_text())
}
PODS = {name: o["spec"]["template"]["spec"] for (_, name), o in OBJECTS.items() if "template" in o["spec"]}


def options(args):
    """A command's options in ``args`` with what follows each."""
    return {a: after for a, after in zip(args, [*args[1:], ""], strict=True) if a.startswith("--")}


@pytest.mark.parametrize("pod", PODS)
def test_commands_have_the_options_that_pods_give(pod):
    (container,) = PODS[pod]["containers"]
    command = COMMANDS[container["args"][0]]
    known = {name: p for p in command.params for name in p.opts}
    assert set(options(container["args"])) <= set(known)
    port = int(options(container["args"])["--port"])
    assert container["ports"] == [{"name": "http", "containerPort": port}]
    variables = {v for p in command.params if p.envvar for v in ([p.envvar] if isinstance(p.envvar, str) else p.envvar)}
    assert {e["name"] for e in container["env"]} <= variables
    assert PODS[pod]["securityContext"]["runAsNonRoot"]


def test_the_router_is_given_every_server():
    server = OBJECTS["StatefulSet", "ridgeline-server"]["spec"]
    (container,) = server["template"]["spec"]["containers"]
    port = options(container["args"])["--port"]
    given = [a for a in PODS["ridgeline-router"]["containers"][0]["args"] if a.startswith("http://")]
    hosts = [f"ridgeline-server-{i}.{server['serviceName']}" for i in range(server["replicas"])]
    assert given == [f"http://{host}:{port}" for host in hosts]
    assert OBJECTS["Service", server["serviceName"]]["spec"]["clusterIP"] == "None"


def test_a_pod_may_finish_what_runs():
    pod = PODS["ridgeline-server"]
    assert pod["terminationGracePeriodSeconds"] > float(options(pod["containers"][0]["args"])["--drain-timeout"])
    assert PODS["ridgeline-router"]["terminationGracePeriodSeconds"] > DRAIN


def test_metrics_are_read_where_no_key_is_asked_for():
    """A server with a key asks for it; the router, which brings it, has the metrics of all."""
    pods = [o["spec"]["template"] for o in OBJECTS.values() if "template" in o["spec"]]
    (scraped,) = [p for p in pods if p["metadata"].get("annotations", {}).get("prometheus.io/scrape") == "true"]
    (container,) = scraped["spec"]["containers"]
    assert container["args"][0] == "router"
    assert scraped["metadata"]["annotations"]["prometheus.io/port"] == str(container["ports"][0]["containerPort"])


def test_probes_ask_for_what_is_there():
    source = Path(routes.__file__).read_text(encoding="utf-8")
    (container,) = PODS["ridgeline-server"]["containers"]
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert f'"{container[probe]["httpGet"]["path"]}"' in source


def test_services_select_pods():
    for (kind, name), o in OBJECTS.items():
        if kind == "Service":
            labels = [p["spec"]["template"]["metadata"]["labels"] for k, p in OBJECTS.items() if k[0] != "Service"]
            assert any(o["spec"]["selector"].items() <= found.items() for found in labels), name


def test_the_container_file_copies_what_exists():
    root = DEPLOY.parent
    lines = (DEPLOY / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
    copied = [shlex.split(line)[1:-1] for line in lines if line.startswith("COPY ") and "--from" not in line]
    assert copied
    allowed = (root / ".dockerignore").read_text(encoding="utf-8")
    for name in [n for names in copied for n in names]:
        assert (root / name).exists(), name
        assert f"!{name}\n" in allowed
    (command,) = [line for line in lines if line.startswith("CMD [")]
    args = yaml.safe_load(command.removeprefix("CMD "))
    assert set(options(args)) <= {name for p in COMMANDS[args[0]].params for name in p.opts}
