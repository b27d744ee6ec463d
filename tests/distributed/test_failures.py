"""A rank that dies, raises or stays away: the others get an error that names it, within the timeout."""

import logging
import os
import re
import signal
import socket
import time

import pytest
import torch
import torch.distributed as dist

from torchguard import distributed
from torchguard.distributed import _failures
from torchguard.testing import run_ranks
from torchguard.testing._processes import outcomes


def step(how, bad):
    """Some collectives, of which rank `bad` does not reach the second."""
    try:
        with distributed.name_failures(interval=0.1):
            dist.all_reduce(torch.ones(1))
            if dist.get_rank() == bad:
                how()
            for _ in range(3):
                dist.all_reduce(torch.ones(1))
    except distributed.RankFailedError as error:
        return [*error.ranks], str(error)
    return [], ""


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def fail():
    raise ValueError("no such file")


@pytest.mark.parametrize("bad", [0, 2])
def test_a_rank_that_is_killed(bad):
    found = outcomes(step, kill, bad, size=4, timeout=20)
    assert found[bad][0] == "died"
    for rank in {*range(4)} - {bad}:
        ranks, message = found[rank][1]
        assert ranks == [bad], message
        assert f"rank {bad} died" in message


@pytest.mark.parametrize("machine", ["one", pytest.param("several", marks=pytest.mark.long)])
def test_a_death_is_logged_where_no_collective_fails(machine, monkeypatch):
    """As under NCCL: a rank waits for what Python does not see."""
    monkeypatch.setattr(_failures, "_state", _failures._state if machine == "one" else lambda note: "")

    def wait_for_the_log():
        lines = []
        handler = logging.Handler()
        handler.emit = lambda record: lines.append(record.getMessage())
        logging.getLogger("torchguard").addHandler(handler)
        with distributed.name_failures(interval=0.1):
            dist.all_reduce(torch.ones(1))
            if dist.get_rank() in (1, 2):
                kill()
            end = time.monotonic() + 15
            while len(lines) < 2 and time.monotonic() < end:
                time.sleep(0.05)
        return sorted(lines)

    found = outcomes(wait_for_the_log, size=4, timeout=20)
    assert [found[rank][0] for rank in (1, 2)] == ["died", "died"]
    for rank in (0, 3):
        for line, dead in zip(found[rank][1], (1, 2), strict=True):
            assert re.fullmatch(rf"Rank {dead} died.*\. Rank {rank} may wait for it in a collective\.", line)


