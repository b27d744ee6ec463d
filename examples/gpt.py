"""A small GPT as people write it, with planted faults. Nothing in it knows torchguard: `make demo` runs it as it is.

The faults: a broken style vector in the dataset, a last batch that is smaller, and a line that breaks the graph.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, WIDTH, LENGTH, SAMPLES, BATCH = 64, 32, 12, 70, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.style = nn.Embedding(VOCAB, WIDTH), nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor, style: Tensor) -> Tensor:
        x = self.tokens(ids) + self.style(style).square()[:, None]
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@torch.compile(backend="aot_eager", dynamic=False)
def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    losses = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    print("losses of", tuple(losses.shape))  # a print that was left behind breaks the graph
    return losses.mean()


def main() -> None:
    torch.manual_seed(0)
    ids, style = torch.randint(0, VOCAB, (SAMPLES, LENGTH + 1)), torch.randn(SAMPLES, 4)
    style[37] = 1e30  # finite, but its square is not
    model = Gpt()
    compiled = torch.compile(model, backend="aot_eager", dynamic=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step, start in enumerate(range(0, SAMPLES, BATCH)):
        batch = slice(start, start + BATCH)
        logits = compiled(ids[batch, :-1], style[batch])
        loss = loss_of(logits, ids[batch, 1:])
        optimizer.zero_grad()
        loss.backward()
        if loss.isfinite():  # the usual way out: the whole batch is lost
            optimizer.step()
        print(f"step {step}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
