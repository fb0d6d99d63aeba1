"""The workflows: what they may do, and each of their commands, run here with stand-ins for what needs a network."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from release.version import version_in

pytestmark = pytest.mark.checkout

ROOT = Path(__file__).resolve().parent.parent
WORKFLOWS = {
    path.stem: yaml.safe_load(path.read_text(encoding="utf-8")) for path in (ROOT / ".github/workflows").glob("*.yml")
}
JOBS = {(name, job): what for name, flow in WORKFLOWS.items() for job, what in flow["jobs"].items()}
COMMANDS = [(*job, step["run"]) for job, what in JOBS.items() for step in what["steps"] if "run" in step]
STAND_INS = {
    "python": f'exec {sys.executable} "$@"',
    "make": f'exec {shutil.which("make")} --dry-run "$@" > made',
    "sudo": '[ "$1" = env ] && exec "$@"',
    "gh": 'echo "$@" >> asked; [ "$2" != list ] || cat issues',
    "pip": f"""[ $1 = install ] || exec {sys.executable} -c '
import os, zipfile
os.mkdir("wheels")
with zipfile.ZipFile("wheels/vllm-9.9-cp38-abi3-any.whl", "w") as wheel:
    wheel.writestr("vllm-9.9.dist-info/METADATA", "Version: 9.9")'""",
}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what the commands read, with a CHANGELOG as of a release, and stand-ins in bin/."""
    for name in (".ci", "release", "csrc", "shmstore", "Makefile", "pyproject.toml", "constraints.txt"):
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, tmp_path / name)
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    dated = re.sub(r"^(## \[[\d.]+\] - ).+", r"\g<1>2026-12-01", text, count=1, flags=re.M)
    (tmp_path / "CHANGELOG.md").write_text(f"{dated}\n## [0.0.1] - 2026-01-01\n\nan old one\n", encoding="utf-8")
    (tmp_path / ".ci" / "run").write_text("#!/bin/sh\necho all > ran\n")
    (tmp_path / "issues").touch()
    (tmp_path / "bin").mkdir()
    for name, script in STAND_INS.items():
        (tmp_path / "bin" / name).write_text(f"#!/usr/bin/env bash\n{script}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    return tmp_path


def run(command: str, folder: Path, tag: str = f"v{version_in('pyproject.toml')}") -> subprocess.CompletedProcess[str]:
    """Run a step as GitHub does."""
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "GITHUB_REF_NAME": tag, "PIP_EXTRA_INDEX_URL": ""}
    script = ["bash", "-e", "-o", "pipefail", "-c", command]
    return subprocess.run(script, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def commands(name: str, job: str) -> list[str]:
    return [command for *of, command in COMMANDS if of == [name, job]]


def test_actions_are_pinned_to_a_commit() -> None:
    used = [step["uses"] for what in JOBS.values() for step in what["steps"] if "uses" in step]
    assert len(used) > 10
    assert [] == [action for action in used if not re.fullmatch(r"[\w.-]+/[\w.-]+@[0-9a-f]{40}", action)]


def test_a_job_may_write_only_what_it_is_for() -> None:
    assert all({"contents": "read"} == flow["permissions"] for flow in WORKFLOWS.values())
    writes = {
        job: {name for name, may in what.get("permissions", {}).items() if may == "write"} for job, what in JOBS.items()
    }
    assert {
        ("engines", "vllm"): {"issues"},
        ("release", "publish"): {"id-token"},
        ("release", "github"): {"contents"},
        ("release", "docs"): {"pages", "id-token"},
    } == {job: what for job, what in writes.items() if what}


def test_nothing_is_published_that_was_not_tried() -> None:
    jobs: dict[str, Any] = WORKFLOWS["release"]["jobs"]
    assert ["build"] * 2 == [jobs[name]["needs"] for name in ("test", "free-threaded")], "it looks at the tag first"
    assert {"build", "test", "free-threaded"} == set(jobs["publish"]["needs"])
    assert "needs.test.result == 'success'" in jobs["publish"]["if"]
    assert {"publish"} == {jobs[name]["needs"] for name in ("github", "docs")}
    *_, upload = jobs["free-threaded"]["steps"]
    assert "make test-dist" in jobs["free-threaded"]["steps"][-2]["run"]
    assert {"name": "dist-free-threaded", "path": "dist/*-cp314t-*_x86_64.whl"} == upload["with"]
    assert jobs["free-threaded"]["runs-on"] == jobs["build"]["runs-on"] == "ubuntu-24.04", "which is x86_64"


def test_a_job_that_needs_torch_asks_an_index_that_has_it_for_cpus() -> None:
    assert {"ci", "release"} == {name for name, flow in WORKFLOWS.items() if "vars.TORCH_INDEX" in str(flow.get("env"))}
    (command,) = commands("ci", "run")
    assert 'PIP_EXTRA_INDEX_URL="$PIP_EXTRA_INDEX_URL"' in command, "sudo drops the environment"


@pytest.mark.parametrize(("name", "job", "command"), [one for one in COMMANDS if one[0] != "engines"], ids=str)
def test_a_command_runs_as_it_stands(name: str, job: str, command: str, checkout: Path) -> None:
    done = run(command, checkout)
    assert 0 == done.returncode, done.stderr


def test_the_text_of_a_release_is_the_section_of_its_version(checkout: Path) -> None:
    first, *_ = commands("release", "build")
    assert 0 == run(first, checkout).returncode
    text = (checkout / "notes.md").read_text(encoding="utf-8")
    assert text.startswith("The first version.")
    assert "### Security" in text
    assert "an old one" not in text


def test_a_version_without_a_date_or_another_one_is_not_released(checkout: Path) -> None:
    first, *_ = commands("release", "build")
    assert 1 == run(first, checkout, "v9.9").returncode
    shutil.copy(ROOT / "CHANGELOG.md", checkout)
    text = (checkout / "CHANGELOG.md").read_text(encoding="utf-8")
    (checkout / "CHANGELOG.md").write_text(re.sub(r"\d{4}-\d\d-\d\d$", "soon", text, flags=re.M), encoding="utf-8")
    assert 1 == run(first, checkout).returncode


def test_an_engine_that_differs_opens_one_issue(checkout: Path) -> None:
    install, download, compare, report = commands("engines", "vllm")
    assert [0, 0, 1, 0] == [run(command, checkout).returncode for command in (install, download, compare, report)]
    assert "| 9.9 |" in (checkout / "compared.md").read_text()
    created = "issue create --title vllm-9.9 is not as the plug-in knows it --body-file compared.md"
    assert created == (checkout / "asked").read_text().splitlines()[-1]

    (checkout / "issues").write_text("vllm-9.9 is not as the plug-in knows it\n")
    (checkout / "asked").unlink()
    assert 0 == run(report, checkout).returncode
    assert "create" not in (checkout / "asked").read_text()
