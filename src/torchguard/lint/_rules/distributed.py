"""Several processes: collectives and losses."""

import ast
import re
from collections.abc import Iterator

from torchguard.lint import _torch_names as names
from torchguard.lint._module import Function, Module
from torchguard.lint._rules.base import FUNCTIONS, Problem, Rule, is_loss, is_method, keyword, last_name, text


def collective(node: ast.AST, module: Module) -> str:
    """`all_reduce` of `dist.all_reduce(...)`, or ""."""
    if not isinstance(node, ast.Call):
        return ""
    package, _, last = module.qualified(node.func).rpartition(".")
    if package in ("torch.distributed", "torch.distributed.nn", "torch.distributed.nn.functional"):
        return last if last in names.COLLECTIVES else ""
    return last_name(node) if is_method(node, "wait_for_everyone") else ""


_RANK = re.compile(
    r"(?:^|_)rank$|^is_(?:main|local_main|global_zero|rank_zero|world_process_zero|master)|^get_rank$|^get_(?:local|global)_rank$"
)


def _is_rank(node: ast.AST) -> bool:
    return bool(_RANK.search(last_name(node)))


def rank_condition(test: ast.expr) -> bool:
    """Whether a condition differs between ranks. `rank != -1` and `rank is not None` ask whether there are ranks."""
    for one in ast.walk(test):
        if isinstance(one, ast.Compare):
            sides = [one.left, *one.comparators]
            if not any(_is_rank(side) for side in sides):
                continue
            if any(_is_no_rank(side, op) for side in sides for op in one.ops):
                continue
            return True
    bare = [test, *(test.values if isinstance(test, ast.BoolOp) else [])]
    for one in bare:
        inner = one.operand if isinstance(one, ast.UnaryOp) and isinstance(one.op, ast.Not) else one
        name = last_name(inner)
        if name.startswith("is_") and _RANK.search(name):
            return True
    return False


def _is_no_rank(node: ast.expr, op: ast.cmpop) -> bool:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return True
    if isinstance(node, ast.Constant) and node.value == 0 and isinstance(op, ast.GtE | ast.Lt):
        return True
    return isinstance(node, ast.Constant) and node.value is None


def _leaves(block: list[ast.stmt]) -> bool:
    return bool(block) and isinstance(block[-1], ast.Return | ast.Continue | ast.Break)


class CollectiveUnderRank(Rule):
    code = "TG140"
    name = "collective-under-rank"
    nodes = (ast.Call,)
    summary = "A collective runs on some ranks only: a deadlock."
    why = """
A collective returns when every rank of its group has called it. Under `if rank == 0:`, or after `if rank != 0:
return`, the others never do, and the job hangs until a timeout. Call it on all ranks, and do the work around it on
one. A collective with a `group=` of its own is not reported.
"""
    wrong = """
import torch
import torch.distributed as dist

def log_loss(loss: torch.Tensor) -> None:
    if dist.get_rank() == 0:
        dist.all_reduce(loss)
        print(loss)
"""
    right = """
import torch
import torch.distributed as dist

def log_loss(loss: torch.Tensor) -> None:
    dist.all_reduce(loss)
    if dist.get_rank() == 0:
        print(loss)
"""
    silence = "Where the other ranks call the same collective somewhere else."

    def check(self, node: ast.AST, module: Module) -> Iterator[Problem]:
        name = collective(node, module)
        if not name:
            return
        assert isinstance(node, ast.Call)
        function = module.function_of(node)
        if keyword(node, "group", "process_group") is not None:
            return
        test = self._condition(node, name, function, module)
        if test:
            yield Problem(node, f"{name} runs only where {test}: the other ranks wait forever. Call it on every rank.")

    def _condition(self, node: ast.Call, name: str, function: Function | None, module: Module) -> str:
        if function is not None and any(
            "rank_zero_only" in one or one == "main_process_first" for one in function.decorators
        ):
            return "rank is zero"
        for parent, child in module.inside(node):
            if not isinstance(parent, ast.If) or child is parent.test or not rank_condition(parent.test):
                continue
            others = parent.orelse if child in parent.body else parent.body
            same = [one for block in others for one in ast.walk(block) if collective(one, module) == name]
            if not same and not self._is_matched(node, name, function, module):
                return f"{'not ' if child in parent.orelse else ''}({text(parent.test)})"
        return self._after_return(node, module)

    def _is_matched(self, node: ast.Call, name: str, function: Function | None, module: Module) -> bool:
        """Whether another rank condition of the function holds the same collective: the other ranks call that one."""
        return function is not None and any(
            call is not node
            and collective(call, module) == name
            and any(rank_condition(test) for test, _ in module.conditions(call))
            for call in function.calls
        )

    def _after_return(self, node: ast.Call, module: Module) -> str:
        """`if rank != 0: return` in front of the collective."""
        for parent, child in module.inside(node):
            for block in (getattr(parent, "body", None), getattr(parent, "orelse", None)):
                before = block[: block.index(child)] if isinstance(block, list) and child in block else []
                if found := self._left_by_rank(before):
                    return found
        function = module.function_of(node)
        if function is not None:
            top = next((one for one in function.node.body if any(inner is node for inner in ast.walk(one))), None)
            if top is not None:
                return self._left_by_rank(function.node.body[: function.node.body.index(top)])
        return ""

    def _left_by_rank(self, before: list[ast.stmt]) -> str:
        for one in before:
            if isinstance(one, ast.If) and _leaves(one.body) and not one.orelse and rank_condition(one.test):
                is_return = isinstance(one.body[-1], ast.Return)
                if is_return:
                    return f"not ({text(one.test)})"
        return ""


