"""Check that every model family of the recipes starts and is correct, on one GPU, in minutes.

    make smoke                                  # on a machine with a GPU and SGLang
    python -m tests.smoke.run --families gemma4 --no-recipe --out gemma4.json    # one family

Besides the recipes' families there are a target with linear attention and a DFlash2 drafter.

Each family is served at its real head shapes with few layers and random weights, by three servers
at once: plain decoding and DFLASH in fp32 (Triton drafts), whose answers must be equal token for
token, and DFLASH by launch/serve.sh in bf16 (fa4 drafts). CUDA graphs, overlap scheduling and the
plan stream are on (in fp32, models with experts run without graphs and have fewer experts, and the
vocabulary is smaller); more requests run at once than the largest graph holds. The verify width is
automatic, and in fp32 also changes at every step. Quantised targets are served in bf16 only. They
and DeepSeek run beside the others, because SGLang compiles kernels of theirs for minutes. The 31B
recipe starts at full size as soon as the last families leave it the memory; once they have ended it
answers an OpenAI client, and its step is timed.

    python -m tests.smoke.run --tp 2    # two ranks on one GPU (sglang_dflash/testing/two_ranks.py)

serves a dense Gemma 4, one with experts and a Qwen3 on two ranks each, which compare every step:
the same servers, and plain decoding on one rank. Qwen3 is also served in SGLang's deterministic
mode, in which sampled answers with seeds must be equal, too.

Writes the results, durations, versions and the commit to benchmarks/results/smoke-h200.json (named
after the GPU, and after the release of SGLang unless it is the newest that is served), against
which `make test` compares the serving path of the tree. A part of the families, or all without the
recipe, needs --out instead; tests/smoke/join.py makes one result of several such calls. A run that
is cut off leaves what it found until then in a file beside it that ends in .part.json.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch

from benchmarks import gpu, recipes, result_files
from sglang_dflash.command_help import parser_of
from sglang_dflash.glue import release
from sglang_dflash.interrupt import end_on_interrupt
from sglang_dflash.testing.progress import Progress, say
from sglang_dflash.testing.server import START_TIMEOUT_S, Server, free_port
from tests.smoke import checks
from tests.smoke.families import FAMILIES, Family
from tests.smoke.servers import compiling_sampler, expected_worker, script_folder, start
from tests.smoke.since import RESULTS, failed, is_fine

RECIPE = recipes.Cell("gemma4-31b", "bf16", "ours", 8)
# of its KV pools, for all that is asked of it; the memory that must be free before it starts, with
# some for families that still run; and how often to look
RECIPE_TOKENS, RECIPE_GIB, LOOK_S = 65536, 95, 2.0
KEPT_LOG = 6000  # characters of a failed server's log
# of a target for which SGLang may have to compile kernels
COMPILE_TIMEOUT_S = 540


# ranks that share a GPU take turns on it: with two, one family is asked at a time
ASKING = {1: contextlib.nullcontext(), 2: threading.Lock()}
# for Ctrl-C, which only the main thread hears of
STOPPED = threading.Event()
RUNNING: set[Server] = set()
# families that run on the GPU and have all their servers
STARTED: set[str] = set()
# of the releases that do not choose the snapshots of recurrent states, which they refuse
WITHOUT_STATES = ("0.5.17",)
# families of the test with two ranks, with and without seeds
ON_TWO_RANKS = {"gemma4": False, "gemma4-moe": False, "qwen3": False, "qwen3, seeded": True}


def run_family(
    family: Family, *, small: bool = False, ranks: int = 1, seeded: bool = False
) -> dict[str, Any]:
    """Serve a family; return the check results of each server and the durations."""
    began = time.monotonic()
    found: dict[str, Any] = {"checks": {}, "start_s": {}, "ask_s": {}}
    servers: dict[str, Server] = {}

    def ask(part: Part, names: list[str]) -> None:
        patience = COMPILE_TIMEOUT_S if family.is_compiled else START_TIMEOUT_S
        for name in names:
            servers[name].wait(end_if_stopped, timeout_s=patience)
            found["start_s"][name] = servers[name].start_s
        if found["start_s"].keys() == servers.keys():
            STARTED.add(family.name)
        say(f"{family.name}: started, s: {found['start_s']}")
        with ASKING[ranks]:
            asking = time.monotonic()
            # on a CPU there is one kernel for all
            falls_back = family.has_mla and not small
            for name, checked in part(
                servers, folder, family, seeded=seeded, has_widths=not falls_back
            ):
                found["checks"][name] = checked
                if name in ("exact", "deployed"):
                    how = expected_worker(family, name, small=small, seeded=seeded)
                    checked |= checks.check_worker(servers[name], how, falls_back=falls_back)
                    checked |= checks.check_compared(servers[name]) if ranks > 1 else {}
                failed = {each: result for each, result in checked.items() if result != "ok"}
                told = f"{len(checked) - len(failed)} of {len(checked)} checks passed"
                say(f"{family.name}, {name}: {told} {failed or ''}")
                found["ask_s"][name] = round(time.monotonic() - asking, 1)

    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        try:
            for name, server in start(family, folder, small=small, ranks=ranks, seeded=seeded):
                servers[name] = server
                RUNNING.add(server)
            # each part begins once its own servers have started
            with ThreadPoolExecutor(len(PARTS)) as pool:
                asked = [
                    pool.submit(ask, part, names)
                    for part, wanted in PARTS.items()
                    if (names := [name for name in wanted if name in servers])
                ]
            for each in asked:
                each.result()
        # one family's failure must not hide the others; a server refuses a port by SystemExit
        except (Exception, SystemExit) as error:
            end_if_stopped()
            say(traceback.format_exc())
            found["error"] = f"{type(error).__name__}: {str(error)[-2000:]}"
        finally:
            for server in servers.values():
                server.stop()
                RUNNING.discard(server)
        if not is_fine(found):
            found["logs"] = {name: server.log()[-KEPT_LOG:] for name, server in servers.items()}
    found["seconds"] = round(time.monotonic() - began, 1)
    return found


def end_if_stopped() -> None:
    """End the thread of a family after Ctrl-C."""
    if STOPPED.is_set():
        raise KeyboardInterrupt


def check_texts(
    servers: dict[str, Server], folder: Path, family: Family, *, seeded: bool, has_widths: bool
) -> Iterator[tuple[str, dict[str, str]]]:
    """Compare answers with plain decoding's; yield the name and the check results of each server
    that was."""
    prompts = checks.draw_prompts()
    if seeded:
        yield "exact", checks.check_seeded(servers["plain"], servers["exact"], prompts)
        return
    wanted = checks.ask_plain(servers["plain"], prompts)
    if "one rank" in servers:
        alone = checks.ask_plain(servers["one rank"], prompts)
        yield "plain", checks.check_one_rank(wanted, alone)
    script = script_folder(folder, "exact")
    found = checks.check_exact(servers["exact"], prompts, wanted, script, has_widths=has_widths)
    yield "exact", found


def check_deployed(
    servers: dict[str, Server], folder: Path, family: Family, **_: Any
) -> Iterator[tuple[str, dict[str, str]]]:
    """The same for the server in half precision, whose texts are not compared."""
    script = script_folder(folder, "deployed")
    prompts, flips_often = checks.draw_prompts(), family.flips_often
    server = servers["deployed"]
    found = checks.check_answers(server, prompts, script, flips_often=flips_often)
    yield "deployed", found | checks.check_prefills(server)


Part = Callable[..., Iterator[tuple[str, dict[str, str]]]]
# with the servers that each asks
PARTS: dict[Part, tuple[str, ...]] = {
    check_texts: ("plain", "exact", "one rank"),
    check_deployed: ("deployed",),
}


def run_recipe(has_started: Callable[[], None]) -> dict[str, Any]:
    """Serve the 31B at full size, call `has_started`, and return its start-up, its answer and its
    step time."""
    began = time.monotonic()
    options = recipes.parse(
        ["--recipes", RECIPE.recipe, "--requests", "1", "8", "--port", str(free_port())]
        + ["--lengths", "73", "313", "--tries", "1", "2", "--cuda-graph-max-bs-decode", "8"]
        + ["--max-total-tokens", str(RECIPE_TOKENS)]
    )
    try:
        [(_, found)] = recipes.run_group(
            [RECIPE], options, timeout_s=START_TIMEOUT_S, have_started=has_started
        )
    except (Exception, SystemExit) as error:  # the families' results must not be lost
        say(traceback.format_exc())
        found = {"error": f"{type(error).__name__}: {str(error)[-2000:]}"}
    return found | {"seconds": round(time.monotonic() - began, 1)}


def result_file(report: dict[str, Any]) -> Path:
    """Return where a whole result belongs, by its GPU, release of SGLang and ranks."""
    card = str(report["gpu"]).split()[-1].lower()
    of_release = "" if report["sglang"] == release.NEWEST else f"-{report['sglang']}"
    ranks = report.get("ranks") or 1
    of_ranks = "" if ranks == 1 else f"-tp{ranks}"
    return RESULTS / f"smoke{of_release}{of_ranks}-{card}.json"


def names_of(ranks: int, sglang: str | None) -> list[str]:
    """Return the families of a whole smoke test on so many ranks, with a release of SGLang."""
    if ranks > 1:
        return list(ON_TWO_RANKS)
    has_states = sglang not in WITHOUT_STATES
    served = [family for family in FAMILIES if has_states or not family.has_states]
    return [family.name for family in served]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--tp",
        type=int,
        choices=(1, 2),
        default=1,
        help="ranks of a server, all on one GPU; default: %(default)s",
    )
    parser.add_argument("--families", nargs="+", help="default: all")
    parser.add_argument(
        "--at-once",
        type=int,
        default=4,
        help="families to run on the GPU at once, quantised ones aside; default: %(default)s",
    )
    parser.add_argument("--no-recipe", action="store_true", help="skip the full-sized 31B recipe")
    parser.add_argument(
        "--commit", help="commit to record if the tree is a copy without git history"
    )
    parser.add_argument("--out", type=Path, help="default: in benchmarks/results")
    options = parser.parse_args(arguments)
    names = names_of(options.tp, release.installed())
    options.families = names if options.families is None else options.families
    if unknown := set(options.families) - set(names):
        parser.error(f"--families knows {', '.join(names)}, not {', '.join(sorted(unknown))}")
    has_recipe = options.tp > 1 or not options.no_recipe
    options.is_whole = set(options.families) == set(names) and has_recipe
    if not options.is_whole and options.out is None:
        parser.error(
            "this is a part of the smoke test, which would replace the result of the whole: name "
            "a file by --out"
        )
    # it is for one rank
    options.no_recipe |= options.tp > 1
    return options


def named(name: str) -> Family:
    """Return a family of the command line."""
    [family] = [each for each in FAMILIES if each.name == name.partition(",")[0]]
    return family


def run_all(
    options: argparse.Namespace, progress: Progress, keep: Callable[[dict[str, Any]], None]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run the families of the command line, several at once, and the recipe; print and return their
    results, and hand over those of the families after each of them."""
    results: dict[str, Any] = {}
    recipe: dict[str, Any] = {}
    one_by_one = threading.Lock()

    def run_named(name: str) -> None:
        end_if_stopped()
        seeded = options.tp > 1 and ON_TWO_RANKS[name]
        found = run_family(named(name), ranks=options.tp, seeded=seeded)
        with one_by_one:
            results[name] = found
            say(json.dumps({name: found}, indent=1))
            progress.step(", ".join(each for each in options.families if each not in results))
            keep(results)

    progress.name(", ".join(options.families))
    with (
        ThreadPoolExecutor(options.at_once) as pool,
        # each has one server, which mostly waits for SGLang's compiler
        ThreadPoolExecutor(len(FAMILIES)) as beside,
        stopping(),
    ):
        running = {
            name: (beside if named(name).is_compiled else pool).submit(run_named, name)
            for name in options.families
        }
        if not options.no_recipe:
            wait_for_room(running)
            recipe = {RECIPE.key: run_recipe(lambda: wait_for_all(running))}
            say(json.dumps(recipe, indent=1))
            progress.step()
        wait_for_all(running)
    return {name: results[name] for name in options.families}, recipe


