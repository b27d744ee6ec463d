import pytest
import torch

import torchguard as tg
from torchguard import AccumulationConfig, Dedupe, ErrorConfig, Order, Priority, err, get_config, set_config
from torchguard.exceptions import ConfigError


def test_defaults():
    config = ErrorConfig()
    assert config.num_slots == 16
    assert config.flag_dtype == torch.int64
    assert config.default_severity == tg.Severity.ERROR
    assert config.strict_validation is False
    assert config.use_transposed_layout is False
    assert config.transpose_threshold == 10_000
    assert config.accumulation == AccumulationConfig(Priority.CHRONO, Order.FIRST, Dedupe.UNIQUE)


def test_changing_the_global_config_changes_new_flags():
    tg.CONFIG.flag_dtype = torch.float32
    tg.CONFIG.num_slots = 32
    assert tg.err.new(torch.randn(4, 8)).shape == (4, 16)


def test_replacing_and_restoring_the_config():
    original = get_config()
    set_config(ErrorConfig(flag_dtype=torch.float32, num_slots=64))
    assert tg.CONFIG is get_config()
    assert err.new_t(2).shape == (2, 32)
    set_config(original)
    assert tg.CONFIG is original
    assert err.new_t(2).shape == (2, 4)


def test_a_config_for_one_call():
    custom = ErrorConfig(flag_dtype=torch.float64, num_slots=8)
    assert err.new_t(5, config=custom).dtype == torch.float64
    assert err.new_t(5).dtype == torch.int64


def test_a_severity_for_codes_without_one():
    config = ErrorConfig(default_severity=tg.Severity.WARN)
    assert err.max_severity(err.from_code(err.UNKNOWN, 1, 1, config=config)).item() == tg.Severity.WARN
    assert err.max_severity(err.from_code(err.NAN, 1, 1, config=config)).item() == tg.Severity.CRITICAL


@pytest.mark.wrong_types
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_slots", 0),
        ("num_slots", 32_769),
        ("num_slots", 2.5),
        ("flag_dtype", torch.float16),
        ("flag_dtype", "int64"),
        ("default_severity", 4),
        ("accumulation", "fifo"),
        ("transpose_threshold", -1),
        ("num_slot", 4),
    ],
)
def test_wrong_settings_are_refused_and_change_nothing(name, value):
    config = ErrorConfig()
    with pytest.raises(ConfigError, match=name):
        setattr(config, name, value)
    assert config == ErrorConfig()


@pytest.mark.wrong_types
@pytest.mark.parametrize("axis", ["priority", "order", "dedupe"])
def test_a_policy_is_made_of_its_own_words(axis):
    with pytest.raises(ConfigError, match=f"AccumulationConfig.{axis} is 'first'"):
        AccumulationConfig(**{axis: "first"})


@pytest.mark.wrong_types
def test_set_config_takes_a_config():
    with pytest.raises(ConfigError, match="got dict"):
        set_config({"num_slots": 3})


class TestTransposedLayout:
    CONFIG = ErrorConfig(use_transposed_layout=True, transpose_threshold=100)

    def test_is_used_above_the_threshold(self):
        assert not self.CONFIG.should_transpose(100)
        assert self.CONFIG.should_transpose(101)
        assert err.new_t(101, config=self.CONFIG).stride() == (1, 101)
        assert err.new_t(100, config=self.CONFIG).stride() == (4, 1)

    def test_one_word_has_nothing_to_transpose(self):
        config = ErrorConfig(num_slots=4, use_transposed_layout=True, transpose_threshold=2)
        f = err.push(err.new_t(5, config=config), err.NAN, 1, config=config)
        assert err.count_errors(f).tolist() == [1] * 5

    def test_is_invisible_and_kept(self, run, carrier):
        bad = torch.arange(200) % 3 == 0

        def work(use_transposed):
            config = ErrorConfig(
                use_transposed_layout=use_transposed, transpose_threshold=100, flag_dtype=carrier, num_slots=8
            )

            def fn(bad):
                f = err.new(bad, config)
                f = err.push(f, err.NAN, 700, config=config, where=bad)
                f = err.push(f, err.INF, 2, config=config, where=bad)
                return f, err.is_ok(f), err.count_errors(f), err.clear(f, err.NAN)

            return run(fn)(bad)

        for transposed, plain in zip(work(True), work(False), strict=True):
            assert torch.equal(_bits(transposed), _bits(plain))
            if transposed.ndim == 2:
                assert transposed.stride() == (1, 200)


def _bits(t):
    return t if not t.is_floating_point() else t.contiguous().view(torch.int32)
