"""The manifests, as kustomize would build them: by Kubernetes' schemas, and by each other."""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
from ipaddress import ip_address, ip_network
from typing import Any

import kubernetes_validate
import promql_parser
import pytest
import yaml

import reference
from docker.conftest import DOCKER, flags_in
from docker.manifests import Manifest, built, documents, pod_of
from docker.test_observability import selectors
from sglang_epd.config import Settings
from sglang_epd.encoder.serving import DRAIN_S

KUBERNETES = DOCKER / "kubernetes"
OVERLAYS = sorted((KUBERNETES / "overlays").iterdir())
# `preStop.sleep` is on from the first of these.
VERSIONS = ("1.30", kubernetes_validate.latest_version())
NAME = "app.kubernetes.io/component"


@pytest.fixture(scope="module", params=OVERLAYS, ids=lambda folder: folder.name)
def manifests(request: pytest.FixtureRequest) -> list[Manifest]:
    return built(request.param)


def of(manifests: list[Manifest], kind: str) -> list[Manifest]:
    return [one for one in manifests if one["kind"] == kind]


def components(manifests: list[Manifest]) -> set[str]:
    return {
        one["spec"]["template"]["metadata"]["labels"][NAME] for one in of(manifests, "Deployment")
    }


def containers(manifests: list[Manifest]) -> list[dict[str, Any]]:
    pods = filter(None, map(pod_of, manifests))
    return list(itertools.chain.from_iterable(pod["containers"] for pod in pods))


def words(container: dict[str, Any]) -> list[str]:
    return [*container.get("command", ()), *container.get("args", ())]


@pytest.mark.skipif(not shutil.which("kubectl"), reason="kubectl is not installed")
@pytest.mark.parametrize("folder", OVERLAYS, ids=lambda folder: folder.name)
def test_kustomize_builds_what_is_checked_here(folder):
    done = subprocess.run(
        ["kubectl", "kustomize", folder], capture_output=True, text=True, timeout=60, check=True
    )
    # It adds a digest of a ConfigMap's content to its name, here and where it is used.
    text = re.sub(r"\bsglang-epd-[a-z0-9]{10}$", "sglang-epd", done.stdout, flags=re.MULTILINE)

    def names(one: Manifest) -> tuple[str, str]:
        return one["kind"], one["metadata"]["name"]

    assert sorted(yaml.safe_load_all(text), key=names) == sorted(built(folder), key=names)


@pytest.mark.parametrize("version", VERSIONS)
def test_every_manifest_is_one(manifests, version):
    for one in manifests:
        kubernetes_validate.validate(one, version, strict=True)


