from __future__ import annotations

import pytest

import oomguard
from oomguard.core.errors import SettingError

torch = pytest.importorskip("torch", reason="torch is not installed")
from oomguard.testing import limit_memory  # noqa: E402


def work(rows: int) -> object:
    return torch.zeros(rows, 2**18).exp()  # 2 MiB a row at the peak


def test_attempts_go_on_with_a_smaller_value_until_one_succeeds():
    sizes = []
    with limit_memory("64 MiB"):
        for attempt in oomguard.attempts(batch_size=100):
            with attempt:
                sizes.append(attempt.settings["batch_size"])
                result = work(attempt.settings["batch_size"])
    assert sizes[0] == 100
    assert sizes == sorted(set(sizes), reverse=True)
    assert result.shape[0] == sizes[-1]


def test_another_error_is_raised_at_once():
    tried = []
    with pytest.raises(KeyError):
        for attempt in oomguard.attempts(batch_size=4):
            with attempt:
                tried.append(attempt.number)
                raise KeyError("x")
    assert tried == [1]


def test_failure_is_raised_with_the_diagnosis_at_the_end():
    with limit_memory("1 MiB"), pytest.raises(torch.OutOfMemoryError) as caught:
        for attempt in oomguard.attempts(batch_size=4):
            with attempt:
                work(attempt.settings["batch_size"])
    assert "oomguard: CUDA out of memory" in caught.value.__notes__[0]


def test_a_floor_ends_the_attempts():
    with limit_memory("16 MiB"), pytest.raises(torch.OutOfMemoryError):
        for attempt in oomguard.attempts(batch_size=64, floors={"batch_size": 60}):
            with attempt:
                work(attempt.settings["batch_size"])


def test_settings_cannot_be_changed_by_the_body():
    for attempt in oomguard.attempts(batch_size=4):
        with attempt, pytest.raises(TypeError):
            attempt.settings["batch_size"] = 1


def test_an_unknown_setting_is_refused():
    with pytest.raises(SettingError):
        next(oomguard.attempts(bach_size=4))


def test_disabled_means_that_the_first_failure_is_raised(monkeypatch):
    monkeypatch.setenv("OOMGUARD_DISABLE", "1")
    with limit_memory("16 MiB"), pytest.raises(torch.OutOfMemoryError):
        for attempt in oomguard.attempts(batch_size=64):
            with attempt:
                work(attempt.settings["batch_size"])
    assert attempt.number == 1


def test_an_unknown_effect_is_refused():
    with pytest.raises(SettingError):
        oomguard.attempts(allow="reduce", batch_size=4)


def test_a_block_may_be_left_in_another_context():
    import contextvars

    def numbers():
        for attempt in oomguard.attempts(batch_size=4):
            with attempt:
                yield attempt.settings["batch_size"]

    running = numbers()
    assert contextvars.copy_context().run(next, running) == 4
    assert list(running) == []
