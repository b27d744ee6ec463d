"""Train a small GPT with broken samples in every batch: they do not affect what it learns from the other samples.

Three of sixteen samples are broken: one has a NaN in the input, one a token that does not exist, and one a value that
overflows inside the model. The model is trained three times from the same weights: with checks on all samples, without
checks on the good samples only, and without checks on all samples, dropping bad rows at the loss.
"""

import copy

import torch
import torch.nn.functional as F
from gpt import LENGTH, VOCAB, WIDTH, Block
from torch import Tensor, nn

from torchguard import err, fix, flag_nan_and_inf, flag_oob_indices, flags, has_err, tracked

BATCH, STEPS = 16, 20
BAD = {3: "NaN in its style vector", 7: "token 99 of 64", 12: "style vector of 1e30"}
GOOD = [row for row in range(BATCH) if row not in BAD]


@tracked
class Gpt(nn.Module):
    def __init__(self, guarded: bool) -> None:
        super().__init__()
        self.guarded = guarded
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.style = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor, style: Tensor) -> tuple[Tensor, Tensor]:
        f = err.new(ids)
        if self.guarded:
            f = flag_oob_indices(ids, VOCAB, self.tokens, f)
            f = flag_nan_and_inf(style, "batch.style", f)
            style, f = fix(style, f, "batch.style")
        x = self.tokens(ids.clamp(0, VOCAB - 1)) + self.style(style).square()[:, None]
        for block in self.blocks:
            if self.guarded:
                f = flag_nan_and_inf(x, block, f)
                x, f = fix(x, f, block)
            x = block(x)
        return self.head(x), f


def make_batch() -> tuple[Tensor, Tensor]:
    ids, style = torch.randint(0, VOCAB, (BATCH, LENGTH + 1)), torch.randn(BATCH, 4)
    style[3, 1], ids[7, 5], style[12] = float("nan"), 99, 1e30
    return ids, style


def per_sample_loss(logits: Tensor, ids: Tensor) -> Tensor:
    targets = ids[:, 1:].clamp(0, VOCAB - 1)
    return F.cross_entropy(logits.transpose(1, 2), targets, reduction="none").mean(-1)


def train(model: Gpt, batches: list[tuple[Tensor, Tensor]], step_loss) -> Tensor:
    compiled = torch.compile(model, fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for ids, style in batches:
        optimizer.zero_grad()
        logits, f = compiled(ids[:, :-1], style)
        step_loss(f, per_sample_loss(logits, ids)).backward()
        optimizer.step()
    return f


def finite_mean(_: Tensor, loss: Tensor) -> Tensor:
    return torch.where(loss.isfinite(), loss, 0.0).sum() / loss.isfinite().sum()


def main() -> None:
    torch.manual_seed(0)
    guarded = Gpt(guarded=True)
    plain, naive = copy.deepcopy(guarded), copy.deepcopy(guarded)
    plain.guarded = naive.guarded = False
    batches = [make_batch() for _ in range(STEPS)]

    f = train(guarded, batches, err.mean_ok)
    train(plain, [(ids[GOOD], style[GOOD]) for ids, style in batches], lambda _, loss: loss.mean())
    train(naive, batches, finite_mean)

    print(f"\n{STEPS} steps of {BATCH} samples, {len(BAD)} of them broken, torch.compile(fullgraph=True)\n")
    if has_err(f):
        print(f"  {flags.repr(f)}\n")
        for row, errors in enumerate(flags.unpack_all(f)):
            if errors:
                print(f"  sample {row:2} ({BAD[row]}): {', then '.join(map(str, errors))}")
    pairs = zip(guarded.parameters(), plain.parameters(), strict=True)
    largest = torch.stack([(one - other).abs().max() for one, other in pairs]).max().item()
    lost = [not p.isfinite().all() for p in naive.parameters()]
    print(f"\n  guarded on all samples, against plain on the good samples: weights differ by at most {largest:.1e}")
    print(f"  plain on all samples, bad rows dropped at the loss: {sum(lost)} of {len(lost)} weights are NaN\n")
    if err.is_err(f).nonzero().flatten().tolist() != list(BAD) or not largest < 1e-4:
        raise SystemExit("a broken sample changed the weights, or another sample was flagged")


if __name__ == "__main__":
    main()
