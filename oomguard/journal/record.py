"""What the journal stores of one attempt, when it begins and when it ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Record:
    """One attempt as the journal stores it; the caller has masked every text.

    Those from ``original`` on are of the run: the first attempt's are kept for all.

    Attributes:
        session: the run's name in the journal.
        number: 1 is the first attempt.
        command: what was started.
        settings: what oomguard has changed so far.
        patches: the contract's patches, applied before this attempt.
        incident: the contract's object of the failure.
        predicted: facts and their predicted values.
        measured: facts and their measured values.
        started_at: Unix seconds; 0: now.
        ended_at: Unix seconds; None while it runs.
        exit_status: as a shell shows it.
        original: the command before any patch; empty: ``command``.
        folder: where it was started.
        files: the digest of the files that the command names.
        hides_secrets_alone: whether masking hid only secrets; None: not known.
        who: the user's name on the host.
        host: the machine.
    """

    session: str
    number: int
    command: Sequence[str]
    settings: Mapping[str, Any]
    patches: Sequence[Mapping[str, Any]]
    incident: Mapping[str, Any] | None = None
    predicted: Mapping[str, Any] | None = None
    measured: Mapping[str, Any] | None = None
    started_at: float = 0.0
    ended_at: float | None = None
    exit_status: int | None = None
    original: Sequence[str] = ()
    folder: str | None = None
    files: str | None = None
    hides_secrets_alone: bool | None = None
    who: str | None = None
    host: str | None = None

    def after(self, first: Record | None) -> Record:
        """Return it with the run's fields of its first attempt, in case that run has
        been removed.
        """
        if first is None or first.session != self.session or self.original:
            return self
        told = {
            name: getattr(first, name)
            for name in ("folder", "files", "hides_secrets_alone", "who", "host")
        }
        return replace(self, original=first.original or first.command, **told)


@dataclass(frozen=True, slots=True)
class Ran:
    """What an attempt ran, masked; None: not known. ``device`` is name and size of the GPUs."""

    engine: str | None = None
    engine_version: str | None = None
    model: str | None = None
    device: str | None = None


@dataclass(frozen=True, slots=True)
class Ended:
    """How an attempt ended.

    Attributes:
        exit_status: as a shell shows it.
        incident: the contract's object of the failure, None if none was found.
        measured: facts and what this attempt showed of them.
        ran: what ran; a later attempt without it leaves what is known.
        set_by_user: whether the user had set each setting that may be changed after it.
        seconds: how long it ran; None: until ``ended_at``.
        error: why it failed, masked, if status and incident do not say it.
        ended_at: Unix seconds.
    """

    exit_status: int
    incident: Mapping[str, Any] | None
    measured: Mapping[str, Any]
    ran: Ran | None = None
    set_by_user: Mapping[str, bool | None] | None = None
    seconds: float | None = None
    error: str | None = None
    ended_at: float = 0.0
