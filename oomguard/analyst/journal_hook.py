"""Record each attempt of a run in the journal; if the journal fails, the run continues.

A healthy run logs nothing, because many runs at once lock each other's journal. A thread opens the
journal and begins the record while the command starts, because loading SQLite and writing to a disk
take as long as the rest of a start. A shared journal is first written on this machine, and
delivered to its database during the run.
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
from oomguard.core.redact import hides_secrets_alone, homes_kept, mask, mask_command
from oomguard.core.settings import value_in_force
from oomguard.journal.codec import RunIdentity
from oomguard.probe.nvml import devices
from oomguard.remedy.policy import set_by_user

if TYPE_CHECKING:
    from oomguard.analyst.attempt_settings import EnvLauncher
    from oomguard.analyst.output import ParsedOutput
    from oomguard.engines.command import Launch
    from oomguard.journal.codec import AttemptRow
    from oomguard.journal.delivery import SharedJournal
    from oomguard.journal.store import Journal
    from oomguard.scan.scan import Scanner


# Files that decide what a command does: programs and their configuration.
_ENDS: Final = (".py", ".sh", ".yaml", ".yml", ".json", ".toml")
_MOST_BYTES: Final = 1 << 20
_MOST_FILES: Final = 16


def describe_start(argv: Sequence[str]) -> dict[str, Any]:
    """Return how a run was started, as the journal stores it.

    That is the masked command, whether only secrets were masked, the folder, the digest of the
    files, and the names of user and host.
    """
    folder = None
    # The working directory may be gone.
    with homes_kept(), suppress(OSError):
        folder = mask(str(Path.cwd()))
    original = mask_command(argv, keep_homes=True)
    is_exact = hides_secrets_alone(argv, original)
    fields = {
        "original": original,
        "folder": folder,
        "files": digest_of_files(argv),
        "hides_secrets_alone": is_exact,
    }
    return fields | {"who": user_name(), "host": host_name()}


def host_name() -> str | None:
    """Return this machine's name; None if it has none."""
    return platform.node() or None


def user_name() -> str | None:
    """Return the user's name; None if this machine knows no name, as in many containers."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return None


def digest_of_files(argv: Sequence[str]) -> str | None:
    """Return a digest of the programs and configuration files in a command; None without any."""
    digest = hashlib.sha256()
    found = 0
    # A file may stand alone or behind its option: --config=serve.yaml.
    names = (word.rpartition("=")[2] for word in argv)
    for name in dict.fromkeys(names):
        if not name.endswith(_ENDS):
            continue
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


def names_local_path(argv: Sequence[str]) -> bool:
    """Return whether a word of a command is a path in the working directory.

    In another folder the same word means another file or model.
    """
    tails = (word.rpartition("=")[2] for word in argv)
    return any(tail and not tail.startswith("/") and os.path.lexists(tail) for tail in tails)


def device_words() -> str | None:
    """Return name and size of this machine's GPUs, each kind once; None if NVML does not answer.

    With several kinds, or parts of a GPU, the text includes the visible devices.
    """
    kinds = set()
    for device in devices() or ():
        if device.name and device.total_bytes is None:
            kinds.add(device.name)
        elif device.name:
            kinds.add(f"{device.name}, {format_gib(device.total_bytes or 0)}")
    if not kinds:
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    words = " + ".join(sorted(kinds))
    if visible and (len(kinds) > 1 or "MIG" in visible):
        return f"{words} ({visible})"
    return words


def identify_run(
    incident: Incident | None, start: EngineStart | None, device: str | None
) -> RunIdentity:
    """Return what an attempt really ran, masked.

    Args:
        incident: its failure; None if it did not fail.
        start: what its engine reported at start; None if no engine started.
        device: the GPUs, from ``device_words``.
    """
    engine = version = model = None
    both: tuple[Incident | EngineStart | None, ...] = (incident, start)
    for record in both:
        if record is None:
            continue
        if record.framework != "unknown":
            engine = record.framework
        version = record.framework_version or version
        named = value_in_force("model", record.settings, record.facts)
        if named is not None:
            model = str(named[0])
    return RunIdentity(engine, version, None if model is None else mask(model), device)


def chosen_by_user(incident: Incident | None) -> dict[str, bool | None]:
    """Return, for each setting in a failure's plan, whether the user had set it."""
    if incident is not None:
        plan = incident.plan
    else:
        plan = ()
    found = {}
    for patch in plan:
        if incident and patch.new is not None:
            found[patch.setting] = set_by_user(patch.setting, incident)
    return found


def last_start(
    output: ParsedOutput | None, engine: EnvLauncher, launch: Launch
) -> EngineStart | None:
    """Return the report of an attempt's last engine start; None if there is none."""
    if output is None:
        return None
    try:
        starts = output.scanner.diagnosis("", given=engine.settings_in_force(launch)).starts
    except Exception as error:  # noqa: BLE001 - as below
        get_logger().debug("Could not read the engine's start", reason=str(error))
        return None
    if starts:
        return starts[-1]
    return None


