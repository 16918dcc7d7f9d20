"""Files of a watch: written whole, or as they were."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import oomguard
from oomguard.core.errors import UsageError
from oomguard.instrumentation import write

FULL = """
import resource, signal, sys
from oomguard.core.errors import UsageError
from oomguard.instrumentation import write
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    write("old.csv", b"x" * 2000)
except UsageError as error:
    print(error, error.hint, sep="; ")
"""


def test_full_disk_keeps_the_old_file_and_hints_at_room(tmp_path):
    (tmp_path / "old.csv").write_text("old")
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run(
        [sys.executable, "-c", FULL],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )

    assert "old.csv cannot be written: File too large; free 2,000 bytes" in ran.stdout
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"old.csv": "old"}


def test_a_link_stays_one_and_rights_stay(tmp_path):
    (tmp_path / "real.csv").write_text("old")
    (tmp_path / "real.csv").chmod(0o640)
    (tmp_path / "link.csv").symlink_to("real.csv")
    write(tmp_path / "link.csv", b"new")

    assert (tmp_path / "link.csv").is_symlink()
    assert (tmp_path / "real.csv").read_bytes() == b"new"
    assert (tmp_path / "real.csv").stat().st_mode & 0o777 == 0o640


def test_standard_output_is_written_to_after_what_stands_there(subtests, tmp_path):
    for name, to_a_file in [
        ("file", True),
        ("pipe", False),
    ]:
        with subtests.test(name):
            code = "import os; os.write(1, b'first '); from oomguard.instrumentation import write; write('/dev/stdout', b'then')"
            env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
            with (tmp_path / "out").open("wb") as file:
                out = file if to_a_file else subprocess.PIPE
                ran = subprocess.run([sys.executable, "-c", code], stdout=out, env=env, check=True)

            assert ((tmp_path / "out").read_bytes() if to_a_file else ran.stdout) == b"first then"


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(UsageError, match="cannot be written: Is a directory"):
        write(tmp_path, b"x")


def test_a_plot_is_not_written_under_the_name_of_another_format(tmp_path):
    seen = oomguard.watch()
    for name in ("seen.pdf", "seen.svg", "seen.JPG", "seen.html"):
        with pytest.raises(oomguard.UsageError, match="is another format") as caught:
            seen.to_png(tmp_path / name)
        assert "seen.png" in caught.value.hint
    assert not list(tmp_path.iterdir())


def test_the_removed_page_is_refused_with_what_there_is(tmp_path):
    with pytest.raises(oomguard.UsageError, match="no longer writes HTML") as caught:
        oomguard.watch().to_html(tmp_path / "seen.html")
    assert 'seen.to_png("watch.png")' in caught.value.hint
    assert not list(tmp_path.iterdir())
