"""The manifests for Kubernetes are what its API takes, by its own schemas; of KubeRay's resources, the pods in them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = pytest.mark.ray

MANIFESTS = Path(__file__).parents[2] / "infra" / "kubernetes"
VERSIONS = ("1.28", "1.34")


def resources() -> Iterator[Any]:
    for path in sorted(MANIFESTS.glob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text()):
            if document["kind"] != "RayCluster":
                yield pytest.param(document, id=f"{path.stem}-{document['kind']}")
                continue
            groups = [document["spec"]["headGroupSpec"], *document["spec"]["workerGroupSpecs"]]
            for number, group in enumerate(groups):
                pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "ray"}, **group["template"]}
                yield pytest.param(pod, id=f"{path.stem}-Pod-{number}")


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("resource", resources())
def test_a_manifest_suits_its_schema(resource: Any, version: str) -> None:
    kubernetes_validate: Any = pytest.importorskip("kubernetes_validate")
    kubernetes_validate.validate(resource, version, strict=True)


def test_a_manifest_with_a_wrong_key_does_not() -> None:
    kubernetes_validate: Any = pytest.importorskip("kubernetes_validate")
    service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "s"}, "spec": {"port": []}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(service, VERSIONS[-1], strict=True)
