"""What is written of one attempt: as it begins, and as it ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Record:
    """One attempt as the journal keeps it; times are Unix seconds, and the caller has masked every text.

    ``original`` is the command before any patch (empty: ``command``), ``folder`` where it was started, ``files`` the digest of the
    files that it names, ``hides_secrets_alone`` whether masking hid nothing else of it (None: not known), ``who`` the user's name on
    ``host``: of the first attempt of a session they are kept for all of it.
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
        """Return it with what the first attempt of its session tells of the run: whoever removed that run lost nothing of it."""
        if first is None or first.session != self.session or self.original:
            return self
        told = {name: getattr(first, name) for name in ("folder", "files", "hides_secrets_alone", "who", "host")}
        return replace(self, original=first.original or first.command, **told)


@dataclass(frozen=True, slots=True)
class Ran:
    """What an attempt turned out to run, masked: the engine that spoke, its version, its model, the GPUs; None: not known."""

    engine: str | None = None
    engine_version: str | None = None
    model: str | None = None
    device: str | None = None


@dataclass(frozen=True, slots=True)
class Ended:
    """How an attempt ended.

    Attributes:
        exit_status: as a shell tells it.
        incident: the contract's object of the failure, None if none was found.
        measured: facts and what this attempt showed of them.
        ran: what ran; what is known of it stays where a later attempt does not tell.
        set_by_user: of the settings that may be changed after it, whether the user had set them.
        seconds: how long it ran; None: until ``ended_at``.
        error: why it failed, masked, where status and incident tell less.
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
