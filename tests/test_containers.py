"""The manifests of `examples/containers`: sizes add up, and what they run and mount exists. So do the guide's sizes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from shmstore.cli.main import build_parser
from shmstore.places import DIRECTORY
from shmstore.store.arguments import size_of
from tests.support import bytes_needed, memory_group

ROOT = Path(__file__).resolve().parent.parent
GUIDE = (ROOT / "docs" / "guides" / "kubernetes.md").read_text(encoding="utf-8")
CLAIM, HOST_PATH = (
    (ROOT / "examples/containers" / name).read_text(encoding="utf-8")
    for name in ("two-pods.yaml", "two-pods-host-path.yaml")
)
PROCESSES = 1 << 30
"""What is left for the writer's processes, at least."""


@dataclass(frozen=True)
class Container:
    environment: Mapping[str, str]
    memory: int
    mounts: Mapping[str, str]
    probes: Mapping[str, list[str]]
    timeouts: list[int]
    user: Any


@dataclass(frozen=True)
class Manifest:
    """One of the two files, the writer's container first."""

    volume: str
    size: int
    containers: list[Container]


def pod() -> Manifest:
    spec = yaml.safe_load((ROOT / "examples/containers/pod.yaml").read_text(encoding="utf-8"))["spec"]
    (volume,) = spec["volumes"]
    assert "Memory" == volume["emptyDir"]["medium"]
    found = []
    for one in spec["containers"]:
        assert not any(mount.get("readOnly") for mount in one["volumeMounts"])
        probes = {name: probe for name, probe in one.items() if name.endswith("Probe")}
        found.append(
            Container(
                {variable["name"]: variable["value"] for variable in one["env"]},
                size_of("size", one["resources"]["limits"]["memory"]),
                {mount["name"]: mount["mountPath"] for mount in one["volumeMounts"]},
                {name: probe["exec"]["command"] for name, probe in probes.items()},
                [probe["timeoutSeconds"] for probe in probes.values()],
                one["securityContext"].get("runAsUser", spec["securityContext"]["runAsUser"]),
            )
        )
    return Manifest(volume["name"], size_of("size", volume["emptyDir"]["sizeLimit"]), found)


def compose() -> Manifest:
    file = yaml.safe_load((ROOT / "examples/containers/compose.yaml").read_text(encoding="utf-8"))
    ((name, volume),) = file["volumes"].items()
    assert "tmpfs" == volume["driver_opts"]["type"] == volume["driver_opts"]["device"]
    options = dict(option.split("=") for option in volume["driver_opts"]["o"].split(","))
    found = []
    for one in file["services"].values():
        check = one.get("healthcheck")
        assert check is None or "CMD" == check["test"][0]
        found.append(
            Container(
                one["environment"],
                size_of("size", one["mem_limit"]),
                dict(mount.split(":") for mount in one["volumes"]),
                {"livenessProbe": check["test"][1:]} if check else {},
                [int(check["timeout"].removesuffix("s"))] if check else [],
                one["user"],
            )
        )
    return Manifest(name, size_of("size", options["size"]), found)


MANIFESTS = pytest.mark.parametrize("manifest", [pod(), compose()], ids=["pod", "compose"])


@MANIFESTS
def test_the_volume_holds_the_store_and_the_writers_memory_holds_the_volume(manifest: Manifest) -> None:
    writer, *readers = manifest.containers
    capacity = int(writer.environment["STORE_CAPACITY_MIB"]) << 20
    n_readers = int(writer.environment["STORE_READERS"])
    assert len(readers) == n_readers
    assert bytes_needed(capacity, n_readers) <= manifest.size
    assert manifest.size + PROCESSES <= writer.memory


@MANIFESTS
def test_the_containers_share_one_folder_and_one_user_and_one_name(manifest: Manifest) -> None:
    for one in manifest.containers:
        assert {manifest.volume: DIRECTORY} == one.mounts
        assert manifest.containers[0].user == one.user
        assert manifest.containers[0].environment == one.environment
    assert set(re.findall(r'environ\["(\w+)"\]', GUIDE)) == set(manifest.containers[0].environment)


@MANIFESTS
def test_the_probes_are_commands_that_exist_and_ask_about_this_store(manifest: Manifest) -> None:
    writer, *readers = manifest.containers
    assert "livenessProbe" in writer.probes
    assert not any("livenessProbe" in one.probes for one in readers)
    for one in manifest.containers:
        for program, *arguments in one.probes.values():
            parsed = build_parser().parse_args(arguments)
            assert ("shmstore", "verify", True) == (program, parsed.command.name, parsed.quick)
            assert one.environment["STORE_NAME"] == parsed.name
        assert all(seconds >= 5 for seconds in one.timeouts)


def deployment_of(text: str) -> tuple[list[Any], dict[str, Any], dict[str, Any], dict[str, str]]:
    """Return what stands before the two pods, their deployment, its one container and where that mounts what."""
    *before, deployment = yaml.safe_load_all(text)
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    return before, deployment, container, {one["name"]: one["mountPath"] for one in container["volumeMounts"]}


def sources(deployment: dict[str, Any]) -> dict[str, dict[str, Any]]:
    volumes = deployment["spec"]["template"]["spec"]["volumes"]
    return {one["name"]: {key: value for key, value in one.items() if key != "name"} for one in volumes}


