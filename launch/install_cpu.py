"""Build the environment that `make` uses: a release of SGLang on the CPU, and this package.

    python -m launch.install_cpu .venv --sglang 0.5.23

uv installs, with the indexes and certificates that pip is set to: from its cache that takes
seconds, where pip takes minutes. pip installs where uv cannot be had, or where pip has a setting
that uv lacks.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, Queue
from threading import Thread

from sglang_dflash.command_help import parser_of
from sglang_dflash.interrupt import end_on_interrupt

ROOT = Path(__file__).resolve().parents[1]
UV = "uv==0.13.8"
# seconds an index of CPU wheels is waited for
PATIENCE = 3

# options of uv that take each word of a setting of pip's
OPTIONS = {
    "index-url": "--default-index",
    "extra-index-url": "--index",
    "find-links": "--find-links",
    "trusted-host": "--allow-insecure-host",
    "constraint": "--constraints",
}
VARIABLES = {
    "cert": "SSL_CERT_FILE",
    "client-cert": "SSL_CLIENT_CERT",
    "proxy": "ALL_PROXY",
    "timeout": "UV_HTTP_TIMEOUT",
    "default-timeout": "UV_HTTP_TIMEOUT",
}
# settings that say nothing about what is installed, or where from
IRRELEVANT = {
    *("disable-pip-version-check", "progress-bar", "no-color", "quiet", "verbose", "log"),
    *("retries", "resume-retries", "cache-dir", "no-cache-dir", "no-input", "exists-action"),
    *("require-virtualenv", "break-system-packages", "root-user-action", "user"),
    *("no-warn-script-location", "compile", "no-compile", "config-file"),
}


@dataclass(frozen=True)
class UvSettings:
    """pip's settings, as uv takes them."""

    options: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    # settings of pip's that uv has nothing for
    unknown: list[str] = field(default_factory=list)


def uv_settings(listed: str) -> UvSettings:
    """Translate what `pip config list` prints."""
    found: dict[str, str] = {}
    # in pip's own order of precedence
    for section in ("global", "install", ":env:"):
        pattern = rf"^{section}\.([\w-]+)=(.*)$"
        found |= {
            name: ast.literal_eval(value) for name, value in re.findall(pattern, listed, re.M)
        }
    settings = UvSettings()
    for name, value in found.items():
        if name in OPTIONS:
            for word in value.split():
                settings.options.extend([OPTIONS[name], word])
        elif name in VARIABLES:
            settings.environment[VARIABLES[name]] = value
        elif name == "no-index":
            settings.options.extend(["--no-index"] * (value.lower() in ("1", "true", "yes", "on")))
        elif name not in IRRELEVANT:
            settings.unknown.append(name)
    return settings


