"""Models as people have them, watched: the same outputs and gradients, and every bad row named."""

import copy
import dataclasses
import warnings
from collections import OrderedDict
from typing import NamedTuple

import pytest
import torch
from tests.breadth import breadth
from tests.compare import faults, take_gradients
from tests.models import bert, gpt2, mlp
from torch import Tensor, nn
from torch._dynamo.testing import AotEagerAndRecordGraphs, CompileCounter
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import (
    ConvNextConfig,
    ConvNextForImageClassification,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTModel,
)

from torchguard import err
from torchguard._watch import watch

NAN, INF = float("nan"), float("inf")
BATCH, TOKENS, VOCABULARY, WIDTH = 3, 5, 50, 16
BAD = 1

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture
def run(run_light):
    """As the fixture of all tests, without the slow backends: these models are large to compile."""
    return run_light


def llama():
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=WIDTH,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            intermediate_size=32,
            vocab_size=VOCABULARY,
            max_position_embeddings=8,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def vit():
    return ViTModel(
        ViTConfig(
            hidden_size=WIDTH,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=32,
            image_size=8,
            patch_size=4,
        )
    )


def t5():
    return T5ForConditionalGeneration(
        T5Config(
            d_model=WIDTH,
            d_kv=8,
            d_ff=32,
            num_layers=1,
            num_heads=2,
            vocab_size=VOCABULARY,
            use_cache=False,
            decoder_start_token_id=0,
        )
    )


MODELS = {"bert": bert, "gpt2": gpt2, "llama": llama, "vit": vit, "t5": t5}
WORD_EMBEDDINGS = {
    "bert": "embeddings.word_embeddings",
    "gpt2": "transformer.wte",
    "llama": "model.embed_tokens",
    "t5": "encoder.embed_tokens",
}


def arguments(name):
    ids = torch.randint(0, VOCABULARY, (BATCH, TOKENS))
    return {
        "bert": {"input_ids": ids, "attention_mask": torch.ones_like(ids)},
        "vit": {"pixel_values": torch.randn(BATCH, 3, 8, 8)},
        "t5": {"input_ids": ids, "labels": ids.flip(1)},
    }.get(name, {"input_ids": ids})


def with_embeddings(kwargs):
    """The same call with vectors instead of token ids."""
    kwargs = {name: value for name, value in kwargs.items() if name != "input_ids"}
    return kwargs | {"inputs_embeds": torch.randn(BATCH, TOKENS, WIDTH)}


def without_loss(kwargs):
    """The same call without a loss over the batch, which mixes samples."""
    given = {name: value for name, value in kwargs.items() if name != "labels"}
    return given | ({"decoder_input_ids": kwargs["labels"]} if "labels" in kwargs else {})


def planted(z, at, value):
    z = z.clone()
    z[at] = value
    return z


def tensors(output):
    if isinstance(output, Tensor):
        return [output]
    parts = output.values() if hasattr(output, "values") else output
    return [z for part in parts if isinstance(part, (Tensor, tuple, list)) for z in tensors(part)]


def loss_of(output):
    return sum(z.float().square().mean() for z in tensors(output) if z.requires_grad)


def assert_equal(got, want):
    assert type(got) is type(want)
    got, want = tensors(got), tensors(want)
    assert len(got) == len(want) > 0
    assert all(torch.equal(one, two) for one, two in zip(got, want, strict=True))


def assert_other_rows_equal(got, want, batch_dim=0):
    rows = torch.tensor([row for row in range(BATCH) if row != BAD])
    for one, two in zip(tensors(got), tensors(want), strict=True):
        if one.ndim > batch_dim and one.shape[batch_dim] == BATCH:
            assert torch.equal(one.index_select(batch_dim, rows), two.index_select(batch_dim, rows))


def assert_clean_is_as_ever(run, model, call, **settings):
    """Outputs and gradients are those of the plain model, and nothing is flagged."""
    plain = call(model)
    loss_of(plain).backward()
    want = take_gradients(model)

    guarded = watch(model, **settings)
    out, f = call(run(guarded))
    assert_equal(out, plain)
    assert err.all_ok(f)
    assert f.shape[0] == BATCH
    loss_of(out).backward()
    got = take_gradients(model)
    assert got.keys() == want.keys()
    assert [name for name in want if not torch.equal(got[name], want[name])] == []


