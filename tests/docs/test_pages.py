"""The pages agree with each other and with the code: links, figures, closed lists."""

from __future__ import annotations

import functools
import io
import json
import pickle
import re
import runpy
import tomllib
from pathlib import Path

from oomguard.core.incident import CAUSES, PHASES
from oomguard.core.kinds import KINDS
from oomguard.diagnosis.diagnose import diagnose, diagnose_stream
from oomguard.report.json import to_dict

ROOT = Path(__file__).parents[2]
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS]
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")


def prose(path: Path) -> str:
    return re.sub(
        r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL
    )


@functools.cache
def anchors(path: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", prose(path), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def leads_nowhere(link: str, path: Path) -> bool:
    name, _, anchor = link.partition("#")
    target = (path.parent / name).resolve() if name else path
    return not target.is_file() or bool(anchor and anchor not in anchors(target))


def test_every_link_leads_to_a_file_and_a_heading_of_this_repository():
    links = [(path, one or other) for path in PAGES for one, other in LINK.findall(prose(path))]
    assert len(links) > 100
    broken = [
        (path, link)
        for path, link in links
        if not link.startswith("https://") and leads_nowhere(link, path)
    ]
    assert [f"{path.name}: {link}" for path, link in broken] == []


def test_every_page_of_the_site_is_in_its_navigation():
    text = json.dumps(tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"])
    assert set(re.findall(r'"([\w-]+\.md)"', text)) == {page.name for page in DOCS}


def figures(path: Path) -> list[list[str]]:
    """Return the cells of each table row that a command or "held-out, texts not ours" stands behind."""
    rows = [
        line.strip("| ").split(" | ")
        for line in path.read_text(encoding="utf-8").splitlines()
        if line[:2] == "| "
    ]
    return [
        row
        for row in rows
        if len(row) >= 4
        and re.search(r"^`(\.venv/bin/python benchmarks/|make )|^held-out, texts not ours$", row[3])
    ]


def test_every_figure_of_the_readme_is_in_the_figures_with_the_same_value():
    rows = figures(ROOT / "README.md")
    assert len(rows) == 10
    assert [
        row for row in rows if row not in [row[:4] for row in figures(ROOT / "docs" / "figures.md")]
    ] == []


def test_the_figures_are_at_most_thirty_rows_each_with_a_command_that_exists():
    page = ROOT / "docs" / "figures.md"
    rows = [
        line
        for line in page.read_text(encoding="utf-8").splitlines()
        if re.match(r"\| (?!figure \|)", line)
    ]
    assert len(figures(page)) == len(rows) <= 30
    named = set(
        re.findall(
            r"benchmarks/(\w+\.py)", "".join(path.read_text(encoding="utf-8") for path in PAGES)
        )
    )
    assert [name for name in named if not (ROOT / "benchmarks" / name).is_file()] == []


def test_the_readme_fits_in_150_lines():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


def test_the_json_page_names_every_kind_cause_and_phase():
    page = prose(ROOT / "docs" / "json.md")
    assert [word for word in (*KINDS, *CAUSES, *PHASES) if f"`{word}`" not in page] == []


def test_the_json_page_explains_every_key_of_an_incident_and_a_patch():
    log = ROOT / "examples" / "logs" / "vllm_serve_kv_cache.log"
    incident = to_dict(diagnose(log))["incidents"][0]
    page = prose(ROOT / "docs" / "json.md")
    keys = {
        *incident,
        *incident["plan"][0],
        *incident["causes"][0],
        *incident["location"],
        *incident["budget"],
    }
    assert [key for key in sorted(keys) if f"`{key}`" not in page] == []


def test_the_json_page_names_every_key_of_a_snapshot():
    whole = runpy.run_path(str(ROOT / "examples" / "make_snapshot.py"))["in_pieces"]()
    snapshot = to_dict(diagnose_stream(io.BytesIO(pickle.dumps(whole))))["snapshot"]
    device = snapshot["devices"][0]
    keys = {
        *snapshot,
        *device,
        *device["refused"],
        *device["stacks"][0],
        *device["stacks"][0]["frames"][0],
        *device["pools"][0],
    }
    page = prose(ROOT / "docs" / "json.md")
    assert [key for key in sorted(keys) if f"`{key}`" not in page] == []


def test_the_table_of_where_to_add_what_names_what_is_there():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = page.partition("## Where to add what")[2].partition("\n## ")[0]
    places = re.findall(r"\| `([^`]+)` \|$", table, re.MULTILINE)
    named = [
        place.replace("<engine>", "vllm").replace("<who>", "vllm").rstrip("/") for place in places
    ]
    assert named
    assert [place for place in named if not list(ROOT.glob(place))] == []
