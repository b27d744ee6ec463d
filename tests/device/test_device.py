"""The description of a device in Python, TOML and environment variables, and its errors."""

import dataclasses

import pytest
import torch

from torchguard.device import Constraint, Device, DeviceError, examples
from torchguard.device._device import _VARIABLES, FIELDS
from torchguard.exceptions import TorchGuardError


@pytest.fixture(autouse=True)
def no_settings(monkeypatch):
    for variable in [*_VARIABLES, "MOCK_DEVICE", "MOCK_STRICT", "MOCK_RUN"]:
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def toml(tmp_path):
    def write(text):
        path = tmp_path / "some.toml"
        path.write_text(text)
        return path

    return write


def test_a_device_is_a_value():
    one = Device(name="a", alignment=16, deny=["aten.gelu"])
    assert one == Device(name="a", alignment=16, deny=["aten.gelu"])
    assert hash(one) == hash(dataclasses.replace(one))
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.name = "b"  # pyright: ignore[reportAttributeAccessIssue]


def test_by_default_only_double_precision_is_refused():
    plain = Device()
    assert plain.parameters == plain.activations == (torch.float32, torch.float16, torch.bfloat16)
    assert (plain.alignment, plain.max_memory, plain.layouts, plain.deny, plain.dynamic_shapes) == (
        None,
        None,
        None,
        (),
        True,
    )


@pytest.mark.parametrize(
    ("field", "given", "stored"),
    [
        ("parameters", "float32, bfloat16", (torch.float32, torch.bfloat16)),
        ("activations", [torch.float16], (torch.float16,)),
        ("indices", "torch.int32", (torch.int32,)),
        ("accumulators", "any", None),
        ("layouts", ["contiguous", "channels_last"], ("contiguous", "channels_last")),
        ("alignment", 16, ((-1, 16),)),
        ("alignment", "32", ((-1, 32),)),
        ("alignment", {-1: 16, -2: 8}, ((-1, 16), (-2, 8))),
        ("alignment", "-1:16,-2:8", ((-1, 16), (-2, 8))),
        ("max_memory", "16GiB", 16 * 2**30),
        ("max_memory", "17179869184", 17179869184),
        ("max_memory", "1.5 MB", 1_500_000),
        ("max_memory", "4G", 4 * 2**30),
        ("deny", "aten::gelu, torch.ops.aten.add.Tensor", ("aten.gelu", "aten.add.Tensor")),
        ("deny", "gelu", ("aten.gelu",)),
        ("deny", ["mylib.op", "higher_order.cond"], ("mylib.op", "higher_order.cond")),
        ("deny", "any", ()),
        ("deny", None, ()),
        ("deny", ["aten.any"], ("aten.any",)),
        ("deny", "aten.linear", ("aten.linear",)),
        ("allow", "aten.*softmax*", ("aten.*softmax*",)),
        ("max_rank", "4", 4),
        ("max_dim", 65536, 65536),
        ("max_dim", "0:64", ((0, 64),)),
        ("dynamic_shapes", "off", False),
        ("decompositions", "core", "core"),
        ("decompositions", ["aten.gelu"], ("aten.gelu",)),
    ],
)
def test_a_field_is_read_from_values_and_from_text(field, given, stored):
    read = Device(**{field: given})
    assert getattr(read, field) == stored
    assert getattr(dataclasses.replace(read), field) == stored


@pytest.mark.parametrize(
    ("field", "given", "expected"),
    [
        ("name", "", "a name"),
        ("parameters", "float33", "'float33' is not a dtype"),
        ("indices", [3], "3 is not a dtype"),
        ("layouts", "contigous", "Did you mean 'contiguous'?"),
        ("alignment", 0, "a whole number of at least 1"),
        ("alignment", "a lot", "for each dim such as"),
        ("alignment", {-1: -16}, "a whole number of at least 1"),
        ("alignment", True, "a whole number of at least 1"),
        ("alignment", "x:3", "'x' is not a dim"),
        ("alignment", {1.5: 3}, "1.5 is not a dim"),
        ("max_memory", "16 potatoes", "'16GiB'"),
        ("max_memory", -1, "a number of bytes"),
        ("max_memory", 0.5, "a number of bytes"),
        ("max_memory", "0", "a number of bytes"),
        ("deny", "aten.gellu", "There is no op 'aten.gellu'. Did you mean 'aten.gelu'?"),
        ("deny", "aten.add.Tensro", "Did you mean 'aten.add.Tensor'?"),
        ("allow", "aten.zzz*", "There is no op 'aten.zzz*'"),
        (
            "deny",
            "aten.cosine_similarity",
            "AOTAutograd decomposes it first. Name what it decomposes to.",
        ),
        ("deny", "aten.lstm", "Name what it decomposes to, possibly aten._"),
        ("deny", ["aten.softshrink"], "No graph contains 'aten.softshrink': AOTAutograd decomposes it first"),
        ("allow", ["aten.relu", "aten.dropout_"], "No graph contains 'aten.dropout_'"),
        ("deny", [3], "3 is not the name of an op"),
        ("max_rank", "many", "a whole number of at least 1"),
        ("max_dim", {0: 0}, "a whole number of at least 1"),
        ("dynamic_shapes", "perhaps", "true or false"),
        ("decompositions", "some", "There is no op 'aten.some'"),
        ("constraints", [Constraint], "instances of Constraint"),
        ("constraints", "TGD101", "instances of Constraint"),
    ],
)
def test_a_wrong_value_raises_and_names_the_allowed_ones(field, given, expected):
    with pytest.raises(DeviceError) as raised:
        Device(**{field: given})
    message = str(raised.value)
    assert message.startswith(f"Device.{field}: {given!r} is not allowed.")
    assert expected in message
    assert isinstance(raised.value, ValueError)
    assert isinstance(raised.value, TorchGuardError)


