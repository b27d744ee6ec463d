"""`torchguard report` and `torchguard run --html`: what each part found, as one report."""

import json

import pytest
import torch
from tests.report.browser import Opened, browser

from torchguard import compiled
from torchguard.report import Report

TRAIN = """
import torch
from torch import nn
from torchguard import Retry, guards

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 1)
    def forward(self, x):
        return self.b(self.a(x).relu()).squeeze(-1)

torch.manual_seed(0)
model = torch.compile(Net(), backend="aot_eager", dynamic=False)
guard = Retry(model, torch.optim.SGD(model.parameters(), lr=0.1))
for step in range(4):
    x = torch.randn(6, 4)
    if step == 2:
        x[3] = float("inf")
    guard.step(lambda x: model(x).square(), x)

FACTOR = 1.0  # torch 2.11 has no guards on attributes of classes

def scaled(x):
    return x * FACTOR

def without_guards_on_globals():
    global FACTOR
    audit = guards.audit(guards.skip_globals(), every=1)
    drop_shapes = lambda entries: [one.guard_type != "TENSOR_MATCH" for one in entries]
    checked = guards.compile(scaled, filter=audit, backend="eager")
    checked(torch.ones(3))
    FACTOR = 2.0
    checked(torch.ones(3))
    torch.compile(lambda x: x + 1, backend="eager", options={"guard_filter_fn": drop_shapes})(torch.ones(3))

without_guards_on_globals()
"""


def sections(data):
    return {section["title"]: section for section in data["sections"]}


def blocks(section, kind):
    return [block for block in section["blocks"] if block["kind"] == kind]


def test_run_writes_what_was_bad_what_retry_did_and_what_was_compiled(command, script, tmp_path):
    options = ["--watch", "--device", "training-card", "--html", "report.html", "--report", "report.json"]
    ran = command("run", *options, script(TRAIN))
    assert ran.returncode == 0, ran.stderr
    assert "report.html has the report." in ran.stderr
    assert "<!doctype html>" in (tmp_path / "report.html").read_text()
    data = json.loads((tmp_path / "report.json").read_text())["report"]
    assert Report.from_dict(data).status == "bad"
    found = sections(data)
    guards = ["Audit of dropped guards", "Cost of guards"]
    assert [*found] == ["Values of Net", "Retry", "Compile", *guards, "Device", "Graphs and code"]
    incident = found["Values of Net"]["sections"][0]
    facts = dict(blocks(incident, "facts")[0]["items"])
    assert facts["Origin"] == "input x"
    assert facts["Retry"].startswith("step 2: trained without 1 bad sample")
    (retried,) = blocks(found["Retry"], "table")[0]["rows"]
    assert retried[2] == "3"
    compiled, dropped = blocks(found["Compile"], "answer")
    assert "3 compilations" in compiled["text"]
    assert "1 of them unchecked" in dropped["text"]
    ((name, *_),) = blocks(found["Audit of dropped guards"], "table")[0]["rows"]
    assert "FACTOR" in name
    assert "Audit of dropped guards: " in ran.stderr
    flames = blocks(found["Cost of guards"], "flame")
    assert flames[0]["root"]["value"] > 0
    assert len(blocks(found["Cost of guards"], "table")[0]["rows"]) == 3
    memory = found["Device"]["sections"][0]["blocks"][0]
    assert memory["kind"] == "line"
    assert max(memory["series"][0]["values"]) > 0
    code = next(block for one in found["Graphs and code"]["sections"] for block in blocks(one, "code"))
    titles = [pane["title"] for pane in code["panes"]]
    assert titles[0].endswith("script.py")
    assert titles[1:4] == ["dynamo graph", "forward graph", "backward graph"]
    source, dynamo = code["panes"][:2]
    key = next(key for key, line in zip(source["keys"], source["lines"], strict=True) if "return self.b" in line)
    assert any("relu" in line for line, its in zip(dynamo["lines"], dynamo["keys"], strict=True) if its == key)


@pytest.mark.long
def test_a_report_is_made_of_the_newest_run_of_files_and_of_the_linter(invoke, captured, tmp_path):
    certificate = compiled.compile_out(torch.sin, torch.randn(3)).certify("probe")
    (tmp_path / "certificate.json").write_text(certificate.to_json())
    (tmp_path / "model.py").write_text("import torch\nact = torch.nn.ReLU(inplace=True)\n")
    options = ["--lint", tmp_path / "model.py", "--json", tmp_path / "all.json", "--html", tmp_path / "all.html"]
    assert invoke("report", tmp_path / "certificate.json", *options).exit_code == 0
    found = sections(json.loads((tmp_path / "all.json").read_text()))
    assert [*found] == ["Certificate of sin", "Lint"]
    assert "1 finding in 1 file" in blocks(found["Lint"], "answer")[0]["text"]
    again = invoke("report", tmp_path / "all.json")
    assert "Claims of the layer typed" in again.stdout
    newest = invoke("report", "--dir", captured.root)
    assert "4 compilations, 1 recompile, 1 graph break" in newest.stdout


@pytest.mark.long
def test_a_model_is_traced_with_the_cost_of_its_guards(invoke, module, tmp_path):
    name = module("import torch\ndef build():\n    return torch.nn.Linear(8, 8), (torch.randn(4, 8),)\n")
    result = invoke("report", f"{name}:build", "--device", "edge-npu", "--json", tmp_path / "report.json")
    assert result.exit_code == 1  # it does not fit
    found = sections(json.loads((tmp_path / "report.json").read_text()))
    assert [*found] == ["Compile", "Cost of guards", "Device", "Graphs and code"]
    assert blocks(found["Cost of guards"], "flame")
    assert blocks(found["Device"], "answer")[0]["text"].startswith("Does not fit edge-npu, because")


@pytest.mark.parametrize(("content", "message"), [("{", "is not JSON"), ("{}", "is no report of torchguard")])
def test_a_file_that_is_no_report_is_refused(invoke, tmp_path, content, message):
    (tmp_path / "x.json").write_text(content)
    result = invoke("report", tmp_path / "x.json")
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.long
def test_the_page_of_a_run_opens_without_errors(command, script, tmp_path):
    command("run", "--watch", "--device", "training-card", "--html", "report.html", script(TRAIN))
    with browser() as chromium:
        opened = Opened(chromium, tmp_path / "report.html")
        opened.page.goto((tmp_path / "report.html").as_uri() + "#incident-0")
        opened.see_all()
        assert opened.messages == []
        assert opened.page.get_by_text("trained without 1 bad sample").first.is_visible()


def test_an_interrupt_is_one_line_and_leaves_no_file(invoke, module, tmp_path):
    name = module("def build():\n    raise KeyboardInterrupt\n")
    ran = invoke("report", f"{name}:build", "--html", tmp_path / "report.html")
    assert ran.exit_code == 130
    assert ran.stderr == "torchguard: interrupted.\n"
    assert ran.stdout == ""
    assert [one.name for one in tmp_path.iterdir() if "report" in one.name] == []
