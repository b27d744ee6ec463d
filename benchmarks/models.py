"""What is measured: the same model with and without checks."""

import torch.nn.functional as F
from torch import Tensor, nn

from torchguard import err


class Mlp(nn.Module):
    """12 x (Linear, GELU, check)."""

    def __init__(self, check=None, depth: int = 12, width: int = 512) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.check = check

    def forward(self, x: Tensor):
        f = err.new(x) if self.check else None
        for place, layer in enumerate(self.layers):
            x = F.gelu(layer(x))
            if self.check:
                f = self.check(x, place + 1, f)
        return (x, f) if self.check else x


class Block(nn.Module):
    """A GPT block of which every LayerNorm and Linear output is checked: six checks."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, seen) -> Tensor:
        batch, length, _ = x.shape
        h = seen(self.norm1(x))
        q, k, v = seen(self.qkv(h)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + seen(self.proj(h))
        h = seen(self.up(seen(self.norm2(x))))
        return x + seen(self.down(F.gelu(h)))


class Gpt(nn.Module):
    """GPT blocks; `check` as for `Mlp`."""

    def __init__(self, check=None, blocks: int = 4, width: int = 1024, heads: int = 16) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.check = check

    def forward(self, x: Tensor):
        if self.check is None:
            for block in self.blocks:
                x = block(x, lambda z: z)
            return x
        f, place = err.new(x), 0

        def seen(z: Tensor) -> Tensor:
            nonlocal f, place
            place += 1
            f = self.check(z, place, f)
            return z

        for block in self.blocks:
            x = block(x, seen)
        return x, f
