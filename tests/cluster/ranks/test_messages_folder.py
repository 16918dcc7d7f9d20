"""The folder of documents: whole or not at all, and of this user alone."""

from __future__ import annotations

import threading

import pytest

from oomguard.cluster.ranks.messages import OWN_NAME, MessageFolder


def test_who_reads_while_another_writes_reads_a_whole_document(tmp_path):
    folder, over = MessageFolder(tmp_path / "job"), threading.Event()

    def write() -> None:
        for number in range(200):
            folder.write(1, f"{number}," * 2000)
        over.set()

    thread = threading.Thread(target=write)
    thread.start()
    reader = MessageFolder(tmp_path / "job")
    while not over.is_set():
        text = reader.read().get(1)
        assert text is None or len(set(text.split(",")[:-1])) == 1
    thread.join()
    assert reader.read()[1].startswith("199,")


def test_mirrored_rank_is_read_after_one_of_this_host(tmp_path):
    folder = MessageFolder(tmp_path / "job")
    (folder.there / "1.json").write_text("there")
    (folder.there / "2.json").write_text("there")
    (folder.there / "2.123").write_text("half")
    folder.write(1, "here")
    assert folder.read() == {1: "here", 2: "there"}


def test_a_folder_of_ours_that_others_may_write_is_refused(tmp_path):
    own = tmp_path / f"{OWN_NAME}0"
    own.mkdir()
    own.chmod(0o777)
    with pytest.raises(PermissionError):
        MessageFolder(own / "job")
