"""What each rule reports, and what it leaves alone."""

import re
import textwrap
from pathlib import Path

import pytest

from torchguard.lint import RULES, Settings, check_source

EVERY = Settings(select=("TG",))
IMPORTS = """
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
import torchguard
from torchguard import err, flag_nan, flags, watch
"""


def codes(source):
    return [finding.code for finding in check_source(IMPORTS + textwrap.dedent(source), settings=EVERY)]


def forward(body, signature="self, x: Tensor, y: Tensor"):
    """A model whose forward has this body."""
    lines = textwrap.indent(textwrap.dedent(body).strip(), " " * 8)
    return f"class Net(nn.Module):\n    def forward({signature}):  # (batch, dim)\n{lines}\n"


@pytest.mark.parametrize("rule", [rule for rule in RULES.values() if rule.nodes], ids=lambda rule: rule.code)
def test_a_rule_reports_its_wrong_example_and_not_its_right_one(rule):
    wrong, right = ({one.code for one in check_source(code, settings=EVERY)} for code in (rule.wrong, rule.right))
    assert rule.code in wrong
    assert rule.code not in right


@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.code)
@pytest.mark.filterwarnings("ignore")
def test_right_examples_run(rule):
    exec(compile(rule.right, rule.code, "exec"), {})


def test_the_snippets_of_the_guidelines_are_clean_and_name_every_rule():
    page = (Path(__file__).parents[2] / "docs" / "guidelines.md").read_text()
    snippets = "\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL))
    assert [str(finding) for finding in check_source(snippets, settings=EVERY)] == []
    assert {*re.findall(r"TG\d{3}", page)} == {*RULES}


