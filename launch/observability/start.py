"""Run Prometheus and Grafana beside running servers, with the dashboard loaded, until Ctrl-C.

    python launch/observability/start.py                              # a server at 127.0.0.1:30000
    python launch/observability/start.py --targets gpu1:30000 gpu2:30000

For machines without containers (else see compose.yml): it starts the programs that are installed
here, `prometheus` and `grafana`, and changes none of their own settings. The servers need
--enable-metrics.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from sglang_dflash.command_help import parser_of
from sglang_dflash.interrupt import end_on_interrupt

HERE = Path(__file__).resolve().parent
TARGET = "127.0.0.1:30000"
DATA = Path.home() / ".local" / "state" / "sglang_dflash" / "observability"
START_TIMEOUT_S = 60
# where packages put what Grafana needs besides its program
GRAFANA_HOMES = (Path("/usr/share/grafana"), Path("/usr/local/share/grafana"))


def main() -> int:
    options = parse()
    check(options)
    # `timeout` and service managers send SIGTERM: the programs must not outlive this one
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    options.data.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as running:
        programs = [running.enter_context(start_prometheus(options))]
        print(f"Prometheus: {url_of(options.prometheus_port)}", flush=True)
        grafana = start_grafana(options)
        if grafana is not None:
            programs.append(running.enter_context(grafana))
            print(f"Grafana: {url_of(options.grafana_port)}", flush=True)
        print("Ctrl-C ends it.", flush=True)
        while all(program.is_running for program in programs):
            time.sleep(0.5)
        [ended, *_] = [program for program in programs if not program.is_running]
        raise SystemExit(f"{ended.name} has ended:\n{ended.log_tail()}")


def check(options: argparse.Namespace) -> None:
    """Exit if the programs cannot start; print which servers have nothing to show yet."""
    if shutil.which("prometheus") is None:
        raise SystemExit(
            "There is no program `prometheus` here. Install it (Debian: apt install prometheus), "
            "or use containers: docker compose -f launch/observability/compose.yml up"
        )
    refuse_taken(options.prometheus_port, "--prometheus-port")
    refuse_taken(options.grafana_port, "--grafana-port")
    for target in options.targets:
        warn_without_metrics(target)


def url_of(port: int) -> str:
    return f"http://127.0.0.1:{port}"


def start_prometheus(options: argparse.Namespace) -> Program:
    command = ["prometheus", f"--config.file={write_config(options.data, options.targets)}"]
    command += [f"--storage.tsdb.path={options.data / 'prometheus'}"]
    command += [f"--web.listen-address=127.0.0.1:{options.prometheus_port}"]
    ready = f"{url_of(options.prometheus_port)}/-/ready"
    return Program("prometheus", command, ready=ready, data=options.data)


def start_grafana(options: argparse.Namespace) -> Program | None:
    """Start Grafana; if it is not installed, say what shows the numbers without it."""
    command = grafana_command()
    if command is None:
        print(
            "There is no program `grafana` here, so there is no dashboard. Install Grafana from "
            "its own packages, or use containers, or `python -m sglang_dflash report --web`, which "
            "needs neither.",
            flush=True,
        )
        return None
    return Program(
        "grafana",
        command,
        ready=f"{url_of(options.grafana_port)}/api/health",
        data=options.data,
        env=grafana_settings(options, url_of(options.prometheus_port)),
    )


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--targets",
        nargs="+",
        default=[TARGET],
        metavar="HOST:PORT",
        help=f"servers to watch; default: {TARGET}",
    )
    parser.add_argument(
        "--prometheus-port", type=int, default=9090, help="port of Prometheus; default: %(default)s"
    )
    parser.add_argument(
        "--grafana-port", type=int, default=3000, help="port of Grafana; default: %(default)s"
    )
    parser.add_argument(
        "--data", type=Path, default=DATA, help=f"folder for history and logs; default: {DATA}"
    )
    options = parser.parse_args()
    for target in options.targets:
        host, _, port = target.rpartition(":")
        if not host or "/" in target or not port.isdigit():
            parser.error(f"--targets {target}: pass HOST:PORT, as in {TARGET}")
    return options


def refuse_taken(port: int, option: str) -> None:
    """Exit if another program has the port: it would answer in place of ours."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise SystemExit(
                f"{option} {port} cannot be used: {error.strerror}. Pass another one, or stop what "
                "listens there. (Debian's packages start a Prometheus and a Grafana of their own.)"
            ) from None


