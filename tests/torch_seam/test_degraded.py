"""A torch that lacks a private name: what is required says so, and what is not does without, as the docstring says."""

import ast
import contextlib
import functools
import importlib
import importlib.util
import re
import sys
import types
from pathlib import Path

import pytest
import torch
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

from torchguard import Retry, RetryError, err, flag_nan, flags, guards, unwatch, watch
from torchguard._retry import step_scope
from torchguard._torch import (
    aot,
    compilations,
    dynamo,
    dynamo_graph,
    events,
    fakes,
    hook_calls,
    hook_guards,
    inductor,
    modules,
    nodes,
    ops,
    process,
    region_calls,
    settings,
    support,
    tensors,
    tracing,
    training,
)
from torchguard._torch import guards as guard_trees
from torchguard.compiled import compile_out
from torchguard.exceptions import CompileError, GuardError

SEAM = Path(process.__file__).parent


def reimported(module):
    """A module executed once more, beside the one that is imported."""
    spec = importlib.util.spec_from_file_location(f"{module.__name__}_again", module.__file__)
    again = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(again)
    return again


def double(x):
    return x * 2


@pytest.fixture
def no_module(monkeypatch):
    """Have the import of a module of torch fail."""
    return lambda name: monkeypatch.setitem(sys.modules, name, None)


class TestRequired:
    @pytest.mark.parametrize("name", ["_current_graph_task_id", "_get_tracing_state", "_len_torch_dispatch_stack"])
    def test_of_torch_c(self, monkeypatch, name):
        monkeypatch.delattr(torch._C, name)
        with pytest.raises(
            ImportError, match=rf"needs torch\._C\.{name}, which torch .* does not have.*2\.11 to 2\.15"
        ):
            reimported(tracing)

    @pytest.mark.parametrize("name", ["is_legacy_batchedtensor", "maybe_current_level", "get_unwrapped"])
    def test_of_functorch(self, monkeypatch, name):
        monkeypatch.delattr(torch._C._functorch, name)
        with pytest.raises(ImportError, match=rf"needs torch\._C\._functorch\.{name}"):
            reimported(tracing)

    def test_of_tensors(self, monkeypatch):
        monkeypatch.delattr(torch._C, "_set_grad_enabled")
        with pytest.raises(AttributeError, match="_set_grad_enabled"):
            reimported(tensors)

    def test_of_fake_tensors(self, monkeypatch):
        monkeypatch.delattr("torch.fx.experimental.symbolic_shapes.free_unbacked_symbols")
        with pytest.raises(ImportError, match="free_unbacked_symbols"):
            reimported(fakes)

    def test_of_inductor(self, monkeypatch):
        monkeypatch.delattr("torch._inductor.decomposition.select_decomp_table")
        with pytest.raises(ImportError, match="select_decomp_table"):
            inductor.decompositions()

    def test_of_backends(self, monkeypatch):
        monkeypatch.delattr("torch._dynamo.backends.debugging.boxed_nop")
        with pytest.raises(ImportError, match="boxed_nop"):
            aot.compile_boxed(fx.symbolic_trace(double), [])


class TestTracing:
    def test_a_mark_that_dynamo_does_not_know_is_traced_into(self):
        @tracing.constant_in_graphs
        def two():
            return 2

        assert two._dynamo_marked_constant
        del two._dynamo_marked_constant
        assert torch.compile(lambda x: x * two(), backend="eager", fullgraph=True)(torch.ones(1)) == 2

    @pytest.mark.parametrize(
        "name", ["torch._subclasses.fake_tensor.is_fake", "torch.fx.experimental.proxy_tensor.get_proxy_mode"]
    )
    def test_nothing_is_shape_only(self, monkeypatch, name):
        with fakes.fake_tensors():
            fake = torch.ones(2)
        assert tracing.is_shape_only(fake)
        monkeypatch.delattr(name)
        assert not tracing.is_shape_only(fake)

    def test_a_check_compiles_where_nothing_is_shape_only(self, monkeypatch):
        monkeypatch.setattr("torchguard._channel.deferred.is_shape_only", lambda tensor: False)
        x = torch.tensor([[1.0], [float("nan")]])
        f = torch.compile(lambda x: flag_nan(x, "x", err.new(x)), backend="aot_eager", fullgraph=True)(x)
        assert flags.repr(f) == "ErrorFlags(2 samples, 1 errors: 1xNAN @ x)"

    @pytest.mark.parametrize("name", ["V", "NullHandler"])
    def test_no_graph_is_known_to_be_for_inductor(self, monkeypatch, name):
        from torch._inductor.virtualized import V

        with fakes.fake_tensors() as mode, V.set_fake_mode(mode):
            assert tracing.is_compiled_by_inductor()
            monkeypatch.delattr(f"torch._inductor.virtualized.{name}")
            assert not tracing.is_compiled_by_inductor()

    def test_nothing_counts_as_an_export(self, monkeypatch):
        monkeypatch.setattr(torch.compiler, "_is_exporting_flag", True)
        assert tracing.is_exporting()
        monkeypatch.delattr(torch.compiler, "_is_exporting_flag")
        assert not tracing.is_exporting()

    def test_nothing_counts_as_in_a_checkpoint(self, monkeypatch):
        def asked(z):
            found.append(tracing.is_in_checkpoint())
            return z * 2

        found, x = [], torch.ones(1, requires_grad=True)
        checkpoint(asked, x, use_reentrant=False)
        monkeypatch.delattr(torch._C._autograd, "_top_saved_tensors_default_hooks")
        asked(x)
        assert found == [True, False]

    def test_without_the_tracer_of_dynamo_nothing_counts_as_a_branch(self, monkeypatch):
        """`is_in_branch`."""
        import torch._dynamo.symbolic_convert as dynamo

        x, found = torch.ones(2), []
        note = tracing.constant_in_graphs(lambda: found.append(tracing.is_in_branch()))

        def branch(x):
            note()
            return x * 2

        def function(x):
            note()
            return torch.cond(x.sum() > 0, branch, torch.sin, (x,))

        torch.compile(function, backend="eager", fullgraph=True)(x)
        assert found[0] is False
        assert True in found
        monkeypatch.setattr(dynamo, "tls", None)
        assert not tracing.is_in_branch()


