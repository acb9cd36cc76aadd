"""The performance pages and their picture show the committed results of the GPU, and nothing else."""

import json

import pytest

from benchmarks import plot_gpu


def rows():
    return json.loads(plot_gpu.RESULTS.read_text())["rows"]


def test_the_tables_of_the_documentation_are_those_of_the_results(repo_root):
    pages = [(repo_root / "docs" / name).read_text() for name in ("performance.md", "performance-notes.md")]
    tables = "\n".join(plot_gpu.tables(rows())).split("\n\n")
    assert len(tables) == 3
    missing = [table for table in tables if not any(f"\n\n{table}\n\n" in page for page in pages)]
    assert missing == [], "run python benchmarks/plot_gpu.py and put its tables into docs/performance*.md"


@pytest.mark.parametrize(
    ("table", "results", "document"),
    [
        (plot_gpu.beside_table, plot_gpu.BESIDE, "docs/performance-notes.md"),
        (plot_gpu.bounds_table, plot_gpu.BOUNDS, "docs/performance-notes.md"),
        (plot_gpu.scatter_table, plot_gpu.SCATTER, "docs/performance-notes.md"),
        (plot_gpu.strips_table, plot_gpu.STRIPS, "docs/performance-notes.md"),
        (plot_gpu.client_table, plot_gpu.CLIENT, "docs/gpu.md"),
    ],
)
def test_the_other_tables_are_those_of_their_results(repo_root, table, results, document):
    lines = list(table(json.loads(results.read_text())["rows"]))
    text = (repo_root / document).read_text().splitlines()
    assert len(lines) > 2
    assert [line for line in lines if line not in text] == [], "run python benchmarks/plot_gpu.py"


def test_the_picture_is_that_of_the_results():
    assert plot_gpu.PICTURE.read_text() == plot_gpu.picture(rows()), "run python benchmarks/plot_gpu.py"


def test_other_figures_are_another_picture_and_other_tables():
    changed = [row | {"gb_per_s": row["gb_per_s"] / 2} for row in rows()]
    assert plot_gpu.picture(changed) != plot_gpu.picture(rows())
    assert list(plot_gpu.tables(changed)) != list(plot_gpu.tables(rows()))
