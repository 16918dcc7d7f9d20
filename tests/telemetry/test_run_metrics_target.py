"""What --metrics may name: a port, an address, a file that ends in .prom."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from oomguard.core.errors import UsageError
from oomguard.core.http_port import HttpAddress
from oomguard.telemetry.run_metrics import parse_target


def test_an_address_is_read_and_a_port_alone_is_of_this_machine():
    for text, address in [
        ("9400", HttpAddress("127.0.0.1", 9400)),
        ("0", HttpAddress("127.0.0.1", 0)),
        ("0.0.0.0:9400", HttpAddress("0.0.0.0", 9400)),
        ("gpu-3.example.org:9400", HttpAddress("gpu-3.example.org", 9400)),
        ("[::1]:9400", HttpAddress("::1", 9400)),
        ("*:9400", HttpAddress("::" if socket.has_dualstack_ipv6() else "0.0.0.0", 9400)),
    ]:
        assert parse_target(text) == address, (text, address)


@pytest.mark.parametrize(
    "text",
    ["", "x", "65536", "-1", ":9400", "::1:9400", "host:", "metrics.txt", "http://h:9400", "९"],
)
def test_anything_else_is_refused_with_the_forms_to_paste(text):
    with pytest.raises(UsageError, match="is not a port, an address, or a file") as caught:
        parse_target(text)
    assert "--metrics 9400" in (caught.value.hint or "")


def test_a_file_is_told_by_its_ending(tmp_path: Path):
    assert parse_target(str(tmp_path / "9400.prom")) == tmp_path / "9400.prom"


def test_missing_folder_is_reported_before_the_command_runs(tmp_path: Path):
    with pytest.raises(UsageError, match="the folder cannot be written"):
        parse_target(str(tmp_path / "no" / "x.prom"))


def test_a_folder_in_the_place_of_the_file_is_told(tmp_path: Path):
    (tmp_path / "x.prom").mkdir()
    with pytest.raises(UsageError, match="is a folder"):
        parse_target(str(tmp_path / "x.prom"))


def test_of_a_link_the_target_is_written_so_that_the_link_stays(tmp_path: Path):
    (tmp_path / "there").mkdir()
    (tmp_path / "x.prom").symlink_to("there/target.prom")
    assert parse_target(str(tmp_path / "x.prom")) == tmp_path / "there" / "target.prom"


@pytest.mark.parametrize("leads_to", ["/dev/null", "x.prom"])
def test_a_link_to_what_no_file_may_replace_is_refused(tmp_path: Path, leads_to):
    (tmp_path / "x.prom").symlink_to(leads_to)
    with pytest.raises(UsageError, match=r"is not a regular file|the folder cannot be written"):
        parse_target(str(tmp_path / "x.prom"))
