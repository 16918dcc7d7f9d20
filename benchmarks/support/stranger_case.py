"""Cases that testers wrote (data/strangers_ninth, data/guarded_sixth), and the folder in which each
runs.
"""

import json
import shutil
import tomllib
from pathlib import Path
from typing import Any

from support.byte_tokenizer import write_tokenizer

DATA = Path(__file__).parents[1] / "data"


def read_cases(name: str) -> list[dict[str, Any]]:
    """Return the cases of a set as its tester wrote them, in the tester's order; ``set`` is added,
    the set's name.
    """
    lines = (DATA / name / "cases.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) | {"set": name} for line in lines]


def read_models(name: str) -> dict[str, dict[str, Any]]:
    """Return each model of a set: its ``config``, what its ``tokenizer`` has, and the files
    ``beside`` it.
    """
    return json.loads((DATA / name / "models.json").read_text(encoding="utf-8"))


def read_reading(name: str) -> dict[str, dict[str, Any]]:
    """Return how the words of a set's tester are read: causes.toml, which was added afterwards."""
    return tomllib.loads((DATA / name / "causes.toml").read_text(encoding="utf-8"))


def make_folder(case: dict[str, Any], folder: Path) -> None:
    """Write the case's files and models; weights are dummies that the engine makes."""
    files = DATA / case["set"] / case["files"]
    if files.is_dir():  # git keeps no empty folders
        shutil.copytree(files, folder)
    folder.mkdir(exist_ok=True)
    models = read_models(case["set"])
    for name, model in case["models"].items():
        write_model(models[model], folder / name)


def write_model(model: dict[str, Any], folder: Path) -> None:
    """Write one model's folder."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(model["config"]))
    write_tokenizer(folder, **model.get("tokenizer", {}))
    for name, content in model.get("beside", {}).items():
        (folder / name).write_text(json.dumps(content))


def written_text(case: dict[str, Any]) -> str:
    """Return all that the user of a case wrote: the command, its variables and its files."""
    files = DATA / case["set"] / case["files"]
    texts = [
        path.read_text(encoding="utf-8", errors="replace")
        for path in sorted(files.rglob("*"))
        if path.is_file()
    ]
    return "\n".join([*case["command"], *case["env"], *texts])
