import pytest


@pytest.fixture(params=["eager", "aot_eager", "inductor"])
def backend(request):
    """Each backend of `compile_out`, by name."""
    return request.param