class TestTransformers:
    @pytest.mark.parametrize("name", breadth(MODELS, "llama"))
    def test_outputs_and_gradients_are_those_of_the_plain_model(self, run, name):
        kwargs = arguments(name)
        assert_clean_is_as_ever(run, MODELS[name]().eval(), lambda fn: fn(**kwargs))

    @pytest.mark.parametrize("name", breadth(WORD_EMBEDDINGS, "gpt2"))
    @torch.no_grad()
    def test_a_token_id_out_of_range_is_found_at_the_embedding(self, run, name):
        model, kwargs = MODELS[name]().eval(), arguments(name)
        want = model(**kwargs)
        guarded = run(watch(model))
        for value, code in ((VOCABULARY + 7, "OUT_OF_BOUNDS"), (-2, "NEGATIVE_IDX")):
            bad = kwargs | {"input_ids": planted(kwargs["input_ids"], (BAD, 2), value)}
            out, f = guarded(**bad)
            assert faults(f) == {BAD: [f"{code} @ {WORD_EMBEDDINGS[name]}"]}
            assert_other_rows_equal(out, want)

    @pytest.mark.parametrize("name", breadth(["bert", "gpt2", "llama"], "gpt2"))
    @torch.no_grad()
    def test_a_bad_value_in_the_embeddings_is_found_at_the_input(self, run, name):
        model, kwargs = MODELS[name]().eval(), with_embeddings(arguments(name))
        want = model(**kwargs)
        guarded = run(watch(model))
        for value, code in ((NAN, "NAN"), (-INF, "INF")):
            bad = kwargs | {"inputs_embeds": planted(kwargs["inputs_embeds"], (BAD, 2, 3), value)}
            out, f = guarded(**bad)
            assert faults(f) == {BAD: [f"{code} @ input"]}
            assert_other_rows_equal(out, want)

    @torch.no_grad()
    def test_a_loss_that_one_row_made_bad_does_not_accuse_the_others(self, run):
        model, kwargs = t5().eval(), with_embeddings(arguments("t5"))
        bad = kwargs | {"inputs_embeds": planted(kwargs["inputs_embeds"], (BAD, 2, 3), NAN)}
        out, f = run(watch(model))(**bad)
        assert torch.isnan(out.loss)
        assert faults(f) == {BAD: ["NAN @ input"]}

    @torch.no_grad()
    def test_a_bad_pixel_is_found_at_the_input(self, run):
        model, pixels = vit().eval(), torch.randn(BATCH, 3, 8, 8)
        want = model(pixel_values=pixels)
        guarded = run(watch(model))
        for value, code in ((NAN, "NAN"), (INF, "INF")):
            out, f = guarded(pixel_values=planted(pixels, (BAD, 0, 5, 1), value))
            assert faults(f) == {BAD: [f"{code} @ input"]}
            assert_other_rows_equal(out, want)

    @torch.no_grad()
    def test_a_bad_word_vector_is_found_at_the_embedding(self, run):
        model = llama().eval()
        ids = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]])
        model.model.embed_tokens.weight[5, 0] = INF
        _, f = run(watch(model))(input_ids=ids)
        assert faults(f) == {BAD: ["INF @ model.embed_tokens"]}

    @torch.no_grad()
    def test_a_bad_weight_in_a_block_is_found_there_for_every_row(self, run):
        model = llama().eval()
        model.model.layers[0].mlp.up_proj.weight[3, 3] = NAN
        _, f = run(watch(model))(**arguments("llama"))
        assert faults(f) == {row: ["NAN @ model.layers.0.mlp.up_proj"] for row in range(BATCH)}

    @torch.no_grad()
    @pytest.mark.long
    def test_a_cache_is_returned_unchanged(self, run):
        model, kwargs = gpt2(use_cache=True).eval(), arguments("gpt2")
        want = model(**kwargs)
        for quarantine in (False, True):
            out, f = run(watch(gpt2_like(model), quarantine=quarantine))(**kwargs)
            assert type(out.past_key_values) is type(want.past_key_values)
            assert out.past_key_values.get_seq_length() == TOKENS
            assert torch.equal(out.logits, want.logits)
            assert err.all_ok(f)

    @torch.no_grad()
    def test_generated_tokens_are_those_of_the_plain_model(self):
        model, ids = gpt2(use_cache=True).eval(), arguments("gpt2")["input_ids"]
        settings = {"max_new_tokens": 2, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
        want = model.generate(ids, **settings)
        assert torch.equal(watch(model, returns="output").generate(ids, **settings), want)

    @pytest.mark.parametrize("name", breadth(MODELS, "gpt2", "llama"))
    def test_in_quarantine_the_other_rows_are_unchanged(self, name):
        model, kwargs = MODELS[name]().eval(), without_loss(arguments(name))
        plain = model(**kwargs)
        guarded = watch(model, quarantine=True)
        out, f = guarded(**kwargs)
        assert_equal(out, plain)
        assert err.all_ok(f)
        if name == "vit":
            kwargs["pixel_values"] = planted(kwargs["pixel_values"], (BAD, 0, 5, 1), NAN)
            expected = "NAN @ input", "FALLBACK_VALUE @ input"
        else:
            kwargs["input_ids"] = planted(kwargs["input_ids"], (BAD, 2), VOCABULARY)
            expected = f"OUT_OF_BOUNDS @ {WORD_EMBEDDINGS[name]}", f"FALLBACK_VALUE @ {WORD_EMBEDDINGS[name]}"
        out, f = guarded(**kwargs)
        assert faults(f) == {BAD: list(expected)}
        assert_other_rows_equal(out, plain)
        loss_of(out).backward()
        assert all(grad.isfinite().all() for grad in take_gradients(model).values())

    def test_in_quarantine_a_compiled_transformer_trains_on_the_rest(self):
        model, kwargs = gpt2().eval(), with_embeddings(arguments("gpt2"))
        x = kwargs["inputs_embeds"]
        keep = [row for row in range(BATCH) if row != BAD]
        model(inputs_embeds=x[keep]).logits.square().mean((1, 2)).mean().backward()
        want = take_gradients(model)

        guarded = torch.compile(watch(model, quarantine=True), backend="aot_eager", fullgraph=True)
        out, f = guarded(inputs_embeds=planted(x, (BAD, 2, 3), INF))
        assert faults(f) == {BAD: ["INF @ input", "FALLBACK_VALUE @ input"]}
        assert (out.logits[BAD] == 0).all()
        err.mean_ok(f, out.logits.square().mean((1, 2))).backward()
        got = take_gradients(model)
        assert got.keys() == want.keys()
        for name in want:
            torch.testing.assert_close(got[name], want[name], msg=lambda text, name=name: f"{name}: {text}")

    @pytest.mark.long
    @pytest.mark.parametrize("size", [32, 36])
    def test_in_quarantine_a_compiled_convnext_trains_on_the_rest(self, size, monkeypatch):
        """Inductor's own code stores results of checks behind their buffers here: see `store_partial_tiles`."""
        torch.manual_seed(0)
        config = ConvNextConfig(hidden_sizes=[8, 16, 16, 32], depths=[1, 1, 1, 1], image_size=size)
        model = ConvNextForImageClassification(config).double()
        x, keep = torch.randn(4, 3, size, size, dtype=torch.double), [0, 2, 3]
        model(pixel_values=x[keep]).logits.square().mean(1).mean().backward()
        want = take_gradients(model)

        behind = put_numbers_behind_buffers(monkeypatch)
        guarded = torch.compile(watch(model, quarantine=True), fullgraph=True)
        out, f = guarded(pixel_values=planted(x, (1, 0, 3, 3), NAN))
        assert faults(f) == {1: ["NAN @ input", "FALLBACK_VALUE @ input"]}
        err.mean_ok(f, out.logits.square().mean(1)).backward()
        got = take_gradients(model)
        assert got.keys() == want.keys()
        for name in want:
            torch.testing.assert_close(got[name], want[name], rtol=1e-9, atol=1e-12)
        assert len(behind) > 0
        assert all((numbers == 7).all() for numbers in behind)


def put_numbers_behind_buffers(monkeypatch):
    """Have Inductor's code allocate buffers with sevens behind them. Returns the sevens of all buffers."""
    behind = []

    def allocate(size, stride, dtype):
        length = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        buffer = torch.full((length + 512,), 7, dtype=dtype)
        behind.append(buffer[length:])
        return buffer.as_strided(size, stride)

    monkeypatch.setattr("torch._C._dynamo.guards._empty_strided_cpu", allocate)
    return behind


def gpt2_like(model):
    """Another model with the same weights."""
    copy = gpt2(use_cache=model.config.use_cache).eval()
    copy.load_state_dict(model.state_dict())
    return copy


@pytest.mark.parametrize("level", ["outputs", "blocks", "modules"])
@torch.no_grad()
def test_a_token_id_out_of_range_stops_no_call_at_any_level(level):
    model, kwargs = gpt2().eval(), arguments("gpt2")
    kwargs["input_ids"] = planted(kwargs["input_ids"], (BAD, 2), VOCABULARY + 7)
    _, f = watch(model, level=level)(**kwargs)
    assert faults(f) == {BAD: ["OUT_OF_BOUNDS @ transformer.wte"]}


@torch.no_grad()
def test_at_the_level_of_blocks_a_fault_is_found_at_its_block(run):
    model = gpt2(n_layer=2).eval()
    model.transformer.h[1].mlp.c_fc.weight[0, 0] = NAN
    _, f = run(watch(model, level="blocks"))(**arguments("gpt2"))
    assert faults(f) == {row: ["NAN @ transformer.h.1"] for row in range(BATCH)}


class Tagger(nn.Module):
    def __init__(self, batch_first):
        super().__init__()
        self.lstm = nn.LSTM(4, 6, num_layers=2, batch_first=batch_first)
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        h, _ = self.lstm(x)
        return self.head(h)


class TestLSTM:
    @pytest.fixture(autouse=True)
    def rnn(self):
        """Dynamo traces no LSTM unless a setting allows it, watched or not."""
        with torch._dynamo.config.patch(allow_rnn=True):
            yield

    @pytest.fixture(params=[True, False], ids=["batch_first", "sequence_first"])
    def batch_first(self, request):
        return request.param

    def x(self, batch_first, tokens=TOKENS):
        x = torch.randn(BATCH, tokens, 4)
        return x if batch_first else x.transpose(0, 1).contiguous()

    def test_outputs_and_gradients_are_those_of_the_plain_model(self, batch_first):
        x = self.x(batch_first)
        model, batch_dim = Tagger(batch_first), 0 if batch_first else 1
        assert_clean_is_as_ever(lambda fn: fn, model, lambda fn: fn(x), batch_dim=batch_dim)

    @torch.no_grad()
    def test_compiled_outputs_are_those_of_the_plain_model(self, batch_first):
        """Without gradients: AOTAutograd fails on an LSTM that needs them, watched or not."""
        model, x = Tagger(batch_first), self.x(batch_first)
        guarded = watch(model, batch_dim=0 if batch_first else 1)
        out, f = torch.compile(guarded, backend="aot_eager", fullgraph=True)(x)
        assert torch.equal(out, model(x))
        assert err.all_ok(f)

    @torch.no_grad()
    def test_a_bad_row_is_found_at_the_input(self, run, batch_first):
        model, x, batch_dim = Tagger(batch_first), self.x(batch_first), 0 if batch_first else 1
        want = model(x)
        guarded = run(watch(model, batch_dim=batch_dim))
        for value, code in ((NAN, "NAN"), (INF, "INF")):
            out, f = guarded(planted(x, (BAD, 2, 0) if batch_first else (2, BAD, 0), value))
            assert faults(f) == {BAD: [f"{code} @ input"]}
            assert_other_rows_equal(out, want, batch_dim)

    @torch.no_grad()
    def test_as_many_layers_as_samples_confuse_nothing(self, run):
        """The states lie as (layers, batch, width), whatever is first elsewhere."""
        lstm = nn.LSTM(4, 6, num_layers=BATCH, batch_first=True)
        model = nn.Sequential(OrderedDict(lstm=lstm))
        _, f = run(watch(model))(planted(self.x(True), (BAD, 2, 0), NAN))
        assert faults(f) == {BAD: ["NAN @ input"]}

    @torch.no_grad()
    def test_in_quarantine_the_other_rows_are_unchanged(self, run, batch_first):
        model, x, batch_dim = Tagger(batch_first), self.x(batch_first), 0 if batch_first else 1
        want = model(x)
        out, f = run(watch(model, batch_dim=batch_dim, quarantine=True))(
            planted(x, (BAD, 2, 0) if batch_first else (2, BAD, 0), NAN)
        )
        assert faults(f) == {BAD: ["NAN @ input", "FALLBACK_VALUE @ input"]}
        assert_other_rows_equal(out, want, batch_dim)
        assert (out.select(batch_dim, BAD) == 0).all()

    @torch.no_grad()
    def test_an_lstm_alone_is_watched_too(self, run):
        lstm, x = nn.LSTM(4, 6, batch_first=True), self.x(True)
        want = lstm(x)
        guarded = run(watch(lstm))
        out, f = guarded(x)
        assert_equal(out, want)
        assert err.all_ok(f)
        _, f = guarded(planted(x, (BAD, 2, 0), NAN))
        assert faults(f) == {BAD: ["NAN @ input"]}


class CNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.conv2, self.head = nn.Conv2d(4, 4, 3, stride=2), nn.Linear(4, 2)

    def forward(self, x):
        x = F.relu(self.norm(self.conv1(x)))
        return self.head(self.conv2(x).mean((2, 3)))


def cnn(training):
    model = CNN()
    model(torch.randn(8, 3, 6, 6))  # the statistics of something
    return model.train(training)


@pytest.mark.filterwarnings("ignore::torchguard.exceptions.MixedRowsWarning")
class TestCNN:
    @pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
    @pytest.mark.parametrize("quarantine", [False, True], ids=["", "quarantine"])
    def test_outputs_gradients_and_statistics_are_those_of_the_plain_model(self, run, training, quarantine):
        model, x = cnn(training), torch.randn(BATCH, 3, 6, 6)
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        want = model(x)
        loss_of(want).backward()
        want_grads = take_gradients(model)
        want_buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        assert any(not torch.equal(before[name], want_buffers[name]) for name in before) is training

        model.load_state_dict(before, strict=False)
        out, f = run(watch(model, quarantine=quarantine))(x)
        assert torch.equal(out, want)
        assert err.all_ok(f)
        loss_of(out).backward()
        for name, grad in take_gradients(model).items():
            if quarantine:  # Only its values have to be the same there.
                torch.testing.assert_close(grad, want_grads[name])
            else:
                assert torch.equal(grad, want_grads[name]), name
        for name, buffer in model.named_buffers():
            assert torch.equal(buffer, want_buffers[name]), name

    @torch.no_grad()
    def test_a_bad_pixel_is_found_at_the_input(self, run):
        model, x = cnn(training=False), torch.randn(BATCH, 3, 6, 6)
        want = model(x)
        guarded = run(watch(model))
        for value, code in ((NAN, "NAN"), (INF, "INF")):
            out, f = guarded(planted(x, (BAD, 2, 3, 3), value))
            assert faults(f) == {BAD: [f"{code} @ input"]}
            assert_other_rows_equal(out, want)

    def test_in_training_the_norm_is_where_the_other_rows_go_bad(self, run):
        """It mixes rows: they did go bad, and this is where."""
        model, x = cnn(training=True), torch.randn(BATCH, 3, 6, 6)
        _, f = run(watch(model))(planted(x, (BAD, 2, 3, 3), NAN))
        assert faults(f) == {0: ["NAN @ norm"], BAD: ["NAN @ input"], 2: ["NAN @ norm"]}

    @pytest.mark.filterwarnings("ignore::torchguard.exceptions.MixedRowsWarning")
    def test_in_quarantine_all_rows_are_accused_and_the_statistics_stay_finite(self, run):
        model, x = cnn(training=True), torch.randn(BATCH, 3, 6, 6)
        out, f = run(watch(model, quarantine=True))(planted(x, (BAD, 2, 3, 3), NAN))
        assert faults(f) == {i: ["NAN @ input", "FALLBACK_VALUE @ input"] for i in range(BATCH)}
        assert out.isfinite().all()
        loss_of(out).backward()
        assert all(grad.isfinite().all() for grad in take_gradients(model).values())
        assert all(buffer.isfinite().all() for buffer in model.buffers())


class TestEncoderOfTorch:
    """`nn.TransformerEncoder` has a fast path for inference, and calls some of its modules by their weights alone."""

    @pytest.fixture
    def model(self):
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()

    def test_outputs_and_gradients_are_those_of_the_plain_model(self, run, model):
        x = torch.randn(BATCH, TOKENS, 8)
        assert_clean_is_as_ever(run, model, lambda fn: fn(x))

    @torch.no_grad()
    def test_a_bad_row_is_found_at_the_input(self, run, model):
        x = torch.randn(BATCH, TOKENS, 8)
        out, f = run(watch(model))(planted(x, (BAD, 0, 0), NAN))
        assert faults(f) == {BAD: ["NAN @ input"]}
        torch.testing.assert_close(out[[0, 2]], model(x)[[0, 2]])


class Checkpointed(nn.Module):
    def __init__(self, embedding=False):
        super().__init__()
        self.first = nn.Embedding(8, 4) if embedding else nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4)) for _ in range(2))

    def forward(self, x):
        x = checkpoint(self.first, x, use_reentrant=False)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class TestCheckpoint:
    @pytest.fixture(autouse=True)
    def side_effects(self):
        with torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True):
            yield

    @pytest.mark.parametrize("quarantine", [False, True], ids=["", "quarantine"])
    def test_outputs_and_gradients_are_those_of_the_plain_model(self, run, quarantine):
        x = torch.randn(BATCH, 4)
        assert_clean_is_as_ever(run, Checkpointed(), lambda fn: fn(x), quarantine=quarantine)

    def test_a_bad_row_is_found_at_the_input(self, run):
        model, x = Checkpointed(), torch.randn(BATCH, 4)
        out, f = run(watch(model))(planted(x, (BAD, 2), NAN))
        assert faults(f) == {BAD: ["NAN @ input"]}
        assert_other_rows_equal(out, model(x))

    def test_a_fault_within_a_block_is_found_there(self, run):
        model, x = Checkpointed(), torch.randn(BATCH, 4)
        with torch.no_grad():
            model.blocks[1][0].weight[0, 0] = INF
        _, f = run(watch(model))(x)
        assert set(faults(f)) == set(range(BATCH))
        assert {fault for found in faults(f).values() for fault in found} == {"INF @ blocks.1.0"}

    def test_in_quarantine_the_gradients_are_those_of_the_rest(self, run):
        model, x = Checkpointed(), torch.randn(BATCH, 4)
        model(x[[0, 2]]).square().mean(-1).mean().backward()
        want = take_gradients(model)
        out, f = run(watch(model, quarantine=True))(planted(x, (BAD, 2), NAN))
        err.mean_ok(f, out.square().mean(-1)).backward()
        for name, grad in take_gradients(model).items():
            torch.testing.assert_close(grad, want[name])

    def test_an_index_out_of_range_stays_harmless_in_the_second_pass(self, run):
        model, ids = Checkpointed(embedding=True), torch.randint(0, 8, (BATCH, TOKENS))
        out, f = run(watch(model))(planted(ids, (BAD, 2), 9))
        assert faults(f) == {BAD: ["OUT_OF_BOUNDS @ first"]}
        out.square().mean().backward()
        assert all(grad.isfinite().all() for grad in take_gradients(model).values())


