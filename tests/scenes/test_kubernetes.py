"""The Helm chart as real helm renders it, the examples, the dashboard and the rules beside them.

There is no cluster: what is rendered is checked against the schemas of Kubernetes' own API, and the
control plane runs as its container would, with the same arguments, variables, files and probes.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import kubernetes_validate
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from paramd.security import authority
from paramd.trainer.settings import AttachSettings
from paramd.version import __version__
from tests.integration.control_process import control_plane, mesh, until
from tests.launch import ROOT
from tests.needs import helm, program

pytestmark = pytest.mark.usefixtures("grpc_is_up")

CHART = ROOT / "deploy/helm/paramd-control"
EXAMPLES = ROOT / "deploy/kubernetes"
RULES, DASHBOARD = CHART / "files/rules.yaml", CHART / "files/dashboard.json"
VERSIONS = ("1.29", "1.37")
"""The oldest Kubernetes that the chart says it runs on, and the newest one known here."""

CUSTOM = {
    "Certificate", "PodMonitor", "PrometheusRule", "JobSet", "ClusterTrainingRuntime", "TrainJob",
}  # fmt: skip
"""Kinds that operators bring; the pods within are checked."""

PATIENCE_S = 60.0
NAMESPACE = {"namespaceSelector": {"matchLabels": {"team": "training"}}}
LEAST: dict[str, Any] = {"image": {"repository": "registry.example/paramd"}}
FILES = {**LEAST, "tls": {"existingSecret": "site-tls"}}
EVERYTHING = {
    "image": {"repository": "registry.example/paramd", "digest": "sha256:" + "0" * 64},
    "imagePullSecrets": [{"name": "registry"}],
    "tls": {"certManager": {"enabled": True, "issuerRef": {"name": "ca", "kind": "ClusterIssuer"},
                            "dnsNames": ["paramd.lab.example"]}},
    "token": {"existingSecret": "site-token", "key": "admin"},
    "store": {"existingSecret": "database"},
    "advertise": "paramd.lab.example",
    "listenHost": "::",
    "readonly": True,
    "extraArgs": ["--no-watch"],
    "extraEnv": [{"name": "PARAMD_ALERTS", "value": "{}"}],
    "persistence": {"storageClass": "fast", "size": "5Gi"},
    "service": {"type": "LoadBalancer", "annotations": {"a": "b"}},
    "ingress": {"enabled": True, "className": "nginx", "host": "paramd.lab.example",
                "annotations": {"nginx.ingress.kubernetes.io/backend-protocol": "HTTPS"},
                "tlsSecret": "ingress-tls"},
    "networkPolicy": {"jobs": [NAMESPACE], "clients": [NAMESPACE], "prometheus": [NAMESPACE],
                      "ingressController": [NAMESPACE], "database": {"to": [NAMESPACE]},
                      "egress": [{"to": [{"ipBlock": {"cidr": "192.0.2.0/24"}}]}]},
    "podMonitor": {"enabled": True, "tokenSecret": "scrape", "labels": {"release": "prometheus"}},
    "prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}},
    "dashboard": {"enabled": True},
    "nodeSelector": {"kubernetes.io/os": "linux"},
    "tolerations": [{"operator": "Exists"}],
    "priorityClassName": "high",
    "podAnnotations": {"a": "b"},
    "podLabels": {"c": "d"},
}  # fmt: skip


@pytest.fixture(scope="module")
def helm_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return helm(tmp_path_factory.mktemp("helm"))


class Helm:
    """Renders the chart."""

    def __init__(self, path: Path, folder: Path) -> None:
        self._path = path
        self._folder = folder

    def run(self, values: Any, *command: str) -> subprocess.CompletedProcess[str]:
        file = self._folder / "values.yaml"
        file.write_text(yaml.safe_dump(values))
        environment = {**os.environ, "HOME": str(self._folder), "KUBECONFIG": os.devnull}
        return subprocess.run(
            [self._path, *command, CHART, "--values", file],
            capture_output=True, text=True, timeout=PATIENCE_S, check=False, env=environment,
        )  # fmt: skip

    def rendered(self, values: Any) -> list[Any]:
        done = self.run(values, "template", "site", "--namespace", "lab", "--include-crds")
        assert done.returncode == 0, done.stderr
        return [document for document in yaml.safe_load_all(done.stdout) if document is not None]


@pytest.fixture
def chart(helm_path: Path, tmp_path: Path) -> Helm:
    return Helm(helm_path, tmp_path)


def by_kind(documents: list[Any]) -> dict[str, Any]:
    return {document["kind"]: document for document in documents}


def pods_of(value: Any) -> Iterator[Any]:
    """Every pod template within, however deep."""
    if isinstance(value, dict):
        if "containers" in value:
            yield value
        for inner in value.values():
            yield from pods_of(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from pods_of(inner)


def check_schemas(documents: list[Any]) -> None:
    """Against what Kubernetes accepts: unknown fields and wrong types fail."""
    for version in VERSIONS:
        for document in documents:
            if document["kind"] not in CUSTOM:
                kubernetes_validate.validate(document, version, strict=True)
        for pod in pods_of(documents):
            alone = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": pod}
            kubernetes_validate.validate(alone, version, strict=True)


def check_hardened(pod: Any) -> None:
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in [*pod.get("initContainers", ()), *pod["containers"]]:
        limits = container["securityContext"]
        assert limits["readOnlyRootFilesystem"] is True
        assert limits["allowPrivilegeEscalation"] is False
        assert limits["capabilities"] == {"drop": ["ALL"]}
        assert set(container["resources"]) == {"requests", "limits"}


@pytest.mark.parametrize("values", [FILES, EVERYTHING], ids=["least", "everything"])
def test_the_chart_is_sound_and_its_pod_has_no_rights(chart: Helm, values: Any) -> None:
    linted = chart.run(values, "lint", "--strict")
    assert linted.returncode == 0, linted.stdout + linted.stderr
    documents = chart.rendered(values)
    check_schemas(documents)
    (pod,) = pods_of(documents)
    check_hardened(pod)
    selected = by_kind(documents)["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"]
    template = by_kind(documents)["StatefulSet"]["spec"]["template"]
    assert selected.items() <= template["metadata"]["labels"].items()
    # Every file that is named is one that is mounted.
    mounted = {mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
    named = re.findall(r"(/(?:run|var)/[\w/.-]+)", json.dumps(pod["containers"][0]["args"]))
    named += [one["value"] for one in pod["containers"][0]["env"] if "/" in one.get("value", "")]
    assert all(any(path == m or path.startswith(m + "/") for m in mounted) for path in named)


def test_nothing_gets_in_or_out_but_what_is_named(chart: Helm) -> None:
    closed = by_kind(chart.rendered(FILES))["NetworkPolicy"]["spec"]
    assert closed["policyTypes"] == ["Ingress", "Egress"]
    assert "ingress" not in closed
    (dns,) = closed["egress"]
    assert {port["port"] for port in dns["ports"]} == {53}
    opened = by_kind(chart.rendered(EVERYTHING))["NetworkPolicy"]["spec"]
    for rule in opened["ingress"] + opened["egress"]:
        assert rule.get("from", rule.get("to")), "a rule without peers admits everybody"
    no_names = {**FILES, "networkPolicy": {"dns": {"to": []}}}
    assert "egress" not in by_kind(chart.rendered(no_names))["NetworkPolicy"]["spec"]


def test_pods_of_trainings_reach_each_other_the_control_plane_and_names_alone(chart: Helm) -> None:
    ours = {"matchLabels": {"app": "paramd-training"}}
    given = {
        "podSelector": ours,
        "namespace": "training",
        "egress": EVERYTHING["networkPolicy"]["egress"],
    }
    documents = chart.rendered(
        {**FILES, "networkPolicy": {"clients": [NAMESPACE], "trainings": given}}
    )
    check_schemas(documents)
    kinds = [one for one in documents if one["kind"] == "NetworkPolicy"]
    (found,) = (one for one in kinds if one["metadata"].get("namespace") == "training")
    spec = found["spec"]
    assert spec["podSelector"] == ours
    peers, control = spec["ingress"]
    assert peers == {"from": [{"podSelector": ours}]}
    selected = by_kind(documents)["StatefulSet"]["spec"]["selector"]["matchLabels"]
    assert control["from"][0]["podSelector"]["matchLabels"] == selected
    assert control["from"][1:] == [NAMESPACE]
    assert [[port["port"] for port in rule.get("ports", ())] for rule in spec["egress"]] == [
        [], [8470, 8471], [53, 53], []
    ]  # fmt: skip
    assert all(rule["to"] for rule in spec["egress"])


def test_secrets_are_kept_and_certificates_have_every_name(chart: Helm) -> None:
    made = by_kind(chart.rendered(FILES))["Secret"]
    assert made["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    found = by_kind(chart.rendered(EVERYTHING))
    assert "Secret" not in found
    assert {"site-paramd-control.lab.svc", "paramd.lab.example"} <= set(
        found["Certificate"]["spec"]["dnsNames"]
    )
    # The operator's own objects carry what lies in the files.
    assert found["PrometheusRule"]["spec"] == yaml.safe_load(RULES.read_text())
    shown = json.loads(found["ConfigMap"]["data"]["paramd.json"])
    assert shown == json.loads(DASHBOARD.read_text())
    (scraped,) = found["PodMonitor"]["spec"]["podMetricsEndpoints"]
    assert scraped["authorization"]["credentials"] == {"name": "scrape", "key": "token"}
    assert scraped["tlsConfig"]["serverName"] == "site-paramd-control.lab.svc"


def test_the_chart_is_of_this_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == __version__


def started(pod: Any, volumes: dict[str, Path], log: Path) -> subprocess.Popen[str]:
    """The pod's container, with its mounts in folders of ours and on free ports."""
    (container,) = pod["containers"]
    paths = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}

    def here(text: str) -> str:
        for path, folder in sorted(paths.items(), reverse=True):
            text = re.sub(rf"{path}(?=/|$)", str(folder), text)
        return re.sub(r"0\.0\.0\.0:84\d\d", "0.0.0.0:0", text)

    environment = {name: value for name, value in os.environ.items() if "PARAMD" not in name}
    environment |= {one["name"]: here(one["value"]) for one in container["env"]}
    paramd = Path(sys.executable).with_name("paramd")
    command = [sys.executable, "-m", "paramd.cli.main"] if not paramd.exists() else [paramd]
    with log.open("wb") as stderr:
        return subprocess.Popen(
            [*command, *map(here, container["args"])],
            env=environment, stdout=subprocess.PIPE, stderr=stderr, text=True,
        )  # fmt: skip


