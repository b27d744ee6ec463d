"""Which versions of torch were tested, and what each part of torchguard lacks on the torch that is installed.

A torch that is newer than every tested one is allowed. The private names that torchguard uses may have moved there, so
`warn_if_untested` says once that it was not tested, and `warn_of_missing` says, when a part is first used, which names
that part lacks and what that means. `torchguard doctor` shows the same for all parts. On a tested torch nothing is
looked up: the tests have shown that nothing is missing there.

The tables list names that can be looked up without an object at hand, some with the parameters that are used. A name
that came after torch 2.11 is not among them: the code that uses it says what an older torch does instead.
"""

import functools
import importlib
import inspect
import sys
import warnings
from typing import Any, NamedTuple

from torchguard._torch.process import process_state
from torchguard.exceptions import UntestedTorchWarning

# The first and the last minor version that the tests ran on; docs/private-torch.md has the runs.
TESTED = ((2, 11), (2, 15))


class Missing(NamedTuple):
    """A private name that torch lacks, and what happens without it."""

    name: str
    without: str
    is_required: bool


# Without these, an import or the first use of a part raises.
_NEEDED = {
    "err": {
        "torch._C": "_current_graph_task_id _get_tracing_state _len_torch_dispatch_stack",
        "torch._C._functorch": "is_legacy_batchedtensor maybe_current_level",
        "torch.fx.experimental.symbolic_shapes": "guard_or_false statically_known_true",
        "torch.utils._pytree": "tree_flatten tree_unflatten tree_map_only tree_flatten_with_path keystr",
    },
    "checks": {},
    "watch": {
        "torch._dynamo.symbolic_convert": "InstructionTranslator.current_tx",
        "torch._dynamo.side_effects": "SideEffects.is_modified",
        "torch._dynamo.variables": "TensorVariable",
        "torch._dynamo.variables.base": "VariableTracker.visit",
        "torch._subclasses.fake_tensor": "FakeTensorMode",
        "torch.multiprocessing.reductions": "StorageWeakRef",
        "torch._functorch.pyfunctorch": "temporarily_pop_interpreter_stack",
        "torch.utils._python_dispatch": "TorchDispatchMode",
        "torch._C": "_dispatch_has_kernel_for_dispatch_key",
    },
    "Retry": {
        "torch": "_foreach_copy_ _foreach_add_ _foreach_norm",
        "torch._dynamo.exc": "TorchDynamoException",
        "torch.utils._python_dispatch": "TorchDispatchMode",
    },
    "guards": {
        "torch._dynamo.convert_frame": "ConvertFrameAssert",
        "torch._dynamo.guards": "CheckFunctionManager.build_guards CheckFunctionManager.compile_check_fn "
        "get_guard_fail_reason _get_closure_vars",
        "torch._dynamo.utils": "get_compilation_metrics",
        "torch._C._dynamo.guards": "DictGuardManager RelationalGuard RootGuardManager",
        "torch._C": "_EnableTorchFunction",
        "torch._guards": "CompileContext TracingContext",
    },
    "device": {
        "torch._decomp": "decomposition_table get_decompositions",
        "torch._dynamo.backends.common": "aot_autograd",
        "torch._dynamo.backends.debugging": "boxed_nop",
        "functorch.compile": "min_cut_rematerialization_partition",
        "torch._guards": "TracingContext tracing",
        "torch._ops": "OpOverload HigherOrderOperator",
        "torch._C": "_dispatch_get_all_op_names DispatchKey",
    },
    "artifacts": {"torch._functorch._aot_autograd.descriptors": "PlainAOTInput"},
    "export": {"torch._inductor": "aoti_compile_and_package aoti_load_package"},
    "compiled": {
        "torch._dynamo.source": "ConstantSource",
        "torch._functorch.autograd_function": "custom_function_call",
        "torch._inductor.compile_fx": "compile_fx compile_fx_inner",
        "torch._inductor.decomposition": "select_decomp_table",
        "torch._subclasses.fake_tensor": "FakeTensor FakeTensorMode DataDependentOutputException "
        "DynamicOutputShapeException",
        "torch._subclasses": "FakeTensorMode",
        "torch.fx.experimental.proxy_tensor": "make_fx",
        "torch.fx.experimental.symbolic_shapes": "DimDynamic ShapeEnv free_symbols free_unbacked_symbols "
        "GuardOnDataDependentSymNode",
        "torch._C": "_set_grad_enabled _get_mkldnn_enabled _set_mkldnn_enabled _get_cudnn_enabled _set_cudnn_enabled",
    },
}
# What is used with less than this is slower, unknown or refused.
_STAGE_2 = "torch._functorch.aot_autograd.aot_stage2_compile(fw_compiler, bw_compiler, inference_compiler)"
_NO_REGIONS = "compile_once compiles each block on its own"
_SLOW_CHECKS = "a model with checks by hand compiles more slowly"
_SLOW_HOOKS = "a watched model compiles more slowly"
_OVERRUNS = "checks of transposed tensors, compiled for the CPU, may write behind their results"
_COPIES = "gradients are copied before they are masked"
_VARIABLES = (
    "functions.BaseUserFunctionVariable.call_function",
    "UnspecializedNNModuleVariable",
    "ConstantVariable",
    "TensorVariable",
    "TupleVariable",
    "VariableTracker",
)
_ONLY_HELPS = {
    "err": {
        "torch._subclasses.fake_tensor.is_fake": "computing shapes takes as long as tracing",
        "torch.fx.experimental.proxy_tensor.get_proxy_mode": "computing shapes takes as long as tracing",
        "torch.compiler._is_exporting_flag": "an exported program may hold torchguard operators",
    },
    "checks": {  # not of "err", whose names are looked up at import: these load Inductor
        "torch._inductor.virtualized.V.fake_mode": _SLOW_CHECKS,
        "torch._inductor.virtualized.NullHandler": _SLOW_CHECKS,
        "torch._inductor.virtualized.ops": _SLOW_CHECKS,
        "torch._inductor.lowering.register_lowering": _SLOW_CHECKS,
        "torch._inductor.lowering.lowerings": _SLOW_CHECKS,
        "torch._inductor.lowering.make_pointwise": _SLOW_CHECKS,
        "torch._inductor.codegen.cpp.CppVecKernel.store_reduction": _OVERRUNS,
        "torch._inductor.codecache.FxGraphHashDetails": _OVERRUNS,
    },
    "watch": {
        "torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint": "a watched model with checkpoints "
        "compiles with graph breaks",
        "torch._dynamo.mark_static": "a watched model may recompile once",
        "torch._dynamo.mark_static_address": "a watched model runs without CUDA graphs",
        "torch._dynamo.eval_frame.skip_code": "a function is compiled for each class of watched models",
        "torch._dynamo.output_graph.OutputGraph._call_user_compiler": _NO_REGIONS,
        _STAGE_2: _NO_REGIONS,
        "torch._dynamo.variables.higher_order_ops.are_same_graph_modules": _NO_REGIONS,
        "torch._higher_order_ops.invoke_subgraph.get_invoke_subgraph_cache": "compile_once compiles more slowly",
        **{f"torch._dynamo.variables.{name}": _SLOW_HOOKS for name in _VARIABLES},
        "torch._inductor.lowering.register_lowering": _COPIES,
        "torch._inductor.virtualized.V": _COPIES,
        "torch._inductor.codegen.cpp.CppVecKernel.store_reduction": _OVERRUNS,
        "torch._inductor.codecache.FxGraphHashDetails": _OVERRUNS,
        "torch._higher_order_ops.utils.setup_compilation_env": "torch.cond and the like fail in eager mode",
        "torch.utils.checkpoint._CheckpointFrame": "checkpoints around compiled blocks fail in eager mode",
    },
    "Retry": {},
    "guards": {
        "torch._dynamo.guards.GuardBuilder": "filters do not check the names of guard types",
        "torch._dynamo.guards.CheckFunctionManager.UNSUPPORTED_SERIALIZATION_GUARD_TYPES": "filters for portable "
        "guards keep types that cannot be saved",
        "torch._dynamo.symbolic_convert.InstructionTranslatorBase.log_graph_break": "inspect raises GuardError",
        "torch._dynamo.eval_frame._stance": "why does not take stances into account",
        "torch._dynamo.exc.RestartAnalysis": "a restart of Dynamo counts as a failed compilation",
        "torch._inductor.list_mode_options": "a mode cannot be combined with a filter",
        "torch.autograd._profiler_enabled": "cost does not notice that a profiler runs",
    },
    "device": {
        "torch._dynamo.backends.registry._COMPILER_FNS": "after a second import of torchguard, its backend is the first"
    },
    "export": {},
    "artifacts": {
        "torch._dynamo.output_graph.OutputGraph._call_user_compiler": "graphs of Dynamo are not captured",
        _STAGE_2: "forward and backward graphs are not captured",
        "torch._inductor.graph.GraphLowering.save_output_code": "output code is not captured",
        "torch._dynamo.callback.callback_handler": "torchguard run shows no progress",
    },
    "compiled": {
        "torch._C._is_any_autocast_enabled": "only CUDA's autocast is noticed",
        "torch._inductor.config.layout_optimization": "some gradients of convolutions cannot be protected",
    },
}
PARTS = tuple(_NEEDED)


