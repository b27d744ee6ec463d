"""The kernels that summarize a call on a GPU, against what they do in plain Python."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.watch import summary_model

from torchguard._watch.history_table import empty_table

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = torch.device("cuda")
INF = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00, torch.float32: 0x7F800000, torch.float64: 0x7FF0000000000000}
NUMBERS = [0.0, 1.0, -2.0, 1e4, float("inf"), -float("inf"), float("nan")]
ORDER = 2**61 + 12345


@st.composite
def calls(draw):
    """Statuses of a call by their size in bytes, the table of its checks, and how it is summarized."""
    batch, checks = draw(st.sampled_from([1, 3, 40])), draw(st.sampled_from([1, 2, 9, 70]))
    seed, is_bad = draw(st.integers(0, 2**20)), draw(st.sampled_from([0.0, 0.001, 0.02, 0.5]))
    random = torch.Generator().manual_seed(seed)
    dtypes = draw(st.lists(st.sampled_from([*INF, torch.int8]), min_size=1, max_size=3))
    rows, statuses = {}, {}
    of_checks = []
    for check in range(checks):
        dtype = dtypes[int(torch.randint(len(dtypes), (), generator=random))]
        vectors, length = (int(torch.randint(1, 6, (), generator=random)) for _ in range(2))
        if seed % 7 == 0 and check == 0:
            vectors = 1_700  # longer than what a program reads at a time
        is_fault = torch.rand(batch, vectors * length, generator=random) < is_bad
        kind = int(torch.randint(6, (), generator=random))
        kind = kind if kind in (1, 2) else 0
        vector = 2**31 - 1 if kind else length
        if dtype == torch.int8:
            faults = torch.randint(1, 5, is_fault.shape, generator=random)
            values, limit, inf = (is_fault * faults).to(torch.int16), 1, -1
        else:
            values = torch.tensor(NUMBERS)[torch.randint(4, is_fault.shape, generator=random)]
            values[is_fault] = torch.tensor(NUMBERS)[torch.randint(4, 7, (int(is_fault.sum()),), generator=random)]
            values, inf = values.to(dtype), INF[dtype]
            # A limit of 100: its bits in each dtype.
            integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()]
            has_limit = int(torch.randint(4, (), generator=random)) == 0
            limit = int(torch.tensor(100.0).to(dtype).view(integer)) if has_limit else inf
        count, stride = values.shape[1], 0 if kind else values.shape[1]
        of_size = rows.setdefault(values.element_size(), [])
        start = sum(map(len, of_size))
        of_size.append(values[:1].flatten() if kind else values.flatten())
        statuses.setdefault(values.element_size(), []).append([start, count, stride, vector, limit, inf, check])
        of_checks.append([check % 50, kind, check])
    has_path = draw(st.booleans())
    numbers = [0, 24, 28, 12, 8, ORDER if has_path else -1]
    numbers += [n for size in sorted(rows) for one in statuses[size] for n in one] + [
        n for one in of_checks for n in one
    ]
    how = {
        "most": draw(st.sampled_from([1, 3, 8])),
        "fallback": draw(st.sampled_from([None, 49])),
        "mixes": draw(st.booleans()),
    }
    return batch, [rows[size] for size in sorted(rows)], numbers, how, has_path, draw(st.integers(0, 2000))


def summarized(kernels, call, device):
    batch, groups, numbers, how, has_path, before = call
    checks = sum(map(len, groups))
    flags = torch.full((batch, 4), -7, device=device)
    origins = torch.full((3 + (1 + -(-checks // 62) if has_path else 0), batch), -7, device=device)
    history = empty_table(5, device)
    history.counts[1] = before
    ids = torch.arange(batch, device=device) * 3 if before % 2 else None
    table, location_ids = torch.tensor(numbers, device=device), torch.arange(100, 200, device=device)
    statuses, sizes = [one.to(device) for group in groups for one in group], [*map(len, groups)]
    kernels.summarize_statuses(statuses, sizes, table, location_ids, ids, flags, origins, history, *how.values())
    return flags.cpu(), origins.cpu(), history.entries[:-1].cpu(), history.counts.cpu()


@given(calls())
@settings(deadline=None, max_examples=60)
def test_kernels_do_what_plain_python_does(call):
    from torchguard._watch import summary_kernels

    found = summarized(summary_kernels, call, DEVICE)
    expected = summarized(summary_model, call, torch.device("cpu"))
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