_GUARDS = re.compile(
    r"is_initialized|is_available|world_size|distributed|num_processes|n_gpu|\bddp\b|process_group|use_dist|is_dist|parallel|dist_",
    re.IGNORECASE,
)


class CollectiveWithoutGuard(Rule):
    code = "TG141"
    name = "collective-without-guard"
    nodes = FUNCTIONS
    is_default = False
    summary = "A collective is not guarded by `dist.is_initialized()`."
    why = """
Without a process group a collective raises: the function cannot be used in a notebook, in a test, or on one GPU. Ask
`dist.is_available() and dist.is_initialized()` first. The linter sees guards in the function itself, not in its
callers.
"""
    wrong = """
import torch
import torch.distributed as dist

def mean_over_ranks(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    dist.all_reduce(x)
    return x / dist.get_world_size()
"""
    right = """
import torch
import torch.distributed as dist

def mean_over_ranks(x: torch.Tensor) -> torch.Tensor:
    if not (dist.is_available() and dist.is_initialized()):
        return x
    x = x.clone()
    dist.all_reduce(x)
    return x / dist.get_world_size()
"""
    silence = "In code that only runs in a process group, such as a launcher's worker."

    def check(self, node: ast.AST, module: Module) -> Iterator[Problem]:
        if "distributed" not in module.source:
            return
        function = module.functions[node]
        found = [call for call in function.calls if (name := collective(call, module)) and name != "wait_for_everyone"]
        if not found:
            return
        owner: Function | None = function
        while owner is not None:
            if any(last_name(call) == "init_process_group" for call in owner.calls):
                return
            for one in owner.body:
                tests = [one.test] if isinstance(one, ast.If | ast.IfExp | ast.Assert | ast.While) else []
                if any(_GUARDS.search(ast.unparse(test)) for test in tests):
                    return
            owner = owner.outer
        name = collective(found[0], module)
        yield Problem(found[0], f"{name} raises without a process group. Ask dist.is_initialized() first.")