class Environment:
    """A virtual environment, and what installs into it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._python = folder / "bin" / "python"
        self._uv = folder / "bin" / "uv"
        self._settings = UvSettings()
        self._has_uv = False

    def create(self) -> None:
        """Create it unless it is there; its programs serve on the CPU unless told otherwise."""
        if not (self._folder / "bin" / "pip").exists():
            _run([sys.executable, "-m", "venv", str(self._folder)])
        asked = "import sysconfig; print(sysconfig.get_path('purelib'))"
        packages = subprocess.check_output([self._python, "-c", asked], text=True).strip()
        (Path(packages) / "sglang_dflash_cpu.pth").write_text(
            f"{ROOT}/sglang_dflash/glue/cpu/path\nimport sglang_dflash_cpu\n"
        )

    def find_uv(self) -> None:
        """Install uv, if it can be had and can do as pip is told."""
        pip = [str(self._python), "-m", "pip"]
        self._settings = uv_settings(subprocess.check_output([*pip, "config", "list"], text=True))
        if self._settings.unknown:
            settings = " and ".join(self._settings.unknown)
            print(f"pip is set to {settings}, which uv does not know: pip installs", flush=True)
            return
        self._has_uv = _succeeds([*pip, "install", "--quiet", "--retries", "1", UV])
        if not self._has_uv:
            print(f"{UV} cannot be installed: pip installs, which takes minutes", flush=True)

    def install(self, *what: str, index: str | None = None) -> None:
        """Install with uv or, if it is absent or fails, with pip; end the program if that fails."""
        if not self._has_uv or not self._install_with_uv(what, index=index):
            only = [] if index is None else ["--index-url", index]
            _run([str(self._python), "-m", "pip", "install", *only, *what])

    def _install_with_uv(self, what: Sequence[str], *, index: str | None) -> bool:
        # pip takes the best version of all its indexes
        options = ["--python", str(self._python), "--index-strategy", "unsafe-best-match"]
        options += self._settings.options if index is None else ["--default-index", index]
        if sys.dont_write_bytecode:
            # otherwise every process would compile what it imports
            options.append("--compile-bytecode")
        variables = {"UV_SYSTEM_CERTS": "1", **self._settings.environment}
        return _succeeds([str(self._uv), "pip", "install", *options, *what], variables)


def install_torch(environment: Environment, requirements: Path, index: str) -> None:
    """Install torch's CPU wheels if their index has them: PyPI has the CUDA build only, with 2.2 GB
    of libraries."""
    if not answers(f"{index}/torch/"):
        print(f"{index} does not answer: torch comes from where pip finds it", flush=True)
        return
    pins = re.findall(r"^torch(?:vision)?==.*$", requirements.read_text(), re.M)
    try:
        environment.install("--no-deps", *pins, index=index)
    except subprocess.CalledProcessError:
        print(f"{index} has no such torch: it comes from where pip finds it", flush=True)


def answers(url: str) -> bool:
    """Return whether a server answers soon, whatever hangs: name, connection or reply."""
    heard: Queue[bool] = Queue()

    def ask() -> None:
        try:
            with urllib.request.urlopen(url, timeout=PATIENCE):
                heard.put(True)
        except (OSError, ValueError):
            heard.put(False)

    Thread(target=ask, daemon=True).start()
    try:
        return heard.get(timeout=PATIENCE)
    except Empty:
        return False


def _run(command: Sequence[str]) -> None:
    subprocess.run(command, check=True)


def _succeeds(command: Sequence[str], variables: dict[str, str] | None = None) -> bool:
    try:
        return subprocess.run(command, env={**os.environ, **(variables or {})}).returncode == 0
    except OSError as error:
        print(f"install: {error}", file=sys.stderr)
        return False


def main() -> None:
    parser = parser_of(__doc__, prog="python -m launch.install_cpu")
    parser.add_argument("folder", type=Path, help="the virtual environment")
    parser.add_argument("--sglang", required=True, metavar="RELEASE", help="release of SGLang")
    parser.add_argument(
        "--torch-index",
        default="https://download.pytorch.org/whl/cpu",
        metavar="URL",
        help="index of torch's CPU wheels; default: PyTorch's own",
    )
    parser.add_argument(
        "--only-torch", action="store_true", help="stop after the environment and torch"
    )
    options = parser.parse_args()
    requirements = ROOT / f"requirements-cpu-{options.sglang}.txt"
    if not requirements.exists():
        parser.error(f"there is no {requirements.name}: this release of SGLang is not served")
    environment = Environment(options.folder)
    try:
        environment.create()
        environment.find_uv()
        install_torch(environment, requirements, options.torch_index)
        if options.only_torch:
            return
        # torch and torchvision are pinned together; SGLang is installed without its own pins
        environment.install("-r", str(requirements))
        environment.install("--no-deps", f"sglang=={options.sglang}")
        # setuptools is pinned: building with it, not in isolation, needs no network
        environment.install("--no-deps", "--no-build-isolation", "-e", str(ROOT))
    except subprocess.CalledProcessError as error:
        sys.exit(f"install: {error}")


if __name__ == "__main__":
    sys.exit(end_on_interrupt("install", main))
