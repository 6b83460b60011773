"""The notebooks: each runs from top to bottom with its solutions, ships executed, and has the parts of the arc."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flash_tutorial.versions import VERSIONS

nbformat = pytest.importorskip("nbformat", reason="Jupyter is not installed: pip install jupyter")
nbclient = pytest.importorskip("nbclient", reason="Jupyter is not installed: pip install jupyter")
pytest.importorskip("ipykernel", reason="Jupyter is not installed: pip install jupyter")
pytest.importorskip("matplotlib", reason="the notebooks draw with matplotlib: pip install matplotlib")

NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"
STARTER = "building_blocks"
ORDER = [STARTER, *(version.name for version in VERSIONS)]
ARC = [
    "1. Where we are",
    "2. The idea",
    "3. Predict",
    "4. The code",
    "5. Run it by name",
    "6. Measure",
    "7. Break it",
    "8. Exercises",
    "9. What bounds it now",
]
SECONDS = 90  # for one notebook on two cores, as notebooks/README.md promises
FIGURE_BYTES = 60 * 1024

SOLUTION = re.compile(r"<details><summary>Solution</summary>.*?</details>", re.DOTALL)
PYTHON = re.compile(r"```python\n(.*?)```", re.DOTALL)
LINK = re.compile(r"(?<!!)\[[^\]]+\]\(([^)#\s]+)(?:#[^)]*)?\)")


def read(name: str):
    return nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)


def markdown(notebook) -> str:
    return "\n\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")


def outputs(notebook) -> list:
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def solutions(cell) -> list[str]:
    """The Python code of the folded solutions in a Markdown cell."""
    if cell.cell_type != "markdown":
        return []
    return [code for solution in SOLUTION.findall(cell.source) for code in PYTHON.findall(solution)]


def with_solutions(notebook):
    """The notebook with the code of each folded solution as a cell of its own right after it."""
    cells = []
    for cell in notebook.cells:
        cells.append(cell)
        cells += [nbformat.v4.new_code_cell(code) for code in solutions(cell)]
    return nbformat.v4.new_notebook(cells=cells, metadata=notebook.metadata)


def test_every_version_has_a_notebook_and_nothing_else_has():
    assert sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb")) == sorted(ORDER)


@pytest.mark.timeout(3 * SECONDS)
@pytest.mark.parametrize("name", ORDER)
def test_runs_with_its_solutions(name, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(NOTEBOOKS.parent))  # the package of this checkout, installed or not
    notebook = with_solutions(read(name))
    client = nbclient.NotebookClient(notebook, timeout=SECONDS, resources={"metadata": {"path": str(NOTEBOOKS)}})
    client.execute()  # a cell that raises fails the test with the cell's own traceback


@pytest.mark.parametrize("name", ORDER)
def test_ships_executed_in_order_and_without_errors(name):
    code = [cell for cell in read(name).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1)), "run all cells, then save"
    for output in outputs(read(name)):
        assert output.output_type != "error", output
        assert output.get("name") != "stderr", f"a warning or progress bar was saved: {output.text[:200]}"


@pytest.mark.parametrize("name", ORDER)
def test_figures_have_alternative_text_and_are_small(name):
    figures = [output for output in outputs(read(name)) if "image/png" in output.get("data", {})]
    assert figures, "a notebook shows its idea in a picture"
    for figure in figures:
        assert len(figure.metadata["image/png"]["alt"]) > 40
        assert len(figure.data["image/png"]) * 3 / 4 <= FIGURE_BYTES


@pytest.mark.parametrize("name", ORDER)
def test_shows_no_path_of_the_machine_it_ran_on(name):
    text = (NOTEBOOKS / f"{name}.ipynb").read_text(encoding="utf-8")
    found = re.findall(r"(?:/(?:home|root|tmp|work|Users|usr|opt|var)/|[A-Z]:\\\\)\S*", text)
    assert not found, f"paths of one machine: {found[:5]}"


@pytest.mark.parametrize("name", ORDER)
def test_links_resolve(name):
    for target in LINK.findall(markdown(read(name))):
        if not target.startswith(("http://", "https://")):
            assert (NOTEBOOKS / target).exists(), f"{name}: {target}"


@pytest.mark.parametrize("name", ORDER)
def test_links_to_its_neighbours_on_the_ladder(name):
    targets = set(LINK.findall(markdown(read(name))))
    place = ORDER.index(name)
    for neighbour in ORDER[max(place - 1, 0) : place] + ORDER[place + 1 : place + 2]:
        assert f"{neighbour}.ipynb" in targets
    assert "README.md" in targets


@pytest.mark.parametrize("name", ORDER[1:])
def test_has_the_parts_of_the_arc_in_order(name):
    headings = re.findall(r"^## (.+)$", markdown(read(name)), re.MULTILINE)
    assert [heading.split(":")[0] for heading in headings] == ARC


@pytest.mark.parametrize("name", ORDER)
def test_has_exercises_with_solutions_that_check_themselves(name):
    notebook = read(name)
    exercises = len(re.findall(r"^\*\*\d \(\w+\)", markdown(notebook), re.MULTILINE))
    found = [code for cell in notebook.cells for code in solutions(cell)]
    assert 3 <= exercises <= 5
    assert len(SOLUTION.findall(markdown(notebook))) == exercises
    assert len(found) == exercises and all("assert " in code for code in found)


def test_readme_lists_the_notebooks_in_order():
    text = (NOTEBOOKS / "README.md").read_text(encoding="utf-8")
    listed = [target.removesuffix(".ipynb") for target in LINK.findall(text) if target.endswith(".ipynb")]
    assert list(dict.fromkeys(listed)) == ORDER
    for target in LINK.findall(text):
        if not target.startswith("http"):
            assert (NOTEBOOKS / target).exists(), target