def minor_version(text: str) -> tuple[int, ...]:
    """The first two numbers of a version such as `2.16.0a0+git1234`."""
    return tuple(int("".join(filter(str.isdigit, part)) or 0) for part in text.split("+")[0].split(".")[:2])


def tested_range() -> str:
    return " to ".join(".".join(map(str, version)) for version in TESTED)


def is_newer(version: str) -> bool:
    """Whether a torch is newer than every one that the tests ran on."""
    return minor_version(version) > TESTED[1]


def torch_is_at_least(major: int, minor: int) -> bool:
    """Whether the installed torch is that version or a later one: for results that differ, where no name does."""
    return minor_version(str(sys.modules["torch"].__version__)) >= (major, minor)


def warn_if_untested() -> None:
    """Warn once per process if the installed torch is newer than every tested one."""
    version = str(sys.modules["torch"].__version__)
    said: set[str] = process_state("warnings about torch", set)
    if is_newer(version) and "" not in said:
        said.add("")
        warnings.warn(
            f"torch {version} is newer than what torchguard was tested on: {tested_range()}. Private names may "
            "have moved; each part warns of those that it misses. `torchguard doctor` shows all.",
            UntestedTorchWarning,
            stacklevel=2,
        )


def warn_of_missing(part: str) -> None:
    """Warn, once per process, of what a part lacks on a torch that was not tested. Called when it is first used."""
    version = str(sys.modules["torch"].__version__)
    said: set[str] = process_state("warnings about torch", set)
    if part in said or not is_newer(version):
        return
    said.add(part)
    if lacking := missing(part):
        names = "; ".join(f"{one.name} ({one.without})" for one in lacking)
        warnings.warn(f"{part}: torch {version} has no {names}.", UntestedTorchWarning, stacklevel=3)


