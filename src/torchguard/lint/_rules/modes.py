"""Training and evaluation mode."""

import ast
from collections.abc import Iterator

from torchguard.lint._module import Function, Module
from torchguard.lint._rules.base import (
    FUNCTIONS,
    MODEL_NAMES,
    Problem,
    Rule,
    is_evaluation,
    is_method,
    is_training,
    last_name,
)

# A right example of several rules; each replaces the line that its wrong example has otherwise.
PREDICT = """
import torch
from torch import nn

@torch.inference_mode()
def predict(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    model.eval()
    return model(x)
"""
_TRAINS = frozenset(("backward", "zero_grad"))


def receiver(call: ast.Call) -> str:
    """`self.model` of `self.model.eval()`."""
    return ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""


def mode_calls(function: Function, method: str) -> list[ast.Call]:
    """Calls such as `model.eval()`: without arguments, on a variable or an attribute."""
    return [
        call
        for call in function.calls
        if is_method(call, method)
        and not call.args
        and not call.keywords
        and isinstance(call.func, ast.Attribute)
        and isinstance(call.func.value, ast.Name | ast.Attribute)
    ]


def calls_model(function: Function, model: str, after: int = 0) -> list[ast.Call]:
    """Calls of the model itself, `model(x)`."""
    return [call for call in function.calls if call.lineno > after and ast.unparse(call.func) == model]


def trains(function: Function) -> bool:
    return any(last_name(call) in _TRAINS for call in function.calls) or any(
        ast.unparse(call.func).endswith("autograd.grad") for call in function.calls
    )


def _gradients_are_off(function: Function, module: Module, node: ast.AST) -> bool:
    """Whether gradients are off, or something that the linter cannot see may turn them off."""
    if module.has_no_grad(node):
        return True
    if any("grad" in name or "inference" in name for name in function.decorators):
        return True
    for call in function.calls:
        if last_name(call) in ("set_grad_enabled", "is_grad_enabled", "no_grad", "inference_mode", "requires_grad_"):
            return True
    return any(
        isinstance(parent, ast.With) and any(_may_turn_off(item.context_expr) for item in parent.items)
        for parent, _ in module.inside(node)
    )


def _may_turn_off(node: ast.expr) -> bool:
    name = ast.unparse(node).lower()
    return any(word in name for word in ("grad", "ctx", "context", "inference", "eval"))


def _class_turns_off(function: Function, module: Module) -> bool:
    """Whether another method of the class turns gradients off: it may be the caller."""
    assert function.cls is not None
    for method in function.cls.methods.values():
        other = module.functions[method]
        if any("grad" in name or "inference" in name for name in other.decorators):
            return True
        if any(last_name(call) in ("no_grad", "inference_mode") for call in other.calls):
            return True
    return False


class EvaluationWithGradients(Rule):
    code = "TG130"
    name = "evaluation-with-gradients"
    nodes = FUNCTIONS
    summary = "A model is evaluated with gradients on."
    why = """
Without `torch.inference_mode()` (or `no_grad`) every evaluated batch records a graph for a backward pass that never
comes: it takes memory and time, and results that are kept, such as a running loss, keep all graphs alive.
"""
    wrong = """
import torch
from torch import nn

def evaluate(model: nn.Module, batches: list[torch.Tensor]) -> list[torch.Tensor]:
    model.eval()
    return [model(batch) for batch in batches]
"""
    right = """
import torch
from torch import nn

@torch.inference_mode()
def evaluate(model: nn.Module, batches: list[torch.Tensor]) -> list[torch.Tensor]:
    model.eval()
    return [model(batch) for batch in batches]
"""
    silence = "Where the caller turns gradients off, or where gradients of the evaluated model are wanted."

    def check(self, node: ast.AST, module: Module) -> Iterator[Problem]:
        function = module.functions[node]
        if ".eval()" not in module.source and not is_evaluation(function):
            return
        if not module.imports_torch or function.name.startswith("test_") or trains(function):
            return
        if function.cls is not None and function.name.endswith("_step"):
            return  # a trainer calls it, with gradients off
        if function.cls is not None and _class_turns_off(function, module):
            return
        seen: set[str] = set()
        for call in mode_calls(function, "eval"):
            model = receiver(call)
            is_single = not any(receiver(one) == model for one in mode_calls(function, "train"))
            for use in calls_model(function, model, call.lineno) if is_single else ():
                if model not in seen and not _gradients_are_off(function, module, use):
                    seen.add(model)
                    yield Problem(
                        use, f"{model} is evaluated with gradients on. Decorate with @torch.inference_mode()."
                    )
        if seen or not is_evaluation(function):
            return
        if function.cls is not None:
            if not function.cls.node.bases:  # else a base class may call it, with gradients off
                yield from self._check_method(function, module)
            return
        for model in sorted(MODEL_NAMES & {one.arg for one in function.arguments}):
            for use in calls_model(function, model)[:1]:
                if not _gradients_are_off(function, module, use):
                    yield Problem(
                        use, f"{function.name} calls {model} with gradients on. Decorate with @torch.inference_mode()."
                    )

    def _check_method(self, function: Function, module: Module) -> Iterator[Problem]:
        """`evaluate(self)`, which calls `self.model`, in a class that nowhere turns gradients off."""
        for model in ("self.model", "self.net"):
            for use in calls_model(function, model)[:1]:
                if not _gradients_are_off(function, module, use):
                    yield Problem(use, f"{function.name} calls {model} with gradients on. Use torch.inference_mode().")