def record_calibration(
    scanner: Scanner, engine: EnvLauncher, launch: Launch, journal: JournalHook
) -> None:
    """Store the engine's start measurements for later plans, if a journal exists."""
    if journal.path is None or "kv_cache_available_bytes" not in scanner.measured:
        return
    try:
        starts = scanner.diagnosis("", given=engine.settings_in_force(launch)).starts
        kept = engine.keep_measured(
            starts, f"oomguard run on {time.strftime('%Y-%m-%d')}", journal.session
        )
        get_logger().debug("Stored the measurements of the start", kept=kept)
    except Exception as error:  # noqa: BLE001
        # whatever a log or a folder contains, the command's own end must not change
        get_logger().debug("Could not store the measurements of the start", reason=str(error))


# The last survived steps of an attempt that are recorded, about 200 bytes each.
_MOST_SURVIVED: Final = 200
# How long the end of a run waits for the delivery to a shared journal.
_DELIVERY_S: Final = 3.0


class JournalHook:
    """Write the attempts of one run, as far as the journal can be written.

    Args:
        open_journal: opens the journal, and raises InputError if it cannot; None for no journal.
        is_asked_for: whether the user named the journal, so that its failure is always reported.
        original: the user's command; empty if it is the first attempt's command.
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
        self._unreported: tuple[str, dict[str, str]] | None = None
        self._beginning: threading.Thread | None = None
        self._session = uuid.uuid4().hex

    @property
    def path(self) -> Path | None:
        """The journal's file; None without a journal, or after it failed."""
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
        """Write in the background that an attempt has begun.

        Args:
            number: the number of the attempt.
            command: the command.
            settings: all changed settings.
            patches: the changes of this attempt.
            began_at: Unix seconds; None (default) for now.
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
            except RuntimeError:
                # If no more threads are permitted, the start waits for the journal.
                self._beginning = None
                self._begin(*given)

    @property
    def session(self) -> str:
        """The run's name in the journal."""
        return self._session

    def end(
        self,
        attempt: Attempt,
        start: EngineStart | None = None,
        survived: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Write how the attempt ended.

        A failed journal is reported once, if the attempt failed or the user named the journal.

        Args:
            attempt: its changes and its result.
            start: the report of its engine's start; None without one.
            survived: the steps without memory that its engine survived.
        """
        self._wait()
        if self._journal is not None and self._begun is not None:
            self._end(self._journal, self._begun, attempt, start, survived)
        if self._unreported is not None:
            event, fields = self._unreported
            logger = get_logger()
            (logger.warning if self._is_asked_for or attempt.incident else logger.debug)(
                event, **fields
            )
            self._unreported = None

    def finish(self) -> None:
        """Wait briefly for the delivery at the end of a run; report what remains undelivered."""
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
                    "The shared journal refused these attempts, so they stay on this machine",
                    **fields,
                )
            else:
                get_logger().warning(
                    "The shared journal did not get these attempts yet; the next run delivers them",
                    **fields,
                )

    def _end(
        self,
        journal: Journal | SharedJournal,
        begun: AttemptRow,
        attempt: Attempt,
        start: EngineStart | None,
        survived: Sequence[Mapping[str, Any]],
    ) -> None:
        from oomguard.core.redact import mask
        from oomguard.report.json import stored_incident

        incident = None
        if attempt.incident is not None:
            if attempt.ranks is None:
                of_all = {}
            else:
                of_all = {"ranks": dict(attempt.ranks)}
            incident = stored_incident(attempt.incident) | of_all
        if attempt.exit_status is not None:
            status = attempt.exit_status
        else:
            status = 125
        if attempt.error == error_of(status, attempt.incident):
            error = None
        else:
            error = mask(attempt.error)
        try:
            ran = identify_run(attempt.incident, start, self._device)
            chosen = chosen_by_user(attempt.incident)
            end: dict[str, Any] = {
                "ran": ran,
                "set_by_user": chosen,
                "seconds": attempt.seconds,
                "error": error,
            }
            measured: dict[str, Any] = dict(attempt.measured)
            if survived:
                measured["survived"] = list(survived[-_MOST_SURVIVED:])
            journal.end(begun, exit_status=status, incident=incident, measured=measured, **end)
        except Exception as error:  # noqa: BLE001
            # an error of SQLite or the disk must not stop the run
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
            from oomguard.core.redact import mask_command
            from oomguard.journal.codec import AttemptRow
            from oomguard.report.json import patch_dict

            if self._journal is None and self._open is not None:
                self._journal = self._open()
            predicted: dict[str, FactValue] = {}
            for patch in patches:
                predicted.update(patch.predicts)
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
                    record = replace(record, **describe_start(self._original or command))
                self._begun = self._journal.begin(record)
                self._device = self._device or device_words()
        except Exception as error:  # noqa: BLE001
            # reported after the command has released the terminal
            self._give_up(error)

    def _wait(self) -> None:
        """Wait until the begin is written, or has failed."""
        if self._beginning is not None:
            self._beginning.join()
            self._beginning = None

    def _give_up(self, error: Exception) -> None:
        """Stop recording, and keep the reason for a report after the attempt."""
        if self._journal is None or isinstance(error, InputError):
            self._unreported = (
                "Not recording this run: the journal cannot be opened",
                {"reason": str(error)},
            )
        else:
            self._unreported = (
                "Stopped recording this run: the journal cannot be written",
                {"path": str(self._journal.path), "error": str(error)},
            )
        self._journal = self._open = None
