"""One poisoned request in a batch: it is marked, and the tokens of the others are what they are without it."""

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from torchguard import unwatch, watch
from torchguard.exceptions import WatchError
from torchguard.integrations.serving import RequestGuard, bad_requests

transformers = pytest.importorskip("transformers")
from transformers import (  # noqa: E402
    CompileConfig,
    ContinuousBatchingConfig,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
)

POISON = 50  # the token whose embedding is not finite; no good request generates it
# By default the cache takes most of the machine's memory.
SMALL = {"num_blocks": 16, "max_batch_tokens": 64, "page_size": 16}
PROMPTS = [[1, 2, 3, 4], [5, POISON, 6, 7], [8, 9, 10, 11]]


def llama():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    tokens = {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 63, "pad_token_id": 0}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **tokens, num_key_value_heads=2, max_position_embeddings=64)).eval()
    model.generation_config = GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
    with torch.no_grad():
        model.model.embed_tokens.weight[POISON] = torch.nan
    return model


def compiled_by(backend):
    """Arguments of `generate` that compile the decode steps, on the CPU as well."""
    config = CompileConfig(backend=backend, mode=None, fullgraph=True)
    config._compile_all_devices = True
    return {"cache_implementation": "static", "compile_config": config}


def served(model):
    config = ContinuousBatchingConfig(**SMALL)
    return {"generation_config": model.generation_config, "continuous_batching_config": config, "warmup": False}


@pytest.mark.parametrize(
    "how",
    [
        pytest.param({}, id="eager"),
        pytest.param({"num_beams": 2}, id="beams", marks=pytest.mark.long),
        pytest.param({"num_beams": 2, "num_return_sequences": 2}, id="several answers"),
        pytest.param({"cache_implementation": "static"}, id="static cache"),
        pytest.param(compiled_by("aot_eager"), id="compiled", marks=pytest.mark.long),
    ],
)
def test_generate_isolates_a_poisoned_request(how):
    model, ids = llama(), torch.tensor(PROMPTS)
    good = model.generate(ids[[0, 2]], **{k: v for k, v in how.items() if k.startswith("num")})
    assert not good.eq(POISON).any()
    guarded = watch(model, quarantine=True, returns="output")
    counters.clear()
    out = guarded.generate(ids, **how)
    assert counters["stats"]["unique_graphs"] == ("compile_config" in how)  # transformers falls back silently
    by_request = out.view(3, -1, out.shape[1])
    assert torch.equal(by_request[[0, 2]].flatten(0, 1), good)
    marked = bad_requests(guarded, 3)
    assert {*marked} == {1}
    assert marked[1].path == "model.embed_tokens"
    assert bad_requests(guarded, 3, since=guarded.run_report().calls) == {}
    with pytest.raises(WatchError, match="7 requests cannot share"):
        bad_requests(guarded, 7)


def test_one_watched_model_takes_every_kind_of_cache():
    """An empty cache does not show its kind in tensors, and the model takes another way with each."""
    model, ids = llama(), torch.tensor(PROMPTS)
    guarded = watch(model, quarantine=True, returns="output")
    for how in ({}, {"cache_implementation": "static"}, {"cache_implementation": "static", "max_new_tokens": 9}):
        before = guarded.run_report().calls
        guarded.generate(ids, **how)
        assert {*bad_requests(guarded, 3, since=before)} == {1}


def test_generate_of_a_model_whose_cache_has_no_length():
    torch.manual_seed(0)
    model = MambaForCausalLM(MambaConfig(hidden_size=16, num_hidden_layers=2, vocab_size=64, state_size=4)).eval()
    with torch.no_grad():
        model.backbone.embeddings.weight[POISON] = torch.nan
        model.lm_head.weight = nn.Parameter(torch.randn(64, 16))  # not that of the embedding
    how = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    ids = torch.tensor(PROMPTS)
    good = model.generate(ids[[0, 2]], **how)
    assert not good.eq(POISON).any()
    guarded = watch(model, quarantine=True, returns="output")
    assert torch.equal(guarded.generate(ids, **how)[[0, 2]], good)
    assert {*bad_requests(guarded, 3)} == {1}


