"""Settings of torch: changed around a compilation, or while an object needs them, and put back."""

import copy
import gc
import pickle
import re
import threading
from pathlib import Path

import pytest
import torch
from tests.models import Residual
from torch import nn
from torch._dynamo import config as dynamo
from torch._functorch import config as functorch
from torch._inductor import config as inductor
from torch.utils.checkpoint import checkpoint

from torchguard import unwatch, watch
from torchguard._torch import settings
from torchguard._torch.aot import compile_boxed

CHECKPOINT = "skip_fwd_side_effects_in_bwd_under_checkpoint"
IS_PER_THREAD = settings._is_per_thread(dynamo, CHECKPOINT)


@pytest.fixture(autouse=True)
def defaults(monkeypatch):
    """No model needs a setting, also if earlier tests left watched models alive."""
    monkeypatch.setattr(settings, "_needed", {})
    with (
        dynamo.patch({CHECKPOINT: False}),
        functorch.patch(donated_buffer=True),
        inductor.patch(inplace_buffers=True, allow_buffer_reuse=True),
    ):
        yield


def is_set() -> bool:
    return getattr(dynamo, CHECKPOINT)


class Holder:
    pass


class TestWhileAnObjectNeedsThem:
    def test_watch_sets_and_unwatch_puts_back(self):
        guarded = watch(nn.Linear(2, 2))
        assert is_set()
        unwatch(guarded)
        assert not is_set()

    def test_the_last_watched_model_counts(self):
        one, two = watch(nn.Linear(2, 2)), watch(nn.Linear(2, 2))
        unwatch(one)
        assert is_set()
        unwatch(two)
        assert not is_set()

    def test_a_model_that_is_collected_counts_as_gone(self):
        guarded = watch(nn.Linear(2, 2))
        assert is_set()
        del guarded
        gc.collect()
        assert not is_set()

    @pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
    def test_a_copy_and_a_pickled_model_need_it_themselves(self, copied):
        guarded = watch(nn.Linear(2, 2))
        twin = copied(guarded)
        unwatch(guarded)
        assert is_set()
        unwatch(twin)
        assert not is_set()

    def test_a_pickled_model_sets_it_where_nothing_is_watched(self):
        guarded = watch(nn.Linear(2, 2))
        pickled = pickle.dumps(guarded)
        unwatch(guarded)
        assert not is_set()
        twin = pickle.loads(pickled)
        assert is_set()
        unwatch(twin)
        assert not is_set()

    def test_what_the_user_had_set_stays(self):
        setattr(dynamo, CHECKPOINT, True)
        unwatch(watch(nn.Linear(2, 2)))
        assert is_set()

    def test_what_somebody_changed_meanwhile_stays(self):
        with dynamo.patch(recompile_limit=77):
            holder = Holder()
            settings._need(holder, dynamo, "recompile_limit", 1234)
            dynamo.recompile_limit = 5
            settings.release_settings(holder)
            assert dynamo.recompile_limit == 5

    def test_what_was_found_is_put_back(self):
        with dynamo.patch(recompile_limit=77):
            holder = Holder()
            settings._need(holder, dynamo, "recompile_limit", 1234)
            assert dynamo.recompile_limit == 1234
            settings.release_settings(holder)
            assert dynamo.recompile_limit == 77

    def test_a_change_meanwhile_is_made_anew_for_a_second_object_and_then_put_back(self):
        one, two = Holder(), Holder()
        settings.allow_side_effects_under_checkpoint(one)
        setattr(dynamo, CHECKPOINT, False)
        settings.allow_side_effects_under_checkpoint(two)
        assert is_set()
        settings.release_settings(one)
        settings.release_settings(two)
        assert not is_set()

    def test_releasing_twice_and_what_needs_nothing(self):
        holder, other = Holder(), Holder()
        settings.allow_side_effects_under_checkpoint(holder)
        settings.release_settings(other)
        assert is_set()
        settings.release_settings(holder)
        settings.release_settings(holder)
        assert not is_set()

    def test_a_thread_puts_its_own_back(self):
        seen = {}

        def work():
            guarded = watch(nn.Linear(2, 2))
            seen["watched"] = is_set()
            unwatch(guarded)
            seen["unwatched"] = is_set()

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert seen == {"watched": True, "unwatched": False}
        assert not is_set()

    def test_what_another_thread_releases_is_put_back_when_its_own_comes_by(self):
        guarded = watch(nn.Linear(2, 2))
        thread = threading.Thread(target=unwatch, args=[guarded])
        thread.start()
        thread.join()
        assert is_set() == IS_PER_THREAD  # nobody can change it from there, unless it is the process's
        unwatch(watch(nn.Linear(2, 2)))
        assert not is_set()

    def test_a_watched_checkpoint_compiles_without_a_break(self):
        class Checkpointed(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = nn.Linear(2, 2)

            def forward(self, x):
                return checkpoint(self.inner, x, use_reentrant=False)

        guarded = watch(Checkpointed())
        out, _ = torch.compile(guarded, backend="aot_eager", fullgraph=True)(torch.ones(3, 2))
        out.sum().backward()
        assert guarded.inner.weight.grad is not None


def region_settings():
    return functorch.donated_buffer, inductor.allow_buffer_reuse, inductor.inplace_buffers


ON, OFF = (True, True, True), (False, False, False)


class TestAroundACompilation:
    @pytest.fixture
    def compiled_with(self):
        """A backend, and the settings under which it compiled each graph."""
        from torch._dynamo.backends.common import aot_autograd

        seen = {}

        def compiler(name):
            def compile(graph, inputs):
                seen[name] = region_settings()
                return compile_boxed(graph, inputs)

            return compile

        return aot_autograd(fw_compiler=compiler("forward"), bw_compiler=compiler("backward")), seen

    def test_a_graph_with_regions_is_compiled_with_settings_of_its_own(self, compiled_with):
        backend, seen = compiled_with
        guarded = watch(Residual(), compile_once=True)
        out, _ = torch.compile(guarded, backend=backend, fullgraph=True)(torch.randn(4, 3, 8))
        assert region_settings() == ON
        out.sum().backward()
        assert seen == {"forward": OFF, "backward": OFF}
        assert region_settings() == ON

    def test_also_where_another_thread_compiles_the_backward_graph(self, compiled_with):
        backend, seen = compiled_with
        guarded = watch(Residual(), compile_once=True)
        out, _ = torch.compile(guarded, backend=backend, fullgraph=True)(torch.randn(4, 3, 8))
        assert "backward" not in seen
        thread = threading.Thread(target=out.sum().backward)
        thread.start()
        thread.join()
        assert seen["backward"] == OFF

    def test_also_after_unwatch(self, compiled_with):
        backend, seen = compiled_with
        guarded = watch(Residual(), compile_once=True)
        out, _ = torch.compile(guarded, backend=backend, fullgraph=True)(torch.randn(4, 3, 8))
        unwatch(guarded)
        out.sum().backward()
        assert seen["backward"] == OFF

    def test_a_graph_without_regions_is_compiled_as_ever(self, compiled_with):
        backend, seen = compiled_with
        torch.compile(watch(Residual(), compile_once=True), backend="aot_eager", fullgraph=True)(torch.randn(4, 3, 8))
        out, _ = torch.compile(watch(Residual()), backend=backend, fullgraph=True)(torch.randn(4, 3, 8))
        out.sum().backward()
        assert seen == {"forward": ON, "backward": ON}

    def test_a_backward_pass_can_keep_its_graph(self):
        guarded = watch(Residual(), compile_once=True)
        compiled = torch.compile(guarded, backend="aot_eager", fullgraph=True)
        compiled(torch.randn(4, 3, 8))[0].sum().backward()
        loss = compiled(torch.randn(4, 3, 8))[0].sum()
        loss.backward(retain_graph=True)
        loss.backward()

    def test_limits_and_caches_are_as_before_afterwards(self):
        before = dynamo.recompile_limit, functorch.enable_autograd_cache, inductor.fx_graph_cache
        with settings.without_limits(), settings.without_graph_caches():
            assert dynamo.recompile_limit == 2**20
            assert not functorch.enable_autograd_cache
            assert not inductor.fx_graph_cache
        assert (dynamo.recompile_limit, functorch.enable_autograd_cache, inductor.fx_graph_cache) == before


def test_one_module_changes_settings():
    changing = re.compile(r"\bpatch\(\w+=|config\.patch\(|\b_set_\w+_enabled\(")
    files = Path(settings.__file__).parents[1].rglob("*.py")
    assert [path.name for path in files if changing.search(path.read_text())] == ["settings.py"]
