"""What goes along with a run hears of every attempt, and harms none."""

from __future__ import annotations

from oomguard.analyst.attempt_hooks import AttemptHooks
from oomguard.core.incident import Attempt, Patch
from oomguard.engines.command import Launch


class Heard:
    def __init__(self) -> None:
        self.of: list[object] = []

    def began(self, number: int, launch: Launch, pid: int | None) -> None:
        self.of.append((number, launch.argv, pid))

    def ended(self, attempt: Attempt) -> None:
        self.of.append(attempt)


class Broken(Heard):
    def began(self, number: int, launch: Launch, pid: int | None) -> None:
        raise OSError("no room")


def test_one_that_fails_is_told_and_the_others_hear_all_the_same(caplog):
    heard = Heard()
    AttemptHooks((Broken(), heard)).began(1, Launch(("true",)), 7)

    assert heard.of == [(1, ("true",), 7)]
    assert "OSError: no room" in caplog.text


class Forewarned(Heard):
    def begins(self, number: int, patches: tuple[Patch, ...]) -> None:
        self.of.append((number, patches))


def test_observer_hears_of_an_attempt_before_its_start():
    forewarned, heard = Forewarned(), Heard()
    AttemptHooks((forewarned, heard)).begins(2, ())

    assert forewarned.of == [(2, ())]
    assert heard.of == []
