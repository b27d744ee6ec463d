"""Embeddings: only what really indexes the table is checked and clamped."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torchguard import err, flags, watch

transformers = pytest.importorskip("transformers")


class Hashed(nn.Embedding):
    """Takes ids of any size."""

    def forward(self, ids):
        return super().forward(ids % self.num_embeddings)


class MissingIsZero(nn.Embedding):
    """Takes -1 for "missing"."""

    def forward(self, ids):
        return super().forward(ids.clamp(min=0)) * (ids >= 0).unsqueeze(-1)


class Positions(nn.Embedding):
    """Gets the token ids, and looks up their positions."""

    def forward(self, ids):
        return super().forward(torch.arange(ids.shape[1], device=ids.device)).expand(ids.shape[0], -1, -1)


class Lookup(nn.Module):
    def __init__(self, embedding):
        super().__init__()
        self.embedding, self.head = embedding, nn.Linear(4, 2)

    def forward(self, ids):
        return self.head(self.embedding(ids))


@pytest.mark.parametrize("quarantine", [False, True])
@pytest.mark.parametrize("kind", [Hashed, MissingIsZero, Positions])
def test_a_forward_of_its_own_gets_the_ids_as_they_are(run_light, kind, quarantine):
    odd = -1 if kind is MissingIsZero else 70_000
    model, ids = Lookup(kind(10, 4)), torch.tensor([[1, odd, 3], [odd, 2, 1]])
    want = model(ids)
    out, f = run_light(watch(model, quarantine=quarantine))(ids)
    assert torch.equal(out, want)
    assert err.all_ok(f)


def test_a_forward_that_is_set_on_the_instance_gets_the_ids_as_they_are():
    model = Lookup(nn.Embedding(10, 4))
    table = model.embedding
    table.forward = lambda ids: F.embedding(ids % 10, table.weight)  # pyright: ignore[reportAttributeAccessIssue]
    ids = torch.tensor([[1, 70], [11, 2]])
    want = model(ids)
    out, f = watch(model)(ids)
    assert torch.equal(out, want)
    assert err.all_ok(f)


def test_a_subclass_that_looks_up_its_argument_is_checked(run_light):
    class Named(nn.Embedding):
        pass

    out, f = run_light(watch(Lookup(Named(10, 4))))(torch.tensor([[1, 10], [1, 2]]))
    assert [error.code_name for error in flags.unpack(f, 0)] == ["OUT_OF_BOUNDS"]
    assert err.is_ok(f).tolist() == [False, True]
    assert out.isfinite().all()


def test_a_table_that_has_grown_is_checked_by_its_weight(run_light):
    model = Lookup(nn.Embedding(10, 4))
    model.embedding.weight = nn.Parameter(torch.randn(20, 4))  # `num_embeddings` still says 10
    ids = torch.tensor([[1, 19], [20, 2]])
    want = model(ids.clamp(max=19))
    out, f = run_light(watch(model))(ids)
    assert torch.equal(out, want)
    assert err.is_ok(f).tolist() == [True, False]


SMALL = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2}
SMALL |= {"decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "vocab_size": 40}


def _encoder_decoder(name, **more):
    config = getattr(transformers, f"{name}Config")(**{**SMALL, "pad_token_id": 1, **more})
    ids = torch.randint(5, 40, (3, 7))
    model = getattr(transformers, f"{name}Model")(config)
    return model, {"input_ids": ids, "decoder_input_ids": ids.flip(0)}


def _whisper():
    config = transformers.WhisperConfig(
        **SMALL, num_mel_bins=8, max_source_positions=10, pad_token_id=1, bos_token_id=2, eos_token_id=3
    )
    model = transformers.WhisperModel(config)
    return model, {"input_features": torch.randn(3, 8, 20), "decoder_input_ids": torch.randint(5, 40, (3, 7))}


def _trocr():
    config = transformers.TrOCRConfig(**{**SMALL, "max_position_embeddings": 12, "use_cache": False})
    return transformers.TrOCRForCausalLM(config), {"input_ids": torch.randint(5, 40, (3, 7))}


def _idefics():
    from transformers.models.idefics.modeling_idefics import IdeficsDecoupledEmbedding

    model = Lookup(IdeficsDecoupledEmbedding(30, 6, 4, partially_freeze=False))
    return model, {"ids": torch.randint(0, 36, (3, 7))}


BUILDERS = {
    "whisper": _whisper,
    "bart": lambda: _encoder_decoder("Bart"),
    "mbart": lambda: _encoder_decoder("MBart"),
    "plbart": lambda: _encoder_decoder("PLBart"),
    "mvp": lambda: _encoder_decoder("Mvp"),
    "m2m": lambda: _encoder_decoder("M2M100"),
    "trocr": _trocr,
    "idefics": _idefics,
}


@pytest.mark.filterwarnings("ignore::torchguard.exceptions.MixedRowsWarning")  # Idefics chooses rows by value
@pytest.mark.parametrize("quarantine", [False, True])
@pytest.mark.parametrize("name", BUILDERS)
def test_position_tables_and_vocabularies_of_transformers(name, quarantine):
    model, inputs = BUILDERS[name]()
    model.eval()
    with torch.no_grad():
        want = model(**inputs)
        out, f = watch(model, quarantine=quarantine)(**inputs)
    assert err.all_ok(f)
    first, got = (z if isinstance(z, torch.Tensor) else z[0] for z in (want, out))
    assert torch.equal(got, first)
