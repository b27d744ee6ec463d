"""The path of each bad sample through a model: at which checks of a call it was bad, one bit a check.

The path is part of `CallSummary.origins`, so it leaves a graph, and a device, with the origins. Below the origin of a
sample there is a row for the *order* of the call, and rows of words with a bit for every check. The order is the
location of each check, in the order in which the checks ran. It is not the order in which the model defines its
modules: a model may skip a module or call it several times.

An order is known by a number, which is a constant of a graph. It is the hash of its locations, since torch's caches
hand a graph to other processes. A process that has never met the order (Dynamo did not trace the graph there) finds no
entry for the number, and reports that the path was not recorded.
"""

import functools
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from torchguard._torch.tracing import constant_in_graphs, in_transform, is_traced

# In place of the number of an order: paths are not recorded.
NO_ORDER = -1
# The bits of a word. The sign stays free: -1 stands for "none" in the rows of origins.
WORD_BITS = 62
# A call with more checks records no paths: 992 of them are more than 100 blocks of a transformer have.
MAX_WORDS = 16
# Orders of eager calls may vary without end. Those met later are not recorded.
_MAX_ORDERS = 4_096
_ORDERS: dict[int, tuple[int, ...]] = {}


@constant_in_graphs
def order_number(locations: tuple[int, ...]) -> int:
    """The number of an order, which can be read from now on; `NO_ORDER` if it is too long or there are too many."""
    number = hash(locations) & ((1 << WORD_BITS) - 1)  # the same in every process: hashes of integers are not salted
    if _num_words(len(locations)) > MAX_WORDS or (len(_ORDERS) >= _MAX_ORDERS and number not in _ORDERS):
        return NO_ORDER
    return number if _ORDERS.setdefault(number, locations) == locations else NO_ORDER


def _num_words(checks: int) -> int:
    return -(-checks // WORD_BITS)


class CallOrder(NamedTuple):
    """The order of the checks of a call, for the paths of its samples.

    Args:
        number: that of the order, or `NO_ORDER`.
        checks: how many checks the call made.
        kept: the numbers of those that are summarized; the others checked nothing.
    """

    number: int
    checks: int
    kept: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        """The number of rows that a path takes below the origins."""
        return 0 if self.number == NO_ORDER else 1 + _num_words(self.checks)

    def rows(self, check: Tensor) -> Tensor:
        """The rows of the paths, `(num_rows, batch)`.

        Args:
            check: `(found, batch)`: the checks at which each sample was bad, counted among those that were kept. For
                none, the number of these.
        """
        words = _bits(self.kept, self.checks, check)[check].sum(0)  # each bit comes once, so the sum has them all
        return torch.cat([torch.full_like(words[:, :1], self.number), words], -1).t()


def all_checks(number: int, checks: int) -> CallOrder:
    """The order of a call, all of whose checks are kept."""
    return CallOrder(number, checks, tuple(range(checks)))


def _bits(numbers: tuple[int, ...], checks: int, like: Tensor) -> Tensor:
    """The words of each check, `(checks + 1, words)`. The last row is for none."""
    if torch.compiler.is_compiling() or is_traced(like) or in_transform():
        return torch.tensor(_bit_lists(numbers, checks), device=like.device)
    return _cached_bits(numbers, checks, like.device)


def _bit_lists(numbers: tuple[int, ...], checks: int) -> list[list[int]]:
    words = range(_num_words(checks))
    return [[1 << i % WORD_BITS if i // WORD_BITS == word else 0 for word in words] for i in numbers] + [
        [0 for _ in words]
    ]


@functools.lru_cache(64)
def _cached_bits(numbers: tuple[int, ...], checks: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(_bit_lists(numbers, checks), device=device)


def read_path(rows: Sequence[int]) -> tuple[int, ...]:
    """The locations at which a sample was bad, in the order of the checks; empty where that is not known.

    Successive checks of one location count once: a module may return several tensors.
    """
    order, *words = rows or (NO_ORDER,)
    locations = _ORDERS.get(order, ())
    found = [location for i, location in enumerate(locations) if words[i // WORD_BITS] >> i % WORD_BITS & 1]
    return tuple(location for location, _ in groupby(found))