def warn_without_metrics(target: str) -> None:
    """Say so if a server does not answer yet, or has no metrics; it may still be started."""
    try:
        urllib.request.urlopen(f"http://{target}/metrics", timeout=5).close()
    except urllib.error.HTTPError as error:
        print(f"{target} has no /metrics ({error}): start it with --enable-metrics", flush=True)
    except OSError:
        print(f"{target} does not answer yet: start it with --enable-metrics", flush=True)


def write_config(data: Path, targets: list[str]) -> Path:
    """Write Prometheus's configuration for these servers, with the alert rules beside it."""
    shipped = (HERE / "prometheus.yml").read_text()
    place = json.dumps([TARGET])
    assert place in shipped, f"prometheus.yml names no {place}"
    (data / "prometheus.yml").write_text(shipped.replace(place, json.dumps(targets)))
    shutil.copy(HERE / "alerts.yml", data)
    return data / "prometheus.yml"


def grafana_command() -> list[str] | None:
    """Return how to start Grafana, under its new or its old name; None if it is not installed."""
    new, old = shutil.which("grafana"), shutil.which("grafana-server")
    program = new or old
    if program is None:
        return None
    # an unpacked archive has bin/ beside public/
    homes = [Path(program).resolve().parents[1], *GRAFANA_HOMES]
    home = next((path for path in homes if (path / "public").is_dir()), None)
    command = [program, "server"] if new else [program]
    return [*command, "--homepath", str(home)] if home else command


def grafana_settings(options: argparse.Namespace, prometheus: str) -> dict[str, str]:
    """Return Grafana's settings as environment variables: they override its own file."""
    return {
        "PROMETHEUS_URL": prometheus,
        "DASHBOARDS": str(HERE),
        "GF_SERVER_HTTP_ADDR": "127.0.0.1",
        "GF_SERVER_HTTP_PORT": str(options.grafana_port),
        "GF_AUTH_ANONYMOUS_ENABLED": "true",
        "GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH": str(HERE / "grafana-dashboard.json"),
        "GF_PATHS_PROVISIONING": str(HERE / "provisioning"),
        "GF_PATHS_DATA": str(options.data / "grafana"),
        "GF_PATHS_LOGS": str(options.data / "grafana"),
    }


class Program:
    """A program that runs while the block does; its output goes to a file in `data`."""

    def __init__(
        self,
        name: str,
        command: list[str],
        *,
        ready: str,
        data: Path,
        env: dict[str, str] | None = None,
    ) -> None:
        self.name, self.ready = name, ready
        self.log = data / f"{name}.log"
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                command,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
                # Ctrl-C reaches this script only, which ends them
                start_new_session=True,
            )

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    def log_tail(self) -> str:
        return self.log.read_text(errors="replace")[-2000:].strip()

    def __enter__(self) -> Program:
        """Wait until it answers."""
        end = time.monotonic() + START_TIMEOUT_S
        try:
            while time.monotonic() < end and self.is_running:
                with contextlib.suppress(OSError):
                    urllib.request.urlopen(self.ready, timeout=2).close()
                    return self
                time.sleep(0.2)
            raise SystemExit(f"{self.name} did not start:\n{self.log_tail()}")
        except BaseException:
            # Ctrl-C, too
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        self.process.kill()
        self.process.wait()


if __name__ == "__main__":
    sys.exit(end_on_interrupt("observability", main))
