"""Callers of transformers that expect the model's own output: `Trainer` and pipelines, with `returns="output"`."""

import pytest
import torch
from torch.utils.data import Dataset
from transformers import (
    BatchEncoding,
    BertConfig,
    BertForSequenceClassification,
    TextClassificationPipeline,
    Trainer,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
)

from torchguard import err
from torchguard._watch import unwatch, watch
from torchguard.exceptions import ReturnsError

NAN, BAD = float("nan"), 5
pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),
]


class Images(Dataset):
    def __init__(self):
        self.images = torch.randn(12, 3, 8, 8, generator=torch.Generator().manual_seed(0))
        self.images[BAD] = NAN

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        return {"pixel_values": self.images[i], "labels": i % 2, "sample_ids": i}


def small_vit():
    torch.manual_seed(0)
    return ViTForImageClassification(
        ViTConfig(
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            image_size=8,
            patch_size=4,
        )
    )


def trained(guarded, folder, **more):
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=6,
        per_device_train_batch_size=4,
        remove_unused_columns=False,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        logging_steps=1,
        disable_tqdm=True,
    )
    trainer = Trainer(model=guarded, args=arguments, train_dataset=Images(), **more)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_trainer_learns_from_the_other_samples_and_the_history_has_the_index_in_the_dataset(tmp_path):
    guarded = watch(small_vit(), quarantine=True, returns="output")

    def loss(outputs, labels, num_items_in_batch=None):
        each = torch.nn.functional.cross_entropy(outputs.logits, labels, reduction="none")
        return err.mean_ok(guarded.flags, each)

    losses = trained(guarded, tmp_path, compute_loss_func=loss)
    assert all(0 < one < 10 for one in losses)
    assert {incident.id for incident in guarded.history} == {BAD}
    assert {incident.argument for incident in guarded.history} == {"pixel_values"}
    assert all(p.isfinite().all() for p in unwatch(guarded).parameters())


def test_a_loss_of_the_model_itself_is_declared_and_weights_stay_finite(tmp_path):
    guarded = watch(small_vit(), quarantine=True, returns="output")
    trained(guarded, tmp_path)
    assert BAD in {incident.id for incident in guarded.history}
    assert all(p.isfinite().all() for p in unwatch(guarded).parameters())


def test_with_the_pair_the_error_names_the_argument(tmp_path):
    with pytest.raises(ReturnsError, match="returns='output'"):
        trained(watch(small_vit(), quarantine=True), tmp_path, compute_loss_func=lambda outputs, *_, **__: outputs.loss)


class Tokens:
    """A tokenizer of characters, as far as a pipeline asks for one."""

    model_input_names = ("input_ids",)

    def __call__(self, text, **_):
        texts = [text] if isinstance(text, str) else text
        return BatchEncoding({"input_ids": torch.tensor([[ord(c) % 30 for c in one[:5]] for one in texts])})


def test_a_pipeline_gives_what_it_gives_for_the_plain_model():
    torch.manual_seed(0)
    size = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = BertForSequenceClassification(BertConfig(vocab_size=30, **size)).eval()
    want = _classify(model)("hello world")
    guarded = watch(model, quarantine=True, returns="output")
    assert _classify(guarded)("hello world") == want


def _classify(model):
    return _Classify(model=model, tokenizer=Tokens(), device="cpu", framework="pt")


class _Classify(TextClassificationPipeline):
    def preprocess(self, inputs, **_):
        return self.tokenizer(inputs)
