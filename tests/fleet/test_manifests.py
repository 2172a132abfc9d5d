"""The Kubernetes manifests against the schemas of Kubernetes' releases, base and GPU overlay. Needs kubernetes-validate
(100 MB: `make test-peers`); the overlay needs kubectl."""

import copy
import shutil
import subprocess
from pathlib import Path

import pytest

schemas = pytest.importorskip("kubernetes_validate")
yaml = pytest.importorskip("yaml")
FOLDER = Path(__file__).parents[2] / "deploy/kubernetes"
VERSIONS = ("1.28", "1.31", "1.34")
RENDERED = {
    "base": [o for f in ("servers.yaml", "router.yaml") for o in yaml.safe_load_all((FOLDER / "base" / f).read_text())]
}
if shutil.which("kubectl"):
    for name in ("base", "gpu"):
        text = subprocess.run(
            ["kubectl", "kustomize", FOLDER / name], capture_output=True, text=True, check=True
        ).stdout
        RENDERED[f"{name}, by kustomize"] = list(yaml.safe_load_all(text))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", RENDERED)
def test_every_object_fits_the_schema(name, version):
    kinds = sorted(o["kind"] for o in RENDERED[name])
    assert kinds == ["Deployment", "Service", "Service", "StatefulSet"]
    for o in RENDERED[name]:
        schemas.validate(o, version, strict=True)


def test_the_schema_finds_mistakes():
    (server,) = [copy.deepcopy(o) for o in RENDERED["base"] if o["kind"] == "StatefulSet"]
    server["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
    with pytest.raises(schemas.ValidationError, match="readynessProbe"):
        schemas.validate(server, VERSIONS[-1], strict=True)


@pytest.mark.skipif("gpu, by kustomize" not in RENDERED, reason="needs kubectl")
def test_the_overlay_asks_for_a_gpu():
    (server,) = [o for o in RENDERED["gpu, by kustomize"] if o["kind"] == "StatefulSet"]
    pod = server["spec"]["template"]["spec"]
    assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert pod["tolerations"][0]["key"] == "nvidia.com/gpu"