class TestTensors:
    def test_autocast_is_asked_for_cuda_alone(self, monkeypatch):
        monkeypatch.delattr(torch._C, "_is_any_autocast_enabled")
        again = reimported(tensors)
        with torch.autocast("cpu"):
            assert tensors.any_autocast()
            assert not again.any_autocast()


class TestFakes:
    def test_control_flow_is_left_to_torch_where_it_runs_otherwise(self, monkeypatch):
        monkeypatch.delattr("torch._higher_order_ops.utils._hop_compile_and_call", raising=False)
        with fakes.expanded_control_flow({"cond_op": pytest.fail}):
            assert not hasattr(torch._higher_order_ops.utils, "_hop_compile_and_call")

    def test_a_loop_is_refused_where_numbers_of_fake_tensors_are_not_known(self, monkeypatch):
        def loop(x):
            step = lambda i, x: (i + 1, x * 2)  # noqa: E731
            return torch.while_loop(lambda i, x: i < 3, step, (torch.tensor(0), x))[1]

        assert compile_out(loop, torch.ones(2), backend="eager").forward(torch.ones(2)).tolist() == [8.0, 8.0]
        monkeypatch.setattr(fakes, "constant_of", lambda _, of=fakes.constant_of: of(torch.ones(())))
        with pytest.raises(CompileError, match="its number of steps is not known"):
            compile_out(loop, torch.ones(2), backend="eager")


class TestOps:
    def test_there_are_no_names_of_higher_order_operators(self, monkeypatch):
        assert "higher_order.cond" in ops._op_names("higher_order")
        monkeypatch.delattr(torch._ops, "_higher_order_ops")
        assert ops._op_names("higher_order") == ()
        assert "aten.mm.default" in ops.op_names()


class TestModules:
    def test_a_compiled_module_without_its_mark_is_one_whose_forward_is_compiled(self):
        compiled = torch.compile(nn.Linear(2, 2), backend="eager")
        assert modules.is_compiled_module(compiled)
        call = modules.compiled_function(compiled)
        compiled._modules["_original"] = compiled._modules.pop("_orig_mod")
        assert not modules.is_compiled_module(compiled)
        assert modules.uncompiled(compiled) is compiled
        assert modules.compiled_function(compiled) == call

    def test_without_the_id_of_its_function_a_wrapper_counts_as_compiled(self):
        compiled = torch.compile(double, backend="eager")
        wrapper = functools.wraps(compiled)(lambda *args: compiled(*args))
        assert modules.compiled_function(wrapper) is None
        del wrapper._torchdynamo_wrapper_id
        assert modules.compiled_function(wrapper) is wrapper

    def test_without_a_compiled_call_nothing_is_wrapped(self):
        model = nn.Linear(2, 2)
        modules.wrap_compiled_call(model, lambda call: pytest.fail("there is nothing to wrap"))
        model.compile(backend="eager")
        modules.wrap_compiled_call(model, lambda call: lambda *args: "wrapped")
        assert model(torch.ones(2)) == "wrapped"

    def test_without_skip_code_a_watched_model_compiles(self, monkeypatch):
        class Other(nn.Linear):
            pass

        with monkeypatch.context() as without:  # not while it compiles: on Python 3.12, Dynamo itself needs the name
            without.delattr("torch._dynamo.eval_frame.skip_code")
            modules.skip_frame(double)
            assert [*modules.compiled_call_at("_watch")] == ["_compiled_call_impl"]
            guarded = watch(Other(2, 2))
        out, _ = torch.compile(guarded, backend="eager", fullgraph=True)(torch.ones(3, 2))
        assert out.shape == (3, 2)

    def test_without_a_compiled_call_a_module_is_not_compiled_in_place(self):
        one, other = nn.Linear(2, 2), nn.Linear(2, 2)
        assert not modules.is_compiled_in_place(one)
        modules.share_compiled_call(one, other)
        assert other(torch.ones(2)).shape == (2,)
        one.compile(backend="eager")
        assert modules.is_compiled_in_place(one)
        modules.share_compiled_call(one, other)
        assert torch.equal(other(torch.ones(2)), one(torch.ones(2)))


