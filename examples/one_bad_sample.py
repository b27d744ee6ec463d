"""BatchNorm and a contrastive loss survive broken samples exactly: the step is run again without them.

Both mix the samples of a batch, so a NaN in one sample is in every loss and every gradient. The model is trained three
times from the same weights, in float64: plainly on all samples, with `Retry` on all samples, and plainly on good ones.
"""

import copy

import torch
from torch import Tensor, nn

from torchguard import Retry

BATCH, STEPS = 16, 20


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2), nn.BatchNorm2d(16)
        )
        self.head = nn.Linear(16, 8)

    def forward(self, images: Tensor) -> Tensor:
        return nn.functional.normalize(self.head(self.body(images).relu().mean((2, 3))), dim=-1)


def contrastive_losses(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """InfoNCE: each sample has to find its other view among all samples of the batch."""
    one, other = model(batch["view1"]), model(batch["view2"])
    return nn.functional.cross_entropy(one @ other.mT / 0.1, torch.arange(len(one)), reduction="none")


def make_batch(step: int) -> tuple[dict[str, Tensor], list[int]]:
    image = torch.randn(BATCH, 1, 12, 12, dtype=torch.float64)
    batch = {name: image + 0.1 * torch.randn_like(image) for name in ("view1", "view2")}
    batch["index"] = torch.arange(step * BATCH, (step + 1) * BATCH)  # the samples' ids in the dataset
    bad = sorted({3, (5 * step) % BATCH}) if step % 4 == 1 else []
    for row in bad:
        batch["view1"][row, 0, 2] = float("nan") if row == 3 else 1e200  # which overflows inside the model
    return batch, bad


def main() -> None:
    torch.manual_seed(0)
    batches = [make_batch(step) for step in range(STEPS)]
    guarded = Encoder().double()
    plain, reference = copy.deepcopy(guarded), copy.deepcopy(guarded)

    guard = Retry(guarded, torch.optim.AdamW(guarded.parameters()))
    optimizers = {model: torch.optim.AdamW(model.parameters()) for model in (plain, reference)}
    for batch, bad in batches:
        report = guard.step(lambda b: contrastive_losses(guarded, b), batch)
        if not report.ok:
            print(report)
        good = [row for row in range(BATCH) if row not in bad]
        for model, rows in ((plain, [*range(BATCH)]), (reference, good)):
            optimizers[model].zero_grad()
            contrastive_losses(model, {key: one[rows] for key, one in batch.items()}).mean().backward()
            optimizers[model].step()

    state = reference.state_dict()  # with BatchNorm's statistics
    largest = max((value - state[key]).abs().max().item() for key, value in guarded.state_dict().items())
    lost = sum(not one.isfinite().all() for one in plain.parameters())
    print(f"\nplain training: {lost} of {len([*plain.parameters()])} weights are NaN")
    print(f"with Retry, against training without the broken samples: weights and statistics differ by {largest:.0e}\n")
    found = [report.bad for report in guard.history]
    if found != [bad for _, bad in batches] or not largest < 1e-9:
        raise SystemExit("a broken sample changed the weights, or another sample was accused")


if __name__ == "__main__":
    main()
