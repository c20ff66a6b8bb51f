"""The wheel: small, without weights, and working where nothing but it is installed."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from sglang_dflash import __version__, pairs
from sglang_dflash.pairs import release_file
from sglang_dflash.testing.server import ROOT

PACKAGE = ROOT / "sglang_dflash"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MOST_BYTES = 1_000_000


def run(*command: str | Path, folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INDEX": "1", **env},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of a checkout in which an earlier version, with its weights, was installed."""
    folder = tmp_path_factory.mktemp("checkout")
    shutil.copytree(PACKAGE, folder / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    listed = "".join(f"sglang_dflash/pairs/{name}\n" for name in release_file.FILES)
    (folder / "sglang_dflash.egg-info").mkdir()
    (folder / "sglang_dflash.egg-info" / "SOURCES.txt").write_text(listed)
    # what pip asks setuptools to do
    build = "from setuptools import build_meta; build_meta.build_wheel('dist')"
    done = run(sys.executable, "-c", build, folder=folder)
    assert done.returncode == 0, done.stderr
    [made] = (folder / "dist").glob("*.whl")
    return made


@pytest.fixture(scope="module")
def installed(wheel: Path) -> Path:
    folder = wheel.parent / "installed"
    pip = (sys.executable, "-m", "pip", "install", "--no-deps", "--no-compile")
    done = run(*pip, "--target", folder, wheel, folder=wheel.parent)
    assert done.returncode == 0, done.stderr
    return folder


def test_the_wheel_has_every_module_and_no_weights(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    modules = {str(path.relative_to(ROOT)) for path in PACKAGE.rglob("*.py")}
    assert wheel.stat().st_size < MOST_BYTES
    assert {name for name in names if ".dist-info/" not in name} == {
        *modules,
        "sglang_dflash/commands/live.html",
        "sglang_dflash/py.typed",
    }


def test_the_installed_commands_run(installed: Path) -> None:
    """Neither the console script nor help may need torch, SGLang or the checkout."""
    script = installed / "bin" / "sglang-dflash"
    # -S: of this environment's packages, only those that PYTHONPATH names
    bare = (sys.executable, "-S")
    version = run(*bare, script, "--version", folder=installed, PYTHONPATH=str(installed))
    assert (version.returncode, version.stdout) == (0, f"sglang-dflash {__version__}\n")
    doctor = run(*bare, script, "doctor", "--help", folder=installed, PYTHONPATH=str(installed))
    assert doctor.returncode == 0
    assert "\nexample:\n  sglang-dflash doctor --model-path " in doctor.stdout


def test_an_installed_package_says_where_it_looked_for_a_pair(installed: Path) -> None:
    asks = "from sglang_dflash.pairs import tiny_target; print(tiny_target())"
    env = {"PYTHONPATH": str(installed), "HOME": str(installed)}
    absent = run(sys.executable, "-c", asks, folder=installed, **env)
    last = absent.stderr.splitlines()[-1]
    assert last.startswith("FileNotFoundError: The model tiny/target of sglang_dflash is not in ")
    assert f"{installed}/sglang_dflash/pairs, {installed}/.cache/sglang_dflash/pairs. " in last
    assert "release_file unpack FILE" in last
    # in a checkout, or with a folder named
    found = run(sys.executable, "-P", "-c", asks, folder=ROOT, **env)
    assert found.stdout == f"{ROOT}/sglang_dflash/pairs/tiny/target\n"
    given = {"SGLANG_DFLASH_PAIRS": str(PACKAGE / "pairs")}
    named = run(sys.executable, "-c", asks, folder=installed, **env, **given)
    assert named.stdout == found.stdout


def test_a_folder_that_is_named_is_the_only_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A misspelt folder would otherwise be answered with the weights of another one."""
    monkeypatch.setenv("SGLANG_DFLASH_PAIRS", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=f"is not in {tmp_path}. Its weights"):
        pairs.smollm2_drafter()


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return release_file.pack(PACKAGE / "pairs", tmp_path_factory.mktemp("release"))


def test_the_release_file_has_the_pairs_of_the_checkout(
    archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_git = run("git", "ls-files", "smollm2_dflash", "tiny", folder=PACKAGE / "pairs")
    assert set(release_file.FILES) == set(in_git.stdout.split())
    release_file.unpack(archive, tmp_path / "pairs")
    for name in release_file.FILES:
        assert (tmp_path / "pairs" / name).read_bytes() == (PACKAGE / "pairs" / name).read_bytes()
    assert {path.name for path in (tmp_path / "pairs").iterdir()} == set(release_file.MODELS)
    monkeypatch.setenv("SGLANG_DFLASH_PAIRS", str(tmp_path / "pairs"))
    assert pairs.tiny_drafter() == tmp_path / "pairs" / "tiny" / "drafter"


def test_another_file_is_refused_and_nothing_unpacked(archive: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.tar.gz"
    cut.write_bytes(archive.read_bytes()[:1_000_000])
    other = tmp_path / "other.tar"
    with tarfile.open(other, "w") as made:
        for name in release_file.FILES:
            made.add(ROOT / "LICENSE", arcname=name)
    with pytest.raises(ValueError, match="is not a release file of the pairs"):
        release_file.unpack(cut, tmp_path / "out")
    with pytest.raises(ValueError, match=r"missing.tar is not .* No such file"):
        release_file.unpack(tmp_path / "missing.tar", tmp_path / "out")
    with pytest.raises(
        ValueError, match="weights of smollm2_dflash have sha256 .* Use the pairs of"
    ):
        release_file.unpack(other, tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


def third_party(folder: str) -> set[str]:
    """Return the packages that a folder's modules import, at whatever level."""
    found: set[str] = set()
    for path in (PACKAGE / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found.add((node.module or "").split(".")[0])
    return found - sys.stdlib_module_names - {"__future__", "sglang_dflash"}


def test_the_extras_have_what_is_imported() -> None:
    extras = {
        name: {Requirement(text).name for text in texts}
        for name, texts in PROJECT["optional-dependencies"].items()
    }
    # SGLang is built on these two
    needed = third_party("train") | third_party("pairs") | third_party("reference")
    assert needed - {"torch", "transformers"} == extras["train"]
    needed = third_party("commands") - extras["train"]
    assert needed - {"torch", "transformers", "requests"} == extras["plots"]


def test_pre_commit_and_the_forge_run_what_make_runs() -> None:
    """A commit that passed here would otherwise fail there, with other versions or options."""
    makefile = (ROOT / "Makefile").read_text()
    [lint] = re.findall(r"^lint: venv\n\t@(.*)$", makefile, re.M)
    hooks = re.findall(r"^ +entry: (.*)$", (ROOT / ".pre-commit-config.yaml").read_text(), re.M)
    assert hooks == lint.replace("$(BIN)", ".venv/bin").split(" && ")
    workflow = (ROOT / ".github" / "workflows" / "test.yml").read_text()
    [versions] = re.findall(r"^ +python: (\[.*\])$", workflow, re.M)
    served = SpecifierSet(PROJECT["requires-python"])
    assert json.loads(versions) == [f"3.{n}" for n in range(30) if served.contains(f"3.{n}")]
    assert re.search(r"^ +- run: make test PYTHON=python$", workflow, re.M)


def test_the_changelog_begins_with_this_version() -> None:
    [first, *_] = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert first == __version__
