"""A file to which several paths lead is read once, under the name that tells most."""

from __future__ import annotations

from pathlib import Path

import pytest

from oomguard.scan.inputs import find_inputs, read_once

POD = "prod_llm-1_0b5cf621-1f52-4d3c-9e00-000000000001"


def once(*paths: Path | str, keeps_named: bool = False) -> tuple[list[str], int]:
    kept, repeated = read_once(find_inputs(map(str, paths)).found, keeps_named=keeps_named)
    return [one.path for one in kept], repeated


@pytest.fixture
def node(tmp_path: Path) -> Path:
    """A node's /var/log under Docker: a container's log is a link to a link."""
    (tmp_path / "docker").mkdir()
    (tmp_path / "docker/abc-json.log").touch()
    (tmp_path / f"pods/{POD}/engine").mkdir(parents=True)
    (tmp_path / f"pods/{POD}/engine/0.log").symlink_to(tmp_path / "docker/abc-json.log")
    (tmp_path / "containers").mkdir()
    (tmp_path / f"containers/llm-1_prod_engine-{'c3' * 32}.log").symlink_to(
        tmp_path / f"pods/{POD}/engine/0.log"
    )
    return tmp_path


@pytest.mark.parametrize("order", [1, -1])
def test_pod_name_is_found_whatever_the_order_of_paths(node: Path, order: int):
    kept, repeated = once(*[node / "docker", node / "pods"][::order])
    assert (kept, repeated) == ([str(node / f"pods/{POD}/engine/0.log")], 1)


def test_a_pattern_over_all_of_a_node_finds_each_log_once(node: Path):
    kept, repeated = once(node / "**/*.log")
    assert (len(kept), repeated) == (1, 2)


def test_equal_names_prefer_the_one_without_a_link(tmp_path: Path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b/x.log").touch()
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "c.log").hardlink_to(tmp_path / "b/x.log")
    assert once(tmp_path / "a/x.log", tmp_path / "b/x.log", tmp_path / "c.log") == (
        [str(tmp_path / "b/x.log")],
        2,
    )


def test_named_paths_have_one_answer_each_despite_a_folder(tmp_path: Path):
    (tmp_path / "x.log").touch()
    (tmp_path / "y.log").symlink_to("x.log")
    named = [str(tmp_path / "y.log"), str(tmp_path / "x.log")]
    assert once(*named, keeps_named=True) == (named, 0)
    assert once(*named, tmp_path, keeps_named=True) == (named, 2)
    assert once(*named) == (named[1:], 1)


def test_objects_and_local_files_behind_urls_are_read_once_too(tmp_path: Path):
    pytest.importorskip("fsspec")
    (tmp_path / "x.log").touch()
    (tmp_path / "y.log").symlink_to("x.log")
    assert once(f"file://{tmp_path}", tmp_path / "x.log")[1] == 2


def test_standard_input_is_never_the_same_as_anything(tmp_path: Path):
    assert once("-", "-") == (["-", "-"], 0)
