"""The model card of a trained drafter: architecture, scores, data, training."""

from __future__ import annotations

import platform
from importlib import metadata
from typing import Any

from sglang_dflash.reference.model import DrafterConfig
from sglang_dflash.train.repeats import ROUNDS

_TABLE_ROWS = 12


def versions() -> dict[str, str]:
    """Return the versions of the packages that the scores depend on."""
    found = {"python": platform.python_version()}
    for name in ("torch", "transformers", "sglang", "sglang-dflash"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def write_card(
    *,
    config: DrafterConfig,
    run: dict[str, Any],
    scores: dict[str, Any],
    progress: list[dict[str, Any]],
) -> str:
    """Return the card as Markdown. `run` is the content of run.json, `scores` of scores.json."""
    target = run["settings"]["model_path"]
    sections = [
        f"# DFlash drafter for {target.rstrip('/').split('/')[-1]}",
        "A drafter for speculative decoding with DFlash. It has no embedding and no head: it is "
        "served together with its target, and never changes what the target writes.",
        _shape(config),
        _scores(scores),
        _data(run),
        f"## Training\n\n{_training(run, scores)}",
        _progress(progress),
        f"## Licence\n\n{run['licence']}",
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _shape(config: DrafterConfig) -> str:
    window = f", window {config.sliding_window}" if config.sliding_window else ""
    rows = [
        ("layers", f"{config.num_hidden_layers} ({', '.join(config.layer_types)}{window})"),
        ("hidden / intermediate", f"{config.hidden_size} / {config.intermediate_size}"),
        (
            "heads / kv heads / head_dim",
            f"{config.num_attention_heads} / {config.num_key_value_heads} / {config.head_dim}",
        ),
        ("block size", config.block_size),
        ("features from layers", ", ".join(map(str, config.target_layer_ids))),
        ("mask token", config.mask_token_id),
    ]
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])


def _scores(scores: dict[str, Any]) -> str:
    lines = ["## Scores", ""]
    if "loops" in scores:
        lines += [
            "Accept length is the mean number of tokens committed per verify step, the bonus "
            "included; the token that comes from the prompt is not counted. Measured on held-out "
            f"prompts in the real decoding loop, at most {scores['evaluate_tokens']} tokens each "
            f"({scores['device']}). Drawn drafts are drawn from the drafter's distribution, and "
            "kept or dropped by the block, as sampled requests are served. Every draft of an ideal "
            "drafter is the target's likeliest token: sampled text departs from it, and so stops "
            "even that one.",
            "",
            "| temperature | drafts | prompts | verify steps | accept length | an ideal one's |",
            "|---|---|---|---|---|---|",
            *(
                f"| {loop['temperature']:g} | {loop['drafts']} | {loop['prompts']} | "
                f"{loop['verify_steps']} | {loop['accept_length']:.2f} | "
                f"{format(loop['ideal'], '.2f') if loop['ideal'] else ''} |"
                for loop in scores["loops"]
            ),
            "",
        ]
    if scores.get("estimate") is not None:
        lines.append(
            f"Estimate over the greedy answers to all {scores['held_out']} held-out prompts, by "
            f"comparing drafts with the text: {scores['estimate']:.2f}."
        )
    return "\n".join(lines).rstrip()


def _data(run: dict[str, Any]) -> str:
    answers = run["answers"]
    left_out = answers.get("left_out", 0)
    later = answers.get("later_turns", 0)
    talks = f"; {later} are to later turns of a talk" if later else ""
    further = f" ({left_out} further answers to these prompts are left out)" if left_out else ""
    lines = [
        "## Data",
        "",
        f"{answers['count']} of the target's own answers ({answers['tokens']} tokens; "
        f"{answers['stopped']} ended by themselves{talks}). {answers['held_out']} are held out "
        f"with their prompts{further}. An endless loop at an answer's end is cut after "
        f"{ROUNDS} rounds. Temperatures: {answers['temperatures']}. "
        f"Thinking: {run['settings']['thinking']}. Made by: {answers['engine']}.",
        "",
        "| file | rows | sha256 |",
        "|---|---|---|",
    ]
    return "\n".join(
        lines + [f"| {f['name']} | {f['rows']} | {f['sha256']} |" for f in run["files"]]
    )


def _training(run: dict[str, Any], scores: dict[str, Any]) -> str:
    # commands of the runs that generated the answers, then of this run
    all_commands = [*run["answers"]["commands"], *run["commands"]]
    commands = "\n".join(f"    {command}" for command in all_commands)
    used = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
    share = scores.get("share", 1.0)
    cut = f" (stopped after {share:.0%} of the schedule)" if share < 1 else ""
    settings = run["settings"]
    begun = f"From the drafter {settings['init_from']}: " if settings.get("init_from") else ""
    return (
        f"{begun}{scores.get('step', 0)} steps in {scores.get('seconds', 0) / 60:.1f} minutes{cut} "
        f"on {run['device']}: {settings['labels']} labels, {settings['optimizer']}, seed "
        f"{settings['seed']}. {used}.\n\n{commands}"
    )


def _progress(progress: list[dict[str, Any]]) -> str:
    rows = [row for row in progress if row.get("estimate") is not None]
    if not rows:
        return ""
    every = -(-len(rows) // _TABLE_ROWS)
    shown = [row for i, row in enumerate(rows) if (len(rows) - 1 - i) % every == 0]
    lines = ["| minutes of training | step | loss | estimated accept length |", "|---|---|---|---|"]
    lines += [
        f"| {row['seconds'] / 60:.1f} | {row['step']} | {row['loss']:.3f} | {row['estimate']:.2f} |"
        for row in shown
    ]
    return "\n".join(lines)
