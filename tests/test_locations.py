"""Locations and their names: tracking, copying, saving, and models with many modules."""

import copy
import gc
import io
import pickle
import subprocess
import sys
import weakref

import pytest
import torch
from torch import nn

from torchguard import ErrorLocation, err, flag_nan, flags, push, tracked
from torchguard.exceptions import LocationWarning, TorchGuardError
from torchguard.locations import IdsGivenError, WeightedLocationTree, _tracked
from torchguard.locations._registry import registry


@tracked
class Block(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 1)
        self.ffn = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, x):
        h = self.ffn(x)
        return h, flag_nan(h, self.ffn[2], err.new(x))


@tracked
class Other(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    def forward(self, x):
        h = self.second(self.first(x))
        f = flag_nan(h, self.second, err.new(x))
        return h, flag_nan(h, self, f)


X = torch.full((1, 4), float("nan"))


def ids(model):
    return [module._fx_location.id for module in model.modules() if hasattr(module, "_fx_path")]


@pytest.fixture(autouse=True)
def empty_registry(monkeypatch):
    """An empty location registry, even if other tests keep models alive."""
    gc.collect()
    for name, empty in vars(type(registry)()).items():
        monkeypatch.setattr(registry, name, empty)
    monkeypatch.setattr(_tracked, "_tables", weakref.WeakSet())


def test_modules_with_parameters_have_a_path():
    block = Block()
    assert block.attention._fx_path == "attention"
    assert block.ffn._fx_path == "ffn"
    assert block.ffn[0]._fx_path == "ffn.0"
    assert block.ffn[2]._fx_path == "ffn.2"
    assert not hasattr(block.ffn[1], "_fx_path")


def test_ids_are_sequential_in_depth_first_order():
    block = Block()
    first = ids(block)[0]
    assert ids(block) == list(range(first, first + 5))
    paths = [module._fx_path for module in block.modules() if hasattr(module, "_fx_path")]
    assert paths == ["attention", "attention.out_proj", "ffn", "ffn.0", "ffn.2"]


def test_ids_are_the_same_in_every_run():
    script = "from tests.test_locations import Block, ids; block = Block(); print(ids(block))"
    runs = {
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    }
    assert runs == {"[128, 129, 130, 131, 132]\n"}


def test_names_survive_compilation(compiled):
    _, f = compiled(Block())(X)
    assert flags.summary(f) == {"ffn.2": {"NAN": 1}}


def test_a_module_without_parameters_has_the_location_of_the_previous_module():
    block = Block()
    assert flags.summary(flag_nan(X, block.ffn[1])) == {"ffn.0": {"NAN": 1}}


def test_without_a_known_order_it_has_the_location_of_its_parent():
    class Free(nn.Module):
        def __init__(self):
            super().__init__()
            self.act = nn.ReLU()
            self.inner = nn.ModuleDict({"linear": nn.Linear(1, 1), "act": nn.ReLU()})

    model = tracked(Free())
    assert flags.summary(flag_nan(X, model.inner["act"])) == {"inner": {"NAN": 1}}
    assert flags.summary(flag_nan(X, model.act)) == {"Free": {"NAN": 1}}


def test_the_model_itself_is_named_after_its_class():
    _, f = Other()(X)
    assert flags.summary(f) == {"second": {"NAN": 1}, "Other": {"NAN": 1}}


def test_two_live_models_do_not_share_ids():
    block, other = Block(), Other()
    assert not set(ids(block)) & set(ids(other))
    _, one = block(X)
    _, two = other(X)
    assert flags.summary(one) == {"ffn.2": {"NAN": 1}}
    assert flags.summary(two) == {"second": {"NAN": 1}, "Other": {"NAN": 1}}


def test_equal_paths_of_two_models_are_qualified_by_model_in_one_report():
    teacher, student = Other(), Other()
    merged = err.merge(teacher(X)[1], student(X)[1])
    assert list(flags.summary(merged)) == ["Other:second", "Other", "Other#2:second", "Other#2"]
    assert flags.summary(teacher(X)[1]) == {"second": {"NAN": 1}, "Other": {"NAN": 1}}


@pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))],
    ids=["deepcopy", "pickle"],
)
def test_a_copy_has_its_own_locations(duplicate):
    block = Block()
    twin = duplicate(block)
    assert twin.ffn[0]._fx_path == "ffn.0"
    assert not set(ids(block)) & set(ids(twin))
    _, f = twin(X)
    assert flags.summary(f) == {"ffn.2": {"NAN": 1}}


