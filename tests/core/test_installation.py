"""Install commands name the place that oomguard came from, and never ask an index for its name."""

from __future__ import annotations

import json
import re
import subprocess
from importlib import metadata
from pathlib import Path

import pytest

from oomguard.core import installation
from oomguard.core.installation import install_hint, reinstall_hint, upgrade_hint

ROOT = Path(__file__).parents[2]
INDEX_INSTALL = re.compile(
    r"pip install (?:-\S+ |--\S+ )*['\"]?oomguard(?![\w.-]*\.whl|[\[\w\]]* @)"
)


@pytest.fixture
def installed_from(monkeypatch):
    def record(**direct_url: object) -> None:
        monkeypatch.setattr(installation, "_direct_url", lambda: direct_url)

    return record


def test_an_extra_of_a_clone_is_installed_from_the_clone(installed_from, tmp_path):
    clone = tmp_path / "my clone"
    clone.mkdir()
    url = clone.as_uri()
    installed_from(url=url, dir_info={})
    assert install_hint("plots") == f"pip install '{clone}[plots]'"
    installed_from(url=url, dir_info={"editable": True})
    assert install_hint("plots") == f"pip install -e '{clone}[plots]'"
    assert upgrade_hint() == f"git -C '{clone}' pull && pip install -e '{clone}'"
    assert reinstall_hint() == f"pip install --force-reinstall --no-deps -e '{clone}'"


def test_an_extra_of_a_wheel_file_is_installed_from_that_file(installed_from, tmp_path):
    wheel = tmp_path / "oomguard-1-py3-none-any.whl"
    wheel.touch()
    installed_from(url=wheel.as_uri(), archive_info={})
    assert install_hint("zstd") == f"pip install '{wheel}[zstd]'"
    assert upgrade_hint() == "install the wheel file of a newer oomguard"


def test_an_extra_of_a_repository_is_installed_from_its_address(installed_from):
    installed_from(url="https://git.example/oomguard.git", vcs_info={"vcs": "git"})
    assert (
        install_hint("fast")
        == "pip install 'oomguard[fast] @ git+https://git.example/oomguard.git'"
    )
    assert upgrade_hint().endswith("'oomguard @ git+https://git.example/oomguard.git'")


def test_extra_of_an_unknown_place_names_its_packages(installed_from, tmp_path):
    for record in ({}, {"url": (tmp_path / "gone").as_uri(), "dir_info": {}}):
        installed_from(**record)
        assert install_hint("plots") == "pip install 'matplotlib>=3.8'"
        assert "pip install" not in upgrade_hint() + reinstall_hint()


def test_every_extra_can_be_installed_where_its_place_is_unknown(installed_from):
    installed_from()
    extras = set(metadata.metadata("oomguard").get_all("Provides-Extra")) - {
        "all",
        "dev",
        "bench",
        "docs",
        "fuzz",
    }
    assert {"postgres", "fast", "zstd", "plots", "metrics", "otel", "fleet", "ray"} <= extras
    for extra in extras:
        assert install_hint(extra).startswith("pip install '"), extra


def test_a_damaged_record_of_the_installation_is_as_none(monkeypatch):
    class Damaged:
        requires = ("matplotlib>=3.8; extra == 'plots'",)

        @staticmethod
        def read_text(_name: str) -> str:
            return json.dumps({"url": "file:///x"})[:-3]

    monkeypatch.setattr(metadata, "distribution", lambda _name: Damaged)
    assert install_hint("plots") == "pip install 'matplotlib>=3.8'"


def test_no_text_asks_an_index_for_oomguard():
    names = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\n")
    found = []
    for name in filter(None, names):
        path = ROOT / name
        if name == "tests/core/test_installation.py" or not path.is_file():
            continue
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            if INDEX_INSTALL.search(line):
                found.append(f"{name}:{number}: {line.strip()[:120]}")
    assert not found, "\n".join(found)
