"""Each attempt of a run in the journal; a journal that fails is left out and the run goes on.

Nobody hears of it while all is well: a healthy run prints nothing, and many at once lock each
other's journal.

A thread opens it and begins the record while the command starts: loading SQLite and writing to a
disk take as long as all that has to come before the command. A shared journal is written on this
machine first, and brought to its database beside the run.
"""

from __future__ import annotations

import getpass
import hashlib
import os
import platform
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from oomguard.analyst.outcome import error_of
from oomguard.core.errors import InputError
from oomguard.core.facts import FactValue, format_gib
from oomguard.core.files import read_regular
from oomguard.core.incident import Attempt, EngineStart, Incident, Patch
from oomguard.core.log import get_logger
from oomguard.core.settings import value_in_force
from oomguard.journal.codec import Ran
from oomguard.probe.nvml import devices
from oomguard.remedy.policy import set_by_user
from oomguard.report.redact import hides_secrets_alone, homes_kept, mask, mask_command

if TYPE_CHECKING:
    from oomguard.analyst.effective_settings import WithVariables
    from oomguard.analyst.output import Heard
    from oomguard.engines.command import Launch
    from oomguard.journal.codec import AttemptRow
    from oomguard.journal.shared import SharedJournal
    from oomguard.journal.store import Journal
    from oomguard.scan.scan import Scanner


# What an attempt runs, by which a later run knows it again: the command, its files, the engine,
# the model, the device.

# What decides what a command does: programs, and what they are configured by.
_ENDS: Final = (".py", ".sh", ".yaml", ".yml", ".json", ".toml")
_MOST_BYTES: Final = 1 << 20
_MOST_FILES: Final = 16


def started_as(argv: Sequence[str]) -> dict[str, Any]:
    """Return how a run was started, as the journal keeps it.

    That is the command masked, and whether of secrets alone, the folder, the files' digest, the
    user's name and the host's.
    """
    folder = None
    with homes_kept(), suppress(OSError):  # the working directory may be gone
        folder = mask(str(Path.cwd()))
    original = mask_command(argv, keep_homes=True)
    is_exact = hides_secrets_alone(argv, original)
    told = {
        "original": original,
        "folder": folder,
        "files": digest_of_files(argv),
        "hides_secrets_alone": is_exact,
    }
    return told | {"who": user_name(), "host": host_name()}


def host_name() -> str | None:
    """Return this machine's name; None where it has none."""
    return platform.node() or None


def user_name() -> str | None:
    """Return the user's name; None where this machine has none for its number, as in many
    containers.
    """
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return None


def digest_of_files(argv: Sequence[str]) -> str | None:
    """Return a digest of the programs and configuration files that a command names; None where it
    names none.
    """
    digest = hashlib.sha256()
    found = 0
    for name in dict.fromkeys(word.rpartition("=")[2] for word in argv if word.endswith(_ENDS)):
        try:
            content = read_regular(name, _MOST_BYTES)
        except OSError:
            continue
        found += 1
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
        if found == _MOST_FILES:
            break
    if found:
        return digest.hexdigest()[:32]
    return None


def names_a_place_here(argv: Sequence[str]) -> bool:
    """Return whether a word of a command is a path of the working directory: elsewhere it is
    another file, or model.
    """
    tails = (word.rpartition("=")[2] for word in argv)
    return any(tail and not tail.startswith("/") and os.path.lexists(tail) for tail in tails)


def device_words() -> str | None:
    """Return name and size of this machine's GPUs, each kind once; None where NVML does not tell.

    Where there are several kinds, or parts of one, those that the environment shows are named with
    it.
    """
    kinds = {
        device.name
        if device.total_bytes is None
        else f"{device.name}, {format_gib(device.total_bytes)}"
        for device in devices() or ()
        if device.name
    }
    if not kinds:
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    words = " + ".join(sorted(kinds))
    if visible and (len(kinds) > 1 or "MIG" in visible):
        return f"{words} ({visible})"
    return words