class TestDynamo:
    @pytest.fixture
    def compiled(self):
        torch._dynamo.reset()
        compiled = torch.compile(double, backend="eager")
        compiled(torch.ones(2))
        return compiled

    def test_a_tensor_cannot_be_marked_static(self, monkeypatch):
        monkeypatch.delattr("torch._dynamo.mark_static")
        x = torch.ones(2)
        assert dynamo.keep_static(x) is x

    def test_a_tensor_cannot_be_kept_in_place(self, monkeypatch):
        monkeypatch.delattr("torch._dynamo.mark_static_address")
        x = torch.ones(2)
        assert dynamo.keep_in_place(x) is x

    def test_a_watched_model_compiles_without_static_tensors(self, monkeypatch):
        monkeypatch.delattr("torch._dynamo.mark_static")
        out, _ = torch.compile(watch(nn.Linear(2, 2)), backend="aot_eager", fullgraph=True)(torch.ones(3, 2))
        assert out.shape == (3, 2)

    def test_there_is_one_list_of_entries_for_all_regions(self, compiled, monkeypatch):
        monkeypatch.delattr("torch._dynamo.eval_frame._get_cache_entries_for_region", raising=False)
        monkeypatch.delattr("torch._dynamo.eval_frame._get_total_cache_entry_count", raising=False)
        cache = dynamo.cache_of(compiled)
        assert len(dynamo.entries_of(cache)) == 1
        assert not dynamo.is_full(cache)
        assert dynamo.is_full(cache._replace(limit=1))

    def test_the_region_of_a_frame_is_unknown(self, monkeypatch):
        in_region = guards.compile(double, filter=guards.skip_all(), backend="eager")
        in_region(torch.ones(2))
        cache = dynamo.cache_of(in_region)
        monkeypatch.delattr("torch._dynamo.eval_frame.get_eval_frame_isolate_recompiles_id", raising=False)
        assert len(dynamo.entries_of(dynamo.cache_of_frame(cache.code, cache.backend))) == 1

    def test_the_frame_around_modules_of_torch_has_another_name(self, monkeypatch):
        assert dynamo.shared_frame_variable(double.__code__) is None
        monkeypatch.setattr("torchguard.guards._audit.shared_frame_variable", lambda code: None)
        model, auditor = nn.Linear(2, 2), guards.audit(guards.skip_nn_modules(), every=1)
        net = guards.compile(model, filter=auditor, backend="eager")
        net(torch.ones(2))
        model.weight.requires_grad_(False)
        net(torch.ones(2))
        assert auditor.report().violations

    def test_a_backend_that_is_unknown_matches_all_entries(self, compiled):
        cache = dynamo.cache_of(compiled)
        assert len(dynamo.entries_of(cache._replace(backend=object()))) == 0
        assert len(dynamo.entries_of(cache._replace(backend=None))) == 1
        assert dynamo._is_for(types.SimpleNamespace(), backend=object())  # an entry that does not say its own

    def test_the_closure_of_a_compiled_function_has_no_callback(self):
        assert dynamo._backend_and_limit(double) == (None, torch._dynamo.config.recompile_limit)

    def test_the_stance_cannot_be_read(self, monkeypatch):
        with torch.compiler.set_stance("eager_on_recompile"):
            assert dynamo.stance() == "eager_on_recompile"
            monkeypatch.delattr("torch._dynamo.eval_frame._stance")
            assert dynamo.stance() == "default"
            monkeypatch.undo()

    def test_the_default_backend_cannot_be_set(self, monkeypatch):
        monkeypatch.delattr("torch._dynamo.backends.registry.get_default_backend", raising=False)
        assert dynamo.default_backend() == "inductor"

    def test_metrics_without_times_are_left_out(self, monkeypatch):
        metrics = [types.SimpleNamespace(compile_id="0/0"), types.SimpleNamespace(compile_id="0/1", start_time=1.0)]
        metrics.append(types.SimpleNamespace(compile_id="0/2", start_time=1.0, entire_frame_compile_time_s=2.0))
        monkeypatch.setattr("torch._dynamo.utils.get_compilation_metrics", lambda: metrics)
        assert dynamo.compile_times() == [("0/2", 1.0, 2.0)]

    def test_nothing_counts_as_a_restart(self, monkeypatch):
        from torch._dynamo.exc import SpeculationRestartAnalysis

        error = SpeculationRestartAnalysis(restart_reason="")
        assert dynamo.is_restart(error)
        monkeypatch.delattr("torch._dynamo.exc.RestartAnalysis")
        assert not dynamo.is_restart(error)