def test_with_inductor_outputs_and_gradients_are_those_of_the_plain_model():
    model, x = mlp(), torch.randn(BATCH, 4)
    plain = torch.compile(model, fullgraph=True)(x)
    plain.square().mean().backward()
    want = take_gradients(model)
    guarded = torch.compile(watch(model), fullgraph=True)
    out, f = guarded(x)
    assert torch.equal(out, plain)
    assert err.all_ok(f)
    out.square().mean().backward()
    assert [name for name, grad in take_gradients(model).items() if not torch.equal(grad, want[name])] == []
    out, f = guarded(planted(x, (BAD, 2), NAN))
    assert faults(f) == {BAD: ["NAN @ input"]}
    assert_other_rows_equal(out, plain)


class TestAutocast:
    @pytest.mark.parametrize("quarantine", [False, True], ids=["", "quarantine"])
    def test_outputs_and_gradients_are_those_of_the_plain_model(self, run, quarantine):
        x = torch.randn(BATCH, 4)

        def call(fn):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return fn(x)

        assert_clean_is_as_ever(run, mlp(), call, quarantine=quarantine)

    @torch.no_grad()
    def test_a_bad_row_is_found_at_the_input(self, run):
        model, x = mlp(), torch.randn(BATCH, 4)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out, f = run(watch(model))(planted(x, (BAD, 2), INF))
            assert out.dtype == torch.bfloat16
            assert faults(f) == {BAD: ["INF @ input"]}
            assert_other_rows_equal(out, model(x))

    @torch.no_grad()
    def test_a_value_too_large_for_half_is_found_where_it_overflows(self, run):
        model, x = mlp(), torch.randn(BATCH, 4)
        model[0].weight.fill_(1.0)
        with torch.autocast("cpu", dtype=torch.float16):
            _, f = run(watch(model))(planted(x, BAD, 6e4))
        assert faults(f) == {BAD: ["INF @ 0"]}