def test_a_saved_model_is_loaded_beside_another_model():
    saved = io.BytesIO()
    torch.save(Block(), saved)
    gc.collect()
    ErrorLocation.reset()
    other = Other()
    saved.seek(0)
    block = torch.load(saved, weights_only=False)
    assert not set(ids(block)) & set(ids(other))
    assert flags.summary(block(X)[1]) == {"ffn.2": {"NAN": 1}}


def test_locations_are_not_in_the_state_dict():
    block = Block()
    plain = {key for key in block.state_dict() if "_fx" in key}
    assert plain == set()
    block.to(torch.float64).half().train().eval()
    assert block.ffn[0]._fx_path == "ffn.0"


def test_a_tracked_part_has_paths_relative_to_the_whole():
    @tracked
    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(3))

    whole = Whole()
    assert whole.blocks[1].ffn[0]._fx_path == "blocks.1.ffn.0"
    assert ids(whole) == list(range(128, 147))
    assert ErrorLocation.count() == 21  # the model and the unknown location


def test_a_part_used_before_keeps_its_old_names_in_old_flags():
    part = Other()
    _, f = part(X)
    whole = tracked(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), part))
    assert "second" in flags.summary(f)
    assert whole[2].second._fx_path == "2.second"


def test_a_part_that_is_not_a_submodule_has_its_own_paths():
    @tracked
    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = [Other()]  # a list hides it from torch

    assert Whole().parts[0].second._fx_path == "second"


def test_a_copy_of_one_layer_takes_one_id():
    model = tracked(nn.Sequential(*(nn.Linear(1, 1) for _ in range(100))))
    before = ErrorLocation.count()
    layers = [copy.deepcopy(model[3]) for _ in range(15)]
    assert ErrorLocation.count() == before + 15
    assert ErrorLocation.name(layers[0]._fx_location.id) == "3"


def test_subclasses_are_tracked_after_their_own_init():
    class Larger(Block):
        def __init__(self):
            super().__init__()
            self.extra = nn.Linear(4, 4)

    larger = Larger()
    assert larger.extra._fx_path == "extra"
    assert larger.ffn[0]._fx_path == "ffn.0"