@pytest.mark.parametrize("bad", [0, 2])
def test_a_rank_that_is_killed_where_rank_0_hosts_the_store(bad):
    """If it is rank 0, the store is gone with it. If it is another, rank 0 ends as well once it has the error."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{one.getsockname()[1]}"

    def run():
        found = step(kill, bad)
        if dist.get_rank() == 0:
            os._exit(0)  # at once, and the store with it
        return found

    found = outcomes(run, size=4, timeout=20, init_method=address)
    text = "has ended: it hosts the store" if bad == 0 else "died: its process has ended"
    for rank in {1, 2, 3} - {bad}:
        ranks, message = found[rank][1]
        assert ranks == [bad], message
        assert message.startswith(f"rank {bad} {text}")


@pytest.mark.long
@pytest.mark.parametrize("machine", ["the same", "another"])
def test_a_rank_that_is_stopped(machine, monkeypatch):
    """Of its own machine a rank sees the process; of others, that signs of life are missing."""
    if machine == "another":
        monkeypatch.setattr(_failures, "_own_process", lambda: f"machine{dist.get_rank()} 0 0")
    found = outcomes(step, lambda: os.kill(os.getpid(), signal.SIGSTOP), 1, size=3, timeout=4)
    assert found[1][0] == "hangs"
    text = {"the same": "rank 1 is stopped", "another": "rank 1 died or is stopped: no sign of life for 0.3 s"}[machine]
    for rank in (0, 2):
        ranks, message = found[rank][1]
        assert (ranks, message[: len(text)]) == ([1], text)


def test_a_rank_that_leaves_the_block_early():
    """As one does whose loader has fewer batches."""

    def run():
        try:
            with distributed.name_failures(interval=0.1):
                for _ in range(3 - dist.get_rank()):
                    dist.all_reduce(torch.ones(1))
        except distributed.RankFailedError as error:
            return str(error)

    first, second = run_ranks(run)
    assert first.startswith("rank 1 left the block, and takes part in no more collectives")
    assert second is None


def test_a_rank_of_one_of_two_groups():
    """The other group goes on, and the ranks of this one are named by their number among all."""

    def run():
        rank = dist.get_rank()
        group = [dist.new_group([0, 1]), dist.new_group([3, 2])][rank // 2]
        try:
            with distributed.name_failures(group, interval=0.1):
                dist.all_reduce(torch.ones(1), group=group)
                if rank == 3:
                    kill()
                dist.all_reduce(torch.ones(1), group=group)
        except distributed.RankFailedError as error:
            return [*error.ranks]
        return []

    found = outcomes(run, size=4, timeout=20)
    assert found[:3] == [("returned", []), ("returned", []), ("returned", [3])]


def time_out():
    raise RuntimeError("DataLoader timed out after 5 seconds")


@pytest.mark.parametrize(
    ("how", "text"),
    [(fail, "ValueError: no such file"), (time_out, "RuntimeError: DataLoader timed out after 5 seconds")],
)
def test_a_rank_that_raises(how, text):
    found = outcomes(step, how, 1, size=3, timeout=20)
    assert text in found[1][1]  # its own error
    assert "RankFailedError" not in found[1][1]
    for rank in (0, 2):
        ranks, message = found[rank][1]
        assert ranks == [1]
        assert f"rank 1 raised {text}" in message


@pytest.mark.parametrize("missing", [[], [1], [2, 3, 11]])
def test_the_notes_of_all_ranks_are_read_in_a_few_requests(missing):
    """Some ranks have none: they never came into the block."""
    board, asked = object.__new__(_failures._Board), []

    class Counting(dist.HashStore):
        def check(self, keys):
            asked.append(keys)
            return super().check(keys)

    board.rank, board._others, board._prefix, board._store = 0, [*range(1, 1000)], "block", Counting()
    for rank in {*board._others} - {*missing}:
        board._store.set(board._key(rank), f"alive 0 {rank}")
    assert board._notes() == {rank: f"alive 0 {rank}" for rank in board._others if rank not in missing}
    assert len(asked) <= 1 + 20 * len(missing)


def test_one_rank_reads_the_notes_and_the_others_take_what_it_finds():
    def run():
        readings = []
        read = _failures._Board._notes
        _failures._Board._notes = lambda self: readings.append(1) or read(self)
        return step(kill, 1), len(readings)

    found = [one for kind, one in outcomes(run, size=4, timeout=20) if kind == "returned"]
    assert [ranks for (ranks, _), _ in found] == [[1]] * 3
    assert sorted(count > 0 for _, count in found) == [False, False, True]


@pytest.mark.long
def test_a_rank_that_is_late():
    found = outcomes(step, lambda: time.sleep(60), 1, size=3, timeout=6)
    assert found[1][0] == "hangs"
    for rank in (0, 2):
        ranks, message = found[rank][1]
        assert ranks == [1]
        assert "rank 1 is alive, and did not take part" in message


def test_errors_that_are_no_collective_s_are_raised_as_they_are():
    def raise_at_once():
        with pytest.raises(RuntimeError, match="mine"), distributed.name_failures(interval=0.1):
            raise RuntimeError("mine")
        return True

    assert run_ranks(raise_at_once) == [True, True]


def test_blocks_can_be_entered_again_and_without_a_process_group():
    with distributed.name_failures():
        pass
    assert run_ranks(lambda: [step(int, 0) for _ in range(3)]) == [[([], "")] * 3] * 2


def test_a_process_that_fails_is_named_by_the_runner():
    def run():
        if dist.get_rank() == 1:
            raise ValueError("no such file")

    with pytest.raises(
        distributed.RankFailedError, match=re.compile("1 of 2 ranks.*rank 1 raised.*no such", re.DOTALL)
    ):
        run_ranks(run)
