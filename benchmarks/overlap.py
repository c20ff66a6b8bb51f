"""What overlap scheduling brings: step time and GPU idle time with it off, on, and with the plan
stream, on one GPU, in one run.

    python benchmarks/overlap.py --model-path M --draft-model-path D --load-format dummy \\
        --simulate-accept-length 8 --requests 1 8 32 --sampling greedy sampled \\
        --out benchmarks/results/overlap

Takes the arguments of benchmarks/serving.py. Writes OUT.json and OUT.md.
"""

from __future__ import annotations

import argparse
from typing import Any

import systems
from serving import measure, parse, profile, serve, warm_up

SETTINGS = {
    "off": {"SGLANG_ENABLE_DFLASH_SPEC_V2": "0", "SGLANG_ENABLE_OVERLAP_PLAN_STREAM": "0"},
    "on": {"SGLANG_ENABLE_DFLASH_SPEC_V2": "1", "SGLANG_ENABLE_OVERLAP_PLAN_STREAM": "0"},
    "on, plan stream": {
        "SGLANG_ENABLE_DFLASH_SPEC_V2": "1",
        "SGLANG_ENABLE_OVERLAP_PLAN_STREAM": "1",
    },
}


def run_setting(name: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return one row per number of requests."""
    server = serve("ours", options, SETTINGS[name])
    rows = []
    try:
        server.wait()
        context = options.contexts[0]
        warm_up(options)
        for num_requests in options.requests:
            row: dict[str, Any] = {"overlap": name, "requests": num_requests}
            for sampling in options.sampling:
                point = measure(num_requests, context, sampling, options)
                row[sampling] = {k: point[k] for k in ("tokens_per_s", "step_ms")}
            keep = options.logs and options.logs / name
            row["gpu_time"] = profile(num_requests, context, options, keep=keep)
            rows.append(row)
            print(row, flush=True)
    finally:
        server.stop()
    return rows


def table(rows: list[dict[str, Any]], samplings: list[str]) -> str:
    """Return the rows as Markdown; idle time is that of greedy steps."""
    titles = "".join(f" {name}: tokens/s | step, ms |" for name in samplings)
    lines = [
        f"| overlap | requests |{titles} GPU idle |",
        "|---|---|---|" + "---|---|" * len(samplings),
    ]
    for row in rows:
        cells = "".join(
            f" {row[name]['tokens_per_s']:.1f} | {row[name]['step_ms']:.2f} |" for name in samplings
        )
        lines.append(
            f"| {row['overlap']} | {row['requests']} |{cells} {row['gpu_time']['idle_share']:.1%} |"
        )
    return "\n".join(lines)


def main() -> None:
    options = parse()
    rows = [row for name in SETTINGS for row in run_setting(name, options)]
    shown = table(rows, options.sampling)
    print(shown)
    if options.out:
        systems.write({**systems.provenance(options.commit), "rows": rows}, options.out, shown)


if __name__ == "__main__":
    main()
