"""Parts of a model that are compiled on their own: `block.compile()`, or `model.blocks[i] = torch.compile(block)`.

The call of the watched model then runs in eager mode, and only a part of it is a graph. Hooks in that graph cannot
append to the call record as they do elsewhere: the number of findings in it and the location of each module would be
constants of the graph, with a guard each, and every block would be compiled anew until torch's limit is reached.

So the graph has one opaque operator for each check, `check_in_part_`. It runs as in eager mode, and records into the
call that its thread is in. The location is in a tensor, since values of tensors are not guarded on. The operator
returns nothing: that it writes to that tensor, which it says but does not do, keeps it from being removed as dead code.

In quarantine the checks change what the part computes. They would break its graph into many, and none of these would
show whose rows are whose. So the parts run uncompiled there.
"""

import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from torchguard._channel.detect import can_be_checked, floats_of
from torchguard._operators import define_opaque
from torchguard._pytrees import OBJECTS, tensors_in
from torchguard._torch.modules import has_compiled_parts
from torchguard._torch.uncompiled import without_compiled_code
from torchguard._watch.batch import row_code
from torchguard._watch.call import CallRecord
from torchguard._watch.detect import index_status
from torchguard._watch.warn import warn_of_compiled_parts


class _Running(threading.local):
    """The eager calls that a thread is in, by the key of the watched model."""

    def __init__(self) -> None:
        self.call_records: dict[int, CallRecord] = {}


_RUNNING = _Running()


def enter_call(key: int, call_record: CallRecord) -> None:
    """Have the parts of a watched model record into this call, in this thread."""
    _RUNNING.call_records[key] = call_record


def leave_call(key: int) -> None:
    _RUNNING.call_records.pop(key, None)


def address_of(key: int, location: int) -> Tensor:
    """Where to record: the key of the watched model and a location. On the CPU, since the host reads it."""
    return torch.tensor([key, location], device="cpu")


def is_in_part(call_record: CallRecord) -> bool:
    """Whether the graph that is being traced is a part of this call only, and checks leave its values alone."""
    return not call_record.in_graph and not call_record.quarantine and torch.compiler.is_compiling()


def check_output_in_part(module: nn.Module, output: Any, address: Tensor) -> None:
    """Check what a module returns, when the graph runs."""
    is_recurrent = isinstance(module, nn.RNNBase)
    for keys, z in tensors_in(output, objects=OBJECTS):
        if can_be_checked(z):
            code = row_code(1) if is_recurrent and keys and keys[0] == 1 else None  # states: (layers, batch, width)
            _CHECK_IN_PART_(z.detach(), address, code, None)


def check_indices_in_part(ids: Tensor, table_size: int, address: Tensor) -> None:
    """Check indices into a table of that many rows, when the graph runs."""
    _CHECK_IN_PART_(ids, address, None, table_size)


def _check_in_part_op(z: Tensor, address: Tensor, code: int | None, table_size: int | None) -> None:
    key, location = address.tolist()
    call_record = _RUNNING.call_records.get(key)
    if call_record is None:  # the graph runs outside of a call: a CUDA graph that is being recorded
        return
    if table_size is not None:
        call_record.record_indices(location, z, index_status(z, table_size))
        return
    call_record.check(z, location, rows=code)
    run_other_checks(z, call_record, location)


_CHECK_IN_PART_ = define_opaque(
    "check_in_part_(Tensor z, Tensor(a!) address, int? code, int? table_size) -> ()",
    _check_in_part_op,
    lambda *_: None,
)


def run_other_checks(z: Tensor, call_record: CallRecord, location: int) -> None:
    """Run the checks of whole samples on what a module returns."""
    if not call_record.checks.others or not can_be_checked(z) or call_record.batch is None:
        return
    samples = call_record.samples_of(floats_of(z), location)
    if samples is None or samples.ndim < 2:
        return
    for check in call_record.checks.others:
        mask = check.function(samples.flatten(1))
        call_record.warn(location, check.code, mask.flatten(1).any(-1) if mask.ndim > 1 else mask)


def without_compiled_parts(watch: Any) -> AbstractContextManager[None]:
    """In quarantine, have parts of a watched model that are compiled on their own run uncompiled. Warns of it once."""
    if not watch.quarantine or torch.compiler.is_compiling():
        return nullcontext()
    if not has_compiled_parts(watch.model):
        return nullcontext()
    warn_of_compiled_parts(watch)
    return without_compiled_code()