class TestGuards:
    def test_names_of_types_are_not_checked(self, monkeypatch):
        with pytest.raises(GuardError, match="NO_SUCH"):
            guards.of_type("NO_SUCH")
        monkeypatch.delattr("torch._dynamo.guards.GuardBuilder")
        assert guard_trees.guard_types() == frozenset()
        guards.of_type("NO_SUCH")

    def test_no_type_counts_as_unserializable(self, monkeypatch):
        assert guard_trees.unserializable_guard_types()
        monkeypatch.delattr("torch._dynamo.guards.CheckFunctionManager.UNSUPPORTED_SERIALIZATION_GUARD_TYPES")
        assert guard_trees.unserializable_guard_types() == frozenset()
        monkeypatch.delattr("torch._dynamo.guards.CheckFunctionManager")
        assert guard_trees.unserializable_guard_types() == frozenset()

    def test_a_guard_without_a_source_is_about_state(self):
        assert guard_trees.guard_sources(types.SimpleNamespace(name="L['x']")) == ("state",)

    def test_a_mode_does_not_go_with_a_filter(self, monkeypatch):
        monkeypatch.delattr("torch._inductor.list_mode_options")
        for call in (
            lambda: inductor.mode_options("max-autotune", None),
            lambda: guards.compile(double, filter=guards.skip_globals(), mode="max-autotune"),
        ):
            with pytest.raises(GuardError, match=r"has no list_mode_options, so mode='max-autotune' and filter="):
                call()


class TestEvents:
    def test_graph_breaks_cannot_be_reported(self, monkeypatch):
        monkeypatch.delattr("torch._dynamo.symbolic_convert.InstructionTranslatorBase.log_graph_break")
        with pytest.raises(GuardError, match=r"has no InstructionTranslatorBase\.log_graph_break"), guards.inspect():
            pass

    def test_a_compiler_without_hooks_stands_for_itself(self):
        compiler, frame = object(), types.SimpleNamespace(f_code=double.__code__)
        assert events._convert(lambda self, frame: events._thread.hooks, compiler, frame) is compiler

    def test_code_after_breaks_counts_as_compiled(self, monkeypatch):
        of_torch = torch._C._dynamo.eval_frame  # as on torch 2.11, whether this one has it or not
        swap, states = (lambda state: "SKIP"), types.SimpleNamespace(NONE="NONE")
        monkeypatch.setattr(of_torch, "set_eval_frame_override", swap, raising=False)
        monkeypatch.setattr(of_torch, "_EvalFrameOverride", states, raising=False)
        assert not dynamo.compiles_after_breaks()
        monkeypatch.delattr(of_torch, "set_eval_frame_override")
        assert dynamo.compiles_after_breaks()

    @pytest.mark.parametrize(
        "name",
        ["CheckFunctionManager.build_guards", "CheckFunctionManager.compile_check_fn", "get_guard_fail_reason"],
    )
    def test_guards_cannot_be_reported(self, monkeypatch, name):
        monkeypatch.delattr(f"torch._dynamo.guards.{name}")
        assert events.missing_for_guards() == f"torch._dynamo.guards.{name}"
        with pytest.raises(GuardError, match=f"audit: torch .* has no .*{name}, which it needs. Filters work without"):
            events.require_guard_events("audit")

    def test_where_a_guard_comes_from_is_unknown(self):
        guard = types.SimpleNamespace(name="L['x']", user_stack=None)
        assert events._stacks(types.SimpleNamespace(guards=[guard])) == {}
        assert events._stacks(types.SimpleNamespace()) == {}

    def test_graphs_cannot_be_captured(self, monkeypatch):
        monkeypatch.delattr("torch._dynamo.output_graph.OutputGraph._call_user_compiler")
        assert compilations.missing_for_capture() == (
            f"graphs of Dynamo: torch {torch.__version__} has no _call_user_compiler",
        )

    def test_a_graph_without_its_frame_is_captured_without_names(self, monkeypatch):
        starts = []

        def compiling(start, graph):
            starts.append(start)
            return contextlib.nullcontext()

        monkeypatch.setattr(compilations, "_listener", lambda: types.SimpleNamespace(compiling=compiling))
        graph = fx.symbolic_trace(double)
        assert compilations._compile_frame(lambda self, gm: gm, object(), graph) is graph
        assert [(one.function, one.file, one.line) for one in starts] == [("", "", 0)]

    def test_there_is_no_progress(self, no_module):
        no_module("torch._dynamo.callback")
        assert not compilations.on_compile_start_and_end(print, print)


