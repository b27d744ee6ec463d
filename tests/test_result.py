import pytest

from torchguard import Err, Ok, as_exception, as_result, unwrap
from torchguard.exceptions import UnwrapError


@as_result
def halve(x):
    """Half of an even number."""
    if x % 2:
        raise ValueError("odd")
    return x // 2


def test_as_result():
    assert halve(4) == Ok(2)
    assert isinstance(halve(3).unwrap_err(), ValueError)
    assert halve.__doc__ == "Half of an even number."


def test_as_exception_reverses_as_result():
    for back in (as_exception, unwrap):
        assert back(halve)(4) == 2
        with pytest.raises(ValueError, match="odd"):
            back(halve)(3)


def test_unwrap_a_result():
    assert unwrap(Ok(3)) == 3


def test_ok():
    ok = Ok(2)
    assert ok.is_ok()
    assert not ok.is_err()
    assert ok.unwrap() == ok.unwrap_or(9) == 2
    assert ok.map(lambda x: x + 1) == Ok(3)
    assert ok.map_err(str) == ok
    assert ok.and_then(halve) == Ok(1)
    with pytest.raises(UnwrapError, match=r"unwrap_err on Ok\(2\)"):
        ok.unwrap_err()


def test_err():
    err = Err("why")
    assert err.is_err()
    assert not err.is_ok()
    assert err.unwrap_err() == "why"
    assert err.unwrap_or(9) == 9
    assert err.map(lambda x: x + 1) == err.and_then(halve) == err
    assert err.map_err(len) == Err(3)
    with pytest.raises(UnwrapError, match=r"unwrap on Err\('why'\)"):
        err.unwrap()


def test_results_can_be_matched():
    match halve(4):
        case Ok(value):
            assert value == 2
        case Err(_):
            pytest.fail("it is Ok")


def test_keyboard_interrupt_is_raised():
    with pytest.raises(KeyboardInterrupt):
        as_result(lambda: (_ for _ in ()).throw(KeyboardInterrupt))()
