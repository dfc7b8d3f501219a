"""The manifests of deploy/kubernetes: valid Kubernetes, and started as each process can be."""

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml  # type: ignore[import-untyped]

from api.routes.operations import GAUGES
from contract.config import load_settings
from scorekeep.cli import _RUNS
from scorekeep.parser import create_parser

FOLDER = Path(__file__).parent.parent / "deploy" / "kubernetes"
MANIFESTS: list[dict[str, Any]] = [
    manifest
    for path in sorted(FOLDER.glob("*.yaml"))
    for manifest in yaml.safe_load_all(path.read_text())
]


def containers() -> list[dict[str, Any]]:
    """Return every container of every workload."""
    specs = [
        each["spec"]["template"]["spec"] for each in MANIFESTS if "template" in each.get("spec", {})
    ]
    return [container for spec in specs for container in spec["containers"]]


@pytest.mark.parametrize(
    "manifest", MANIFESTS, ids=lambda each: f"{each['kind']}-{each['metadata']['name']}"
)
def test_it_is_kubernetes(manifest: dict[str, Any]) -> None:
    """Each manifest is valid by the schema of Kubernetes 1.30, unknown fields refused."""
    kubernetes_validate.validate(manifest, "1.30", strict=True)

    assert manifest["kind"] == "Namespace" or manifest["metadata"]["namespace"] == "scorekeep"


def test_each_process_can_be_started() -> None:
    """The arguments are the command line's own."""
    started = {container["args"][0] for container in containers()}

    for container in containers():
        create_parser(_RUNS).parse_args(container["args"])
    assert started == {"migrate", "api", "worker"}


def test_settings_are_those_that_there_are() -> None:
    """Every SCOREKEEP_ variable loads."""
    (secret,) = [each for each in MANIFESTS if each["kind"] == "Secret"]
    told = dict(secret["stringData"])
    for container in containers():
        told |= {each["name"]: each["value"] for each in container.get("env", [])}

    settings = load_settings({name: str(value) for name, value in told.items()})

    assert settings.database.startswith("postgresql+asyncpg://")


def test_autoscaling_follows_a_metric_that_is_there() -> None:
    """The metric is one of ``/metrics``, the target one of the deployments."""
    (scaler,) = [each for each in MANIFESTS if each["kind"] == "HorizontalPodAutoscaler"]
    names = {each["metadata"]["name"] for each in MANIFESTS if each["kind"] == "Deployment"}
    (metric,) = scaler["spec"]["metrics"]

    assert metric["external"]["metric"]["name"] in GAUGES
    assert scaler["spec"]["scaleTargetRef"]["name"] in names
