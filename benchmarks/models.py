"""The models that the benchmarks run, with and without checks."""

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
        for location, layer in enumerate(self.layers):
            x = F.gelu(layer(x))
            if self.check:
                f = self.check(x, location + 1, f)
        return (x, f) if self.check else x


class Block(nn.Module):
    """A GPT block. `check` receives every LayerNorm and Linear output: six checks."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, check) -> Tensor:
        batch, length, _ = x.shape
        h = check(self.norm1(x))
        q, k, v = check(self.qkv(h)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + check(self.proj(h))
        h = check(self.up(check(self.norm2(x))))
        return x + check(self.down(F.gelu(h)))


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
        f, location = err.new(x), 0

        def check(z: Tensor) -> Tensor:
            nonlocal f, location
            location += 1
            f = self.check(z, location, f)
            return z

        for block in self.blocks:
            x = block(x, check)
        return x, f
