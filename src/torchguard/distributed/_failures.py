"""Which rank a collective failed for.

If a rank dies, a collective of the others fails with an error of the transport, such as "Connection closed by peer", or
with a timeout. Neither names the rank. So while `name_failures` is active, each rank has a note in the store of the
process group, in which a thread counts up a number. A rank whose number stands still is dead. Of a rank on the same
machine, the system tells more, and at once: whether its process is there. A rank that leaves the block writes how into
its note, so that the others know what they waited for.

After a failure one rank reads the notes of all, in a few requests, and the others wait for what it finds: thousands of
ranks that read thousands of notes each would keep the store busy for hours.

With NCCL no collective fails: it waits on the GPU, and Python with it. So the thread of each rank reads the note of the
next rank, too. If that one is dead, it writes so into the store, and the threads of all ranks log it.
"""

import contextlib
import datetime
import itertools
import json
import logging
import os
import platform
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from torchguard._torch.collectives import default_store
from torchguard.distributed._group import Group, group_of
from torchguard.exceptions import RankFailedError

logger = logging.getLogger("torchguard")

# Of each group: how many blocks this process has entered. The same on all ranks, so that keys match.
_entered: Counter[str] = Counter()
_REQUEST = 1024  # notes; the time of a larger request grows with the square of its size
_LONG = 10  # intervals without a sign of life, after which a rank on another machine is logged as dead


@contextlib.contextmanager
def name_failures(group: Group = None, *, interval: float | None = None) -> Iterator[None]:
    """In the block, an error of a collective names the ranks that caused it: `RankFailedError`.

    A rank that waits for another gets its error when the collective fails: at once if the connection is closed, and
    after the timeout of the process group otherwise. Naming takes up to three intervals more, less if all ranks are on
    one machine. Put it around the training loop, on every rank of the group. With NCCL, whose collectives wait on the
    GPU, Python gets no error: there the dead rank is named in the log. So it is whatever else a rank waits for.

    Args:
        group: the ranks that the block waits for; all by default.
        interval: seconds between two signs of life. By default 1, and with more than 1,000 ranks as many as there are
            thousands of ranks: the store gets 5,000 requests a second at most.
    """
    ranks = group_of("name_failures", group)
    if ranks is None:
        yield
        return
    board = _Board(ranks, max(1.0, dist.get_world_size(ranks) / 1000) if interval is None else interval)
    try:
        yield
    except Exception as error:
        is_transport = _is_of_transport(error)
        board.post("failed" if is_transport else "raised", f"{type(error).__name__}: {error}")
        causes = board.causes() if is_transport else {}
        board.linger()
        if not causes:
            raise
        listed = "; ".join(f"rank {rank} {text}" for rank, text in causes.items())
        raise RankFailedError(f"{listed}. Rank {board.rank} waited for it: {error}", causes) from error
    else:
        board.post("left", "the block, and takes part in no more collectives")
    finally:
        board.close()


def _is_of_transport(error: Exception) -> bool:
    """Whether an error is one of a collective. gloo raises plain RuntimeErrors, with its source file in the text.

    Their words alone tell nothing: a `DataLoader` times out as well.
    """
    is_named = any(word in str(error).lower() for word in ("gloo", "nccl"))
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and is_named)