def what_ran(incident: Incident | None, start: EngineStart | None, device: str | None) -> Ran:
    """Return what an attempt turned out to run, masked.

    Args:
        incident: what it failed of.
        start: what its engine told of itself.
        device: the GPUs, as ``device_words`` has them.
    """
    engine = version = model = None
    both: tuple[Incident | EngineStart | None, ...] = (incident, start)
    for told in both:
        if told is None:
            continue
        if told.framework != "unknown":
            engine = told.framework
        version = told.framework_version or version
        named = value_in_force("model", told.settings, told.facts)
        if named is not None:
            model = str(named[0])
    return Ran(engine, version, None if model is None else mask(model), device)


def chosen_by_user(incident: Incident | None) -> dict[str, bool | None]:
    """Return whether the user had set what the plan of a failure changes, by setting."""
    if incident is not None:
        plan = incident.plan
    else:
        plan = ()
    return {
        patch.setting: set_by_user(patch.setting, incident)
        for patch in plan
        if incident and patch.new is not None
    }


# What a start measured, kept for the plans to come.


def last_start(heard: Heard | None, engine: WithVariables, launch: Launch) -> EngineStart | None:
    """Return what the last engine of an attempt told of itself; None where none spoke, or where it
    cannot be read.
    """
    if heard is None:
        return None
    try:
        starts = heard.scanner.diagnosis("", given=engine.settings_in_force(launch)).starts
    except Exception as error:  # noqa: BLE001 - as below
        get_logger().debug("what started is not known", reason=str(error))
        return None
    if starts:
        return starts[-1]
    return None


def learn(scanner: Scanner, engine: WithVariables, launch: Launch, keeper: JournalHook) -> None:
    """Keep what the engine measured while it started; go on where that cannot be done, or no
    journal is kept.
    """
    if keeper.path is None or "kv_cache_available_bytes" not in scanner.measured:
        return
    try:
        starts = scanner.diagnosis("", given=engine.settings_in_force(launch)).starts
        kept = engine.keep_measured(
            starts, f"oomguard run on {time.strftime('%Y-%m-%d')}", keeper.session
        )
        get_logger().debug("what the start measured", kept=kept)
    except Exception as error:  # noqa: BLE001
        # whatever a log or a folder holds, the command's own end is not ours to change
        get_logger().debug("what the start measured is not kept", reason=str(error))


# How long the end of a run waits until a shared journal has what it wrote.
_DELIVERY_S: Final = 3.0