def probed(probe: Any, port: int) -> int:
    """A kubelet's request: it verifies no certificate."""
    asked = probe["httpGet"]
    headers = {header["name"]: header["value"] for header in asked["httpHeaders"]}
    url = f"{asked['scheme'].lower()}://127.0.0.1:{port}{asked['path']}"
    return httpx2.get(url, headers=headers, verify=False, trust_env=False).status_code


def test_the_container_serves_its_probes_and_a_scrape_and_starts_again(
    chart: Helm, tmp_path: Path
) -> None:
    (pod,) = pods_of(chart.rendered(FILES))
    volumes = {volume["name"]: tmp_path / volume["name"] for volume in pod["volumes"]}
    volumes["state"] = tmp_path / "state"
    for folder in volumes.values():
        folder.mkdir()
    # As a kubelet hands over a volume with an fsGroup: open to the group, which folders inherit.
    volumes["state"].chmod(0o2775)
    token = "a-token-of-the-site-itself"
    (volumes["token"] / "token").write_text(token + "\n")
    (volumes["token"] / "token").chmod(0o440)
    name = "site-paramd-control.lab.svc"
    authority.write(tmp_path / "certs", names=[name], days=30)
    (tmp_path / "certs/server.pem").rename(volumes["tls"] / "tls.crt")
    (tmp_path / "certs/server.key").rename(volumes["tls"] / "tls.key")
    (container,) = pod["containers"]
    for _ in range(2):
        log = tmp_path / "log"
        with started(pod, volumes, log) as process:
            try:
                assert process.stdout is not None
                line = process.stdout.readline()
                assert line, log.read_text()
                ready = json.loads(line)
                assert ready["url"].startswith(f"https://{name}:")
                assert ready["grpc_address"].startswith(f"grpcs://{name}:")
                port = int(ready["url"].rpartition(":")[2])
                for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                    assert probed(container[probe], port) == 200
                scraped = httpx2.get(
                    f"https://127.0.0.1:{port}/metrics",
                    headers={"host": f"{name}:8470", "authorization": f"Bearer {token}"},
                    verify=False, trust_env=False,
                )  # fmt: skip
                assert scraped.status_code == 200
                missing = named_metrics() - families(scraped.text)
                assert missing == set()
            finally:
                process.terminate()
            assert process.wait(PATIENCE_S) == 0
        assert token not in log.read_text()