def missing(part: str) -> list[Missing]:
    """The private names of a part that the installed torch lacks. Loads Dynamo and Inductor, which takes seconds."""
    required = [f"{owner}.{name}" for owner, names in _NEEDED[part].items() for name in names.split()]
    found = [Missing(name, f"{part} needs it", True) for name in required if not _exists(name)]
    return found + [Missing(name, says, False) for name, says in _ONLY_HELPS[part].items() if not _exists(name)]


def require_names(owner_name: str, owner: Any, *names: str) -> None:
    """Raise ImportError if torch lacks a private name without which torchguard would be wrong, not just slower."""
    for name in names:
        if not hasattr(owner, name):
            raise ImportError(
                f"torchguard needs {owner_name}.{name}, which torch {sys.modules['torch'].__version__} does not have. "
                f"Install a torch that this version of torchguard was tested on: {tested_range()}."
            )


def _exists(name: str) -> bool:
    path, _, parameters = name.removesuffix(")").partition("(")
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        try:
            owner = importlib.import_module(".".join(parts[:end]))
        except ImportError:
            continue
        try:
            found: Any = functools.reduce(getattr, parts[end:], owner)
        except AttributeError:
            return False
        return not parameters or {*parameters.split(", ")} <= {*inspect.signature(found).parameters}
    return False