class LossNotAggregated(Rule):
    code = "TG142"
    name = "loss-not-aggregated"
    nodes = FUNCTIONS
    is_default = False
    summary = "A loss is reported for one rank's share of the batch only."
    why = """
Where `torch.distributed` is in use, `loss.item()` is the loss of this rank's samples: logs, early stopping and
schedulers that read it see a part of the batch, and differ between ranks. Average it with `dist.all_reduce` first.
The loss that is differentiated needs none where gradients are averaged, as DistributedDataParallel does. In a file
that shows no such thing, losses that aggregate nothing are reported, too.
"""
    wrong = """
import torch
import torch.distributed as dist

def log_step(loss: torch.Tensor, step: int) -> None:
    if dist.is_initialized() and dist.get_rank() == 0:
        print(step, loss.item())
"""
    right = """
import torch
import torch.distributed as dist

def log_step(loss: torch.Tensor, step: int) -> None:
    mean = loss.detach().clone()
    if dist.is_initialized():
        dist.all_reduce(mean)
        mean = mean / dist.get_world_size()
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(step, mean.item())
"""
    silence = "Where the loss of one rank is wanted, or where the caller aggregates."

    def check(self, node: ast.AST, module: Module) -> Iterator[Problem]:
        function = module.functions[node]
        if not any(name.startswith("torch.distributed") for name in module.imported):
            return
        if any(
            re.search(r"reduce|gather|aggregate|mean_over|average|sync", last_name(call)) for call in function.calls
        ):
            return
        for call in function.calls:
            if is_method(call, "item") and isinstance(call.func, ast.Attribute):
                name = last_name(call.func.value)
                if re.search(r"(?:^|_)loss(?:es)?$", name):
                    yield Problem(
                        call, f"{name}.item() is the loss of one rank. Average it with dist.all_reduce first."
                    )
                    return
        is_averaged = re.search(r"DistributedDataParallel|FSDP|FullyShardedDataParallel|average_grad", module.source)
        if is_loss(function) and not function.is_stub and function.cls is None and not is_averaged:
            for call in function.calls:
                package, _, last = module.qualified(call.func).rpartition(".")
                if package == "torch.nn.functional" and ("loss" in last or "cross_entropy" in last):
                    yield Problem(
                        node, f"{function.name} sees one rank's samples. Aggregate its value with dist.all_reduce."
                    )
                    return


class GatherWithoutGradient(Rule):
    code = "TG143"
    name = "gather-without-gradient"
    nodes = (ast.Call,)
    summary = "A loss uses `dist.all_gather`, which has no gradient."
    why = """
`dist.all_gather` fills tensors that autograd does not follow: the loss over the gathered batch is right, and its
gradient is missing every term that goes through them, without an error. Use
`torch.distributed.nn.functional.all_gather`, or put the local tensor back into the list (`gathered[rank] = x`), which
gives the gradient of the local share.
"""
    wrong = """
import torch
import torch.distributed as dist

def contrastive_loss(x: torch.Tensor) -> torch.Tensor:
    gathered = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, x)
    return (x @ torch.cat(gathered).T).logsumexp(dim=1).mean()
"""
    right = """
import torch
import torch.distributed as dist
import torch.distributed.nn.functional

def contrastive_loss(x: torch.Tensor) -> torch.Tensor:
    gathered = dist.nn.functional.all_gather(x)
    return (x @ torch.cat(gathered).T).logsumexp(dim=1).mean()
"""
    silence = "For values that need no gradient: labels, counts, metrics."

    def check(self, node: ast.AST, module: Module) -> Iterator[Problem]:
        assert isinstance(node, ast.Call)
        name = module.qualified(node.func)
        package, _, last = name.rpartition(".")
        if package != "torch.distributed" or last not in ("all_gather", "all_gather_into_tensor", "all_gather_object"):
            return
        function = module.function_of(node)
        if function is None or module.has_no_grad(node):
            return
        in_loss = is_loss(function) or (function.cls is not None and function.cls.name.endswith(("Loss", "Criterion")))
        if not in_loss or _puts_back(function):
            return
        sent = keyword(node, "tensor", "input_tensor") or (node.args[1] if len(node.args) > 1 else None)
        if sent is not None and re.search(r"label|target|count|size|num|len|idx|index|mask|detach", ast.unparse(sent)):
            return
        yield Problem(node, f"{last} has no gradient. Use torch.distributed.nn.functional.all_gather in a loss.")


def _puts_back(function: Function) -> bool:
    """`gathered[rank] = x`."""
    return any(
        isinstance(one, ast.Subscript) and isinstance(one.ctx, ast.Store) and "rank" in ast.unparse(one.slice)
        for one in function.body
    )


RULES = (CollectiveUnderRank(), CollectiveWithoutGuard(), LossNotAggregated(), GatherWithoutGradient())