def test_the_validator_sees_what_is_wrong(manifests):
    spoilt = yaml.safe_load(yaml.safe_dump(of(manifests, "Deployment")[0]))
    pod_of(spoilt)["containers"][0]["readynessProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(spoilt, VERSIONS[0], strict=True)


def test_no_file_is_left_out_and_no_name_is_there_twice(manifests):
    names = [(one["kind"], one["metadata"]["name"]) for one in manifests]
    assert len(set(names)) == len(names)
    for folder in [KUBERNETES / "base", *OVERLAYS]:
        (told,) = documents(folder / "kustomization.yaml")
        used = [*told["resources"], *(patch["path"] for patch in told.get("patches", ()))]
        there = {path.name for path in folder.iterdir()} - {"kustomization.yaml"}
        assert there == {name for name in used if not name.startswith("..")}


def test_one_entry_of_an_overlay_names_the_image_of_all(manifests):
    assert {container["image"] for container in containers(manifests)} == {"sglang-epd"}


def test_an_autoscaler_alone_says_how_many_there_are(manifests):
    """Else each `kubectl apply` would undo its work."""
    (scaler,) = of(manifests, "HorizontalPodAutoscaler")
    for one in of(manifests, "Deployment"):
        scaled = one["metadata"]["name"] == scaler["spec"]["scaleTargetRef"]["name"]
        assert ("replicas" in one["spec"]) is not scaled


def test_everything_selects_pods_that_there_are(manifests):
    there = components(manifests)
    for one in manifests:
        text = yaml.safe_dump(one.get("spec", {}))
        named = set(re.findall(rf"{re.escape(NAME)}: (\S+)", text))
        assert named <= there, one["metadata"]["name"]
    selected = {
        one["spec"]["selector"]["matchLabels"][NAME] for one in of(manifests, "PodDisruptionBudget")
    }
    # Of those there is one; a budget would only keep nodes from being drained.
    assert selected == there - {"router", "store-master"}


def test_policies_let_in_only_whom_they_name(manifests):
    guarded = set()
    for one in of(manifests, "NetworkPolicy"):
        guarded.add(one["spec"]["podSelector"]["matchLabels"].get(NAME, "all"))
        for rule in one["spec"].get("ingress", ()):
            assert rule["from"]
            for peer in rule["from"]:
                values = [
                    value
                    for expression in peer.get("podSelector", {}).get("matchExpressions", ())
                    for value in expression["values"]
                ]
                known = components(manifests) | {"language", "prefill"}
                assert set(values) <= known
    assert guarded >= {"all", *components(manifests)} - {"metrics"}


PRIVATE = ("10.1.2.3", "100.64.0.1", "168.63.129.16", "169.254.169.254", "172.31.0.1")
PRIVATE += ("192.168.0.1", "64:ff9b::a00:1", "2002:a00:1::", "fc00::1", "fe80::1", "::1")


def test_servers_that_may_fetch_reach_nothing_private(manifests):
    (policy,) = [one for one in of(manifests, "NetworkPolicy") if "egress" in one["spec"]]
    (expression,) = policy["spec"]["podSelector"]["matchExpressions"]
    assert set(expression["values"]) == {"encoder", "decode"}
    blocks = [
        peer["ipBlock"]
        for rule in policy["spec"]["egress"]
        for peer in rule["to"]
        if "ipBlock" in peer
    ]

    def reached(address: str) -> bool:
        return any(
            ip_address(address) in ip_network(block["cidr"])
            and not any(ip_address(address) in ip_network(one) for one in block["except"])
            for block in blocks
        )

    assert [address for address in PRIVATE if reached(address)] == []
    assert all(map(reached, ("93.184.216.34", "2606:2800:220:1::1")))


def test_pods_are_nobody_and_may_do_nothing(manifests):
    for pod in filter(None, map(pod_of, manifests)):
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        names = [container["name"] for container in pod["containers"]]
        assert pod["automountServiceAccountToken"] is (names == ["router"])
        volumes = {volume["name"] for volume in pod.get("volumes", ())}
        for container in pod["containers"]:
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"] is True
            assert security["allowPrivilegeEscalation"] is False
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert container["resources"]["limits"]["memory"]
            assert {mount["name"] for mount in container["volumeMounts"]} == volumes


def test_servers_have_probes_and_time_to_drain(manifests):
    for one in of(manifests, "Deployment"):
        pod = pod_of(one)
        (container,) = pod["containers"]
        assert {"readinessProbe", "livenessProbe"} <= set(container)
        named = {port["name"] for port in container["ports"]}
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            (kind,) = set(container.get(probe, {"tcpSocket": 0})) & {"httpGet", "tcpSocket"}
            assert probe not in container or container[probe][kind]["port"] in named
        if container["name"] != "server":
            continue
        start = container["startupProbe"]
        start_s = start["periodSeconds"] * start["failureThreshold"]
        assert one["spec"]["progressDeadlineSeconds"] > start_s, "a rollout waits for it"
        pause = container["lifecycle"]["preStop"]["sleep"]["seconds"]
        assert pod["terminationGracePeriodSeconds"] > pause + DRAIN_S + 2
        # An encoder that drains answers /health with 503, and is not to be killed for it.
        if "--encoder-only" in container["args"]:
            assert container["livenessProbe"]["httpGet"]["path"] == "/v1/status"


def test_flags_exist(manifests, sglang_flags, router_flags):
    for container in containers(manifests):
        if container["name"] == "server":
            assert flags_in(words(container)) <= sglang_flags
        elif container["name"] == "router":
            assert flags_in(words(container)) <= router_flags


def test_the_token_comes_from_a_secret_and_settings_from_a_map_that_holds(manifests):
    (config,) = of(manifests, "ConfigMap")
    assert not of(manifests, "Secret")
    for container in containers(manifests):
        told = {one["name"]: one for one in container.get("env", ())}
        if container["name"] == "server":
            reference_ = told["SGLANG_EPD_TOKEN"]["valueFrom"]["secretKeyRef"]
            assert reference_ == {"name": "sglang-epd", "key": "token"}
            assert container["envFrom"] == [{"configMapRef": {"name": "sglang-epd"}}]
        plain = {name: one["value"] for name, one in told.items() if "value" in one}
        Settings.from_env(plain | config["data"])


def test_it_scales_by_a_metric_that_encoders_have(manifests):
    names = {
        name for metric in reference.metrics()["Encoders"] for name in reference.samples_of(metric)
    }
    (scaler,) = of(manifests, "HorizontalPodAutoscaler")
    (metric,) = scaler["spec"]["metrics"]
    asked = metric["pods"]["metric"]["name"]
    assert asked.replace("sglang_epd_", "sglang:epd_") in names
    (rule,) = yaml.safe_load((DOCKER / "observability" / "prometheus-adapter.yaml").read_text())[
        "rules"
    ]["custom"]
    assert rule["name"]["as"] == asked
    assert asked.replace("sglang_epd_", "sglang:epd_") in rule["metricsQuery"]
    target = scaler["spec"]["scaleTargetRef"]["name"]
    assert target in {one["metadata"]["name"] for one in of(manifests, "Deployment")}


@pytest.fixture(scope="module")
def scaled() -> Manifest:
    (scaled,) = documents(KUBERNETES / "keda" / "encoder.yaml")
    return scaled


def test_keda_scales_as_the_autoscaler_in_its_place(scaled):
    """A schema of KEDA's is not at hand: these are the fields that its documentation has."""
    spec = scaled["spec"]
    assert (scaled["apiVersion"], scaled["kind"]) == ("keda.sh/v1alpha1", "ScaledObject")
    assert set(spec) == {
        *("scaleTargetRef", "minReplicaCount", "maxReplicaCount", "pollingInterval"),
        *("triggers", "fallback", "advanced"),
    }
    (own,) = [
        one["spec"]
        for one in documents(KUBERNETES / "base" / "autoscaling.yaml")
        if one["kind"] == "HorizontalPodAutoscaler"
    ]
    assert spec["scaleTargetRef"] == own["scaleTargetRef"]
    replicas = spec["minReplicaCount"], spec["maxReplicaCount"]
    assert replicas == (own["minReplicas"], own["maxReplicas"])
    assert spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"] == own["behavior"]
    (trigger,), (metric,) = spec["triggers"], own["metrics"]
    assert (trigger["type"], trigger["metricType"]) == ("prometheus", "AverageValue")
    assert trigger["metadata"]["threshold"] == metric["pods"]["target"]["averageValue"]


def test_keda_asks_for_a_metric_that_encoders_have(scaled):
    names = {
        name for metric in reference.metrics()["Encoders"] for name in reference.samples_of(metric)
    }
    (trigger,) = scaled["spec"]["triggers"]
    query = promql_parser.parse(trigger["metadata"]["query"])
    assert [one.name for one in selectors(query)] == ["sglang:epd_encoder_patches_queued"]
    assert "sglang:epd_encoder_patches_queued" in names


@pytest.mark.skipif(not shutil.which("kubectl"), reason="kubectl is not installed")
@pytest.mark.parametrize("folder", OVERLAYS, ids=lambda folder: folder.name)
def test_with_keda_there_is_no_other_autoscaler(folder, tmp_path):
    copied = shutil.copytree(KUBERNETES, tmp_path / "kubernetes")
    own = copied / "overlays" / "own"
    own.mkdir()
    told = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [f"../{folder.name}"],
        "components": ["../../keda"],
    }
    (own / "kustomization.yaml").write_text(yaml.safe_dump(told))
    done = subprocess.run(
        ["kubectl", "kustomize", own], capture_output=True, text=True, timeout=60, check=True
    )
    kinds = [one["kind"] for one in yaml.safe_load_all(done.stdout)]
    assert kinds.count("ScaledObject") == 1
    assert "HorizontalPodAutoscaler" not in kinds
    assert len(kinds) == len(built(folder))


def test_only_the_overlay_with_a_store_has_one():
    for folder in OVERLAYS:
        (encoder,) = [
            one for one in of(built(folder), "Deployment") if one["metadata"]["name"] == "encoder"
        ]
        told = {one["name"] for one in pod_of(encoder)["containers"][0]["env"]}
        assert ("SGLANG_EPD_STORE" in told) is folder.name.endswith("mooncake-store")
