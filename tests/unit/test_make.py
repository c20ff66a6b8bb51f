"""The environment that `make` builds, from a package index that this test serves."""

from __future__ import annotations

import http.server
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
import tomllib
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from launch import install_cpu
from sglang_dflash.glue import release
from sglang_dflash.testing.server import ROOT

MAKEFILE = (ROOT / "Makefile").read_text()


def pins(version: str) -> dict[str, str]:
    """Return the versions of torch and torchvision for a release of SGLang."""
    text = (ROOT / f"requirements-cpu-{version}.txt").read_text()
    return dict(re.findall(r"^(torch|torchvision)==(.*)$", text, re.M))


PINS = pins(release.NEWEST)


def write_wheel(folder: Path, name: str, version: str, *, script: str | None = None) -> None:
    """Write a wheel into its own folder of a simple index: an empty one, or one with a program."""
    (folder / name).mkdir(parents=True)
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / name / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
        if script is not None:
            program = zipfile.ZipInfo(f"{name}-{version}.data/scripts/{name}")
            program.external_attr = 0o100755 << 16
            wheel.writestr(program, script)


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of indexes: `/cpu` has wheels of the pinned versions, `/old` has others, and `/tools`
    has the uv of this environment."""
    folder = tmp_path_factory.mktemp("index")
    for name, version in PINS.items():
        write_wheel(folder / "cpu", name, f"{version}+cpu")
        write_wheel(folder / "old", name, "1.0.0+cpu")
    own_uv = f'#!/bin/sh\nexec "{sys.prefix}/bin/uv" "$@"\n'
    write_wheel(folder / "tools", *install_cpu.UV.split("=="), script=own_uv)

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args: object) -> None:
            super().__init__(*args, directory=str(folder))  # type: ignore[arg-type]

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module", params=["tools", "old"], ids=["uv", "pip"])
def venv(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, index: str
) -> Made:
    """An environment built from the complete index, with uv or without; making it again takes no
    time."""
    if request.param == "tools" and not Path(sys.prefix, "bin", "uv").exists():
        pytest.skip("this environment was made without uv")
    made = Made(tmp_path_factory.mktemp("made") / "venv", f"{index}/{request.param}")
    done = made.make(f"{index}/cpu")
    assert done.returncode == 0, done.stderr
    has_uv = request.param == "tools"
    assert (f"{install_cpu.UV} cannot be installed: pip installs" in done.stdout) != has_uv
    assert ("Resolved 2 packages" in done.stderr) == has_uv
    return made


@dataclass(frozen=True)
class Made:
    folder: Path
    # what pip asks for anything but torch
    index: str

    def make(self, torch_index: str) -> subprocess.CompletedProcess[str]:
        return make(self.folder, torch_index, packages=self.index)

    def installed(self) -> set[str]:
        return {
            path.name.removesuffix(".dist-info") for path in self.folder.rglob("torch*.dist-info")
        }


def make(
    venv: Path, index: str, python: str = sys.executable, *, packages: str = "http://127.0.0.1:1"
) -> subprocess.CompletedProcess[str]:
    """Run the part of `make venv` that comes before the PyPI packages."""
    # this machine's pip settings name other indexes
    # a make that runs this test would affect what is printed
    kept = (name for name in os.environ if not name.startswith(("PIP_", "MAKE", "MFLAGS")))
    env = {name: os.environ[name] for name in kept}
    return subprocess.run(
        ["make", "environment", f"VENV={venv}", f"PYTHON={python}", f"TORCH_INDEX={index}"],
        cwd=ROOT,
        env={
            **env,
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "PIP_INDEX_URL": packages,
        },
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_the_releases_are_those_that_the_package_serves() -> None:
    """`make` would install one that is refused, or leave one untested."""
    made = dict(re.findall(r"^(NEWEST|OLDEST) := (.*)$", MAKEFILE, re.M))
    assert made == {"NEWEST": release.NEWEST, "OLDEST": release.SERVED[0]}
    assert {path.stem.removeprefix("requirements-cpu-") for path in ROOT.glob("*cpu-*.txt")} == set(
        release.SERVED
    )
    for version in release.SERVED:
        assert set(pins(version)) == {"torch", "torchvision"}


def test_pip_installs_only_what_is_served() -> None:
    """pip would otherwise keep a release that the plug-in then refuses."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [requirement] = map(Requirement, project["dependencies"])
    assert requirement.name == "sglang"
    around = [f"0.5.{patch}" for patch in range(10, 30)] + ["0.5.19.post1", "0.6.0"]
    assert tuple(requirement.specifier.filter(around)) == release.SERVED


def test_cpu_wheels_are_taken_where_their_index_answers(venv: Made) -> None:
    assert venv.installed() == {f"{name}-{version}+cpu" for name, version in PINS.items()}


def test_an_index_without_these_versions_leaves_torch_to_pip(venv: Made, index: str) -> None:
    subprocess.run([venv.folder / "bin" / "pip", "uninstall", "-y", *PINS], check=True)
    done = venv.make(f"{index}/old")
    assert done.returncode == 0, done.stderr
    assert "has no such torch: it comes from where pip finds it" in done.stdout
    assert venv.installed() == set()


def test_a_host_that_says_nothing_is_waited_for_three_seconds(venv: Made) -> None:
    asked: list[float] = []

    def listen(server: socket.socket) -> None:
        connection, _ = server.accept()
        began = time.monotonic()
        while connection.recv(1024):
            pass
        asked.append(time.monotonic() - began)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=listen, args=(server,), daemon=True)
        thread.start()
        done = venv.make(f"http://127.0.0.1:{server.getsockname()[1]}")
        thread.join(30)
    assert done.returncode == 0, done.stderr
    assert "does not answer: torch comes from where pip finds it" in done.stdout
    # a busy machine adds to it
    assert 1 < asked[0] < 60


