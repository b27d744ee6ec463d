"""What the kernels of `summary_kernels` do, sample by sample in plain Python."""

import torch

from torchguard._watch.history_table import FIELDS, HALF, NO_ID, slot_of

_OF_FAULTS, _OF_STATUS, _OF_CHECK = 6, 7, 3
_MOST = 2**31 - 1


def summarize_statuses(statuses, sizes, table, location_ids, ids, flags, origins, history, *how):
    keys = torch.zeros(sum(sizes), len(flags), dtype=torch.int64)
    _find_keys(statuses, sizes, table, keys)
    _summarize(keys, table, location_ids, ids, flags, origins, history, *how)


def _find_keys(statuses, sizes, table, keys):
    numbers, batch, number = table.tolist(), keys.shape[1], 0
    widths = sorted({one.element_size() for one in statuses})
    for width, size in zip(widths, sizes, strict=True):
        integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[width]
        entries = torch.cat([one.view(integers) for one in statuses if one.element_size() == width]).to(torch.int64)
        entries = (entries & (1 << (8 * width - 1)) - 1).tolist()
        for i in range(number, number + size):
            first = _OF_FAULTS + i * _OF_STATUS
            start, count, stride, vector, limit, inf, check = numbers[first : first + _OF_STATUS]
            for sample in range(batch):
                begin = start + sample * stride
                found = enumerate(entries[begin : begin + count])
                found = [(at // vector, _fault(value, limit, inf)) for at, value in found]
                bad = [((_MOST - position) << 8) | fault for position, fault in found if fault]
                keys[check, sample] = max(bad, default=0)
        number += size


def _fault(value, limit, inf):
    if inf < 0:
        return value
    return 4 if value > inf else 3 if value >= limit else 0


def _summarize(keys, table, location_ids, ids, flags, origins, history, most, fallback, mixes):
    checks, batch = keys.shape
    numbers = table.tolist()
    first = _OF_FAULTS + checks * _OF_STATUS
    of_checks = [numbers[first + i * _OF_CHECK : first + (i + 1) * _OF_CHECK] for i in range(checks)]
    found = [[(check, key) for check, key in enumerate(of_sample) if key] for of_sample in keys.t().tolist()]
    of_samples = [check for one in found for check, _ in one if of_checks[check][1] == 0]
    earliest = min(of_samples, default=checks)
    for sample in range(batch):
        found[sample] = [(c, key) for c, key in found[sample] if of_checks[c][1] != 1 or c < earliest]
    everything = [(-check, key) for one in found for check, key in one]
    is_clean = not everything
    if mixes and everything:
        check, key = max(everything)
        found = [one or [(-check, key)] for one in found]
    lanes = flags.view(torch.int16)
    lanes.zero_()
    origins.fill_(-1)
    bad = []
    for sample, one in enumerate(found):
        if not is_clean and len(origins) > 3:
            origins[3, sample] = numbers[5]
            words = [0] * (len(origins) - 4)
            for check, _ in one:
                number = of_checks[check][2]
                words[number // 62] |= 1 << number % 62
            origins[4:, sample] = torch.tensor(words)
        if not one:
            continue
        slots = []
        for check, key in one[:most]:
            base = int(location_ids[of_checks[check][0]]) << 6
            slots += [base | numbers[key & 0xFF], *([] if fallback is None else [base | fallback])]
        slots = slots[: lanes.shape[1]]
        lanes[sample, : len(slots)] = torch.tensor(slots).to(torch.int16)
        check, key = one[0]
        position = _MOST - (key >> 8 & _MOST)
        origins[:3, sample] = torch.tensor([of_checks[check][0], len(one) - 1, position])
        bad.append((sample, slots[0] >> 2 & 0xF))
    if history is not None:
        calls, before = history.counts.tolist()
        for rank, (sample, code) in enumerate(bad):
            entry = before + rank
            if entry >= HALF and rank < len(bad) - HALF:
                continue
            id_ = NO_ID if ids is None else int(ids[sample])
            row = [calls, batch, sample, id_, *origins[:3, sample].tolist(), code, *origins[3:, sample].tolist()]
            history.entries[slot_of(entry)] = -1
            history.entries[slot_of(entry), : len(row)] = torch.tensor(row)
            assert len(row) >= FIELDS
        history.counts.add_(torch.tensor([1, len(bad)], device=history.counts.device))