def wait_for_all(running: dict[str, Future[None]]) -> None:
    """Wait until all families have ended."""
    for ended in as_completed(running.values()):
        ended.result()


def wait_for_room(running: dict[str, Future[None]]) -> None:
    """Wait until the recipe can start: beside servers that have what they need of the GPU's memory,
    or alone. Those that SGLang compiles kernels for have loaded their weights long before."""
    while left := [name for name, ended in running.items() if not ended.done()]:
        is_starting = any(name not in STARTED and not named(name).is_compiled for name in left)
        if not is_starting and gpu.free_gib() >= RECIPE_GIB:
            return
        time.sleep(LOOK_S)
    wait_for_all(running)


@contextlib.contextmanager
def stopping() -> Iterator[None]:
    """On Ctrl-C stop all servers, so that their families end, whose threads are waited for."""
    try:
        yield
    except KeyboardInterrupt:
        STOPPED.set()
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda server: server.stop(), list(RUNNING)))
        raise


def main() -> None:
    options = parse()
    if not torch.cuda.is_available():
        raise SystemExit("The smoke test needs a GPU that torch can use; `make test` does not.")
    # `timeout` sends SIGTERM: the servers, which threads start, must not outlive this program
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    began = time.monotonic()
    report: dict[str, Any] = result_files.provenance(options.commit) | {"ranks": options.tp}
    out = options.out or result_file(report)
    out.parent.mkdir(parents=True, exist_ok=True)
    # what there is if the run is cut off, for tests.smoke.join
    part = out.with_suffix(".part.json")

    def write(path: Path, *, is_whole: bool, **found: Any) -> None:
        report.update(found)
        report["passed"] = not failed(report)
        report["whole"] = is_whole
        report["seconds"] = round(time.monotonic() - began, 1)
        path.write_text(json.dumps(report, indent=1) + "\n")

    with (
        compiling_sampler(),
        Progress(len(options.families) + (not options.no_recipe), "parts") as progress,
    ):
        report["families"], recipe = run_all(
            options, progress, lambda found: write(part, is_whole=False, families=found)
        )
        if not options.no_recipe:
            report["recipe"] = recipe
    write(out, is_whole=options.is_whole)
    part.unlink(missing_ok=True)
    verdict = "passed" if report["passed"] else "FAILED"
    told = "" if options.is_whole else ", in part"
    print(f"smoke {verdict}{told}, in {report['seconds']:.0f} s: {out}")
    raise SystemExit(0 if report["passed"] else 1)


if __name__ == "__main__":
    sys.exit(end_on_interrupt("smoke", main))