class TestNodes:
    @pytest.fixture
    def placeholder(self):
        return fx.symbolic_trace(lambda x: x + 1).graph.find_nodes(op="placeholder")[0]

    def test_nothing_is_known_of_an_input(self, placeholder):
        assert nodes.source_of(placeholder) == ""
        assert nodes.position_of(placeholder) is None
        assert not nodes.is_lifted_state(placeholder)
        module = fx.GraphModule(nn.Module(), placeholder.graph)
        assert nodes.inputs_of(module) == (nodes.GraphInput("x", is_state=False),)

    def test_nothing_is_known_of_an_op(self, placeholder):
        (node,) = placeholder.users
        assert nodes.call_of(node) is None
        assert nodes.op_before_decomposition(node) == str(node.target)

    def test_what_is_set_is_read(self, placeholder):
        nodes.set_source(placeholder, "L['self']._modules['fc']._parameters['weight']")
        nodes.set_position(placeholder, 3)
        assert nodes.source_of(placeholder).endswith("['weight']")
        assert nodes.position_of(placeholder) == 3
        module = fx.GraphModule(nn.Module(), placeholder.graph)
        assert nodes.inputs_of(module) == (nodes.GraphInput("fc.weight", is_state=True),)


class TestProcess:
    def test_a_function_that_is_missing_is_not_patched(self):
        owner = types.SimpleNamespace()
        assert not process.patch_function(owner, "missing", {}, "replacement")
        assert not vars(owner)

    def test_a_function_is_patched_once_and_by_what_the_module_has_now(self):
        owner = types.SimpleNamespace(add=lambda a, b: a + b)
        scope = {"replacement": lambda original, a, b: original(a, b) * 10}
        for _ in range(2):
            assert process.patch_function(owner, "add", scope, "replacement")
        assert owner.add(1, 2) == 30
        scope["replacement"] = lambda original, a, b: -original(a, b)  # reloaded
        assert owner.add(1, 2) == -3

    def test_copies_of_the_package_are_not_told_apart(self, monkeypatch):
        translator = torch._dynamo.symbolic_convert.InliningInstructionTranslator
        monkeypatch.delattr(translator, "get_globals_source_and_value")
        process.separate_copies_in_dynamo()
        assert "get_globals_source_and_value" not in vars(translator)

    def test_the_name_of_a_backend_stays(self, monkeypatch):
        known = {"mine": double}
        monkeypatch.setattr("torch._dynamo.backends.registry._COMPILER_FNS", known)
        aot.replace_registered_backend("mine", lambda graph, inputs: graph)
        assert known["mine"] is not double
        monkeypatch.delattr("torch._dynamo.backends.registry._COMPILER_FNS")
        aot.replace_registered_backend("mine", double)
        assert known["mine"] is not double


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd is returning a function")
class TestSettings:
    def test_all_tensor_guards_leaves_out_a_setting_that_torch_lacks(self, monkeypatch):
        monkeypatch.setattr(settings, "torch_is_at_least", lambda *_: False)  # as on torch 2.11
        monkeypatch.setattr("torch._dynamo.config", types.SimpleNamespace())
        with settings.all_tensor_guards():
            pass

    def regions_in_graph(self):
        """How many nested regions the graph of a model with `compile_once` has; its gradients are right."""
        from torch._dynamo.testing import AotEagerAndRecordGraphs

        model, x, backend = Tower(), torch.randn(2, 4, requires_grad=True), AotEagerAndRecordGraphs()
        model(x).sum().backward()
        want = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        guarded = watch(model, compile_once=True)
        torch.compile(guarded, backend=backend, fullgraph=True)(x)[0].sum().backward()
        torch.testing.assert_close([p.grad for p in unwatch(guarded).parameters()], want)
        region = torch.ops.higher_order.invoke_subgraph
        return sum(node.target is region for node in backend.graphs[0].graph.nodes)

    def test_blocks_are_no_regions_where_these_cannot_be_protected(self, monkeypatch):
        assert self.regions_in_graph() == 3
        torch._dynamo.reset()
        owner = importlib.import_module("torch._functorch.aot_autograd")
        original = owner.aot_stage2_compile
        monkeypatch.setattr(owner, "aot_stage2_compile", lambda *args: original(*args))
        assert not settings.protect_regions()
        assert self.regions_in_graph() == 0

    @pytest.mark.parametrize(
        "name",
        [
            "torch._functorch.aot_autograd.aot_stage2_compile",
            "torch._dynamo.output_graph.OutputGraph._call_user_compiler",
        ],
    )
    def test_regions_cannot_be_protected(self, monkeypatch, name):
        monkeypatch.delattr(name)
        assert not settings.protect_regions()

    def test_regions_compile_where_schemas_cannot_be_cached(self, monkeypatch):
        monkeypatch.setattr(settings, "_gen_schema", lambda original, *args: original(*args))
        assert self.regions_in_graph() == 3
        monkeypatch.delattr(sys.modules["torch._higher_order_ops.invoke_subgraph"], "get_invoke_subgraph_cache")
        assert settings.protect_regions()

    def test_a_setting_that_is_missing_is_not_reported(self, monkeypatch):
        assert "dynamo.specialize_int" in settings.settings()
        monkeypatch.setattr(settings, "_DYNAMO_SETTINGS", ("no_such_setting",))
        assert not any(name.startswith("dynamo.") for name in settings.settings())

    def test_a_limit_that_is_missing_stays(self, monkeypatch):
        monkeypatch.delattr(torch._dynamo.config, "accumulated_recompile_limit")
        with settings.without_limits():
            assert torch._dynamo.config.recompile_limit == 2**20

    def test_random_numbers_of_inductor_stay_its_own(self, monkeypatch):
        monkeypatch.delattr("torch._inductor.config.fallback_random")
        with settings.same_random_numbers():
            pass

    def test_a_profiler_is_not_noticed(self, monkeypatch):
        monkeypatch.delattr("torch.autograd._profiler_enabled")
        assert not dynamo.is_profiling()

    def test_a_frame_without_a_scope_has_its_own_name(self):
        code = torch._dynamo.external_utils.wrap_inline(torch.sin).__code__
        assert dynamo.function_name(code).function == "wrap_inline.<locals>.inner"
        assert events.locals_of(object()) is None

    def test_side_effects_under_checkpoints_cannot_be_allowed(self, monkeypatch):
        monkeypatch.delattr(torch._dynamo.config, "skip_fwd_side_effects_in_bwd_under_checkpoint")
        guarded = watch(nn.Linear(2, 2))
        unwatch(guarded)

    # Dynamo, of itself, when a graph breaks after a tensor was computed.
    @pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
    def test_without_side_effects_under_checkpoints_graphs_break(self, monkeypatch):
        class Checkpointed(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = nn.Linear(2, 2)

            def forward(self, x):
                return checkpoint(self.inner, x, use_reentrant=False)

        monkeypatch.setattr("torchguard._watch.allow_side_effects_under_checkpoint", lambda holder: None)
        guarded, x = watch(Checkpointed()), torch.tensor([[1.0, 2.0], [float("nan"), 1.0]])
        # A watched model of another test may still be alive, and the setting with it.
        with torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=False):
            with pytest.raises(torch._dynamo.exc.Unsupported):
                torch.compile(guarded, backend="eager", fullgraph=True)(x)
            torch._dynamo.reset()
            _, f = torch.compile(guarded, backend="eager")(x)
        assert flags.repr(f) == "ErrorFlags(2 samples, 2 errors: 2xNAN @ input)"  # across a break, whose is not known

    def test_a_setting_that_is_stored_elsewhere_is_counted_per_process(self):
        assert not settings._is_per_thread(types.SimpleNamespace(), "anything")