# Dynamo, of itself, when an argument is the result of another module.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
class TestTwoCallsAStep:
    """As a GAN has them: the critic sees what is real and what is made, then one backward pass."""

    def nets(self):
        critic = nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))
        return nn.Linear(2, 4), critic

    def step(self, maker, critic, real, noise):
        return critic(real), critic(maker(noise))

    @pytest.mark.parametrize("quarantine", [False, True], ids=["", "quarantine"])
    def test_outputs_and_gradients_are_those_of_the_plain_model(self, run, quarantine):
        maker, critic = self.nets()
        real, noise = torch.randn(BATCH, 4), torch.randn(BATCH, 2)
        wants = self.step(maker, critic, real, noise)
        (F.softplus(-wants[0]).mean() + F.softplus(wants[1]).mean()).backward()
        want = take_gradients(maker) | {f"critic.{name}": grad for name, grad in take_gradients(critic).items()}

        guarded = run(watch(critic, quarantine=quarantine))
        (one, f_real), (two, f_made) = self.step(maker, guarded, real, noise)
        assert torch.equal(one, wants[0])
        assert torch.equal(two, wants[1])
        assert err.all_ok(f_real)
        assert err.all_ok(f_made)
        (F.softplus(-one).mean() + F.softplus(two).mean()).backward()
        got = take_gradients(maker) | {f"critic.{name}": grad for name, grad in take_gradients(critic).items()}
        assert [name for name in want if not torch.equal(got[name], want[name])] == []

    def test_each_call_has_flags_of_its_own(self, run):
        maker, critic = self.nets()
        guarded = run(watch(critic))
        (_, f_real), (_, f_made) = self.step(
            maker, guarded, planted(torch.randn(BATCH, 4), (0, 0), INF), planted(torch.randn(BATCH, 2), (2, 0), NAN)
        )
        assert faults(f_real) == {0: ["INF @ input"]}
        assert faults(f_made) == {2: ["NAN @ input"]}

    def test_both_calls_in_one_graph(self, run):
        maker, critic = self.nets()
        guarded = watch(critic)

        def step(real, noise):
            return self.step(maker, guarded, real, noise)

        real, noise = torch.randn(BATCH, 4), torch.randn(BATCH, 2)
        (one, f_real), (two, f_made) = run(step)(planted(real, (0, 0), INF), noise)
        assert faults(f_real) == {0: ["INF @ input"]}
        assert err.all_ok(f_made)
        assert torch.equal(one[1:], critic(real)[1:])
        assert torch.equal(two, critic(maker(noise)))