def test_an_existing_model_can_be_tracked():
    model = tracked(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    assert model[0]._fx_path == "0"
    assert flags.summary(flag_nan(X, model[0])) == {"0": {"NAN": 1}}


def test_a_module_that_refuses_attributes_has_a_location():
    class Frozen(nn.Linear):
        def __setattr__(self, name, value):
            if "bias" in self.__dict__.get("_parameters", {}) and name != "training":
                raise AttributeError(name)
            super().__setattr__(name, value)

    model = tracked(nn.Sequential(Frozen(4, 4)))
    assert flags.summary(flag_nan(X, model[0])) == {"0": {"NAN": 1}}


def test_only_modules_can_be_tracked():
    with pytest.raises(TorchGuardError, match=r"expected an nn\.Module or a subclass of it, got"):
        tracked(int)


def test_flags_keep_their_names_after_the_model_is_deleted():
    other = Other()
    _, f = other(X)
    del other
    gc.collect()
    Block()
    assert "second" in flags.summary(f)


class TestManyModules:
    def deep(self, layers, **options):
        class Layer(nn.Module):
            def __init__(self):
                super().__init__()
                self.attn = nn.ModuleDict({"q": nn.Linear(1, 1), "k": nn.Linear(1, 1)})

        class Deep(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.ModuleList(Layer() for _ in range(layers))
                self.head = nn.ModuleDict({"a": nn.ModuleDict({"b": nn.ModuleDict({"out": nn.Linear(1, 1)})})})

        return tracked(Deep(), **options)

    def name(self, module):
        return ErrorLocation.name(module._fx_location.id)

    def test_deep_modules_share_the_location_of_the_nearest_ancestor(self):
        model = self.deep(400)  # 1,605 locations
        assert self.name(model.layer[7]) == "layer.7"
        assert self.name(model.layer[399]) == "layer.399"
        assert self.name(model.layer[399].attn.q) == self.name(model.layer[399].attn.k) == "layer.399.attn"
        assert all(0 < module._fx_location.id <= 1023 for module in model.modules())
        assert model.layer[399].attn.q._fx_path == "layer.399.attn.q"

    def test_weights_preserve_important_paths(self):
        assert self.name(self.deep(400).head["a"]["b"]["out"]) == "head.a.b"
        gc.collect()
        model = self.deep(400, weights={"head.*": 10.0})
        assert self.name(model.head["a"]["b"]["out"]) == "head.a.b.out"

    def test_a_flat_model_of_thousands(self):
        model = tracked(nn.Sequential(*(nn.Linear(1, 1) for _ in range(2000))))
        assert self.name(model[0]) == "0"
        assert self.name(model[1999]) == "Sequential"

    def test_a_huge_model_leaves_ids_for_other_models(self):
        huge = self.deep(400)
        other = Other()
        assert self.name(other.second) == "second"
        assert ErrorLocation.name(ErrorLocation.register("by.hand")) == "by.hand"
        del huge

    def test_ids_of_deleted_models_are_reused(self):
        for _ in range(30):
            model = tracked(nn.Sequential(*(nn.Linear(1, 1) for _ in range(100))))
            assert self.name(model[99]) == "99"

    def test_copies_beyond_the_last_id_share_locations(self):
        model = tracked(nn.Sequential(*(nn.Linear(1, 1) for _ in range(300))))
        copies = [copy.deepcopy(model) for _ in range(5)]
        assert all(self.name(twin[299]) == "299" for twin in copies)

    def test_a_model_without_any_id_left_warns(self):
        full = tracked(nn.Sequential(*(nn.Linear(1, 1) for _ in range(1022))))
        assert len(registry.free_ids()) == 0
        with pytest.warns(LocationWarning, match="All 1023 location ids are taken"):
            other = Other()
        assert flags.summary(other(X)[1]) == {"Unknown": {"NAN": 1}}
        with pytest.warns(LocationWarning, match="'one.more'"):
            assert ErrorLocation.register("one.more") == ErrorLocation.UNKNOWN
        del full


class TestErrorLocation:
    def test_registered_names(self):
        location = ErrorLocation.register("encoder.0")
        assert ErrorLocation.register("encoder.0") == location
        assert ErrorLocation.register("encoder.1") == location + 1
        assert (ErrorLocation.get("encoder.0"), ErrorLocation.get("nowhere")) == (location, ErrorLocation.UNKNOWN)
        assert (ErrorLocation.name(location), ErrorLocation.path(location)) == ("encoder.0", "encoder.0")
        assert ErrorLocation.is_registered("encoder.0")
        assert not ErrorLocation.is_registered("nowhere")
        assert ErrorLocation.count() == 3

    def test_every_id_and_every_path(self):
        by_hand = ErrorLocation.register("by.hand")
        first, second = Other(), Other()
        second_id = second.second._fx_location.id
        ids_known, paths = ErrorLocation.get_all_ids(), ErrorLocation.get_all_paths()
        assert len(ids_known) == ErrorLocation.count()
        assert (ids_known[ErrorLocation.UNKNOWN], ids_known[by_hand]) == ("Unknown", "by.hand")
        assert ids_known[first.second._fx_location.id] == ids_known[second_id] == "second"
        assert paths == {"by.hand": by_hand, "first": ErrorLocation.get("first"), "second": second_id}

    def test_unknown_locations(self):
        assert ErrorLocation.UNKNOWN == 0
        assert ErrorLocation.name(0) == "Unknown"
        assert (ErrorLocation.name(77), ErrorLocation.path(77)) == ("Location_77", "")

    def test_reset_drops_registered_names_but_no_live_model(self):
        ErrorLocation.register("by.hand")
        block = Block()
        ErrorLocation.reset()
        assert not ErrorLocation.is_registered("by.hand")
        assert ErrorLocation.get("ffn.0") == block.ffn[0]._fx_location.id

    def test_a_name_is_a_string(self):
        with pytest.raises(TorchGuardError, match="expected a name, got"):
            ErrorLocation.register("")


class TestTree:
    def test_every_path_gets_an_id_if_there_are_enough(self):
        tree = WeightedLocationTree()
        for path in ["a", "a.b", "c"]:
            tree.add_path(path)
        tree.build_ids()
        assert [tree.get_location(path) for path in ["a", "a.b", "c"]] == [1, 2, 3]
        assert tree.get_location("a.b.deeper") == 2
        assert tree.name(3) == "c"

    def test_weights_come_before_depth(self):
        tree = WeightedLocationTree(max_locations=4)
        tree.set_default_weight(1.0)
        tree.set_weight("head.*", 10.0)
        tree.set_weight("encoder.layer*", 0.1)
        for path in ["encoder.layer.0", "encoder.layer.1", "stem", "head.a.b.c"]:
            tree.add_path(path)
        assert tree.name(tree.get_location("head.a.b.c")) == "head.a.b.c"
        assert tree.name(tree.get_location("stem")) == "stem"
        assert tree.name(tree.get_location("encoder.layer.1")) == ""

    def test_a_path_that_was_not_added_is_unknown(self):
        tree = WeightedLocationTree()
        tree.add_path("encoder.conv")
        assert tree.get_location("encoder.conv.weight") == tree.get_location("encoder.conv") == 1
        assert tree.get_location("decoder.linear") == tree.get_location("encoder") == ErrorLocation.UNKNOWN

    def test_every_path_with_its_id(self):
        tree = WeightedLocationTree(max_locations=3)
        for path in ["a", "a.b", "a.c"]:
            tree.add_path(path)
        assert tree.path_to_id == {}
        tree.build_ids(start_id=7)
        assert tree.path_to_id == {"a": 7, "a.b": 7, "a.c": 7}

    def test_leaves_are_counted(self):
        tree = WeightedLocationTree()
        for path in ["a", "a.b.c", "a.b.d", "e"]:
            tree.add_path(path)
        assert tree.count_leaves() == 3

    def test_all_paths_are_registered_by_name(self):
        tree = WeightedLocationTree()
        for path in ["a.b", "c"]:
            tree.add_path(path)
        assert tree.register_all() == {"a.b": 128, "c": 129}
        assert ErrorLocation.name(128) == "a.b"

    def test_no_path_can_be_added_after_build_ids(self):
        tree = WeightedLocationTree()
        tree.add_path("a")
        tree.build_ids()
        with pytest.raises(
            IdsGivenError, match=r"ids are assigned already, so 'b' cannot be added\. Add every path before build_ids"
        ):
            tree.add_path("b")

    def test_too_few_ids(self):
        with pytest.raises(TorchGuardError, match="max_locations: expected 2 or more, got 1"):
            WeightedLocationTree(max_locations=1)


class TestNumbers:
    """Locations that are given as a number, `location=42`, beside those of models and names."""

    def chain(self, count):
        return tracked(nn.Sequential(*(nn.Linear(1, 1) for _ in range(count))))

    @pytest.mark.parametrize("count", [50, 800, 2000])
    @pytest.mark.parametrize("number", [1, 42, 127])
    def test_a_number_is_no_module(self, count, number):
        model = self.chain(count)
        f = err.push(err.new_t(1), err.NAN, location=number)
        assert flags.summary(f) == {f"Location_{number}": {"NAN": 1}}
        assert number not in ids(model)

    def test_both_are_reported(self, run_light):
        model = self.chain(60)

        def fn(x):
            f = push(err.new(x), err.NAN, location=42, where=x.isnan())
            return flag_nan(x, model[41], f)

        summary = flags.summary(run_light(fn)(torch.full((1, 1), float("nan"))))
        assert summary["Location_42"] == summary["41"] == {"NAN": 1}

    def test_a_number_that_was_used_is_given_to_no_model(self):
        for number in (128, 130, 500):
            err.push(err.new_t(1), err.NAN, number)
        model = self.chain(600)
        name = ErrorLocation.register("by.name")
        assert not {128, 130, 500} & {*ids(model), name}
        assert ids(model) == sorted(ids(model))

    @pytest.mark.parametrize(
        "use",
        [
            lambda number: err.push(err.new_t(1), err.NAN, number),
            lambda number: push(err.new_t(1), err.NAN, location=number),
            lambda number: flag_nan(X, number),
        ],
    )
    def test_a_number_of_a_module_warns_once(self, use):
        model = self.chain(5)
        with pytest.warns(LocationWarning, match=r"location=130 is the id of Sequential:2: .* a number below 128"):
            use(model[2]._fx_location.id)
        use(model[2]._fx_location.id)

    def test_numbers_that_torchguard_returned_are_no_mistake(self):
        model = self.chain(5)
        err.push(err.new_t(1), err.NAN, ErrorLocation.get("1"))
        errors = flags.unpack(flag_nan(torch.full((1, 1), float("nan")), model[3], err.new_t(1)))
        err.push(err.new_t(1), err.NAN, errors[0].location)
        err.push(err.new_t(1), err.NAN, ErrorLocation.register("by.name"))
        err.push(err.new_t(1), err.NAN, next(reversed(ErrorLocation.get_all_ids())))

    def test_a_model_that_needs_every_id_gets_ascending_ones(self):
        model = self.chain(1000)
        assert ids(model) == list(range(1, 1001))

    def test_names_take_small_numbers_last(self):
        err.push(err.new_t(1), err.NAN, 127)
        names = [ErrorLocation.register(f"name.{number}") for number in range(900)]
        assert names == [*range(128, 1024), 126, 125, 124, 123]

    def test_a_number_may_be_dynamic(self):
        fn = torch.compile(lambda f, at: err.push(f, err.NAN, at), backend="aot_eager", fullgraph=True, dynamic=True)
        for number in (3, 4, 5):
            assert err.get_first_location(fn(err.new_t(1), number)).tolist() == [number]

    def test_reset_frees_numbers(self):
        err.push(err.new_t(1), err.NAN, 128)
        ErrorLocation.reset()
        assert ErrorLocation.register("encoder") == 128
