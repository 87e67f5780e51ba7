"""A page becomes what the site shows: its prose, its code, and what the code really printed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from _site.pages import Cell, blocks, cells

PAGE = """# Title

Some prose.

```python
x = 6
print(x * 7)
```

```text
printed long ago
```

More prose, then text of its own:

```text
not printed
```

```sh
make docs
```

```text
what a shell shows
```

```python
x += 1
```

The end.
"""


def test_code_is_parted_from_prose_and_takes_what_it_printed_along() -> None:
    found = cells(PAGE)
    assert [cell.language for cell in found] == ["", "python", "", "python", ""]
    assert found[1] == Cell("x = 6\nprint(x * 7)\n", 5, "python", "printed long ago\n")
    assert found[3] == Cell("x += 1\n", 28, "python")
    assert "printed long ago" not in "".join(cell.text for cell in found)


def test_text_after_prose_or_after_another_language_is_text() -> None:
    prose = cells(PAGE)[2].text
    assert [block.text for block in blocks(prose)] == ["not printed\n", "make docs\n", "what a shell shows\n"]


def test_lines_are_those_of_the_page() -> None:
    lines = PAGE.splitlines()
    for cell in cells(PAGE):
        assert lines[cell.line] == cell.text.splitlines()[0]


def test_a_page_without_code_is_one_cell() -> None:
    assert cells("# Title\n\n```text\nx\n```\n") == [Cell("# Title\n\n```text\nx\n```\n", 0)]


def made(text: str, name: str = "page.md") -> Any:
    pytest.importorskip("nbformat", reason="the site needs nbformat: pip install -e '.[docs]'")
    from _site.notebook import DOCS, notebook

    return notebook(text, DOCS / name)


def test_a_notebook_has_the_pages_cells_and_their_lines_after_a_hidden_one() -> None:
    book = made(PAGE)
    assert [cell.cell_type for cell in book.cells] == ["code", "markdown", "code", "markdown", "code", "markdown"]
    assert book.cells[0].metadata.tags == ["remove-cell"]
    assert book.metadata.source_map == [0, 0, 5, 12, 28, 30]


COMMANDS = """# Title

```sh
sardonyx completion zsh --help  # how it is called
sardonyx export absent.onnx -o x.onnx  # exits with 3: there is no such file
```

```text
printed long ago
```

<!-- not run: it needs a GPU -->

```sh
sardonyx native compile model.onnx -o compiled --target cuda
```
"""


def test_commands_are_shown_as_they_are_with_what_they_print_below() -> None:
    (_, shown, code, rest) = made(COMMANDS).cells[-4:]
    assert shown.source == f"```sh\n{blocks(COMMANDS)[0].text}```"
    assert (code.cell_type, code.metadata.tags) == ("code", ["remove-input", "scroll-output"])
    assert "printed long ago" not in rest.source
    assert "--target cuda" in rest.source


def test_pages_of_data_are_not_run() -> None:
    assert [cell.cell_type for cell in made(PAGE, "operators.md").cells] == ["markdown"]


def test_what_a_page_keeps_in_comments_is_written_out() -> None:
    text = "# Title\n\n<!-- toctree Doors\nexport\nmodule\n-->\n\n<!-- include ../CHANGELOG.md -->\n"
    (cell,) = made(text).cells
    assert "```{toctree}\n:hidden:\n:caption: Doors\n\nexport\nmodule\n```" in cell.source
    assert "## [Unreleased]" in cell.source
    assert "# Changelog" not in cell.source


def test_links_out_of_the_documents_lead_to_pages_or_files() -> None:
    (cell,) = made("[rules](../CONTRIBUTING.md#set-up), [a file](../README.md), [a folder](../examples/native)").cells
    assert cell.source == "[rules](contributing.md#set-up), [a file](../README.md), `a folder`"


def test_a_page_in_a_folder_links_to_the_pages_above_it() -> None:
    (cell,) = made("[weights](../architecture.md#weights)", "decisions/page.md").cells
    assert cell.source == "[weights](../architecture.md#weights)"


@pytest.mark.parametrize("name", ["inference", "training", "engines", "gpu", "device", "export", "startup"])
def test_a_figure_tells_its_source_and_takes_the_pages_colour(name: str) -> None:
    pytest.importorskip("matplotlib", reason="figures need matplotlib: pip install -e '.[docs]'")
    from _site import plots

    drawn, found = plots.figure(name), json.loads((plots.RESULTS / plots.PLOTS[name].file).read_text())
    assert f"Measured {found['date'][:10]}" in drawn
    assert f"torch {found['versions']['torch']}" in drawn
    assert "currentColor" in drawn
    assert "\n\n" not in drawn  # Markdown would end the figure there
    rows = plots.PLOTS[name].numbers(found)
    assert all(f">{row}<".replace('"', "") in drawn.replace("&quot;", "").replace('"', "") for row in rows)


def run(book: Any, folder: Path) -> Any:
    pytest.importorskip("ipykernel", reason="pages run in kernels: pip install -e '.[docs]'")
    client = pytest.importorskip("nbclient", reason="pages run in kernels: pip install -e '.[docs]'")
    return client.NotebookClient(book, resources={"metadata": {"path": str(folder)}}, timeout=1200).execute()


PLACES = """# Title

```python
import inspect
import sys


def here():
    return sys._getframe().f_code.co_filename, sys._getframe().f_lineno


"an expression is not shown"
```

```python
print(*here(), inspect.getsource(here).splitlines()[-1].strip())
```
"""


def test_code_runs_as_if_the_page_were_its_file(tmp_path: Path) -> None:
    pytest.importorskip("nbformat", reason="the site needs nbformat: pip install -e '.[docs]'")
    from _site.notebook import notebook

    (tmp_path / "page.md").write_text(PLACES)
    done = run(notebook(PLACES, tmp_path / "page.md"), tmp_path)
    shown = [output.text for cell in done.cells if cell.cell_type == "code" for output in cell.outputs]
    assert shown == ["docs/page.md 9 return sys._getframe().f_code.co_filename, sys._getframe().f_lineno\n"]


def test_commands_run_and_exit_as_they_say(tmp_path: Path) -> None:
    pytest.importorskip("nbformat", reason="the site needs nbformat: pip install -e '.[docs]'")
    from _site.notebook import notebook

    (tmp_path / "page.md").write_text(COMMANDS)
    done = run(notebook(COMMANDS, tmp_path / "page.md"), tmp_path)
    (shown,) = [output.text for cell in done.cells if cell.cell_type == "code" for output in cell.outputs]
    assert shown.startswith("Usage: sardonyx completion")
    wrong = COMMANDS.replace("exits with 3", "exits with 1")
    (tmp_path / "page.md").write_text(wrong)
    with pytest.raises(Exception, match=r"absent.onnx .*exits with 3"):
        run(notebook(wrong, tmp_path / "page.md"), tmp_path)


def test_an_error_tells_the_pages_line(tmp_path: Path) -> None:
    pytest.importorskip("nbformat", reason="the site needs nbformat: pip install -e '.[docs]'")
    from _site.notebook import notebook

    text = "# Title\n\n```python\nx = 1\n```\n\nProse.\n\n```python\n\nx / 0\n```\n"
    (tmp_path / "page.md").write_text(text)
    with pytest.raises(Exception, match="ZeroDivisionError") as error:
        run(notebook(text, tmp_path / "page.md"), tmp_path)
    assert "docs/page.md:11" in re.sub(r"\x1b\[[0-9;]*m", "", str(error.value))  # without colours
