"""The files of packaging/ agree with each other, with the commands and with docs/deployment.md.

What a cluster checks is checked here as far as it can be without one: kubernetes-validate has the
schemas, if it is installed.
"""

from __future__ import annotations

import configparser
import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from oncely import artifacts
from oncely.cli.verbs import app
from oncely.config import parse
from oncely.config.runtimes import WorkerSettings
from tests.plain_yaml import documents
from tests.unit.test_operations import TOP, registry

PACKAGING = TOP / "packaging"
_UNIT_KEYS = {
    "Unit": {"Description", "After", "Wants", "StartLimitIntervalSec"},
    "Service": {
        "Type", "User", "EnvironmentFile", "WorkingDirectory", "ExecStart", "KillMode",
        "KillSignal", "TimeoutStopSec", "Restart", "RestartSec", "RestartPreventExitStatus",
        "PrivateTmp", "NoNewPrivileges", "ProtectSystem", "ProtectHome",
    },
    "Install": {"WantedBy"},
}  # fmt: skip


def accepted(words: list[str]) -> bool:
    """True if there is such a command with these options; nothing is done."""
    return CliRunner().invoke(app, [*words, "--help"]).exit_code == 0


def unit() -> configparser.ConfigParser:
    found = configparser.ConfigParser(interpolation=None, delimiters=("=",), strict=True)
    found.optionxform = str  # type: ignore[assignment, method-assign]
    found.read_string((PACKAGING / "oncely@.service").read_text())
    return found


def test_the_systemd_unit() -> None:
    found, service = unit(), unit()["Service"]
    assert {name: set(found[name]) for name in found.sections()} == _UNIT_KEYS
    assert service["KillMode"] == "mixed"  # SIGTERM to Oncely alone; SIGKILL to all that is left
    assert (service["Restart"], service["RestartPreventExitStatus"]) == ("on-failure", "2 3")
    assert found["Unit"]["StartLimitIntervalSec"] == "0"  # a port that is taken, or a server away
    program, *words, options = service["ExecStart"].split()
    assert (program.endswith("/oncely"), options) == (True, "$ONCELY_OPTIONS")
    (given,) = re.findall(r"ONCELY_OPTIONS=(.+)", (PACKAGING / "oncely@.service").read_text())
    assert accepted([*words, *given.split()])
    assert accepted(["work", *words[1:], *given.split()])


def test_the_page_shows_the_unit_and_the_manifests_agree_with_it() -> None:
    text = (PACKAGING / "oncely@.service").read_text()
    kept = "\n".join(line for line in text.splitlines() if not line.startswith("#")).strip()
    page = (TOP / "docs" / "deployment.md").read_text()
    assert f"```ini\n{kept}\n```" in page
    run = pods("run.yaml")[0]
    assert unit()["Service"]["TimeoutStopSec"] == f"{run['terminationGracePeriodSeconds'] // 60}min"
    listed = set(re.findall(r"`(?:kubernetes/)?([\w-]+\.yaml)`", page))
    assert listed == {one.name for one in MANIFESTS}


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not on the PATH: the unit is parsed alone")
    text = (PACKAGING / "oncely@.service").read_text()
    (tmp_path / "oncely@x.service").write_text(text.replace("/opt/oncely/bin/oncely", "/bin/sh"))
    done = subprocess.run([analyze, "verify", tmp_path / "oncely@x.service"], capture_output=True,
                          text=True, check=False)  # fmt: skip
    assert done.returncode == 0
    assert "oncely@x.service" not in done.stderr, done.stderr


# -- Kubernetes ----------------------------------------------------------------------------

MANIFESTS = sorted((PACKAGING / "kubernetes").glob("*.yaml"))
OF_NAME = {one.name: documents(one.read_text()) for one in MANIFESTS}
RUNNING = ["run.yaml", "worker-static.yaml", "worker.yaml"]
VERSION = tomllib.loads((TOP / "pyproject.toml").read_text())["project"]["version"]
_VOLUMES = {"configMap", "secret", "emptyDir", "projected", "downwardAPI", "csi", "ephemeral",
            "persistentVolumeClaim"}  # fmt: skip


