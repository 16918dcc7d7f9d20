"""Runs a notebook's cells one after the other, as `nbconvert --execute` does."""

import json


def main():
    with open("notebook.ipynb") as file:
        notebook = json.load(file)
    scope = {"__name__": "notebook"}
    for number, cell in enumerate(notebook["cells"], 1):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"<cell {number}>", "exec"), scope)


if __name__ == "__main__":
    main()
