"""Runs the cells of a notebook one by one, as a kernel does: no cell has a file of its own."""
import json
import pathlib


def run(path):
    namespace = {"__name__": "__notebook__"}
    cells = json.loads(pathlib.Path(path).read_text())["cells"]
    for number, cell in enumerate((c for c in cells if c["cell_type"] == "code"), start=1):
        exec(compile("".join(cell["source"]), f"<cell {number}>", "exec"), namespace)


if __name__ == "__main__":
    run("summaries.ipynb")
