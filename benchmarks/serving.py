"""Decode speed of plain decoding, SGLang's DFLASH and ours, on one GPU, in one run.

    python benchmarks/serving.py --model-path M --draft-model-path D --load-format dummy \\
        --simulate-accept-length 8 --requests 1 8 32 --contexts 512 --out results.json

Each system serves alone, with the same prompts. A decode rate is the difference between two output
lengths, so that prefill and start drop out.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import requests

PORT = 30000
START_TIMEOUT_S = 420
SYSTEMS = ("plain", "in-tree", "ours")


class Serving:
    """One system's server, from start to stop."""

    def __init__(self, system: str, options: argparse.Namespace) -> None:
        command = [sys.executable, "-m", "sglang.launch_server", "--port", str(PORT)]
        command += ["--model-path", options.model_path, "--trust-remote-code"]
        command += ["--attention-backend", options.attention_backend, "--skip-server-warmup"]
        command += ["--load-format", options.load_format, "--skip-tokenizer-init"]
        env = dict(os.environ)
        if system != "plain":
            command += ["--speculative-algorithm", "DFLASH"]
            command += ["--speculative-draft-model-path", options.draft_model_path]
            command += ["--speculative-num-draft-tokens", str(options.block_size)]
            command += ["--speculative-draft-attention-backend", options.draft_backend]
            env["SGLANG_DFLASH"] = "on" if system == "ours" else "off"
            if options.simulate_accept_length:
                env["SGLANG_SIMULATE_ACC_LEN"] = str(options.simulate_accept_length)
        self.command = [*command, *options.server_args]
        handle, name = tempfile.mkstemp(suffix=f"-{system}.log")
        self.log = Path(name)
        self._start = time.monotonic()
        self._process = subprocess.Popen(
            self.command, stdout=handle, stderr=subprocess.STDOUT, env=env, start_new_session=True
        )
        os.close(handle)

    def wait(self) -> float:
        """Return the seconds it took until the server answered."""
        while time.monotonic() - self._start < START_TIMEOUT_S:
            if self._process.poll() is not None:
                raise RuntimeError(f"server ended:\n{self.log.read_text()[-3000:]}")
            with contextlib.suppress(requests.RequestException):
                if requests.get(f"http://127.0.0.1:{PORT}/health", timeout=5).ok:
                    return time.monotonic() - self._start
            time.sleep(1)
        raise RuntimeError(f"no answer in time:\n{self.log.read_text()[-3000:]}")

    def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def generate(ids: list[int], new_tokens: int, temperature: float) -> list[int]:
    body = {
        "input_ids": ids,
        "sampling_params": {
            "temperature": temperature,
            "max_new_tokens": new_tokens,
            "ignore_eos": True,
        },
    }
    response = requests.post(f"http://127.0.0.1:{PORT}/generate", json=body, timeout=600)
    response.raise_for_status()
    return response.json()["output_ids"]


def batch_seconds(
    num_requests: int, context: int, new_tokens: int, *, temperature: float, seed: int
) -> float:
    """Return how long a batch of fresh prompts takes, all started together."""
    chance = random.Random(f"{seed} {num_requests} {context} {new_tokens}")
    prompts = [[chance.randrange(1000, 50000) for _ in range(context)] for _ in range(num_requests)]
    with ThreadPoolExecutor(num_requests) as pool:
        start = time.monotonic()
        list(pool.map(lambda ids: generate(ids, new_tokens, temperature), prompts))
        return time.monotonic() - start


def measure(num_requests: int, context: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return the decode rate of one point, from the better of two tries at each length."""
    short, long = options.lengths
    seconds = {
        length: min(
            batch_seconds(
                num_requests, context, length, temperature=options.temperature, seed=repeat
            )
            for repeat in range(options.repeats)
        )
        for length in (short, long)
    }
    rate = num_requests * (long - short) / (seconds[long] - seconds[short])
    tokens_per_step = options.simulate_accept_length or 1
    return {
        "requests": num_requests,
        "context": context,
        "tokens_per_s": round(rate, 1),
        "ms_per_token": round(1000 * num_requests / rate, 3),
        "step_ms": round(1000 * num_requests * tokens_per_step / rate, 2),
    }


def run_system(system: str, options: argparse.Namespace) -> dict[str, Any]:
    server = Serving(system, options)
    try:
        seconds = server.wait()
        print(f"{system}: ready after {seconds:.0f} s", flush=True)
        points = []
        batch_seconds(1, 32, 32, temperature=0.0, seed=-1)
        for context in options.contexts:
            for num_requests in options.requests:
                if context * num_requests > options.max_tokens:
                    continue
                point = measure(num_requests, context, options)
                if system == "plain":
                    point["step_ms"] = point["ms_per_token"]
                print(f"{system}: {point}", flush=True)
                points.append(point)
        return {"start_s": round(seconds, 1), "command": server.command[3:], "points": points}
    finally:
        server.stop()
        if options.logs:
            folder = Path(options.logs)
            (folder / f"{system}.log").write_bytes(server.log.read_bytes()[-2_000_000:])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--draft-model-path", required=True)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--requests", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--contexts", nargs="+", type=int, default=[512])
    parser.add_argument("--max-tokens", type=int, default=200_000, help="skip larger batches")
    parser.add_argument("--lengths", nargs=2, type=int, default=[64, 320])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--simulate-accept-length", type=float, default=0.0)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--attention-backend", default="triton")
    parser.add_argument("--draft-backend", default="fa4")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--logs", help="folder for the end of each server's log")
    options, options.server_args = parser.parse_known_args()
    return options


def main() -> None:
    options = parse()
    results = {}
    for system in options.systems:
        try:
            results[system] = run_system(system, options)
        except RuntimeError as error:
            print(f"{system}: {error}", flush=True)
            results[system] = {"error": str(error)[-2000:]}
    print(table(results))
    if options.out:
        options.out.write_text(json.dumps({**provenance(), "results": results}, indent=1))


def provenance() -> dict[str, Any]:
    """Return what a reader needs to judge the numbers: command, commit, card and versions."""
    import torch
    import triton

    git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True)
    return {
        "command": " ".join(["python", *sys.argv]),
        "commit": git.stdout.strip() or None,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "sglang": version("sglang"),
    }


def table(results: dict[str, Any]) -> str:
    """Return the rates as Markdown, a row per point and a column per system."""
    rows: dict[tuple[int, int], dict[str, float]] = {}
    for system, result in results.items():
        for point in result.get("points", ()):
            key = (point["context"], point["requests"])
            rows.setdefault(key, {})[system] = point["tokens_per_s"]
    lines = ["| context | requests | " + " | ".join(results) + " | ours / in-tree |"]
    lines.append("|" + "---|" * (len(results) + 3))
    for (context, num_requests), rates in sorted(rows.items()):
        cells = [f"{rates[s]:.1f}" if s in rates else "" for s in results]
        ratio = ""
        if "ours" in rates and "in-tree" in rates:
            ratio = f"{rates['ours'] / rates['in-tree']:.2f}x"
        lines.append(f"| {context} | {num_requests} | " + " | ".join(cells) + f" | {ratio} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