class _Board:
    """Notes of all ranks in the store: "alive", a number and the process, or how the rank left the block."""

    def __init__(self, group: dist.ProcessGroup, interval: float) -> None:
        self.rank, self._interval = dist.get_rank(), interval
        self._others = [rank for rank in dist.get_process_group_ranks(group) if rank != self.rank]
        name = group.group_name
        _entered[name] += 1
        self._prefix = f"torchguard/{name}/{_entered[name]}"
        self._store = default_store()
        self._is_closed = threading.Event()
        self._process = _own_process()
        self._found: dict[int, str] = {}  # by another rank
        self._store.set(self._key(self.rank), f"alive 0 {self._process}")
        self._thread = threading.Thread(target=self._count, args=(default_store(),), daemon=True)
        self._thread.start()

    def _key(self, rank: int) -> str:
        return f"{self._prefix}/{rank}"

    def _count(self, store: Any) -> None:
        number, deaths, neighbour = 0, 0, _Neighbour(self.rank, self._others, self._interval)
        while not self._is_closed.wait(self._interval):
            number += 1
            try:
                store.set(self._key(self.rank), f"alive {number} {self._process}")
                if not self._found and store.check([f"{self._prefix}/found"]):
                    self._found = self._read_found(store)
                if died := neighbour.death(lambda rank: _value(store, self._key(rank))):
                    store.set(f"{self._prefix}/death/{store.add(f'{self._prefix}/deaths', 1)}", died)
                if died := _value(store, f"{self._prefix}/death/{deaths + 1}"):
                    deaths += 1
                    logger.error("%s. Rank %d may wait for it in a collective.", died, self.rank)
            except dist.DistError:  # the store is gone, which the others notice as well
                return

    def post(self, kind: str, text: str) -> None:
        """Say how this rank left the block: it "raised", "failed" in a collective, or just "left"."""
        self.close()  # or the thread would write over it
        with contextlib.suppress(dist.DistError):  # without the store, no rank could read it
            self._store.set(self._key(self.rank), f"{kind} {text}"[:2000])

    def close(self) -> None:
        self._is_closed.set()
        self._thread.join()

    def causes(self) -> dict[int, str]:
        """The ranks that a collective failed for, with what is known of each."""
        try:
            found = self._agreed()
        except dist.DistError as error:
            if self._found or not _store_of_rank_0(self._store) or not self.rank:
                found = self._found
            else:
                found = {0: f"has ended: it hosts the store of the process group, which is gone ({error})"}
        return {rank: text for rank, text in found.items() if rank != self.rank}

    def _agreed(self) -> dict[int, str]:
        """What one rank finds, which is the first to ask. If that one dies meanwhile, the next."""
        key = f"{self._prefix}/found"
        for turn in itertools.count():
            if self._store.add(f"{self._prefix}/turn/{turn}", 1) == 1:
                self._store.set(
                    key, json.dumps(self._ended("raised") or self._dead() or self._ended("left") or self._absent())
                )
            # A timeout is a DistError of some stores and a plain RuntimeError of others.
            with contextlib.suppress(RuntimeError):
                self._store.wait([key], datetime.timedelta(seconds=10 * self._interval + 30))
            if self._store.check([key]):
                return self._read_found(self._store)
        raise AssertionError

    def _read_found(self, store: Any) -> dict[int, str]:
        return {int(rank): text for rank, text in json.loads(store.get(f"{self._prefix}/found")).items()}

    def linger(self) -> None:
        """Keep the store for the others, if this rank hosts it, until each has read what it was that failed."""
        if self.rank == 0 and _store_of_rank_0(self._store):
            time.sleep(2 * self._interval)

    def _ended(self, how: str) -> dict[int, str]:
        """The ranks that are no longer in the block, by their own doing."""
        return {rank: note for rank, note in self._notes().items() if note.startswith(how)}

    def _dead(self) -> dict[int, str]:
        before = self._notes()
        end, silent = time.monotonic() + 3 * self._interval, dict.fromkeys(self._others, _RUNS)
        while silent and time.monotonic() < end:
            time.sleep(self._interval / 4)
            now = self._notes()
            silent = {
                rank: _state(now.get(rank, ""))
                for rank in silent
                if now.get(rank) == before.get(rank) and _is_alive(now.get(rank))
            }
            if _ENDED in silent.values() and "" not in silent.values():  # of all others, the system tells
                break
        return self._ended("raised") or {
            rank: state or _silent(3 * self._interval) for rank, state in sorted(silent.items()) if state != _RUNS
        }

    def _absent(self) -> dict[int, str]:
        """Ranks that are alive, and did not fail in a collective as this one did."""
        notes = self._notes()
        running = [rank for rank in self._others if _is_alive(notes.get(rank))]
        return dict.fromkeys(running, "is alive, and did not take part in the collective, or waits for another one")

    def _notes(self) -> dict[int, str]:
        """The notes of the others. One that never came into the block has none."""
        found = {}
        for start in range(0, len(self._others), _REQUEST):
            there = self._with_note(self._others[start : start + _REQUEST])
            notes = self._store.multi_get([self._key(rank) for rank in there]) if there else []
            found |= {rank: note.decode() for rank, note in zip(there, notes, strict=True)}
        return found

    def _with_note(self, ranks: list[int]) -> list[int]:
        """Those of some ranks that have a note: one question if all have, and few if few have none."""
        if not ranks or self._store.check([self._key(rank) for rank in ranks]):
            return ranks
        half = len(ranks) // 2
        return self._with_note(ranks[:half]) + self._with_note(ranks[half:]) if half else []