class Flattening(nn.Module):
    """Works on (batch * tokens, width) in between."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x):
        h = self.inner(x.flatten(0, 1)).log()  # NaN where it is negative
        return self.outer(h).unflatten(0, x.shape[:2])


@pytest.mark.filterwarnings("ignore::torchguard.exceptions.MixedRowsWarning")
class TestBatchSizes:
    @pytest.mark.parametrize(
        ("name", "dynamic", "quarantine"),
        [
            pytest.param(name, dynamic, quarantine, marks=pytest.mark.long if name != "mlp" else ())
            for name in ("mlp", "flattening", "cnn")
            for dynamic in (True, None)
            for quarantine in (False, True)
        ]
        + [("gpt2", True, False)],
    )
    @torch.no_grad()
    def test_no_more_graphs_than_the_plain_model(self, name, dynamic, quarantine):
        model, shape = {
            "mlp": lambda: (mlp(), (4,)),
            "flattening": lambda: (Flattening(), (TOKENS, 4)),
            "cnn": lambda: (cnn(training=False), (3, 6, 6)),
            "gpt2": lambda: (gpt2().eval(), (TOKENS, WIDTH)),
        }[name]()

        def frames(model):
            torch._dynamo.reset()
            counter = CompileCounter()
            compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=dynamic)
            for batch in (6, 3, 7, 4):
                x = torch.rand(batch, *shape)
                compiled(inputs_embeds=x) if name == "gpt2" else compiled(x)
            return counter.frame_count

        plain = frames(model)
        assert frames(watch(model, quarantine=quarantine)) <= plain

    @torch.no_grad()
    def test_bad_rows_are_told_apart_in_batches_of_every_size(self):
        model = mlp()
        guarded = torch.compile(watch(model), backend="aot_eager", fullgraph=True, dynamic=True)
        for batch in (4, 3, 7):
            x = torch.randn(batch, 4)
            out, f = guarded(planted(x, (BAD, 0), NAN))
            assert f.shape[0] == batch
            assert faults(f) == {BAD: ["NAN @ input"]}
            assert torch.equal(out[2:], model(x)[2:])

    @torch.no_grad()
    def test_rows_that_were_flattened_are_told_apart_in_batches_of_every_size(self):
        model = Flattening()
        model.inner.weight.fill_(1.0)
        model.inner.bias.fill_(0.0)
        guarded = torch.compile(watch(model), backend="aot_eager", fullgraph=True, dynamic=True)
        for batch in (4, 3, 7):
            _, f = guarded(planted(torch.rand(batch, TOKENS, 4) + 0.1, (BAD, 3), -1.0))
            assert faults(f) == {BAD: ["NAN @ outer"]}


@dataclasses.dataclass
class Prediction:
    logits: Tensor
    loss: Tensor | None
    scores: list = dataclasses.field(default_factory=list)


class Pair(NamedTuple):
    mean: Tensor
    scale: Tensor


OUTPUTS = {
    "tensor": lambda z: z,
    "tuple": lambda z: (z, (z + 1, None)),
    "named tuple": lambda z: Pair(z, z.exp()),
    "list": lambda z: [z, z * 2],
    "dict": lambda z: {"a": z, "n": 3, "b": [z]},
    "ordered dict": lambda z: OrderedDict(out=z, aux=z * 2),
    "dataclass": lambda z: Prediction(z, loss=None, scores=[z * 2]),
    "sorted": lambda z: z.sort(-1),
}


def flat(value):
    """Every tensor of an output."""
    if isinstance(value, Tensor):
        return [value]
    if dataclasses.is_dataclass(value):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return [z for part in parts for z in flat(part)]


class Giving(nn.Module):
    def __init__(self, give):
        super().__init__()
        self.linear, self.give = nn.Linear(4, 2), give

    def forward(self, x):
        return self.give(self.linear(x))


class TestOutputs:
    @pytest.mark.parametrize("name", OUTPUTS)
    @pytest.mark.parametrize("quarantine", [False, True], ids=["", "quarantine"])
    def test_an_output_keeps_its_type(self, run, name, quarantine):
        model, x = Giving(OUTPUTS[name]), torch.randn(BATCH, 4)
        want = model(x)
        out, f = run(watch(model, quarantine=quarantine))(x)
        assert type(out) is type(want)
        assert err.all_ok(f)
        assert len(flat(out)) == len(flat(want)) > 0
        assert all(torch.equal(one, two) for one, two in zip(flat(out), flat(want), strict=True))

    @pytest.mark.parametrize("name", OUTPUTS)
    def test_in_quarantine_bad_rows_are_zeros_wherever_they_are_in_the_output(self, name):
        model, x = Giving(OUTPUTS[name]), torch.randn(BATCH, 4)
        out, f = watch(model, quarantine=True)(planted(x, (BAD, 0), NAN))
        assert faults(f) == {BAD: ["NAN @ input", "FALLBACK_VALUE @ input"]}
        for z in flat(out):
            if z.is_floating_point():
                assert (z[BAD] == 0).all()
        assert_all_other_rows(flat(out), flat(model(x)))

    @pytest.mark.parametrize("name", OUTPUTS)
    def test_a_fault_of_the_output_is_found_wherever_it_is(self, run, name):
        """Made after the last module, it is reported at the model itself."""
        give = OUTPUTS[name]
        model = Giving(lambda z: give(torch.where(z[:, :1] > 100, NAN, z)))
        x = planted(torch.randn(BATCH, 4), BAD, 1e4 * model.linear.weight[0].detach().sign())
        _, f = run(watch(model))(x)
        assert faults(f) == {BAD: ["NAN @ Giving"]}

    def test_flags_stay_with_the_model_where_only_the_output_returns(self, run):
        model, x = Giving(OUTPUTS["dict"]), torch.randn(BATCH, 4)
        guarded = watch(model, returns="output")
        out = run(guarded)(planted(x, (BAD, 0), NAN))
        assert type(out) is dict
        assert faults(guarded.flags) == {BAD: ["NAN @ input"]}


def assert_all_other_rows(got, want):
    keep = [row for row in range(BATCH) if row != BAD]
    for one, two in zip(got, want, strict=True):
        assert torch.equal(one[keep], two[keep])


def with_layers(name, count):
    config = MODELS[name]().config
    for attribute in ("num_hidden_layers", "num_layers", "num_decoder_layers"):
        if hasattr(config, attribute):
            setattr(config, attribute, count)
    return type(MODELS[name]())(config).eval()


# Encoder and decoder of T5 have layers of their own, and their first layers are others.
@pytest.mark.parametrize(("name", "kinds"), [("llama", 1), ("t5", 2)])
@pytest.mark.long
def test_layers_that_are_compiled_once(name, kinds):
    model, kwargs = with_layers(name, 3), without_loss(with_embeddings(arguments(name)))
    kwargs["inputs_embeds"] = planted(kwargs["inputs_embeds"], BAD, NAN)
    found = []
    for once in (False, True):
        backend = AotEagerAndRecordGraphs()
        guarded = watch(copy.deepcopy(model), quarantine=True, compile_once=once)
        out, f = torch.compile(guarded, backend=backend, fullgraph=True)(**kwargs)
        (graph,) = backend.graphs
        calls = [node.args[1] for node in graph.graph.nodes if node.target is torch.ops.higher_order.invoke_subgraph]
        assert len(set(calls)) == (kinds if once else 0)
        assert len(calls) == 2 * len(set(calls))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # about how that backend is called
            err.mean_ok(f, out.logits.flatten(1).square().mean(-1)).backward()
        grads = {path: p.grad for path, p in guarded.named_parameters()}
        found.append((out.logits, [str(one) for one in guarded.report()], grads))
    torch.testing.assert_close(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]
    torch.testing.assert_close(found[0][2], found[1][2])