class TestTraining:
    def test_without_hooks_on_parameters_an_optimizer_in_backward_is_noticed_by_its_step(self, monkeypatch):
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
        assert training.steps_in_backward(model.weight)
        monkeypatch.setattr(step_scope, "steps_in_backward", lambda _: training.steps_in_backward(object()))
        with pytest.raises(RetryError, match=r"changed model\.weight"):
            Retry(model).backward(lambda x: model(x).squeeze(1), torch.ones(3, 2))

    def test_without_a_reset_a_sharded_module_is_sharded_again(self):
        calls = []
        state = types.SimpleNamespace(_is_root=True)
        module = types.SimpleNamespace(_get_fsdp_state=lambda: state, reshard=lambda: calls.append("reshard"))
        training.reset_sharded(module)
        assert calls == ["reshard"]

    def test_without_a_join_config_no_join_is_seen(self):
        assert not training.is_joining(nn.Linear(2, 1))

    def test_without_communication_hooks_none_are_seen(self):
        assert training.communication_hooks(nn.Linear(2, 1)) == []

    def test_hooks_in_other_attributes_are_not_seen(self):
        model = nn.Linear(2, 1)
        model.register_forward_hook(print)
        model.weight.register_hook(print)
        assert training.hooks_of(model) == [print, print]
        del model._forward_hooks
        assert training.hooks_of(model) == [print]

    def test_hooks_of_tensors_in_other_attributes_are_not_seen(self):
        weight = torch.ones(2, requires_grad=True)
        weight.register_hook(print)
        assert training.hooks_of_tensor(weight) == [print]
        assert training.hooks_of_tensor(types.SimpleNamespace()) == []

    def test_hooks_of_all_modules_in_other_variables_are_not_seen(self, monkeypatch):
        handle = nn.modules.module.register_module_forward_hook(print)
        assert training.hooks_of_all_modules() == [print]
        monkeypatch.delattr(nn.modules.module, "_global_forward_hooks")
        assert training.hooks_of_all_modules() == []
        monkeypatch.undo()
        handle.remove()

    def test_without_the_registry_functions_of_operators_are_not_seen(self, monkeypatch):
        from torch._library import custom_ops

        def double(x: torch.Tensor) -> torch.Tensor:
            return x * 2

        operator = torch.library.custom_op("test_degraded::double", double, mutates_args=())
        assert double in training.functions_of_operators()
        monkeypatch.delattr(custom_ops, "OPDEFS")
        assert training.functions_of_operators() == []
        del operator

    def test_without_types_of_torchscript_its_attributes_are_not_seen(self, monkeypatch):
        scripted = torch.jit.script(nn.Dropout())
        assert "training" in modules.script_attributes(scripted)
        monkeypatch.delattr(torch._C, "ConcreteModuleType")
        assert modules.script_attributes(scripted) == []

    def test_without_the_mark_of_fused_optimizers_none_skips_on_the_device(self, monkeypatch):
        model = nn.Linear(2, 1)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        assert training.skips_on_device(optimizer)
        monkeypatch.delattr(optimizer, "_step_supports_amp_scaling")
        assert not training.skips_on_device(optimizer)
        with pytest.raises(RetryError, match="AdamW is fused, but skips no steps"):
            Retry(model, optimizer, wait=False).step(lambda x: model(x).squeeze(1), torch.ones(3, 2))

    def test_without_their_names_no_step_hooks_are_seen(self, monkeypatch):
        optimizer = torch.optim.AdamW(nn.Linear(2, 1).parameters(), fused=True)
        optimizer.register_step_post_hook(lambda *_: None)
        assert training.has_step_hooks(optimizer)
        monkeypatch.delattr(optimizer, "_optimizer_step_post_hooks")
        assert not training.has_step_hooks(optimizer)

    def test_without_the_mark_of_schedulers_a_scheduled_step_is_a_step_of_its_own(self, monkeypatch):
        optimizer = torch.optim.AdamW(nn.Linear(2, 1).parameters(), fused=True)
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
        assert not training.has_step_of_its_own(optimizer)
        monkeypatch.delattr(vars(optimizer)["step"], "_wrapped_by_lr_sched")
        assert training.has_step_of_its_own(optimizer)

    def test_without_its_name_the_set_of_unsaved_buffers_is_not_known(self, monkeypatch):
        model = nn.Linear(2, 1)
        assert training.names_of_unsaved_buffers(model) == set()
        monkeypatch.delattr(model, "_non_persistent_buffers_set")
        assert training.names_of_unsaved_buffers(model) is None