def templates(name: str) -> list[dict[str, Any]]:
    """What pods are made from, wherever a manifest has it."""
    specs = (one.get("spec", {}) for one in OF_NAME[name])
    jobs = (one["jobTemplate"]["spec"] if "jobTemplate" in one else one for one in specs)
    return [one["template"] for one in jobs if "template" in one]


def pods(name: str) -> list[dict[str, Any]]:
    return [one["spec"] for one in templates(name)]


def violations(pod: dict[str, Any]) -> list[str]:
    """What the restricted level of the Pod Security Standards refuses."""
    found = [key for key in ("hostNetwork", "hostPID", "hostIPC") if pod.get(key)]
    found += [str(one) for one in pod.get("volumes", ())
              if not (one.keys() - {"name"}) <= _VOLUMES]  # fmt: skip
    own = pod.get("securityContext", {})
    containers = pod["containers"] + pod.get("initContainers", [])
    for one in containers:
        context = own | one.get("securityContext", {})
        capabilities = context.get("capabilities", {})
        if context.get("privileged") or context.get("allowPrivilegeEscalation", True):
            found.append("privileges")
        if context.get("runAsNonRoot") is not True or context.get("runAsUser") == 0:
            found.append("root")
        if context.get("seccompProfile", {}).get("type") not in ("RuntimeDefault", "Localhost"):
            found.append("seccompProfile")
        if "ALL" not in capabilities.get("drop", ()) or capabilities.get("add"):
            found.append("capabilities")
        if context.keys() & {"seLinuxOptions", "procMount", "sysctls"}:
            found.append("other")
        found += ["hostPort" for port in one.get("ports", ()) if "hostPort" in port]
    return found


@pytest.mark.parametrize("name", [*RUNNING, "load.yaml"])
def test_pods_keep_to_the_restricted_level(name: str) -> None:
    (pod,) = pods(name)
    assert violations(pod) == []
    assert pod["automountServiceAccountToken"] is False
    user = pod["securityContext"]["runAsUser"]
    assert f"useradd --uid {user} " in (PACKAGING / "Containerfile").read_text()
    bare = {
        **pod,
        "securityContext": {},
        "hostPID": True,
        "volumes": [{"name": "a", "hostPath": 1}],
    }
    bare["containers"] = [{"name": "a", "ports": [{"hostPort": 1}]}]
    assert len(violations(bare)) == 7


@pytest.mark.parametrize("name", RUNNING)
def test_a_stream_is_restarted_for_ever_and_probed(name: str) -> None:
    manifest, (pod,) = OF_NAME[name][-1], pods(name)
    assert manifest["kind"] in ("Deployment", "StatefulSet")
    (container,) = pod["containers"]
    ports = {one["name"] for one in container["ports"]}
    probes = {key: one["httpGet"] for key, one in container.items() if key.endswith("Probe")}
    assert probes["livenessProbe"] == {"path": "/livez", "port": "http"}
    assert probes["startupProbe"] == probes["readinessProbe"] == {"path": "/readyz", "port": "http"}
    assert all(one["port"] in ports for one in probes.values())
    labels = manifest["spec"]["template"]["metadata"]["labels"]
    assert manifest["spec"]["selector"]["matchLabels"] == labels
    assert pod["terminationGracePeriodSeconds"] > 2 * WorkerSettings().revoke_timeout
    if "run" in container["args"]:  # otherwise two pods fence each other by turns
        assert "--on-fenced wait" in " ".join(container["args"])


def test_a_load_ends_and_is_not_repeated_after_wrong_input() -> None:
    (manifest,) = OF_NAME["load.yaml"]
    job, (pod,) = manifest["spec"]["jobTemplate"]["spec"], pods("load.yaml")
    assert "--until latest" in " ".join(pod["containers"][0]["args"])
    (rule,) = job["podFailurePolicy"]["rules"]
    assert (rule["action"], rule["onExitCodes"]["values"]) == ("FailJob", [2, 3])
    assert rule["onExitCodes"]["containerName"] == pod["containers"][0]["name"]
    assert pod["restartPolicy"] == "Never"  # podFailurePolicy requires it
    assert manifest["spec"]["concurrencyPolicy"] == "Forbid"