class JournalHook:
    """Write the attempts of one run, as far as they can be written.

    Args:
        open_journal: opens where they go, and raises InputError where that cannot be; None: nothing
            is kept.
        is_asked_for: whether the user named the place, so that one that keeps nothing is always
            told.
        original: the command as the user gave it; empty: as the first attempt has it.
    """

    def __init__(
        self,
        open_journal: Callable[[], Journal | SharedJournal] | None,
        *,
        is_asked_for: bool = False,
        original: Sequence[str] = (),
    ) -> None:
        self._open = open_journal
        self._is_asked_for = is_asked_for
        self._original = tuple(original)
        self._device: str | None = None
        self._journal: Journal | SharedJournal | None = None
        self._begun: AttemptRow | None = None
        self._untold: tuple[str, dict[str, str]] | None = None
        self._beginning: threading.Thread | None = None
        self._session = uuid.uuid4().hex

    @property
    def path(self) -> Path | None:
        """Where attempts are kept; None where none is, or no longer."""
        self._wait()
        if self._journal is None:
            return None
        return self._journal.path

    def begin(
        self,
        number: int,
        command: Sequence[str],
        settings: Mapping[str, FactValue],
        patches: tuple[Patch, ...],
        began_at: float | None = None,
    ) -> None:
        """Write, beside what goes on, that an attempt has begun; ``began_at`` in Unix seconds, None
        (default): now.
        """
        self._wait()
        self._begun = None
        if self._open is not None:
            given = (
                number,
                tuple(command),
                dict(settings),
                patches,
                time.time() if began_at is None else began_at,
            )
            self._beginning = threading.Thread(
                target=self._begin, args=given, name="oomguard-journal"
            )
            try:
                self._beginning.start()
            except RuntimeError:  # no more threads are permitted
                self._beginning = None
                self._begin(*given)

    @property
    def session(self) -> str:
        """The run's name in the journal."""
        return self._session

    def end(self, attempt: Attempt, start: EngineStart | None = None) -> None:
        """Write how the attempt ended; say, once, where a failure, or anything that was asked for,
        cannot be kept.

        Args:
            attempt: what was changed in it, and what came of it.
            start: what the engine told of itself, where one spoke.
        """
        self._wait()
        if self._journal is not None and self._begun is not None:
            self._end(self._journal, self._begun, attempt, start)
        if self._untold is not None:
            event, fields = self._untold
            logger = get_logger()
            (logger.warning if self._is_asked_for or attempt.incident else logger.debug)(
                event, **fields
            )
            self._untold = None

    def finish(self) -> None:
        """Wait a little, when the run is over, until a shared journal has what was written; say
        what it has not, and what to do.
        """
        self._wait()
        try:
            if self._journal is None:
                left = None
            else:
                left = self._journal.finish(_DELIVERY_S)
        except Exception as error:  # noqa: BLE001 - as below
            self._give_up(error)
            return
        if left is not None:
            fields = {"attempts": left.attempts, "reason": left.reason, "command": left.command}
            if left.is_refused:
                get_logger().warning(
                    "not in the shared journal: it waits on this machine", **fields
                )
            else:
                get_logger().warning(
                    "not yet in the shared journal: the next run delivers it", **fields
                )

    def _end(
        self,
        journal: Journal | SharedJournal,
        begun: AttemptRow,
        attempt: Attempt,
        start: EngineStart | None,
    ) -> None:
        from oomguard.report.json import kept_incident
        from oomguard.report.redact import mask

        incident = None
        if attempt.incident is not None:
            if attempt.ranks is None:
                of_all = {}
            else:
                of_all = {"ranks": dict(attempt.ranks)}
            incident = kept_incident(attempt.incident) | of_all
        if attempt.exit_status is not None:
            status = attempt.exit_status
        else:
            status = 125
        if attempt.error == error_of(status, attempt.incident):
            error = None
        else:
            error = mask(attempt.error)
        try:
            ran = what_ran(attempt.incident, start, self._device)
            chosen = chosen_by_user(attempt.incident)
            told: dict[str, Any] = {
                "ran": ran,
                "set_by_user": chosen,
                "seconds": attempt.seconds,
                "error": error,
            }
            journal.end(
                begun, exit_status=status, incident=incident, measured=attempt.measured, **told
            )
        except Exception as error:  # noqa: BLE001 - of SQLite or the disk: the run goes on
            self._give_up(error)

    def _begin(
        self,
        number: int,
        command: tuple[str, ...],
        settings: dict[str, FactValue],
        patches: tuple[Patch, ...],
        began_at: float,
    ) -> None:
        try:
            from oomguard.journal.codec import AttemptRow
            from oomguard.report.json import patch_dict
            from oomguard.report.redact import mask_command

            if self._journal is None and self._open is not None:
                self._journal = self._open()
            predicted = {name: value for patch in patches for name, value in patch.predicts.items()}
            dicts = [patch_dict(patch) for patch in patches]
            words = mask_command(command)
            record = AttemptRow(
                self._session,
                number,
                words,
                settings,
                dicts,
                predicted=predicted,
                started_at=began_at,
            )
            if self._journal is not None:
                if number == 1:
                    record = replace(record, **started_as(self._original or command))
                self._begun = self._journal.begin(record)
                self._device = self._device or device_words()
        except Exception as error:  # noqa: BLE001
            # it is told when the terminal is the user's again
            self._give_up(error)

    def _wait(self) -> None:
        """Wait until the record has begun, or could not."""
        if self._beginning is not None:
            self._beginning.join()
            self._beginning = None

    def _give_up(self, error: Exception) -> None:
        """Keep nothing from here on, and note why: it is told when the attempt has ended."""
        if self._journal is None or isinstance(error, InputError):
            self._untold = "no journal is kept", {"reason": str(error)}
        else:
            self._untold = (
                "the journal is left out",
                {"path": str(self._journal.path), "error": str(error)},
            )
        self._journal = self._open = None
