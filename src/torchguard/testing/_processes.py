"""Functions run on several ranks: processes forked from this one and joined by gloo.

Forked, not spawned: a child has imported torch already, and can run closures, which cannot be pickled. A child must not
use OpenMP threads, which a fork does not copy, so it computes with one thread. It leaves by `os._exit`: gloo's
destructor may wait for a thread that waits for the interpreter.
"""

import datetime
import multiprocessing
import multiprocessing.connection
import os
import pickle
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from torchguard.exceptions import RankFailedError

Result = TypeVar("Result")


def run_ranks(function: Callable[..., Result], *args: Any, size: int = 2, timeout: float = 60) -> list[Result]:
    """Call `function(*args)` on several gloo ranks on the CPU, and return what each of them returned.

    Args:
        function: any callable; `torch.distributed.get_rank()` tells it where it runs. What it returns is pickled.
        size: the number of ranks.
        timeout: seconds for the whole call. A collective may take half of that.

    >>> run_ranks(lambda: torch.distributed.get_rank() + 1, size=2)
    [1, 2]
    """
    found = outcomes(function, *args, size=size, timeout=timeout)
    failed = {rank: f"{kind}: {value}" for rank, (kind, value) in enumerate(found) if kind != "returned"}
    if failed:
        lines = [f"rank {rank} {text}" for rank, text in failed.items()]
        raise RankFailedError("\n".join([f"run_ranks: {len(failed)} of {size} ranks failed.", *lines]), failed)
    return [value for _, value in found]


Outcome = tuple[str, Any]  # "returned" and a value; "raised" and text; "died" or "hangs" and a note


def outcomes(
    function: Callable[..., Any], *args: Any, size: int, timeout: float, init_method: str | None = None
) -> list[Outcome]:
    """What became of each rank that called a function. They meet in a file, or as `init_method` says."""
    if dist.is_initialized():
        raise RankFailedError("run_ranks: this process belongs to a process group already. Destroy it first.", {})
    context = multiprocessing.get_context("fork")
    ranks = []
    with tempfile.TemporaryDirectory(prefix="torchguard") as folder:
        meeting = init_method or f"file://{Path(folder, 'store')}"
        try:
            for rank in range(size):
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(target=_run, args=(function, args, rank, size, meeting, timeout / 2, sender))
                with warnings.catch_warnings():  # Python 3.12 warns of threads, torch's among them
                    warnings.simplefilter("ignore", DeprecationWarning)
                    process.start()
                sender.close()
                ranks.append((process, receiver))
            return _collect(ranks, time.monotonic() + timeout)
        finally:
            for process, receiver in ranks:
                process.kill()
                process.join()
                receiver.close()


def _run(
    function: Callable[..., Any], args: Any, rank: int, size: int, meeting: str, timeout: float, sender: Any
) -> None:
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=timeout)
    try:
        dist.init_process_group("gloo", meeting, limit, size, rank)
        outcome: Outcome = "returned", function(*args)
        sent = pickle.dumps(outcome)
    except BaseException:
        sent = pickle.dumps(("raised", traceback.format_exc()))
    sender.send_bytes(sent)
    sender.close()
    os._exit(0)


def _collect(ranks: list[tuple[Any, Any]], end: float) -> list[Outcome]:
    """The outcome of each rank. Every rank is kept alive until all have one: others may still wait for its data."""
    found: dict[Any, Outcome] = {}
    while len(found) < len(ranks):
        waiting = [receiver for _, receiver in ranks if receiver not in found]
        ready = multiprocessing.connection.wait(waiting, timeout=max(0.0, end - time.monotonic()))
        for receiver in ready:
            try:
                found[receiver] = pickle.loads(receiver.recv_bytes())  # pyright: ignore[reportAttributeAccessIssue]
            except EOFError:
                found[receiver] = "died", "the process ended without a result"
        if not ready:
            found |= dict.fromkeys(waiting, ("hangs", "no result within the timeout"))
    return [found[receiver] for _, receiver in ranks]