class _Neighbour:
    """The next rank of a rank. If that one is dead, or has left the block, the one after it."""

    def __init__(self, rank: int, others: list[int], interval: float) -> None:
        self._interval = interval
        self._ranks = [*(one for one in others if one > rank), *(one for one in others if one < rank)]
        self._note, self._times = "", 0  # how often the same note was read again

    def death(self, note_of: Callable[[int], str]) -> str:
        """Which rank has died, and how that is known; "" if the next one has not."""
        note = ""
        while self._ranks and not _is_alive(note := note_of(self._ranks[0])):
            self._ranks.pop(0)
        self._note, self._times = note, self._times + 1 if note == self._note else 0
        state = _state(note)
        if not self._ranks or not note or not (state == _ENDED or (not state and self._times >= _LONG)):
            return ""
        return f"Rank {self._ranks.pop(0)} {state or _silent(_LONG * self._interval)}"


def _value(store: Any, key: str) -> str:
    """What the store has for a key; "" if nothing. To get it would wait."""
    return store.get(key).decode() if store.check([key]) else ""


def _is_alive(note: str | None) -> bool:
    """Whether a rank has not said that it left the block."""
    return not note or note.startswith("alive")


def _store_of_rank_0(store: Any) -> bool:
    """Whether the store ends with rank 0. That of `torchrun` is in its agent."""
    while hasattr(store, "underlying_store"):  # of a PrefixStore
        store = store.underlying_store
    is_tcp = isinstance(store, dist.TCPStore)  # pyright: ignore[reportPrivateImportUsage]
    return is_tcp and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


# What the system tells of a process.
_RUNS, _STOPPED, _ENDED = "runs", "is stopped", "died: its process has ended"


def _silent(seconds: float) -> str:
    return f"died or is stopped: no sign of life for {seconds:g} s"


def _own_process() -> str:
    """This process: machine, boot, namespace of ids, id and start. "" where the system does not tell."""
    try:
        boot, names = Path("/proc/sys/kernel/random/boot_id").read_text().strip(), Path("/proc/self/ns/pid").readlink()
        return f"{platform.node()} {boot} {names} {os.getpid()} {_stat(os.getpid())[19]}"
    except OSError:
        return ""


def _state(note: str) -> str:
    """What the system tells of the process in a note; "" if it is one of another machine or container."""
    *machine, pid, start = note.split()[2:] or ["", ""]
    if not machine or machine != _own_process().split()[:-2]:
        return ""
    try:
        found = _stat(int(pid))
    except OSError:
        return _ENDED
    if found[0] in "ZX" or found[19] != start:
        return _ENDED
    return _STOPPED if found[0] in "Tt" else _RUNS


def _stat(pid: int) -> list[str]:
    """State, parent and so on of a process; the start is the 20th (proc(5))."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