class TestDynamoGraph:
    def test_keep_writes_after_calls_says_that_torch_lacks_the_table(self, monkeypatch):
        assert dynamo_graph.keep_writes_after_calls()
        monkeypatch.delattr("torch._dynamo.variables.dicts.SideEffectsProxyDict", raising=False)
        assert dynamo_graph.keep_writes_after_calls() == (not support.torch_is_at_least(2, 13))

    def test_list_attributes_of_new_objects_says_that_torch_lacks_the_method(self, monkeypatch):
        assert dynamo_graph.list_attributes_of_new_objects()
        monkeypatch.setattr(dynamo_graph, "torch_is_at_least", lambda *_: False)  # as on torch 2.11
        monkeypatch.delattr("torch._dynamo.variables.GetAttrVariable", raising=False)
        assert not dynamo_graph.list_attributes_of_new_objects()


class TestInductor:
    def test_ops_are_called_where_inductor_takes_no_lowering(self, monkeypatch):
        monkeypatch.delattr("torch._inductor.lowering.register_lowering")
        inductor.compile_in_place(None, None, "torch:relu_")
        inductor.compile_to_call(None, "torch:relu_")

    def test_partial_tiles_are_stored_as_torch_does_where_there_is_no_such_kernel(self, monkeypatch):
        monkeypatch.delattr("torch._inductor.codegen.cpp.CppVecKernel")
        inductor.store_partial_tiles.__wrapped__()

    @pytest.mark.parametrize("name", ["register_lowering", "lowerings", "make_pointwise"])
    def test_row_maxima_are_not_compiled_where_inductor_takes_no_lowering(self, monkeypatch, name):
        monkeypatch.delattr(f"torch._inductor.lowering.{name}")
        assert not inductor.compile_row_maxima(None)

    @pytest.mark.parametrize("name", ["register_lowering", "lowerings", "make_pointwise"])
    def test_largest_magnitudes_are_operations_where_inductor_takes_no_lowering(self, monkeypatch, name):
        monkeypatch.delattr(f"torch._inductor.lowering.{name}")
        assert not inductor.compile_largest_magnitudes(None, {})

    def test_a_watched_model_compiles_where_largest_magnitudes_are_operations(self, monkeypatch):
        monkeypatch.setattr("torchguard._watch.magnitudes._compile_largest_magnitudes", lambda: False)
        x = torch.tensor([[1.0, 1.0], [float("nan"), 1.0]])
        _, f = torch.compile(watch(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))), fullgraph=True)(x)
        assert err.is_err(f).tolist() == [False, True]

    def test_checks_compile_where_row_maxima_do_not(self, monkeypatch):
        monkeypatch.setattr("torchguard._channel.detect._compile_row_maxima", lambda: False)
        x = torch.tensor([[1.0, 1.0], [float("nan"), 1.0]])
        f = torch.compile(lambda x: flag_nan(x.sin(), "x", err.new(x)), fullgraph=True)(x)
        assert flags.repr(f) == "ErrorFlags(2 samples, 1 errors: 1xNAN @ x)"