def queries() -> list[str]:
    """All expressions of the dashboard, with its variables filled in, and of the rules."""
    board = json.loads(DASHBOARD.read_text())
    texts = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    assert len(texts) > 30
    rules = [
        rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]
    ]
    filled = [text.replace("$__rate_interval", "5m").replace("$job", ".+") for text in texts]
    return filled + [rule["expr"] for rule in rules]


def named_metrics() -> set[str]:
    """Metrics of the control plane that the expressions name, but for what the rules record."""
    found = re.findall(r"(?<![:\w])paramd_\w+", " ".join(queries()))
    return set(found)


def families(text: str) -> set[str]:
    return set(re.findall(r"^# TYPE (\S+) ", text, re.MULTILINE))


def check_rules(*arguments: str | Path) -> None:
    done = subprocess.run(
        [program("promtool"), *arguments],
        capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_rules_and_dashboard_are_read_by_prometheus(tmp_path: Path) -> None:
    check_rules("check", "rules", RULES)
    records = [{"record": f"q:{n}", "expr": text} for n, text in enumerate(queries())]
    board = tmp_path / "board.yaml"
    board.write_text(yaml.safe_dump({"groups": [{"name": "board", "rules": records}]}))
    check_rules("check", "rules", board)


def test_alerts_fire_when_they_should_and_not_before(tmp_path: Path) -> None:
    cases = yaml.safe_load((Path(__file__).parent / "rules_cases.yaml").read_text())
    rules = yaml.safe_load(RULES.read_text())
    alerts = set()
    for group in rules["groups"]:
        for rule in group["rules"]:
            rule.pop("annotations", None)
            alerts |= {rule["alert"]} if "alert" in rule else set()
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(rules))
    cases["rule_files"] = ["rules.yaml"]
    file = tmp_path / "cases.yaml"
    file.write_text(yaml.safe_dump(cases))
    check_rules("test", "rules", file)
    tested = {
        one["alertname"]
        for case in cases["tests"]
        for one in case["alert_rule_test"]
        if one.get("exp_alerts")
    }
    assert tested == alerts


