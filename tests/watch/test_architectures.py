"""Models that nobody here wrote: a clean batch is as without `watch`; a bad sample costs itself, or is declared."""

import copy
import warnings

import pytest
import torch
from tests.watch.architectures import BATCH, build, inputs_of

from torchguard import err
from torchguard._watch import watch
from torchguard.exceptions import MixedRowsWarning

BAD = 1
# Drawn at random from all classes of transformers for language and images that the recipe builds within five seconds.
NAMES = [
    "AlbertForSequenceClassification",
    "BartForConditionalGeneration",
    "BigBirdForMaskedLM",
    "BigBirdPegasusForConditionalGeneration",
    "BioGptForCausalLM",
    "BloomForSequenceClassification",
    "ConvBertForMaskedLM",
    "Data2VecTextForSequenceClassification",
    "DebertaForMaskedLM",
    "DebertaV2ForMaskedLM",
    "DiffLlamaForSequenceClassification",
    "DogeForCausalLM",
    "ElectraForCausalLM",
    "EncoderDecoderModel",
    "ErnieForSequenceClassification",
    "FNetForMaskedLM",
    "Gemma2ForCausalLM",
    "HeliumForCausalLM",
    "HunYuanDenseV1ForSequenceClassification",
    "JetMoeForCausalLM",
    "JetMoeForSequenceClassification",
    "JinaEmbeddingsV3ForMaskedLM",
    "Llama4ForCausalLM",
    "LlamaForCausalLM",
    "MBartForConditionalGeneration",
    "MT5ForConditionalGeneration",
    "MegatronBertForSequenceClassification",
    "MiniCPM3ForCausalLM",
    "MinistralForSequenceClassification",
    "MobileViTForImageClassification",
    "ModernBertForSequenceClassification",
    "MoshiForCausalLM",
    "NanoChatForCausalLM",
    "NomicBertForMaskedLM",
    "NomicBertForSequenceClassification",
    "OPTForCausalLM",
    "OPTForSequenceClassification",
    "Qwen2ForSequenceClassification",
    "RecurrentGemmaForCausalLM",
    "RoFormerForMaskedLM",
    "RwkvForCausalLM",
    "SwiftFormerForImageClassification",
    "TapasForSequenceClassification",
    "UMT5ForConditionalGeneration",
    "ViTMSNForImageClassification",
    "XLMRobertaXLForSequenceClassification",
    "YosoForMaskedLM",
]
# Drawn later, with heads of other kinds, to see that the first draw was no luck.
MORE_NAMES = [
    "ApertusModel",
    "BailingHybridForCausalLM",
    "BarkCausalModel",
    "BarkCoarseModel",
    "BeitModel",
    "BertForMaskedLM",
    "BertLMHeadModel",
    "BioGptForTokenClassification",
    "BitNetModel",
    "CLIPSegVisionModel",
    "Cohere2ForCausalLM",
    "Data2VecTextForCausalLM",
    "Data2VecTextForTokenClassification",
    "Data2VecVisionModel",
    "Ernie4_5ForCausalLM",
    "ErnieForCausalLM",
    "FSMTForConditionalGeneration",
    "GPTNeoXJapaneseModel",
    "Gemma2ForTokenClassification",
    "GemmaForTokenClassification",
    "Glm4ForCausalLM",
    "Glm4ForSequenceClassification",
    "GlmForSequenceClassification",
    "InstructBlipVideoVisionModel",
    "LongT5Model",
    "MambaModel",
    "MobileBertModel",
    "MvpForQuestionAnswering",
    "NemotronForCausalLM",
    "OPTModel",
    "OwlViTVisionModel",
    "PLBartForConditionalGeneration",
    "PegasusForConditionalGeneration",
    "Qwen2Model",
    "RemBertForCausalLM",
    "RemBertForSequenceClassification",
    "RoCBertForPreTraining",
    "SeedOssForCausalLM",
    "SmolLM3Model",
    "Starcoder2ForCausalLM",
    "TapasForQuestionAnswering",
    "UltrabertForQuestionAnswering",
    "UltrabertForSequenceClassification",
    "VaultGemmaForCausalLM",
    "VitDetModel",
]
QUICK = ("BigBirdForMaskedLM", "LlamaForCausalLM", "BartForConditionalGeneration")
# These compute their norms in float32, whatever the dtype of the model.
NORMS_IN_FLOAT32 = (
    *("Gemma2ForCausalLM", "HeliumForCausalLM", "MoshiForCausalLM", "RecurrentGemmaForCausalLM"),
    *(
        "Cohere2ForCausalLM",
        "Gemma2ForTokenClassification",
        "GemmaForTokenClassification",
        "LongT5Model",
        "VaultGemmaForCausalLM",
    ),
)
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


def each():
    return [pytest.param(name, marks=[] if name in QUICK else pytest.mark.long) for name in (*NAMES, *MORE_NAMES)]


def losses(out):
    return out[0].flatten(1).square().mean(-1)


def gradients(model):
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def only(given, samples):
    return {name: z[samples] for name, z in given.items()}


@pytest.mark.parametrize("name", each())
def test_a_clean_batch_is_as_without_watch_and_a_bad_sample_costs_itself_or_is_declared(name):
    model = build(name)
    given, target = inputs_of(model)
    plain = copy.deepcopy(model)
    want = plain(**given)[0]
    guarded = watch(model, quarantine=True)
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        out, f = guarded(**given)
        assert torch.equal(out[0], want)
        assert err.all_ok(f)

        given[target][BAD] = float("nan")
        out, f = guarded(**given)
    err.mean_ok(f, losses(out)).backward()
    got = gradients(model)
    assert all(gradient.isfinite().all() for gradient in got.values())
    accused = err.is_err(f).nonzero().flatten().tolist()
    if any(issubclass(one.category, MixedRowsWarning) for one in raised):
        assert accused == [*range(BATCH)]
        return
    assert accused == [BAD]
    good = [sample for sample in range(BATCH) if sample != BAD]
    want = plain(**only(given, good))
    losses(want).mean().backward()
    torch.testing.assert_close(out[0][good], want[0], rtol=1e-9, atol=1e-12)
    limits = {"rtol": 2e-5, "atol": 1e-8} if name in NORMS_IN_FLOAT32 else {"rtol": 1e-9, "atol": 1e-12}
    for key, gradient in gradients(plain).items():
        torch.testing.assert_close(got[key], gradient, **limits, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.long
@pytest.mark.compiled
def test_a_model_of_which_dynamo_leaves_the_rest_uncompiled_is_declared():
    """It ran into an error: the end of its call is not in the graph that its checks are in."""
    model = build("LongT5EncoderModel")
    given, name = inputs_of(model)
    call = torch.compile(watch(model, quarantine=True), backend="aot_eager")
    with pytest.warns(MixedRowsWarning, match="the graph breaks inside the model"):
        out, f = call(**given)
    assert torch.equal(out[0], model(**given)[0])
    assert not err.is_err(f).any()
    given[name][BAD, 0, 0] = torch.nan
    for _ in range(2):
        out, f = call(**given)
        assert err.is_err(f).all()
        err.mean_ok(f, out[0].square().mean((1, 2))).backward()
        assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
