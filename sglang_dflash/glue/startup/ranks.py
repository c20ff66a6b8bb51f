"""The ranks of a server meet before anything is loaded: all of them, and with the same settings.

SGLang waits ten minutes or more for a rank that never comes, and does not compare what the ranks
were given: different blocks would wait for each other for ever, and shards of different drafters
would draft nonsense. From then on they tell each other that they are alive.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch.distributed import DistError

from sglang_dflash import __version__
from sglang_dflash.checkpoint import fingerprint
from sglang_dflash.environment import Environment
from sglang_dflash.glue import compat, release, seams
from sglang_dflash.glue.startup.early_exit import Refusal
from sglang_dflash.glue.startup.server_args import resolve_config
from sglang_dflash.heartbeat import Heartbeat, Place, reachable_host

logger = logging.getLogger(__name__)

# seconds to wait for the other nodes, unless --dist-timeout says otherwise: only for their first
# meeting, whereas SGLang's argument also limits every later wait of a rank for another
PATIENCE_S = 60
ADVICE = (
    "Start every node with the same --dist-init-addr, a free port of the first one, the same "
    "--nnodes and --tp-size, and a --node-rank of its own, or pass a longer --dist-timeout."
)
WEIGHTS = "drafter's weights"
# seconds from a rank's conclusion that another is gone to the end: others say the same meanwhile
LAST_WORDS_S = 2.0
# seconds for SGLang's own diagnosis: it logs the stack of every rank
DIAGNOSIS_S = 10.0
# of this process, once the ranks have met, and where all of them are
_heartbeat: list[tuple[Heartbeat, Sequence[Place]]] = []


def meet(original: Any, **how: Any) -> None:
    """Wrap SGLang's meeting of the ranks; end this rank, with a sentence, if one does not come or
    was given other settings."""
    settings = seams.settings()
    if settings.speculative_algorithm != "DFLASH":
        original(**how)
        return
    count, place = how["world_size"], how["distributed_init_method"]
    missing = f"Not all of the {count} ranks came to {place} within {PATIENCE_S} s. {ADVICE}"
    is_ours_to_limit = settings.nnodes > 1 and how["timeout"] is None
    try:
        with giving_up(missing) if is_ours_to_limit else contextlib.nullcontext():
            original(**how)
    except DistError as error:
        found = str(error).strip().splitlines()[0]
        raise Refusal(f"The {count} ranks did not meet at {place} ({found}). {ADVICE}") from error
    group = compat.get_world_group()
    if group.world_size > 1:
        refuse_different(group.all_gather_object(described(settings)))
        get_to_know(group, settings)


def get_to_know(group: Any, settings: Any) -> None:
    """Learn where the other ranks are."""
    first = settings.dist_init_addr if settings.nnodes > 1 else None
    own = Heartbeat(
        group.rank_in_group,
        group.world_size,
        host=reachable_host(first),
        patience_s=Environment().rank_patience,
    )
    _heartbeat[:] = [(own, group.all_gather_object(own.place))]


def watched(loop: Callable[[], None]) -> None:
    """Run this rank's event loop; end the server, naming the rank, if another is gone."""
    own, places = _heartbeat[0] if _heartbeat else (None, ())
    if own is None or own.patience_s == 0:
        loop()
        return
    own.start(places, end=end_server)
    try:
        loop()
    except Exception:
        # a collective fails at once if another process has ended, but does not say which
        own.explain()
        # until its process ends this rank still answers: the others must name the first that ended
        raise
    own.stop()


def begin_step() -> None:
    """Tell the other ranks that this one takes part in another step."""
    for own, _ in _heartbeat:
        own.begin_step()


def end_server(reason: str) -> None:
    """End this server, with a sentence; returns at once."""
    logger.error("%s This server ends.", reason)
    for own, _ in _heartbeat:
        own.is_explained()
    threading.Thread(target=_end_soon, daemon=True).start()


def _end_soon() -> None:
    time.sleep(LAST_WORDS_S)
    # as SGLang's own ranks do when they fail: its main process then ends all of them
    server = os.getppid()
    os.kill(server, signal.SIGQUIT)
    # it would wait a minute for dumps of GPUs first; all ranks end with it
    time.sleep(DIAGNOSIS_S)
    os.kill(server, signal.SIGKILL)


@contextlib.contextmanager
def giving_up(reason: str) -> Iterator[None]:
    """End the server after a while, from a thread of its own, unless the context ends before."""
    has_ended = threading.Event()

    def watch() -> None:
        if not has_ended.wait(PATIENCE_S):
            logger.error(reason)
            # as SGLang's own ranks do when they fail: its main process then ends all of them
            os.kill(os.getppid(), signal.SIGQUIT)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        has_ended.set()


def described(server_args: Any) -> dict[str, Any]:
    """Return what must be the same on every rank, as plain values by name."""
    config = resolve_config(server_args, target_config=seams.model_config(server_args))
    # the same drafter may lie in different places
    path = Path(config.drafter.name)
    config = replace(config, drafter=replace(config.drafter, name=""))
    found = {"sglang_dflash version": __version__, "SGLang version": release.installed()}
    for name, value in asdict(config).items():
        if isinstance(value, dict):
            found |= {f"{name}'s {part}": own for part, own in value.items()}
        else:
            found[name] = value
    return found | {WEIGHTS: fingerprint(path)}


def refuse_different(ranks: Sequence[Mapping[str, Any]]) -> None:
    """Raise Refusal if a rank differs from the first one, naming the first difference."""
    first, *others = ranks
    for rank, other in enumerate(others, start=1):
        for name, value in first.items():
            found = other.get(name)
            # not known where a drafter is named by its repository
            is_unknown = name == WEIGHTS and None in (value, found)
            if found != value and not is_unknown:
                raise Refusal(
                    f"The ranks of this server disagree on the {name.replace('_', ' ')}: it is "
                    f"{value} on rank 0 and {found} on rank {rank}. Start every node with the "
                    "same sglang_dflash, drafter, arguments and environment."
                )