@pytest.mark.parametrize("name", [*RUNNING, "load.yaml"])
def test_what_a_pod_names_is_there(name: str) -> None:
    (pod,) = pods(name)
    (container,) = pod["containers"]
    assert container["image"] == f"oncely:{VERSION}"
    assert accepted(container["args"])
    assert {one["name"] for one in container["volumeMounts"]} == {
        one["name"] for one in pod["volumes"]
    }
    kinds = {one["kind"]: one for one in OF_NAME["config.yaml"]}
    (volume,), (source,) = pod["volumes"], container["envFrom"]
    assert volume["configMap"]["name"] == kinds["ConfigMap"]["metadata"]["name"]
    assert source["secretRef"]["name"] == kinds["Secret"]["metadata"]["name"]
    folder, _, file = container["args"][1].rpartition("/")
    assert folder == container["volumeMounts"][0]["mountPath"]
    assert file in kinds["ConfigMap"]["data"]


def test_the_sample_of_a_pipeline_file_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    secret, files = OF_NAME["config.yaml"]
    for name, value in secret["stringData"].items():
        monkeypatch.setenv(name, value)
    (text,) = files["data"].values()
    assert set(re.findall(r"\$\{(\w+)\}", text)) == secret["stringData"].keys()
    assert parse(tomllib.loads(text)).name == "flights"


def test_monitor_budget_and_service_choose_pods_that_are_there() -> None:
    (monitor,), (budget,) = OF_NAME["podmonitor.yaml"], OF_NAME["disruption-budget.yaml"]
    service = OF_NAME["worker-static.yaml"][0]
    chosen = {
        "monitor": monitor["spec"]["selector"]["matchLabels"],
        "budget": budget["spec"]["selector"]["matchLabels"],
        "service": service["spec"]["selector"],
    }
    labels = {
        name: one["metadata"]["labels"].items() for name in [*RUNNING, "load.yaml"]
        for one in templates(name)
    }  # fmt: skip
    found = {kind: [name for name in labels if wanted.items() <= labels[name]]
             for kind, wanted in chosen.items()}  # fmt: skip
    workers = ["worker-static.yaml", "worker.yaml"]
    assert found == {"monitor": list(labels), "budget": workers, "service": workers}
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert (endpoint["port"], endpoint["path"]) == ("http", "/metrics")
    assert service["metadata"]["name"] == OF_NAME["worker-static.yaml"][1]["spec"]["serviceName"]
    assert budget["spec"]["maxUnavailable"] == 1


def test_kubernetes_accepts_the_manifests() -> None:
    validate = shutil.which("kubernetes-validate")
    if validate is None:
        pytest.skip("kubernetes-validate is not on the PATH: schemas are not compared")
    files = [one for one in MANIFESTS if one.name != "podmonitor.yaml"]  # not of Kubernetes itself
    done = subprocess.run([validate, "--strict", *files], capture_output=True, text=True,
                          check=False)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_static_workers_have_the_names_of_their_pods() -> None:
    (plain,), (static,) = templates("worker.yaml"), templates("worker-static.yaml")
    (container,) = static["spec"]["containers"]
    (name,) = container["env"]
    assert name["valueFrom"]["fieldRef"] == {"fieldPath": "metadata.name"}
    assert f'instance = "${{{name["name"]}}}"' in (TOP / "docs" / "deployment.md").read_text()
    without = {key: value for key, value in container.items() if key != "env"}
    assert static | {"spec": static["spec"] | {"containers": [without]}} == plain