def test_continuous_batching_isolates_a_poisoned_request():
    model = llama()
    want = model.generate_batch([PROMPTS[0], PROMPTS[2]], **served(model))
    with RequestGuard(model) as guard:
        out = model.generate_batch(PROMPTS, **served(model))
    assert {*guard.bad} == {"req_1"}
    assert guard.bad["req_1"].path == "model.embed_tokens"
    want_tokens = [one.generated_tokens for one in want.values()]
    assert [out["req_0"].generated_tokens, out["req_2"].generated_tokens] == want_tokens
    assert not model._forward_hooks


def llama_with_a_poisoned_answer():
    """A model, its answers to three requests before it is poisoned, and which token of the second answer is."""
    model = llama()
    prompts = torch.tensor([[1, 2, 3, 4], [8, 9, 10, 11], *([5, 6, 7, last] for last in range(12, 42))])
    answers = model.generate(prompts)
    others = {*answers[:2, 4:].flatten().tolist(), *range(12), POISON}
    row, step, token = next(
        (row, step, token)
        for row in range(2, len(prompts))
        for step, token in enumerate(answers[row, 4:-1].tolist())
        if step and token not in {*others, *answers[row, : 4 + step].tolist()}
    )
    with torch.no_grad():
        model.model.embed_tokens.weight[token] = torch.inf
    return model, answers[[0, row, 1]], step


def test_a_request_that_goes_bad_while_it_decodes_is_isolated():
    model, plain, step = llama_with_a_poisoned_answer()
    guarded = watch(model, quarantine=True, returns="output")
    out = guarded.generate(plain[:, :4])
    assert torch.equal(out[[0, 2]], plain[[0, 2]])
    marked = bad_requests(guarded, 3)
    assert {*marked} == {1}
    assert marked[1].step == step + 1
    generated = plain[:, 4:].tolist()
    with RequestGuard(unwatch(guarded)) as guard:
        answers = model.generate_batch(plain[:, :4].tolist(), **served(model))
    assert [answers["req_0"].generated_tokens, answers["req_2"].generated_tokens] == [generated[0], generated[2]]
    assert {*guard.bad} == {"req_1"}


@pytest.mark.long
@pytest.mark.parametrize("is_compiled_before", [False, True])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_request_that_goes_bad_in_a_compiled_decode_step_is_isolated(backend, is_compiled_before):
    """transformers keeps the compiled call on the model: one from before `watch` must not run in its place."""
    model, plain, step = llama_with_a_poisoned_answer()
    if is_compiled_before:
        model.generate(plain[[0, 2], :4], **compiled_by(backend))
    guarded = watch(model, quarantine=True, returns="output")
    counters.clear()
    for _ in range(2):
        before = guarded.run_report().calls
        out = guarded.generate(plain[:, :4], **compiled_by(backend))
        assert torch.equal(out[[0, 2]], plain[[0, 2]])
        marked = bad_requests(guarded, 3, since=before)
        assert {*marked} == {1}
        assert marked[1].step == before + step + 1
        assert guarded.run_report().calls == before + 6  # the prefill and five decode steps
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


def test_requests_of_different_lengths_that_join_later():
    model = llama()
    prompts = [[1] * length for length in (3, 9, 2, 5, 7)]
    want = model.generate_batch(prompts, **served(model))
    prompts.insert(2, [3, POISON, 4])
    with RequestGuard(model) as guard:
        out = model.generate_batch(prompts, **served(model))
    got = [one.generated_tokens for name, one in out.items() if name not in guard.bad]
    assert {*guard.bad} == {"req_2"}
    assert got == [one.generated_tokens for one in want.values()]


def test_what_is_not_served_that_way_is_refused():
    model = llama()
    with pytest.raises(WatchError, match="no step of continuous batching"), RequestGuard(model):
        model(torch.tensor(PROMPTS[:1]))
    with pytest.raises(WatchError, match="unwatch it"):
        RequestGuard(watch(model))
