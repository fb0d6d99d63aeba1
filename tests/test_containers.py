"""The manifests of `examples/containers`: sizes add up, and what they run and mount exists. So do the guide's sizes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from shmstore.bindings.store import space
from shmstore.cli.command import parse_size
from shmstore.cli.main import build_parser
from shmstore.places import DIRECTORY

ROOT = Path(__file__).resolve().parent.parent
GUIDE = (ROOT / "docs" / "guides" / "kubernetes.md").read_text(encoding="utf-8")
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
                parse_size(one["resources"]["limits"]["memory"]),
                {mount["name"]: mount["mountPath"] for mount in one["volumeMounts"]},
                {name: probe["exec"]["command"] for name, probe in probes.items()},
                [probe["timeoutSeconds"] for probe in probes.values()],
                one["securityContext"].get("runAsUser", spec["securityContext"]["runAsUser"]),
            )
        )
    return Manifest(volume["name"], parse_size(volume["emptyDir"]["sizeLimit"]), found)


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
                parse_size(one["mem_limit"]),
                dict(mount.split(":") for mount in one["volumes"]),
                {"livenessProbe": check["test"][1:]} if check else {},
                [int(check["timeout"].removesuffix("s"))] if check else [],
                one["user"],
            )
        )
    return Manifest(name, parse_size(options["size"]), found)


MANIFESTS = pytest.mark.parametrize("manifest", [pod(), compose()], ids=["pod", "compose"])


@MANIFESTS
def test_the_volume_holds_the_store_and_the_writers_memory_holds_the_volume(manifest: Manifest) -> None:
    writer, *readers = manifest.containers
    capacity = int(writer.environment["STORE_CAPACITY_MIB"]) << 20
    n_readers = int(writer.environment["STORE_READERS"])
    assert len(readers) == n_readers
    assert space(capacity, n_readers, 0, 0)[0] <= manifest.size
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


def test_the_guides_sizes_are_those_of_the_code() -> None:
    rows = re.findall(r"^\| (\d+ [MG]iB) \| (\d+) \| (\d+) MiB \| (\d+) MiB \|$", GUIDE, re.M)
    assert 5 == len(rows)
    for capacity, readers, takes, tables in rows:
        needed = space(parse_size(capacity), int(readers), 0, 0)[0]
        assert (needed >> 20, (needed - parse_size(capacity)) >> 20) == (int(takes), int(tables))