def test_the_autoscaler_reads_a_metric_of_the_workers() -> None:
    (scaler,), (worker,) = OF_NAME["worker-autoscaler.yaml"], OF_NAME["worker.yaml"]
    target = scaler["spec"]["scaleTargetRef"]
    assert target == {
        "name": worker["metadata"]["name"], "kind": worker["kind"],
        "apiVersion": worker["apiVersion"],
    }  # fmt: skip
    (metric,) = (one["external"]["metric"] for one in scaler["spec"]["metrics"])
    assert metric["selector"]["matchLabels"].keys() <= registry()[metric["name"]]
    rule = (TOP / "docs" / "deployment.md").read_text()
    assert f"seriesQuery: '{metric['name']}{{" in rule


@pytest.mark.parametrize("file", sorted(PACKAGING.glob("*.py")), ids=lambda one: one.name)
def test_an_example_for_a_scheduler_compiles_and_calls_what_exists(file: Path) -> None:
    text = file.read_text()
    compile(text, file.name, "exec")
    calls = re.findall(r'\["oncely", ([^\]]+)\]', text)
    assert len(calls) == 2
    for call in calls:
        assert accepted([word.strip(' "') for word in call.split(",")])
    assert "NO_RETRY = (2, 3)" in text


def test_the_container_file() -> None:
    text = (PACKAGING / "Containerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert {line.split()[0] for line in lines} <= {
        "FROM", "COPY", "ARG", "ENV", "RUN", "USER", "WORKDIR", "EXPOSE", "ENTRYPOINT", "CMD",
    }  # fmt: skip
    sources = [word for line in lines if line.startswith("COPY") and "--from" not in line
               for word in line.split()[1:-1]]  # fmt: skip
    assert sources
    assert [word for word in sources if not (TOP / word).exists()] == []
    assert json.loads(next(one for one in lines if one.startswith("ENTRYPOINT"))[11:]) == ["oncely"]


def test_the_image_has_the_native_package() -> None:
    text = (PACKAGING / "Containerfile").read_text().replace("\\\n", " ")
    build, image = text.split("AS build")[1].split("FROM ${BASE}")
    copied = re.findall(r"^COPY (native\S*(?: native\S*)*) ", build, re.MULTILINE)
    needed = {"Cargo.toml", "pyproject.toml", "README.md", "src"}
    assert {one.removeprefix("native/") for line in copied for one in line.split()} == needed
    assert build.index("COPY native") < build.index("--wheel-dir /wheels /src/native\n")
    assert re.search(r"pip install .*/wheels/oncely_native-\*\.whl .*import oncely_native", image)


def test_the_image_is_built_from_all_that_the_wheel_contains() -> None:
    text = (PACKAGING / "Containerfile").read_text()
    copied = [word for line in re.findall(r"(?m)^COPY (?!--from)(.+)/src/\S*$", text)
              for word in line.split()]  # fmt: skip
    settings = tomllib.loads((TOP / "pyproject.toml").read_text())
    files = [one for many in settings["tool"]["setuptools"]["data-files"].values() for one in many]
    files += [settings["project"]["readme"], *settings["project"]["license-files"], "src"]
    assert [one for one in files if not {one, one.partition("/")[0]} & {*copied}] == []


def test_the_image_has_every_extra_of_a_pipeline() -> None:
    (given,) = re.findall(r"(?m)^ARG EXTRAS=(.+)$", (PACKAGING / "Containerfile").read_text())
    settings = tomllib.loads((TOP / "pyproject.toml").read_text())["project"]
    wanted = set(re.findall(r"oncely\[(\w+)\]", str(settings["optional-dependencies"]["all"])))
    assert wanted - {"local"} - set(given.split(",")) == set()  # `oncely local` does not run in it


def test_the_image_has_no_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    """`oncely local` does not run in it."""
    text = (PACKAGING / "Containerfile").read_text()
    (line,) = re.findall("RUN python -m oncely.artifacts(.*)", text)
    fetched: list[str] = []
    monkeypatch.setattr(artifacts, "resolve", fetched.append)
    artifacts.main(line.split())
    assert fetched == [artifacts.POSTGRES_JDBC]
    artifacts.main([])
    assert artifacts.KAFKA_BROKER in fetched