WRONG = [
    ("TG101", "def f(x): return torch.exp(x)"),
    ("TG101", "def f(x: Tensor):\n    return x * 2"),
    ("TG101", "def f(x) -> Tensor:\n    return x.unsqueeze(0)"),
    ("TG101", "class Net(nn.Module):\n    def forward(self, x): return F.relu(x)"),
    ("TG102", forward("a, b = x\nreturn a + b", "self, x")),
    ("TG102", forward("return x[0] + x[1]", "self, x: tuple[Tensor, Tensor] | None = None")),
    ("TG103", forward("return x + y, y")),
    ("TG103", forward("h = self.net(x)\nreturn (torch.exp(h), h)")),
    ("TG110", "x = torch.zeros(3)"),
    ("TG110", "from torch import randn\nx = randn(2, 3, device='cpu')"),
    ("TG110", "x = torch.tensor([1.0, 2.0])"),
    ("TG110", "x = torch.arange(0, 1, 0.1) + torch.full((3,), 2.0)"),
    ("TG103", forward("return self.a(x), self.b(x)")),
    ("TG130", "class T:\n    def evaluate(self, xs):\n        return [self.model(x) for x in xs]"),
    ("TG171", "def f(x: Tensor): return torch.sqrt(x)\ng = torch.func.grad(f)"),
    ("TG171", "def f(x: Tensor):\n    y = torch.sqrt(x.sum())\n    y.backward()"),
    ("TG210", "def f(batch): return batch.cuda()"),
    ("TG230", "def run(model, x):\n    model.eval()\n    with torch.no_grad():\n        return model(x)"),
    ("TG111", forward("return x + torch.ones(3, dtype=x.dtype)")),
    ("TG111", forward("z = torch.zeros(3, dtype=x.dtype)\nreturn x * z")),
    ("TG111", forward("return torch.cat([x, torch.zeros(2, 3, dtype=x.dtype)])")),
    ("TG112", "def my_loss(a: Tensor, b: Tensor) -> Tensor:\n    return ((a - b) ** 2).mean()"),
    (
        "TG112",
        "class MyLoss(nn.Module):\n    def forward(self, a: Tensor, b: Tensor):\n        return F.mse_loss(a, b)",
    ),
    ("TG120", "def f(x: Tensor): x.mul_(2)"),
    ("TG120", forward("x.clamp_(min=0)\nreturn x")),
    ("TG121", "def f(x: Tensor, y: Tensor):\n    x *= y\n    return x"),
    ("TG121", forward("out = F.relu(x)\nout += y\nreturn out")),
    ("TG121", "def f(x: Tensor, y: Tensor):\n    x[0] += y\n    return x"),
    ("TG120", "x = torch.ones(3, dtype=torch.float32)\nx.add_(1)"),
    ("TG121", "x = torch.ones(3, dtype=torch.float32)\nx += 1"),
    ("TG122", "y = F.dropout(torch.ones(3), inplace=True)"),
    ("TG123", "def f(a: Tensor, b: Tensor, c: Tensor): torch.matmul(a, b, out=c)"),
    ("TG130", "def validate(model, loader):\n    model.eval()\n    for x in loader:\n        model(x)"),
    ("TG130", "def evaluate(net, x):\n    net.eval()\n    return net(x)"),
    ("TG131", "@torch.no_grad()\ndef predict(model, x):\n    return model(x)"),
    ("TG131", "def inference(model, x):\n    with torch.inference_mode():\n        return model(x)"),
    (
        "TG132",
        """
        def train_epoch(model, loader, optimizer):
            for x in loader:
                model.eval()
                loss = model(x).sum()
                loss.backward()
                optimizer.step()
        """,
    ),
    ("TG133", "def evaluate(model, x):\n    model.train()\n    with torch.no_grad():\n        return model(x)"),
    ("TG134", "def step(loss: Tensor):\n    with torch.inference_mode():\n        loss.backward()"),
    ("TG140", "def f(x: Tensor, rank):\n    if rank == 0:\n        dist.broadcast(x, 0)"),
    ("TG140", "def f(x: Tensor):\n    if dist.get_rank() != 0:\n        return\n    dist.barrier()"),
    ("TG140", "def f(self, x: Tensor):\n    if self.is_main_process:\n        dist.all_reduce(x)"),
    ("TG140", "if dist.get_rank() == 0:\n    dist.barrier()"),
    ("TG141", "def f(x: Tensor): dist.all_reduce(x)"),
    ("TG142", "def log(loss: Tensor): print(loss.item())"),
    ("TG142", "def my_loss(a: Tensor, b: Tensor): return F.l1_loss(a.float(), b.float())"),
    ("TG143", "def clip_loss(x: Tensor, parts):\n    dist.all_gather(parts, x)\n    return torch.cat(parts).mean()"),
    ("TG150", forward("return x * x.max().item()")),
    ("TG150", forward("return x * float(x.sum())")),
    ("TG150", "@torch.compile\ndef f(x: Tensor): return x * x.sum().item()"),
    ("TG150", "def f(x: Tensor): return int(x.sum())\ng = torch.compile(f)"),
    ("TG151", forward("return sum(x.tolist())")),
    ("TG151", forward("return x.detach().cpu().numpy()")),
    ("TG152", forward("print(x)\nreturn x", "self, x")),
    ("TG152", forward("print(f'{x}')\nreturn x")),
    ("TG153", forward("if x.sum() > 0:\n    return x\nreturn -x", "self, x")),
    ("TG153", forward("return x if x.any() else y")),
    ("TG153", forward("assert (x > 0).all()\nreturn x")),
    ("TG153", forward("if x:\n    return y\nreturn x")),
    ("TG154", forward("mask = x > 0\nreturn x[mask]")),
    ("TG154", forward("return torch.nonzero(x)")),
    ("TG154", forward("return x.masked_select(y > 0)")),
    ("TG155", forward("for i in range(int(x.max())):\n    y = y + i\nreturn y")),
    ("TG155", forward("for i in range(x.max().item()):\n    y = y + i\nreturn y")),
    ("TG155", forward("while (x > 1).any():\n    x = x / 2\nreturn x")),
    ("TG160", "@torch.compile\ndef f(x: Tensor, f):\n    return flags.unpack(f)"),
    ("TG160", forward("f = err.new(x)\nif torchguard.has_err(f):\n    return y\nreturn x")),
    ("TG161", "def f(x: Tensor):\n    f = err.new(x)\n    return f * 0.5"),
    ("TG161", "def f(x: Tensor):\n    return flag_nan(x, 'a').float()"),
    ("TG162", "def f(x: Tensor, f): err.push(f, err.NAN, 'here')"),
    ("TG162", "def f(x: Tensor, f):\n    g = flag_nan(x, 'a', f)\n    return x, f"),
    ("TG170", "def f(x: Tensor): return torch.where(x > 0, torch.sqrt(x), torch.zeros_like(x))"),
    ("TG170", "def f(x: Tensor, y: Tensor):\n    ratio = x / y\n    return torch.where(y == 0, 0.0, ratio)"),
    ("TG171", forward("return torch.sqrt(x)")),
    ("TG171", forward("return ((x - y) ** 2).mean().sqrt()")),
    ("TG171", forward("return (x**2).sum() ** 0.5")),
    ("TG172", forward("return torch.log(x)")),
    ("TG172", forward("return x.softmax(-1).log()")),
    ("TG173", forward("return x / x.norm(dim=-1, keepdim=True)")),
    ("TG173", forward("return (x - x.mean()) / x.std()")),
    ("TG174", "def f(x: Tensor): return torch.clamp(torch.log(x), min=-10)"),
    ("TG175", "def f(net, x: Tensor, y: Tensor):\n    out, f = watch(net)(x)\n    return F.mse_loss(out, y), f"),
    ("TG201", "def f(x: Tensor) -> Tensor:\n    return x"),
    ("TG210", "x = torch.ones(3, dtype=torch.float32, device='cuda:0')"),
    ("TG210", "def f(x: Tensor): return x.cuda()"),
    ("TG210", "def f(x: Tensor): return x.to('cuda')"),
    ("TG210", "device = torch.device('cuda')"),
    ("TG220", "def f(a: Tensor, b: Tensor, c): return a.mul(b).add(c)"),
    ("TG221", "def f(p: nn.Parameter): return p.data"),
    ("TG230", "def evaluate(model, x):\n    model.eval()\n    with torch.no_grad():\n        return model(x)"),
    ("TG240", "def convert_box_to_mask(box: Tensor): return box"),
    ("TG250", "traced = torch.jit.trace(None, None)"),
    ("TG251", "torch.onnx.export(None, (), 'a.onnx', dynamic_axes={'x': {0: 'n'}})"),
    ("TG260", "def test():\n    x = torch.ones(3)\n    (x * x).sum().backward()\n    assert x.grad.isfinite().all()"),
    ("TG301", "def f():\n" + "    print()\n" * 61),
]


