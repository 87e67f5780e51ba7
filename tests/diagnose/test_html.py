"""The HTML report: what stands in it, and that it needs nothing else."""

from __future__ import annotations

import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sardonyx
from sardonyx import MissingDependency, OptionError
from sardonyx.diagnose import html

pytest.importorskip("jinja2", reason="the extra 'report' is not installed")

MODEL = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).eval()
X = torch.randn(3, 8)


def data_of(page: str) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def reported(model: Any, *args: Any, path: Path, **options: Any) -> str:
    torch.compile(model, backend="sardonyx", options={"report": str(path), **options})(*args)
    return path.read_text()


def test_a_compiled_model_has_its_graph_before_and_after(tmp_path: Path) -> None:
    (drawing,) = data_of(reported(MODEL, X, path=tmp_path / "out.html"))
    assert [node["o"] for node in drawing["after"]["nodes"]] == ["Gemm", "Gelu", "Gemm"]
    assert len(drawing["before"]["nodes"]) > 3
    assert drawing["after"]["nodes"][0]["s"] == "0"
    assert drawing["after"]["kinds"]["0"] == "Linear"


def test_a_node_tells_what_it_reads_by_name(tmp_path: Path) -> None:
    program = sardonyx.export(MODEL, (X,), optimize="none")
    path = tmp_path / "out.html"
    optimized = sardonyx.optimize(program.proto(), report=str(path))
    html.report_program(optimized, [X], {})
    first = data_of(path.read_text())[0]["after"]["nodes"][0]
    assert first["r"] == ["input", "0.weight", "0.bias"]


def test_the_time_that_the_report_itself_takes_is_left_out(tmp_path: Path) -> None:
    page = reported(MODEL, X, path=tmp_path / "out.html")
    stages = re.search(r'<section id="stages".*?</section>', page, re.DOTALL)
    assert stages is not None
    assert "translate" in stages[0]
    assert '<th scope="row">report</th>' not in stages[0]


def test_the_slowest_rows_lead_to_nodes_of_a_drawing(tmp_path: Path) -> None:
    page = reported(MODEL, X, path=tmp_path / "out.html")
    drawings = data_of(page)
    links = re.findall(r'data-region="(\d+)" data-node="([^"]+)"', page)
    assert links
    for region, name in links:
        assert name in {node["n"] for node in drawings[int(region)]["after"]["nodes"]}


def test_every_node_has_a_time_and_an_error(tmp_path: Path) -> None:
    (drawing,) = data_of(reported(MODEL, X, path=tmp_path / "out.html"))
    assert all(node["ms"] > 0 and node["e"] < 1e-5 for node in drawing["after"]["nodes"])


def test_the_result_is_right_and_random_numbers_go_on_as_ever(tmp_path: Path) -> None:
    torch.manual_seed(3)
    expected = MODEL(X) * torch.rand(4)
    torch.manual_seed(3)
    got = torch.compile(MODEL, backend="sardonyx", options={"report": str(tmp_path / "out.html")})(X) * torch.rand(4)
    torch.testing.assert_close(got, expected)


def test_fallbacks_rules_and_options_are_listed(tmp_path: Path) -> None:
    page = reported(
        lambda x: torch.linalg.eigvalsh(x @ x.T).softmax(-1), X, path=tmp_path / "out.html", fallback="quiet"
    )
    assert "aten._linalg_eigh.default" in page
    assert "torch.linalg.eigvalsh(x @ x.T)" in page
    assert "MatricesToGemm" in page
    assert re.search(r'class="changed"><td><code>fallback', page)


def test_native_kernels_say_what_they_stand_for(tmp_path: Path) -> None:
    page = reported(lambda x: (x.sin() + 1).tanh() * x, X, path=tmp_path / "out.html", native=True)
    (drawing,) = data_of(page)
    kernels = [node for node in drawing["after"]["nodes"] if node.get("k")]
    assert sorted(kernels[0]["k"].split()) == ["Add", "Mul", "Sin", "Tanh"]
    assert "Sin Add Tanh Mul" in page


def test_layers_in_lower_precision_are_listed(tmp_path: Path) -> None:
    path = tmp_path / "out.html"
    options: dict[str, Any] = {"precision": "int8", "max_drop": 0.0, "cache_dir": ""}
    sardonyx.export(MODEL, (X,), report=str(path), **options)
    assert "<p>precision int8: float32 ×2; drop" in path.read_text()
    assert "<td><code>2</code></td><td>float32</td>" in path.read_text()