def test_uv_installs_as_pip_is_set_to() -> None:
    """pip's indexes and certificates are often a company's: uv reads none of them itself."""
    listed = """\
global.extra-index-url='https://a/simple https://b/simple'
global.find-links='/wheels'
global.index-url='https://pypi.org/simple'
install.index-url='https://mirror/simple'
:env:.cert='/etc/ca.pem'
:env:.find-links='/more/wheels'
:env:.no-index='false'
:env:.progress-bar='off'
"""
    settings = install_cpu.uv_settings(listed)
    assert settings.unknown == []
    assert settings.environment == {"SSL_CERT_FILE": "/etc/ca.pem"}
    words = settings.options
    assert sorted(zip(words[::2], words[1::2], strict=True)) == [
        ("--default-index", "https://mirror/simple"),
        ("--find-links", "/more/wheels"),
        ("--index", "https://a/simple"),
        ("--index", "https://b/simple"),
    ]


def test_a_setting_that_uv_lacks_leaves_it_to_pip() -> None:
    """Ignored, it would install something else."""
    settings = install_cpu.uv_settings("global.only-binary='numpy'\nglobal.quiet='1'\n")
    assert settings.unknown == ["only-binary"]


@pytest.mark.parametrize(
    ("mode", "expected"),
    [(None, ["1", "", True]), ("0", ["0", "7", False])],
    ids=["as made", "told otherwise"],
)
def test_the_environment_serves_on_the_cpu_unless_told_otherwise(
    venv: Made, mode: str | None, expected: list[object]
) -> None:
    """With a GPU visible, the CPU stand-ins would be mixed with SGLang's GPU code."""
    script = (
        "import importlib.util, json, os; print(json.dumps([os.environ['SGLANG_USE_CPU_ENGINE'], "
        "os.environ['CUDA_VISIBLE_DEVICES'], importlib.util.find_spec('sgl_kernel') is not None]))"
    )
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "7"}
    for name in ("PYTHONPATH", "SGLANG_USE_CPU_ENGINE"):
        env.pop(name, None)
    if mode is not None:
        env["SGLANG_USE_CPU_ENGINE"] = mode
    done = subprocess.run(
        [venv.folder / "bin" / "python", "-c", script],
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout) == expected
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        ((3, 10, 9), "is Python 3.10.9, this needs 3.11 or 3.12: make PYTHON=python3.12 ..."),
        ((3, 13, 0), "is Python 3.13.0, this needs 3.11 or 3.12: make PYTHON=python3.12 ..."),
        (None, "Name a Python 3.11 or 3.12: make PYTHON=python3.12 ..."),
    ],
    ids=["3.10", "3.13", "none"],
)
def test_another_python_is_refused_first(
    tmp_path: Path, version: tuple[int, int, int] | None, reason: str
) -> None:
    python = tmp_path / "python"
    if version is not None:
        # this Python, claiming to be another version
        claim = f"import platform, sys; sys.version_info = {version}; "
        claim += f"platform.python_version = lambda: {'.'.join(map(str, version))!r}; "
        python.write_text(f"#!{sys.executable}\n{claim}exec(sys.argv[2])\n")
        python.chmod(0o755)
    done = make(tmp_path / "venv", "http://127.0.0.1:1", str(python))
    assert done.returncode != 0
    assert (done.stdout + done.stderr).splitlines()[0].endswith(reason)
    assert not (tmp_path / "venv").exists()


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A folder with the environments that `make test` needs, whose programs note their words."""
    for venv in ("venv", f"venv-{release.SERVED[0]}"):
        (tmp_path / venv / "bin").mkdir(parents=True)
        (tmp_path / venv / ".installed").touch()
        for name in ("python", "ruff", "mypy"):
            program = tmp_path / venv / "bin" / name
            program.write_text(f'#!/bin/sh\necho "{venv} {name} $*"\nexit ${{{name}_FAILS:-0}}\n')
            program.chmod(0o755)
    return tmp_path


def make_test(folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    kept = {
        name: os.environ[name] for name in os.environ if not name.startswith(("MAKE", "MFLAGS"))
    }
    return subprocess.run(
        ["make", "test", f"VENV={folder / 'venv'}"],
        cwd=ROOT,
        env={**kept, **env},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_both_releases_are_tested(tools: Path) -> None:
    done = make_test(tools)
    assert done.returncode == 0, done.stdout + done.stderr
    runs = [line.split() for line in done.stdout.splitlines() if " -m pytest " in line]
    assert [run[0] for run in runs] == ["venv", f"venv-{release.SERVED[0]}"]
    # all of them on the newest
    assert all(word.startswith("-") or word in ("3", "loadfile") for word in runs[0][4:])
    assert "tests/glue" in runs[1]


def test_a_release_that_cannot_be_installed_fails_the_run(tools: Path) -> None:
    """It is installed beside the tests of the other, where its failure could go unseen."""
    oldest = tools / f"venv-{release.SERVED[0]}"
    (oldest / ".installed").unlink()
    for name in ("python", "pip"):
        (oldest / "bin" / name).write_text("#!/bin/sh\necho no such package >&2\nexit 1\n")
        (oldest / "bin" / name).chmod(0o755)
    done = make_test(tools)
    assert done.returncode != 0
    assert "no such package" in done.stdout
    assert f"SGLang {release.SERVED[0]} was not installed" in done.stdout
    assert done.stdout.count(" -m pytest ") == 1


def test_a_failed_test_fails_the_run(tools: Path) -> None:
    done = make_test(tools, python_FAILS="1")
    assert done.returncode != 0
    assert done.stdout.count(" -m pytest ") == 1
