"""What the pages show is what the commands print, block by block; the slow pages: ``scripts/docs_output.py --check``."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from support.postgresql import throwaway

ROOT = Path(__file__).parents[2]


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


docs_output = _load(ROOT / "scripts" / "docs_output.py")
# Their commands load PyTorch or Ray, wait for devices or run every rule's tests: a quarter of a minute a page.
SLOW = {
    "CONTRIBUTING.md",
    "fleet.md",
    "guard.md",
    "keep-a-job-alive.md",
    "map.md",
    "placement.md",
    "testing.md",
    "watch.md",
}
PAGES = [
    page
    for page in docs_output.PAGES
    if page.name not in SLOW and docs_output.blocks(page.read_text(encoding="utf-8"))
]


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_each_block_of_a_page_is_what_its_command_prints(page: Path, tmp_path: Path):
    if "throwaway_postgresql" in page.read_text(encoding="utf-8") and throwaway.programs() is None:
        pytest.skip("PostgreSQL is not installed (Debian: apt-get install postgresql)")
    assert docs_output.problems(page, tmp_path) == []


def page(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "page.md"
    path.write_text(text, encoding="utf-8")
    return path


def folder(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir(exist_ok=True)
    return tmp_path / "run"


SHOWN = """\
```sh title="greet.sh"
echo one
echo "took $1 s"
echo three
```

<!-- output -->

```console
$ bash greet.sh 1.5
{}
```
"""


@pytest.mark.parametrize(
    "shown",
    ["one\ntook 1.5 s\nthree", "one\ntook 7.2 s\nthree", "one\n…", "…\nthree", "one\n…\nthree"],
)
def test_block_matches_if_only_times_differ_or_lines_are_omitted(shown: str, tmp_path: Path):
    assert docs_output.problems(page(tmp_path, SHOWN.format(shown)), folder(tmp_path)) == []


@pytest.mark.parametrize(
    "shown",
    ["one\nthree", "one\ntook 1.5 s\nthree\nfour", "two\n…", "…\none", "one\n…\ntook 1.5 s"],
)
def test_a_block_that_shows_what_is_not_printed_is_a_problem(shown: str, tmp_path: Path):
    (told,) = docs_output.problems(page(tmp_path, SHOWN.format(shown)), folder(tmp_path))
    assert told.startswith("page.md: $ bash greet.sh 1.5")


def test_a_block_is_rewritten_and_agrees_then(tmp_path: Path):
    path = page(tmp_path, SHOWN.format("two"))
    assert docs_output.rewrite(path, folder(tmp_path)) == 1
    assert path.read_text() == SHOWN.format("one\ntook 1.5 s\nthree")


def test_lines_left_out_stay_left_out_when_a_block_is_rewritten(tmp_path: Path):
    path = page(
        tmp_path, SHOWN.replace("echo three", "echo three; echo four").format("one\n…\nthree")
    )
    assert docs_output.rewrite(path, folder(tmp_path)) == 1
    assert "one\n…\nthree\nfour\n```" in path.read_text()


def test_a_time_that_differs_is_no_reason_to_rewrite(tmp_path: Path):
    path = page(tmp_path, SHOWN.format("one\ntook 7.2 s\nthree"))
    assert docs_output.rewrite(path, folder(tmp_path)) == 0


def test_of_a_machines_own_lines_only_the_subject_is_compared():
    printed = ["ok       torch 2.14", "problem  NVML not available", "         do: nvidia-smi"]
    assert (
        docs_output.difference(
            ["ok       torch 2.13", "ok       NVML: 2 devices"], printed, labels=True
        )
        is None
    )
    assert docs_output.difference(["ok       swap: none"], printed, labels=True) is not None