class TestHookCalls:
    def test_call_hooks_while_tracing_says_that_torch_lacks_a_variable(self, monkeypatch):
        monkeypatch.delattr("torch._dynamo.variables.TupleVariable")
        assert not hook_calls.call_hooks_while_tracing()

    def test_hooks_are_traced_where_they_cannot_be_called(self, monkeypatch):
        called = []
        monkeypatch.setattr(hook_calls, "_hooks_of", lambda tx, module: called.append(module))
        x = torch.tensor([[1.0, 1.0], [float("nan"), 1.0]])
        _, f = torch.compile(watch(nn.Sequential(nn.Linear(2, 2))), backend="eager", fullgraph=True)(x)
        assert called
        assert err.is_err(f).tolist() == [False, True]

    def test_a_method_has_no_object_where_dynamo_does_not_say(self):
        assert hook_calls.arguments_of(object(), [1, 2]) == [1, 2]


class TestRegionCalls:
    @pytest.fixture
    def blocks(self):
        return nn.Sequential(*[nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(4)])

    @pytest.mark.parametrize(
        "name", ["symbolic_convert.InstructionTranslator", "variables.functions.BaseUserFunctionVariable"]
    )
    def test_trace_regions_says_that_torch_lacks_a_class(self, monkeypatch, name):
        monkeypatch.delattr(f"torch._dynamo.{name}")
        assert not region_calls.trace_regions()

    def test_there_are_no_regions_where_torch_cannot_be_kept_from_wrong_ones(self, monkeypatch):
        with monkeypatch.context() as patch:
            patch.delattr("torch._dynamo.variables.higher_order_ops.are_same_graph_modules")
            assert not region_calls.trace_regions()
        monkeypatch.setattr(region_calls, "_calls_of_regions", lambda: None)
        assert not region_calls.trace_regions()

    def test_blocks_are_compiled_one_by_one_without_regions(self, monkeypatch, blocks):
        monkeypatch.setattr("torchguard._watch.regions.trace_regions", lambda: False)
        guarded = watch(blocks, compile_once="*")
        assert not any(region_calls.REGION in vars(block) for block in blocks)
        x = torch.tensor([[1.0, 1.0], [float("nan"), 1.0]])
        _, f = torch.compile(guarded, backend="eager", fullgraph=True)(x)
        assert err.is_err(f).tolist() == [False, True]

    @pytest.mark.parametrize("name", ["RestartAnalysis", "SpeculationLog"])
    def test_torch_raises_its_error_where_dynamo_cannot_begin_anew(self, monkeypatch, blocks, name):
        def refuses_regions(graph, inputs):
            raise NotImplementedError("no regions here")

        module = "exc" if name == "RestartAnalysis" else "symbolic_convert"
        real = getattr(getattr(torch._dynamo, module), name)
        begin_anew = region_calls._begin_anew

        def without_name(tx, error):
            monkeypatch.delattr(real.__module__ + "." + name)
            try:
                begin_anew(tx, error)
            finally:
                monkeypatch.undo()

        monkeypatch.setattr(region_calls, "_begin_anew", without_name)
        with pytest.raises(Exception, match="no regions here"):
            torch.compile(watch(blocks, compile_once="*"), backend=refuses_regions)(torch.ones(2, 2))


class TestHookGuards:
    def test_skip_guards_on_hooks_says_that_torch_lacks_build_guards(self, monkeypatch):
        monkeypatch.setattr("torch._dynamo.guards.CheckFunctionManager", type("CheckFunctionManager", (), {}))
        assert not hook_guards.skip_guards_on_hooks()

    def test_all_guards_stay_where_sources_have_other_names(self, monkeypatch):
        monkeypatch.setattr(hook_guards, "IDENTITY", "a name that no source ends with")
        x = torch.tensor([[1.0, 1.0], [float("nan"), 1.0]])
        _, f = torch.compile(watch(nn.Linear(2, 2)), backend="eager", fullgraph=True)(x)
        assert err.is_err(f).tolist() == [False, True]


def test_every_degraded_mode_is_tested_here():
    tests = Path(__file__).read_text()
    functions = [node for path in SEAM.glob("*.py") for node in ast.walk(ast.parse(path.read_text()))]
    degraded = {
        node.name
        for node in functions
        if isinstance(node, ast.FunctionDef) and "degraded" in (ast.get_docstring(node) or "").lower()
    }
    assert len(degraded) > 20
    assert {name for name in degraded if not re.search(rf"\b{name}\b", tests)} == set()


def test_every_module_of_the_seam_says_for_which_torch_and_what_happens_without():
    modules = {path.name: ast.get_docstring(ast.parse(path.read_text())) for path in SEAM.glob("*.py")}
    del modules["__init__.py"], modules["support.py"]  # which say it of all others
    assert {name for name, text in modules.items() if not re.search(r"torch\s2\.11\sto\s2\.15", text)} == set()
    assert {name for name, text in modules.items() if not re.search("required|degraded", text.lower())} == set()
