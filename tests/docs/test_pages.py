"""The pages agree with each other and with the code: links, figures, closed lists, sizes."""

from __future__ import annotations

import functools
import importlib.util
import io
import pickle
import re
import runpy
import sys
import tomllib
from pathlib import Path
from types import ModuleType

from oomguard.core.incident import CAUSES, KINDS, PHASES
from oomguard.diagnosis import diagnose, diagnose_stream
from oomguard.report.json import to_dict

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
REFERENCE = DOCS / "reference"
RULES = DOCS / "rules"
WRITTEN = sorted(
    path
    for path in DOCS.rglob("*.md")
    if not (path.is_relative_to(REFERENCE) or path.is_relative_to(RULES))
)
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *WRITTEN]
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


docs_site = _load(ROOT / "scripts" / "docs_site.py")


@functools.cache
def reference() -> dict[Path, str]:
    """Return the pages that are made from the code, by the path that they get."""
    return {DOCS / name: text for name, text in docs_site.reference_pages().items()}


def text_of(path: Path) -> str:
    if path in reference():
        return reference()[path]
    return path.read_text(encoding="utf-8")


def prose(path: Path) -> str:
    return re.sub(r"^```.*?^```$", "", text_of(path), flags=re.MULTILINE | re.DOTALL)


@functools.cache
def anchors(path: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", prose(path), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def leads_nowhere(link: str, path: Path) -> bool:
    name, _, anchor = link.partition("#")
    target = (path.parent / name).resolve() if name else path
    made = target.is_relative_to(REFERENCE) or target.is_relative_to(RULES)
    exists = target in reference() if made else target.is_file()
    return not exists or bool(anchor and anchor not in anchors(target))


def test_every_link_leads_to_a_file_and_a_heading():
    links = []
    for path in [*PAGES, ROOT / "CHANGELOG.md", *reference()]:
        links += [(path, one or other) for one, other in LINK.findall(prose(path))]
    assert len(links) > 200
    broken = []
    for path, link in links:
        if not link.startswith("https://") and leads_nowhere(link, path):
            broken.append(f"{path.relative_to(ROOT)}: {link}")
    assert broken == []


def test_every_page_of_the_site_is_in_its_navigation():
    nav = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"]
    listed = {page for _, _, page in docs_site.navigation(nav)}
    rules = [path for path in reference() if re.fullmatch(r"OG\d+\.md", path.name)]
    wanted = {*WRITTEN, *reference()} - set(rules)
    assert listed == {str(path.relative_to(DOCS)) for path in wanted}


def test_llms_txt_has_a_sentence_for_each_page():
    for line in docs_site.llms_text().splitlines():
        if "](how-to/" in line or "](explanation/" in line:
            assert re.search(r"\.md\): .{20,}", line), line


def words(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").split())


def test_the_pages_stay_short():
    limits = {"README.md": 900, "CONTRIBUTING.md": 1500, "docs/limits.md": 600}
    for path in (DOCS / "explanation").glob("*.md"):
        limits[str(path.relative_to(ROOT))] = 1200
    assert {name: words(ROOT / name) for name in limits if words(ROOT / name) > limits[name]} == {}
    by_hand = [path for path in WRITTEN if path.name != "my-error-message.md"]
    assert sum(words(path) for path in by_hand) <= 25_000
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


def test_an_entry_of_the_changelog_has_at_most_25_words():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    entries = re.findall(r"^- .*(?:\n  .*)*", text, re.MULTILINE)
    assert len(entries) > 50
    assert [entry for entry in entries if len(entry.split()) > 26] == []


def test_the_page_of_variables_names_every_one_that_the_code_reads():
    code = "".join(path.read_text("utf-8") for path in (ROOT / "oomguard").rglob("*.py"))
    page = reference()[REFERENCE / "environment.md"]
    names = set(re.findall(r"\"(OOMGUARD_[A-Z_]+[A-Z])\"", code))
    assert len(names) >= 10
    assert sorted(name for name in names if f"`{name}" not in page) == []


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


def test_every_readme_figure_equals_the_figures_page():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    section = text.partition("## Why trust it")[2].partition("\n## ")[0]
    sentences = [line for line in section.splitlines() if "**" in line]
    assert len(sentences) == 3
    for sentence in sentences:
        (value,) = re.findall(r"\*\*([^*]+)\*\*", sentence)
        counts = set(re.findall(r"\d[\d,]*", sentence.replace(value, "")))
        names = [row[0] for row in figures(DOCS / "figures.md") if row[1] == value]
        assert any(counts <= set(re.findall(r"\d[\d,]*", name)) for name in names), sentence


def test_the_figures_are_under_thirty_rows_with_commands_that_exist():
    page = ROOT / "docs" / "figures.md"
    rows = [
        line
        for line in page.read_text(encoding="utf-8").splitlines()
        if re.match(r"\| (?!figure \|)", line)
    ]
    assert len(figures(page)) == len(rows) < 30
    named = set(
        re.findall(
            r"benchmarks/(\w+\.py)", "".join(path.read_text(encoding="utf-8") for path in PAGES)
        )
    )
    assert [name for name in named if not (ROOT / "benchmarks" / name).is_file()] == []


def test_the_json_page_names_every_kind_cause_and_phase():
    page = prose(REFERENCE / "json.md")
    assert [word for word in (*KINDS, *CAUSES, *PHASES) if f"`{word}`" not in page] == []


def test_json_page_explains_every_key():
    log = ROOT / "examples" / "logs" / "vllm_serve_kv_cache.log"
    incident = to_dict(diagnose(log))["incidents"][0]
    page = prose(REFERENCE / "json.md")
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
    page = prose(REFERENCE / "json.md")
    assert [key for key in sorted(keys) if f"`{key}`" not in page] == []


def test_the_table_of_where_to_add_what_names_what_is_there():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    places = re.findall(r": `([\w/.<>*]+/[\w/.<>*]+)`(?=[;| ])", page)
    named = [
        place.replace("<engine>", "vllm").replace("<who>", "vllm").rstrip("/") for place in places
    ]
    assert named
    assert [place for place in named if not list(ROOT.glob(place))] == []