class EvaluationInTrainingMode(Rule):
    code = "TG131"
    name = "no-eval-mode"
    nodes = FUNCTIONS
    summary = "A function for evaluation calls a model that may be in training mode."
    why = """
In training mode dropout is active and batch norm uses and updates the statistics of the batch: predictions are random
and depend on the other samples. Call `model.eval()` first.
"""
    wrong = PREDICT.replace("    model.eval()\n", "")
    right = PREDICT
    silence = "Where the caller has set the mode."

    def check(self, node: ast.AST, module: Module) -> Iterator[Problem]:
        function = module.functions[node]
        if not module.imports_torch or not is_evaluation(function) or function.cls is not None or trains(function):
            return
        if any(last_name(call) in ("eval", "train") for call in function.calls):
            return
        for model in sorted(MODEL_NAMES & {one.arg for one in function.arguments}):
            for use in calls_model(function, model)[:1]:
                yield Problem(use, f"{function.name} calls {model} in whatever mode it is. Call {model}.eval() first.")


_FROZEN = (
    "teacher",
    "ref",
    "frozen",
    "vae",
    "text_encoder",
    "ema",
    "target",
    "reward",
    "aux",
    "old",
    "vgg",
    "lpips",
    "clip",
)


class TrainingInEvaluationMode(Rule):
    code = "TG132"
    name = "eval-in-training"
    nodes = FUNCTIONS
    summary = "A training loop trains a model in evaluation mode."
    why = """
After `model.eval()` dropout is off and batch norm keeps its old statistics: the model trains without regularization,
on statistics that never follow. Call `model.train()` before the step, above all after an evaluation in the middle of
the loop.
"""
    wrong = """
import torch
from torch import nn

def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[torch.Tensor]) -> None:
    model.eval()
    for batch in batches:
        loss = model(batch).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""
    right = """
import torch
from torch import nn

def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[torch.Tensor]) -> None:
    model.train()
    for batch in batches:
        loss = model(batch).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""
    silence = "Where batch norm and dropout are to stay frozen while training."

    def check(self, node: ast.AST, module: Module) -> Iterator[Problem]:
        function = module.functions[node]
        if ".eval()" not in module.source or "backward" not in module.source:
            return
        steps = [call for call in function.calls if is_method(call, "backward")]
        if not module.imports_torch or not steps:
            return
        if not (is_training(function) or any(is_method(call, "step") for call in function.calls)):
            return
        for call in mode_calls(function, "eval"):
            model = receiver(call)
            if any(word in model.lower() for word in _FROZEN):
                continue
            if any(receiver(one) == model for one in mode_calls(function, "train")) and not _next_is_training(
                function, model, call, module
            ):
                continue
            trained = [
                use
                for use in calls_model(function, model, call.lineno)
                if not module.has_no_grad(use) and any(step.lineno >= use.lineno for step in steps)
            ]
            if trained:
                yield Problem(call, f"{model} is trained in evaluation mode. Call {model}.train() before the step.")


def _next_is_training(function: Function, model: str, call: ast.Call, module: Module) -> bool:
    """Whether the model is called with gradients after `eval()`, before `train()` comes again."""
    back = [one.lineno for one in mode_calls(function, "train") if receiver(one) == model and one.lineno > call.lineno]
    uses = [one.lineno for one in calls_model(function, model, call.lineno) if not module.has_no_grad(one)]
    return bool(uses) and (not back or min(uses) < min(back)) and not _in_loop_with_train(function, model, call, module)


def _in_loop_with_train(function: Function, model: str, call: ast.Call, module: Module) -> bool:
    loop = next((parent for parent, _ in module.inside(call) if isinstance(parent, ast.For | ast.While)), None)
    return loop is not None and any(
        receiver(one) == model and loop.lineno <= one.lineno <= (loop.end_lineno or 0)
        for one in mode_calls(function, "train")
    )


class TrainModeInEvaluation(Rule):
    code = "TG133"
    name = "train-in-evaluation"
    nodes = FUNCTIONS
    summary = "A function for evaluation puts the model into training mode."
    why = """
`model.train()` before an evaluation turns dropout on and lets the evaluated batches change the statistics of batch
norm.
"""
    wrong = PREDICT.replace("model.eval()", "model.train()")
    right = PREDICT
    silence = "For Monte Carlo dropout, which wants dropout while predicting."

    def check(self, node: ast.AST, module: Module) -> Iterator[Problem]:
        function = module.functions[node]
        if not module.imports_torch or not is_evaluation(function) or trains(function):
            return
        for call in mode_calls(function, "train"):
            model = receiver(call)
            if any(receiver(one) == model for one in mode_calls(function, "eval")):
                continue
            if calls_model(function, model, call.lineno):
                yield Problem(call, f"{function.name} puts {model} into training mode. Call {model}.eval().")


RULES = (
    EvaluationWithGradients(),
    EvaluationInTrainingMode(),
    TrainingInEvaluationMode(),
    TrainModeInEvaluation(),
)
