"""What `kubectl kustomize` would print of an overlay, as far as these overlays go: resources
of other folders, generated ConfigMaps, and patches that add.

What it does not know it refuses, so that nothing is taken for checked that is not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

_KNOWN = {"apiVersion", "kind", "resources", "configMapGenerator", "patches"}
Manifest = dict[str, Any]


def documents(path: Path) -> list[Manifest]:
    return [one for one in yaml.safe_load_all(path.read_text()) if one is not None]


def built(folder: Path) -> list[Manifest]:
    """All manifests of a kustomization."""
    (told,) = documents(folder / "kustomization.yaml")
    assert set(told) <= _KNOWN, set(told) - _KNOWN
    found: list[Manifest] = []
    for name in told["resources"]:
        place = (folder / name).resolve()
        found += built(place) if place.is_dir() else documents(place)
    for generator in told.get("configMapGenerator", ()):
        assert set(generator) == {"name", "literals"}, set(generator)
        data = dict(literal.split("=", 1) for literal in generator["literals"])
        metadata = {"name": generator["name"]}
        found.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data})
    for patch in told.get("patches", ()):
        target = [one for one in found if _is(one, patch["target"])]
        assert len(target) == 1, patch["target"]
        changes: Any = documents(folder / patch["path"])[0]  # a list, as RFC 6902 has it
        for change in changes:
            _apply(target[0], change)
    return found


def pod_of(manifest: Manifest) -> dict[str, Any] | None:
    """The specification of a workload's pods."""
    if manifest["kind"] != "Deployment":
        return None
    pod: dict[str, Any] = manifest["spec"]["template"]["spec"]
    return pod


def _is(manifest: Manifest, target: dict[str, str]) -> bool:
    return (manifest["kind"], manifest["metadata"]["name"]) == (target["kind"], target["name"])


def _apply(manifest: Manifest, change: dict[str, Any]) -> None:
    assert change["op"] == "add" and change["path"].endswith("/-"), change
    at: Any = manifest
    for part in change["path"].split("/")[1:-1]:
        at = at[int(part)] if isinstance(at, list) else at[part]
    at.append(change["value"])