@pytest.mark.parametrize(("code", "source"), WRONG, ids=[f"{code}-{i}" for i, (code, _) in enumerate(WRONG)])
def test_reported(code, source):
    assert code in codes(source)


RIGHT = [
    ("TG101", "def f(x, scale=2): return x * scale"),  # x may be a number
    ("TG101", "def f(x) -> Tensor:\n    if isinstance(x, list):\n        x = torch.stack(x)\n    return torch.exp(x)"),
    ("TG101", "import numpy as np\ndef f(x): return np.exp(x)"),
    ("TG101", "def f(path): return path.exists()"),
    ("TG102", forward("return x[0]", "self, x: tuple[Tensor, ...]")),
    ("TG102", forward("h, w = size\nreturn x", "self, x: Tensor, size: tuple[int, int]")),
    ("TG103", forward("return x")),
    ("TG103", forward("return x.shape[0], 3")),
    (
        "TG103",
        "class F(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, x: Tensor):\n        return x, x",
    ),
    ("TG110", "def f(x: Tensor): return torch.zeros_like(x) + torch.arange(3) + torch.tensor([1, 2]) + x.new_zeros(3)"),
    ("TG110", "class Net(nn.Module):\n    def __init__(self):\n        self.w = nn.Parameter(torch.zeros(3))"),
    ("TG110", "def f(x: Tensor): return torch.zeros(3).to(x)"),
    ("TG110", "def f(**kwargs): return torch.zeros(3, **kwargs)"),
    ("TG110", "def zeros(n): return n\nx = zeros(3)"),  # not torch's
    ("TG111", forward("return x + torch.ones(3, dtype=x.dtype, device=x.device)")),
    ("TG111", forward("z = torch.zeros(3)\nz = z.to(x)\nreturn x * z")),
    ("TG111", forward("return torch.arange(3) * 2")),
    ("TG112", "def my_loss(a: Tensor, b: Tensor) -> Tensor:\n    return ((a.float() - b.float()) ** 2).mean()"),
    ("TG112", "def get_loss(name: str): return name"),
    ("TG120", "def f(x: Tensor):\n    with torch.no_grad():\n        x.mul_(2)"),
    ("TG120", "def init_weights(w: Tensor): w.normal_()"),
    ("TG120", "def f(x: Tensor): return torch.empty(3).uniform_()"),
    ("TG120", "class Node:\n    def add_(self): ...\ndef f(n: Node): n.add_()"),
    ("TG120", "def f(x: Tensor): x.requires_grad_()"),
    ("TG120", "def f(x: Tensor):\n    out = torch.zeros_like(x)\n    out.index_add_(0, x, x)\n    return out"),
    ("TG121", "def f(x: Tensor):\n    out = x * 2\n    out[0] += 1\n    return out"),
    ("TG121", "def f(n: int):\n    n += 1\n    return n"),
    ("TG121", "def f(xs: list):\n    total = 0\n    for x in xs:\n        total += x\n    return total"),
    ("TG121", "def f(x: Tensor):\n    parts = []\n    parts += [x]\n    return parts"),
    ("TG121", "def f(x: Tensor):\n    n = x.shape[0]\n    n += 1\n    m = x.size(1)\n    m -= 1\n    return n, m"),
    ("TG122", "import pandas as pd\npd.DataFrame().drop(columns='a', inplace=True)"),
    ("TG123", "import numpy as np\nnp.add(1, 2, out=None)"),
    ("TG130", "def evaluate(model, x):\n    model.eval()\n    with torch.no_grad():\n        return model(x)"),
    ("TG130", "def attack(model, x):\n    model.eval()\n    model(x).sum().backward()"),
    ("TG131", "@torch.no_grad()\ndef predict(model, x):\n    model.eval()\n    return model(x)"),
    ("TG131", "def train(model, x): return model(x)"),
    (
        "TG132",
        """
        def train(model, loader, optimizer):
            for x in loader:
                model.train()
                model(x).sum().backward()
                optimizer.step()
                model.eval()
                with torch.no_grad():
                    model(x)
        """,
    ),
    ("TG133", "def evaluate(model, x):\n    model.eval()\n    y = model(x)\n    model.train()\n    return y"),
    ("TG134", "@torch.no_grad()\ndef step(loss: Tensor):\n    with torch.enable_grad():\n        loss.backward()"),
    ("TG140", "def f(x: Tensor, rank):\n    if rank == 0:\n        dist.send(x, 1)"),
    (
        "TG140",
        "def f(x, rank):\n    if rank == 0:\n        dist.broadcast(x, 0)\n    else:\n        dist.broadcast(x, 0)",
    ),
    ("TG140", "def f(x: Tensor, local_rank):\n    if local_rank != -1:\n        dist.all_reduce(x)"),
    (
        "TG140",
        "def f(rank):\n    if rank != 0:\n        dist.barrier()\n    if rank == 0:\n        dist.barrier()",
    ),
    ("TG140", "def f(x: Tensor, rank, group):\n    if rank == 0:\n        dist.all_reduce(x, group=group)"),
    ("TG141", "def f(x: Tensor):\n    if dist.is_initialized():\n        dist.all_reduce(x)"),
    ("TG142", "def log(loss: Tensor):\n    dist.all_reduce(loss)\n    print(loss.item())"),
    (
        "TG143",
        "def clip_loss(x: Tensor, parts, rank):\n    dist.all_gather(parts, x)\n    parts[rank] = x\n    return parts",
    ),
    ("TG143", "def loss(x: Tensor, parts):\n    with torch.no_grad():\n        dist.all_gather(parts, x)"),
    ("TG150", forward("return x.shape[0] * int(x.size(1)) + len(x)")),
    ("TG150", "def report(x: Tensor): return x.item()"),
    ("TG150", forward("if not torch.compiler.is_compiling():\n    return x.max().item()\nreturn x")),
    ("TG150", "@torch.compiler.disable\ndef f(x: Tensor): return x.item()"),
    ("TG151", forward("return x.shape[0]")),
    ("TG152", forward("print(x.shape, x.dtype)\nreturn x")),
    (
        "TG153",
        forward("if x is None or y is not None or x.shape[0] > 1 or x.dtype == torch.float16:\n    return x\nreturn y"),
    ),
    ("TG153", forward("if self.training and x.dim() == 2 and isinstance(x, Tensor):\n    return x\nreturn y")),
    ("TG153", forward("if flag:\n    return x\nreturn x", "self, x, flag")),
    ("TG153", forward("if len(x) > 1 and x.is_floating_point():\n    return x\nreturn y")),
    ("TG154", forward("return x[0] + x[:, 1:].sum() + x[..., None].sum() + torch.where(x > 0, x, y).sum()")),
    ("TG154", forward("x[x > 0] = 0\nreturn x")),
    ("TG155", forward("for i in range(x.shape[0]):\n    y = y + x[i]\nreturn y")),
    ("TG155", forward("for row in self.layers:\n    x = row(x)\nreturn x")),
    ("TG160", "def report(f): return flags.unpack(f)"),
    ("TG161", "def f(x: Tensor, g):\n    f = err.new(x)\n    return err.merge(f, g)"),
    ("TG162", "def f(x: Tensor, f):\n    f = flag_nan(x, 'a', f)\n    return x, f"),
    ("TG162", "def f(x: Tensor, f):\n    for i in range(3):\n        f = flag_nan(x, 'a', f)\n    return f"),
    ("TG162", "def f(xs: list, x): xs.push(x)"),
    ("TG170", "def f(x: Tensor): return torch.where(x > 0, torch.sqrt(x.clamp(min=1e-9)), 0)"),
    ("TG170", "def f(x: Tensor, mask: Tensor): return torch.where(mask, torch.exp(x), 0)"),
    ("TG170", "@torch.no_grad()\ndef f(x: Tensor): return torch.where(x > 0, torch.sqrt(x), 0)"),
    ("TG171", forward("return torch.sqrt(x.var() + self.eps)")),
    ("TG171", "import math\n" + forward("return x / math.sqrt(x.shape[-1]) + x.shape[-1] ** 0.5")),
    ("TG171", "def f(x: Tensor): return torch.sqrt(x)"),  # neither forward nor loss
    ("TG172", forward("return torch.log(x + 1e-8) + torch.log1p(x) + torch.log(torch.exp(x).sum())")),
    ("TG173", forward("return x / x.norm().clamp(min=1e-6) + x / y.shape[0] + x / 2")),
    ("TG173", forward("p = torch.exp(x)\nreturn p / p.sum()")),
    ("TG174", "def f(x: Tensor): return torch.log(x.clamp(min=1e-9)).clamp(max=3)"),
    ("TG174", "def f(x: Tensor): return torch.clamp(torch.log(x), max=3)"),
    ("TG175", "def f(x: Tensor): return x.mean()"),
    ("TG201", "def f(x: Tensor) -> Tensor:  # (batch, dim)\n    return x"),
    ("TG201", 'def f(x: Tensor) -> Tensor:\n    """x has shape (B, T)."""\n    return x'),
    ("TG210", "device = 'cuda' if torch.cuda.is_available() else 'cpu'\nx = torch.device(device)"),
    ("TG210", "if torch.cuda.is_available():\n    x = torch.ones(3, device='cuda')"),
    ("TG210", "name = 'cuda'"),
    ("TG220", "def f(a: set, b, c):\n    a.add(b)\n    return a"),
    ("TG220", "def f(a: Tensor, b): return a.add(b)"),
    ("TG221", "def f(batch): return batch.data"),
    ("TG221", "def f(p: nn.Parameter, x: Tensor): p.data = x"),
    ("TG230", "@torch.no_grad()\ndef update_weights(p: Tensor): p.mul_(2)"),
    ("TG240", "def box_to_mask(box: Tensor): return box"),
    ("TG240", "def conv2d(x: Tensor): return x"),
    ("TG240", "def build_2d_grid(x: Tensor): return x"),
    ("TG250", "compiled = torch.compile(print)"),
    ("TG251", "torch.onnx.export(None, (), 'a.onnx', dynamo=True, dynamic_shapes={})"),
    (
        "TG260",
        "def test():\n    x = torch.ones(3)\n    x.requires_grad_()\n    x.sum().backward()\n    print(x.grad)",
    ),
    ("TG301", "def f():\n    return [\n" + "        0,\n" * 200 + "    ]"),
]


