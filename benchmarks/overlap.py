"""What overlap scheduling brings: step time and GPU idle time with it off, on, and with the plan
stream, on one GPU, in one run.

    python benchmarks/overlap.py --model-path M --draft-model-path D --load-format dummy \\
        --simulate-accept-length 8 --requests 1 8 32 --out benchmarks/results/overlap

Takes the arguments of benchmarks/serving.py. Writes OUT.json and OUT.md.
"""

from __future__ import annotations

import argparse
from typing import Any

import systems
from serving import draw_prompts, measure, parse, profile, run_batch, serve

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
        run_batch(draw_prompts(1, 32, "warm-up"), 32, "greedy")
        for num_requests in options.requests:
            point = measure(num_requests, options.contexts[0], "greedy", options)
            split = profile(num_requests, options.contexts[0])
            rows.append(
                {
                    "overlap": name,
                    "requests": num_requests,
                    "tokens_per_s": point["tokens_per_s"],
                    "step_ms": point["step_ms"],
                    "idle_share": split["idle_share"],
                }
            )
            print(rows[-1], flush=True)
    finally:
        server.stop()
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| overlap | requests | tokens/s | step, ms | GPU idle |", "|---|---|---|---|---|"]
    for row in rows:
        lines.append(
            f"| {row['overlap']} | {row['requests']} | {row['tokens_per_s']:.1f} | "
            f"{row['step_ms']:.2f} | {row['idle_share']:.1%} |"
        )
    return "\n".join(lines)


def main() -> None:
    options = parse()
    rows = [row for name in SETTINGS for row in run_setting(name, options)]
    print(table(rows))
    if options.out:
        found = {**systems.provenance(options.commit), "rows": rows}
        systems.write(found, options.out, table(rows))


if __name__ == "__main__":
    main()
