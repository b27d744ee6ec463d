"""What is sent: how many collectives a call takes, in eager mode and in a graph, and whether NCCL has each of them."""

import pytest
import torch
import torch.distributed as dist
from tests.distributed.cases import flags_with
from torch._dynamo.backends.common import aot_autograd

from torchguard import distributed
from torchguard.testing import run_ranks

SENDING = (
    *("allreduce", "allreduce_coalesced", "broadcast", "reduce", "scatter", "gather", "barrier", "send", "recv"),
    *("allgather", "allgather_coalesced", "_allgather_base", "all_gather_single", "alltoall", "alltoall_base"),
    *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single"),
)
# NCCL reduces no bool, no int16, no complex numbers, and has no bitwise reductions.
NCCL_DTYPES = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int8, torch.uint8),
}
REDUCTIONS = ("SUM", "MAX", "MIN", "PRODUCT", "BAND", "BOR", "BXOR")
NCCL_REDUCTIONS = {"SUM", "MAX", "sum", "max"}

losses = torch.rand(3, dtype=torch.float64)
CALLS = {
    "any_err": lambda f: distributed.any_err(f),
    "agree": lambda f: distributed.agree(f, "majority"),
    "mean_ok": lambda f: distributed.mean_ok(f, losses),
    "digest": lambda f: distributed.digest(f, step=torch.tensor(3)),
    "merge_flags": lambda f: distributed.merge_flags(f),
    "gather_flags": lambda f: distributed.gather_flags(f),
    "gather_flags, rows": lambda f: distributed.gather_flags(f, rows=4),
}
REDUCED = ("any_err", "agree", "mean_ok", "digest")


def sent_by(call):
    """The collectives of a call: name, reduction and dtype of each."""
    found = []

    def recorded(name, method):
        def send(group, *args):
            sent = args[0]
            while isinstance(sent, list):
                sent = sent[0]
            op = ""
            if "reduce" in name:
                op = next(one for one in REDUCTIONS if args[-1].reduceOp == getattr(dist.ReduceOp, one))
            found.append((name, op, sent.dtype))
            return method(group, *args)

        return send

    with pytest.MonkeyPatch.context() as patched:
        for name in SENDING:
            if hasattr(dist.ProcessGroup, name):
                patched.setattr(dist.ProcessGroup, name, recorded(name, getattr(dist.ProcessGroup, name)))
        call()
    return found


def nccl_has(sent):
    return all(dtype in NCCL_DTYPES and (not op or op in NCCL_REDUCTIONS) for _, op, dtype in sent)


def test_every_call_is_one_collective_that_nccl_has():
    def count():
        f = flags_with(3, [dist.get_rank()])
        return {name: sent_by(lambda call=call: call(f)) for name, call in CALLS.items()}

    for found in run_ranks(count):
        assert {name: len(sent) for name, sent in found.items()} == dict.fromkeys(CALLS, 1)
        assert all(map(nccl_has, found.values())), found
        assert {name: sent[0][1] for name, sent in found.items() if name in REDUCED} == {
            **dict.fromkeys(REDUCED, "SUM"),
            "any_err": "MAX",
        }


def test_flags_that_do_not_fit_into_the_message_follow_in_a_second_one():
    def count():
        rank, f = dist.get_rank(), flags_with(100, [7])
        gathered = lambda: distributed.gather_flags(f if rank else f[:1])  # noqa: E731
        return len(sent_by(lambda: distributed.merge_flags(f))), len(sent_by(gathered)), gathered().flags[1:]

    for merging, gathering, flags in run_ranks(count):
        assert (merging, gathering) == (2, 2)
        assert torch.equal(flags, flags_with(100, [7]))


def test_losses_gradients_and_parameters_are_sent_in_dtypes_that_nccl_has():
    def count():
        found, rank = [], dist.get_rank()
        for dtype in (torch.bool, torch.int16, torch.float16, torch.bfloat16, torch.float64, torch.complex64):
            x = torch.ones(2 + rank, 3, dtype=dtype)
            x.requires_grad_(x.is_floating_point() or x.is_complex())

            def gather(x=x):
                out = distributed.all_gather(x)
                if x.requires_grad:
                    out.abs().sum().backward()

            found += sent_by(gather)
            if x.requires_grad:
                weight = torch.nn.Parameter(torch.ones(2, dtype=dtype))
                weight.grad = torch.ones(2, dtype=dtype)
                module = torch.nn.ParameterList([weight])
                found += sent_by(lambda weight=weight: distributed.all_reduce_parameter(weight))
                found += sent_by(lambda module=module: distributed.average_gradients(module))
        return found

    for found in run_ranks(count):
        assert len(found) > 20
        assert nccl_has(found), [one for one in found if not nccl_has([one])]


@pytest.mark.long
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.compiled
def test_a_graph_has_one_collective_that_nccl_has(name):
    def count():
        graphs = []

        def note(graph, _):
            graphs.append(graph)
            return graph

        backend = aot_autograd(fw_compiler=note)
        compiled = torch.compile(CALLS[name], backend=backend, fullgraph=True)
        compiled(flags_with(3, [dist.get_rank()]))
        (graph,) = graphs
        sent = [node for node in graph.graph.nodes if "c10d" in str(node.target) and "wait" not in str(node.target)]
        return [
            (str(node.target), node.args[1] if "reduce" in str(node.target) else "", node.meta["val"].dtype)
            for node in sent
        ]

    for found in run_ranks(count):
        assert len(found) == 1, found
        assert nccl_has(found), found
        assert ("all_reduce" in found[0][0]) == (name in REDUCED)