def test_training_has_a_drawing_for_each_graph(tmp_path: Path) -> None:
    with torch.enable_grad():
        options = {"report": str(tmp_path / "out.html")}
        torch.compile(nn.Linear(8, 4), backend="sardonyx", options=options)(X).sum().backward()
    drawings = data_of((tmp_path / "out.html").read_text())
    assert [drawing["title"].split(",")[0] for drawing in drawings] == ["0: forward", "1: backward"]


def test_the_wrapper_and_export_write_one_too(tmp_path: Path) -> None:
    sardonyx.compile(MODEL, report=str(tmp_path / "module.html"))(X)
    sardonyx.export(MODEL, (X,), report=str(tmp_path / "export.html"))
    for name in ("module.html", "export.html"):
        (drawing,) = data_of((tmp_path / name).read_text())
        assert all(node["ms"] > 0 for node in drawing["after"]["nodes"]), name


class _Outside(HTMLParser):
    """Gathers what a page would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value for name, value in attrs if name in ("src", "href") and value and value[0] != "#"]


def test_the_page_fetches_nothing(tmp_path: Path) -> None:
    page = reported(MODEL, X, path=tmp_path / "out.html")
    parser = _Outside()
    parser.feed(page)
    assert parser.found == ["data:,"]
    assert "@import" not in page
    assert not re.search(r"url\((?!#)", page)


def test_names_cannot_break_out_of_the_page(tmp_path: Path) -> None:
    program = sardonyx.export(MODEL, (X,), input_names=["</script><b>x"])
    options = sardonyx.Options(report=str(tmp_path / "out.html"))
    page = html.save(
        sardonyx.optimize(program.proto(), report=options.report).report, tmp_path / "out.html", options, "<i>a</i>"
    ).read_text()
    assert "</script><b>x" not in page
    assert "&lt;i&gt;a&lt;/i&gt;" in page
    assert data_of(page)[0]["after"]["inputs"][0][0] == "</script><b>x"


def test_what_cannot_be_measured_is_remarked(tmp_path: Path) -> None:
    page = reported(lambda x: nn.functional.dropout(x, 0.5) + 1, X, path=tmp_path / "out.html")
    assert "it uses random numbers" in page
    page = reported(torch.sin, X, path=tmp_path / "out2.html", engine="reference")
    assert "&#39;reference&#39; does not report them" in page


def test_a_folder_that_does_not_exist_is_an_error_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="there is no folder") as caught:
        reported(MODEL, X, path=tmp_path / "none" / "out.html")
    assert isinstance(caught.value.__cause__ or getattr(caught.value, "inner_exception", None), OptionError)


def test_a_missing_jinja_says_which_extra_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    html._jinja.cache_clear()
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(MissingDependency, match=r"sardonyx\[report\]"):
        html.save(sardonyx.Report(), tmp_path / "out.html")


def test_reset_begins_the_file_anew(tmp_path: Path) -> None:
    path = tmp_path / "out.html"
    reported(MODEL, X, path=path)
    torch._dynamo.reset()
    assert len(data_of(reported(torch.sin, X, path=path))) == 1


def test_the_command_line_writes_one_for_a_module_and_for_a_file(tmp_path: Path) -> None:
    program = pytest.importorskip("sardonyx.cli._program", reason="the extra 'cli' is not installed").program
    testing = pytest.importorskip("click.testing")
    source = tmp_path / "given.py"
    source.write_text("import torch\ndef net():\n    return torch.nn.Linear(4, 2).eval(), (torch.ones(3, 4),)\n")
    file = sardonyx.export(nn.Linear(4, 2).eval(), (torch.ones(3, 4),)).save(tmp_path / "linear.onnx")
    for model, title in ((f"{source}:net", "net"), (str(file), "linear")):
        done = testing.CliRunner().invoke(program, ["report", model, "-o", str(tmp_path / "out.html"), "--json"])
        assert done.exit_code == 0, done.output
        assert json.loads(done.stdout)["nodes"] == 1
        page = (tmp_path / "out.html").read_text()
        assert f"<h1>{title}</h1>" in page
        assert data_of(page)[0]["after"]["nodes"][0]["ms"] > 0