async def test_labels_that_the_rules_ask_for_are_labels_of_a_real_scrape() -> None:
    with control_plane("--no-watch") as control:
        async with mesh(control):
            await until(lambda: control.job()["reason"] == "")
            text = control.get("/metrics").text
    seen: dict[str, dict[str, set[str]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            for label, value in sample.labels.items():
                seen.setdefault(sample.name, {}).setdefault(label, set()).add(value)
    checked = 0
    for name, matchers in re.findall(r"(paramd_\w+)\{([^}]*)\}", " ".join(queries())):
        for label, value in re.findall(r'(\w+)!?=~?"([^"]*)"', matchers):
            if name in seen:
                assert label in seen[name], (name, label)
            if value != ".+":
                assert value in seen[name][label], (name, value)
                checked += 1
    assert checked >= 3
    for name in ("paramd_rank_step", "paramd_rank_agreement_works", "paramd_joined_ranks"):
        assert "job" in seen[name]


def examples() -> list[Any]:
    return [
        document
        for path in sorted(EXAMPLES.glob("*.yaml"))
        for document in yaml.safe_load_all(path.read_text())
    ]


def test_the_examples_pods_are_sound_and_share_what_the_two_containers_need() -> None:
    documents = examples()
    kinds = ["CronJob", "JobSet", "ClusterTrainingRuntime", "TrainJob"]
    assert [one["kind"] for one in documents] == kinds
    check_schemas(documents)
    exporting, *pods = pods_of(documents)
    check_hardened(exporting)
    assert len(pods) == 2
    for pod in pods:
        check_hardened(pod)
        (sidecar,), (trainer,) = pod["initContainers"], pod["containers"]
        assert sidecar["restartPolicy"] == "Always"
        assert sidecar["args"] == ["sidecar", "host"]
        inside, outside = environment_of(sidecar), environment_of(trainer)
        assert outside["PARAMD_SIDECAR"] == "external"
        # The trainer gives its sidecars no variables: both containers need the same ones.
        assert inside.items() <= outside.items()
        shared = {mount["name"]: mount["mountPath"] for mount in sidecar["volumeMounts"]}
        ours = {mount["name"]: mount["mountPath"] for mount in trainer["volumeMounts"]}
        assert shared.items() <= ours.items()
        assert inside["PARAMD_STATE_DIR"].startswith(shared["paramd"] + "/")
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert set(volumes) == set(ours)
        assert volumes["paramd"]["emptyDir"]["medium"] == "Memory"
        settings = {f"PARAMD_{name.upper()}" for name in AttachSettings.__dataclass_fields__}
        assert set(outside) <= settings | {"PARAMD_STATE_DIR", "PARAMD_TLS_CA", "OMP_NUM_THREADS"}


def environment_of(container: Any) -> dict[str, str]:
    return {one["name"]: one["value"] for one in container["env"]}