def test_two_pods_share_a_folder_that_the_strictest_pod_security_admits_and_that_holds_their_store() -> None:
    (volume, claim), deployment, container, _ = deployment_of(CLAIM)
    named = {"persistentVolumeClaim": {"claimName": claim["metadata"]["name"]}}
    assert (named, {"store", "shm"}) == (sources(deployment)["store"], set(sources(deployment)))

    assert volume["metadata"]["name"] == claim["spec"]["volumeName"]
    assert claim["metadata"]["name"] == volume["spec"]["claimRef"]["name"]
    assert ["ReadWriteOnce"] == volume["spec"]["accessModes"] == claim["spec"]["accessModes"]
    assert f"\ntmpfs {volume['spec']['local']['path']} tmpfs " in GUIDE

    options = json.loads(container["command"][-1])["ec_connector_extra_config"]
    engine = bytes_needed(int(options["capacity_gb"] * 2**30), 64)
    assert options["engines"] * engine <= size_of("size", volume["spec"]["capacity"]["storage"])
    assert options["engines"] * engine <= size_of("size", claim["spec"]["resources"]["requests"]["storage"])
    assert engine < size_of("size", container["resources"]["limits"]["memory"])


def test_the_pods_with_a_host_path_are_those_with_a_claim_on_one_node_and_its_folder() -> None:
    (volume, _), claiming, *_ = deployment_of(CLAIM)
    nothing, deployment, *_ = deployment_of(HOST_PATH)
    folder = {"hostPath": {"path": volume["spec"]["local"]["path"], "type": "Directory"}}
    assert ([], folder) == (nothing, sources(deployment)["store"])
    pods = deployment["spec"]["template"]["spec"]
    node = volume["spec"]["nodeAffinity"]["required"]["nodeSelectorTerms"][0]["matchExpressions"][0]["values"]
    assert node == [pods.pop("nodeName")]
    pods["volumes"] = claiming["spec"]["template"]["spec"]["volumes"]
    assert claiming == deployment


@pytest.mark.parametrize("text", [CLAIM, HOST_PATH], ids=["claim", "host path"])
def test_two_pods_have_one_user_room_for_vllm_and_probes_of_engine_and_store(text: str) -> None:
    _, deployment, container, mounts = deployment_of(text)
    assert {"name": "SHMSTORE_DIR", "value": mounts["store"]} in container["env"]
    assert ("Memory", DIRECTORY) == (sources(deployment)["shm"]["emptyDir"]["medium"], mounts["shm"])
    security = deployment["spec"]["template"]["spec"]["securityContext"]
    assert not {"fsGroup", "supplementalGroups"} & set(security)
    assert "runAsUser" in security

    options = json.loads(container["command"][-1])["ec_connector_extra_config"]
    assert (options["engines"], "Recreate") == (deployment["spec"]["replicas"], deployment["spec"]["strategy"]["type"])
    assert "/health" == container["livenessProbe"]["httpGet"]["path"] == container["startupProbe"]["httpGet"]["path"]
    program, *arguments = container["readinessProbe"]["exec"]["command"]
    parsed = build_parser().parse_args(arguments)
    asked = parsed.command.name, parsed.quick, parsed.name, parsed.dir
    assert ("shmstore", "verify", True, options["store"], mounts["store"]) == (program, *asked)


def test_the_guides_sizes_are_those_of_the_code() -> None:
    rows = re.findall(r"^\| (\d+ [MG]iB) \| (\d+) \| (\d+) MiB \| (\d+) MiB \|$", GUIDE, re.M)
    assert 5 == len(rows)
    for capacity, readers, takes, tables in rows:
        needed = bytes_needed(size_of("size", capacity), int(readers))
        assert (needed >> 20, (needed - size_of("size", capacity)) >> 20) == (int(takes), int(tables))


@pytest.fixture
def memory_groups() -> Iterator[list[Path]]:
    with memory_group() as creator, memory_group() as reader:
        if creator is None or reader is None:
            pytest.skip("no memory control group can be made here")
        yield [creator, reader]


def usage_file(group: Path) -> Path:
    version_1 = group / "memory.usage_in_bytes"
    return version_1 if version_1.exists() else group / "memory.current"


def run_in(group: Path, program: str, *arguments: str) -> None:
    """Run the program in the group, from its first line on."""
    enter = f"from pathlib import Path; Path({str(group / 'cgroup.procs')!r}).write_text('0')\n"
    subprocess.run([sys.executable, "-c", enter + program, *arguments], check=True, timeout=60)


def test_the_memory_of_a_store_is_charged_to_who_creates_it_and_never_to_a_reader(
    memory_groups: list[Path], name: str
) -> None:
    size = 32 << 20
    creator, reader = memory_groups
    run_in(
        creator,
        "import sys; from shmstore import ObjectStoreWriter\n"
        f"with ObjectStoreWriter.open(sys.argv[1], capacity={size}, n_readers=1) as w: w.put('a', b'x' * {size // 2})",
        name,
    )
    run_in(
        reader,
        "import sys; from shmstore import ObjectStoreReader\n"
        "with ObjectStoreReader.attach(sys.argv[1], 0) as r, r.find('a') as found: assert r.get(found.ref).count(b'x')",
        name,
    )
    charged = [int(usage_file(group).read_text(encoding="utf-8")) for group in memory_groups]
    assert charged[0] >= size > 2 * charged[1]