@pytest.mark.parametrize(("code", "source"), RIGHT, ids=[f"{code}-{i}" for i, (code, _) in enumerate(RIGHT)])
def test_not_reported(code, source):
    assert code not in codes(source)


@pytest.mark.parametrize(
    "source",
    [
        "import torch as t\nx = t.zeros(3)",
        "from torch import zeros as z\nx = z(3)",
        "def f():\n    import torch\n    return torch.zeros(3)",
        "try:\n    import torch\nexcept ImportError:\n    torch = None\nx = torch.zeros(3)",
        "import torch\nmake = torch.zeros\nx = make(3)",
        "import torch\nclass A:\n    x = torch.zeros(3)",
        "import torch\nf = lambda: torch.zeros(3)",
        "import torch\nx = [torch.zeros(3) for i in range(3)]",
    ],
)
def test_names_are_resolved(source):
    assert "TG110" in [one.code for one in check_source(source)]


@pytest.mark.parametrize(
    "source",
    [
        "import numpy as torch\nx = torch.zeros(3)",
        "import torch\ndef f(torch): return torch.zeros(3)",
        "import torch\ndef f():\n    torch = 3\n    return torch.zeros(3)",
        "import torch\nx = [torch.zeros(3) for torch in ()]",
        "import torch\nf = lambda torch: torch.zeros(3)",
        "def f():\n    import torch\nx = torch.zeros(3)",
        "x = torch.zeros(3)",
        "class torch:\n    zeros = list\nx = torch.zeros(3)",
    ],
)
def test_names_that_are_bound_to_something_else_are_not_torch(source):
    assert check_source(source) == []


def test_methods_of_a_layer_of_the_model_are_known_to_give_tensors():
    source = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x):
        h = self.layer(x)
        if h.max() > 0:
            h += self.scale
        return h
"""
    assert {"TG153", "TG121"} <= {*codes(source)}


def test_an_attribute_that_is_set_again_elsewhere_is_unknown():
    source = """
class Net(nn.Module):
    def __init__(self):
        self.state = torch.ones(3, dtype=torch.float32)

    def reset(self):
        self.state = None

    def forward(self, x: Tensor) -> Tensor:  # (n,)
        if self.state:
            return x
        return x
"""
    assert "TG153" not in codes(source)