def test_a_file_sets_its_fields_and_the_name(toml):
    path = toml('alignment = 32\nmax_memory = "2GiB"\nindices = ["int32"]\n[max_dim]\n0 = 64\n')
    assert Device.from_toml(path) == Device(
        name="some", alignment=32, max_memory=2**31, indices="int32", max_dim={0: 64}
    )
    assert Device.from_toml(str(path)) == Device.from_toml(path)


def test_an_unknown_key_of_a_file_raises_and_suggests_a_similar_one(toml):
    path = toml("alignement = 32")
    with pytest.raises(DeviceError, match=r"unknown name 'alignement'. Did you mean 'alignment'") as raised:
        Device.from_toml(path)
    assert str(path) in str(raised.value)


def test_a_wrong_value_in_a_file_raises_and_names_the_file(toml):
    path = toml("max_rank = -1")
    with pytest.raises(DeviceError, match=r"max_rank in .*some.toml: -1 is not allowed. Use a whole number"):
        Device.from_toml(path)


def test_a_missing_file_and_invalid_toml_raise(toml):
    with pytest.raises(DeviceError, match=r"there is no file 'nowhere.toml'.*edge-npu"):
        Device.from_toml("nowhere.toml")
    with pytest.raises(DeviceError, match="is not TOML"):
        Device.from_toml(toml("alignment: 16"))


def test_every_field_has_a_variable(monkeypatch):
    values = {
        "name": "x",
        "parameters": "float32",
        "activations": "float16",
        "indices": "int32",
        "accumulators": "float32",
        "layouts": "contiguous",
        "alignment": "16",
        "max_memory": "17179869184",
        "deny": "aten.gelu",
        "allow": "aten.*",
        "max_rank": "4",
        "max_dim": "512",
        "peak_flops": "2e12",
        "bandwidth": "1e11",
        "dynamic_shapes": "0",
        "decompositions": "core",
    }
    assert values.keys() == FIELDS.keys() - {"constraints"}
    for name, value in values.items():
        monkeypatch.setenv(f"MOCK_{name.upper()}", value)
    assert Device.from_environment() == Device(**values)


def test_an_empty_variable_is_not_set(monkeypatch):
    monkeypatch.setenv("MOCK_ALIGNMENT", "")
    assert Device.from_environment() == Device()


def test_the_word_any_denies_nothing(monkeypatch, toml):
    path = toml('deny = ["aten.gelu"]')
    assert Device.from_toml(path, deny="any").deny == Device.from_toml(path, deny=None).deny == ()
    monkeypatch.setenv("MOCK_DENY", "any")
    assert Device.from_environment() == Device()


def test_a_wrong_variable_raises_and_is_named(monkeypatch):
    monkeypatch.setenv("MOCK_ALIGNMENT", "sixteen")
    with pytest.raises(DeviceError, match=r"MOCK_ALIGNMENT: 'sixteen' is not allowed. Use a whole number"):
        Device.from_environment()


def test_a_misspelt_variable_raises_and_unrelated_ones_are_ignored(monkeypatch):
    monkeypatch.setenv("MOCK_SERVER_ADDRESS", "localhost")
    assert Device.from_environment() == Device()
    monkeypatch.setenv("MOCK_ALIGMENT", "16")
    with pytest.raises(DeviceError, match=r"MOCK_ALIGMENT: unknown setting. Did you mean 'MOCK_ALIGNMENT'"):
        Device.from_environment()


def test_python_wins_over_the_file_the_file_over_the_environment_and_that_over_the_default(monkeypatch, toml):
    monkeypatch.setenv("MOCK_ALIGNMENT", "4")
    monkeypatch.setenv("MOCK_MAX_RANK", "5")
    monkeypatch.setenv("MOCK_MAX_DIM", "6")
    path = toml("alignment = 8\nmax_rank = 7")
    merged = Device.from_toml(path, alignment=16)
    assert (merged.alignment, merged.max_rank, merged.max_dim, merged.layouts) == (((-1, 16),), 7, 6, None)
    monkeypatch.setenv("MOCK_DEVICE", str(path))
    assert Device.from_environment(alignment=16) == merged
    assert Device.from_toml(path, environment={}, alignment=16).max_dim is None


def test_python_can_lift_a_restriction_of_a_file(toml):
    assert Device.from_toml(toml("alignment = 8"), alignment=None).alignment is None


def test_an_override_of_an_unknown_field_raises():
    with pytest.raises(DeviceError, match=r"unknown name 'alignmnt'. Did you mean 'alignment'"):
        Device.from_environment(alignmnt=16)


def test_the_examples_are_devices_with_names():
    found = examples()
    assert {"edge-npu", "systolic-array", "training-card"} <= found.keys()
    for name, example in found.items():
        assert example.name == name
        assert Device.from_toml(name) == example


def test_a_device_as_json():
    plain = Device(alignment=16, parameters="float32").to_dict()
    assert plain["parameters"] == ["float32"]
    assert plain["indices"] is None
    assert plain["alignment"] == ((-1, 16),)
