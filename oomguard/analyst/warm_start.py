"""Start with the changes under which the same command last worked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from oomguard.analyst.attempt_settings import ALLOCATOR, DEVICE, EnvLauncher
from oomguard.analyst.journal_hook import (
    describe_start,
    device_words,
    host_name,
    names_local_path,
    user_name,
)
from oomguard.core.facts import FactValue
from oomguard.core.incident import Incident, Patch, SettingInForce
from oomguard.core.log import get_logger
from oomguard.core.settings import SETTINGS, effect_of
from oomguard.engines.command import Launch
from oomguard.engines.protocol import StartKey
from oomguard.engines.registry import insight_of, launcher_of
from oomguard.journal.queries import KnownGood, KnownRun, last_run, tried_before
from oomguard.remedy.policy import Policy, with_needed

if TYPE_CHECKING:
    from oomguard.journal.database import Database


# A setting is a flag and a value, and both commands may spell it differently.
_WORDS: Final = 4
Reading = Callable[[], AbstractContextManager["Database | None"]]


def known_changes(launch: Launch, policy: Policy, reading: Reading) -> tuple[Patch, ...]:
    """Return the changes to begin with, and log their source or why there are none.

    Args:
        launch: the user's command.
        policy: what may be changed; it applies here as after a failure.
        reading: opens the journal; it gives None if there is none yet.
    """
    log = get_logger()
    try:
        with reading() as database:
            if database is None:
                found = None
            else:
                found = _Reuse(launch, policy).chosen(database)
    except Exception as error:  # noqa: BLE001
        # Whatever a journal or an engine's folder contains, the command must run.
        log.warning("No settings reused: the journal cannot be read", reason=str(error))
        return ()
    if found is None or isinstance(found, str):
        log.info(
            "No settings reused: the command runs as given",
            reason=found or "there is no journal yet",
        )
        return ()
    known, run, patches = found
    changes = {patch.setting: patch.change for patch in patches}
    held = f"{known.held} of {known.held + known.failed} times"
    if patches:
        event = "Reusing settings that worked before"
    else:
        event = "No settings reused: the command worked as given"
    log.info(
        event,
        **changes,
        of_run=run.number,
        began=_moment(run.began_at),
        held=held,
        **_by(run),
        **_unsure(known),
    )
    return patches


@dataclass(slots=True)
class _Reuse:
    """Search the journal for known settings of one command on this machine."""

    launch: Launch
    policy: Policy
    _keys: dict[tuple[str, ...], StartKey | None] = field(default_factory=dict)

    def chosen(self, database: Database) -> tuple[KnownGood, KnownRun, tuple[Patch, ...]] | str:
        """Return the last permitted settings that worked, or the reason why there are none."""
        engine = EnvLauncher(launcher_of(self.launch), self.launch.argv)
        insight = insight_of(launcher_of(self.launch))
        policy = with_needed(self.policy, insight.asked_length(self.launch))
        version = insight.version(self.launch)
        device = device_words()
        reasons = []
        # Commands are compared in their masked form, because the journal has no other.
        as_kept = describe_start(self.launch.argv)
        if not as_kept["hides_secrets_alone"]:
            return (
                "the journal masks more of this command than its secrets, so other commands would "
                "look the same"
            )
        tried = []
        for known in tried_before(database):
            if self._is_same(known, engine, as_kept):
                tried.append(known)
        for one in tried:
            if not one.held:
                continue
            known = _of_all(one, tried)
            differs = _differs(known, version, device)
            if differs is None and known.files != as_kept["files"]:
                differs = "a file that the command names has changed"
            if differs is None and known.has_failed_since:
                differs = "it has run out of memory since"
            run = last_run(database, known)
            if differs is None:
                patches = self._patches(known, run, engine)
                for patch in patches:
                    differs = differs or self._blocked(patch, known, run, engine, policy)
                if differs is None:
                    return known, run, patches
            reasons.append(f"run {run.number}: {differs}")
        if reasons:
            return reasons[0]
        return "no recorded run of this command worked"

    def _is_same(self, known: KnownGood, engine: EnvLauncher, as_kept: Mapping[str, Any]) -> bool:
        """Return whether known settings belong to this command, or to an equivalent start.

        This command means the same words, except for changed settings, and the same local files. An
        equivalent start has the same settings that decide its memory, and a recorded engine
        version. A path in the working directory matches only in that folder.
        """
        is_here = names_local_path(self.launch.argv)
        if is_here and known.folder != as_kept["folder"]:
            return False
        asked = Launch(tuple(as_kept["original"]))
        before = Launch(known.original)
        # This cheap test excludes most other commands.
        # Each changed setting adds or removes a flag and a value in both commands.
        may_be = len({*asked.argv} ^ {*known.original}) <= _WORDS * len(known.settings)
        if may_be and engine.shown(asked, known.settings) == engine.shown(before, known.settings):
            return True
        if known.engine_version is None:
            return False
        mine = self._key(asked)
        if mine is None or not any(str(mine.settings["model"]) in word for word in known.original):
            return False
        theirs = self._key(before)
        return theirs is not None and mine.is_same(theirs, known.settings)

    def _key(self, launch: Launch) -> StartKey | None:
        if launch.argv not in self._keys:
            self._keys[launch.argv] = insight_of(launcher_of(launch)).start_key(launch)
        return self._keys[launch.argv]

    def _patches(self, known: KnownGood, run: KnownRun, engine: EnvLauncher) -> tuple[Patch, ...]:
        """Return the changes that the command does not contain yet."""
        given = _explicit(engine, self.launch)
        reason = f"known to work: run {run.number} of {_moment(run.began_at)}"
        patches = []
        for name, value in known.settings.items():
            # A device that had free memory then says nothing about now.
            if name not in SETTINGS or name == DEVICE or given.get(name) == value:
                continue
            was = run.patches.get(name)
            patch = was or Patch(name, None, value, effect_of(name, None, value), reason)
            predicts = {}
            for fact in patch.predicts:
                if fact in run.measured:
                    predicts[fact] = run.measured[fact]
            fresh = replace(
                patch, new=value, reason=reason, predicts=predicts, blocked_by=None, group=None
            )
            patches.append(replace(fresh, predicted_freed_bytes=None))
        return tuple(patches)

    def _blocked(
        self, patch: Patch, known: KnownGood, run: KnownRun, engine: EnvLauncher, policy: Policy
    ) -> str | None:
        """Return why a change is not permitted now; None if it is."""
        name = patch.setting
        now = _explicit(engine, self.launch)
        if name in now and now[name] != _explicit(engine, Launch(known.original)).get(name):
            return f"{name} is {now[name]} in the command, but {patch.new} worked before"
        insight = insight_of(launcher_of(self.launch))
        if not engine.carries(name) or (
            name != ALLOCATOR and not insight.carries(self.launch, name)
        ):
            return f"oomguard cannot set {name} in this command"
        is_own = engine.is_own_command(self.launch.argv)
        by_user = run.set_by_user.get(name, True if name in now else False if is_own else None)
        settings = {name: SettingInForce(name, patch.old, by_user, "journal")}
        why = policy.blocks(patch, Incident("other", "", settings=settings))
        if why is None:
            return None
        return f"{name} {patch.change} is not permitted ({why})"


def _of_all(known: KnownGood, tried: Sequence[KnownGood]) -> KnownGood:
    """Return known settings with all their successes and failures.

    Equivalent commands, and other folders, on the same version and device count too.
    """
    ran_on = known.settings, known.engine, known.engine_version, known.device
    alike = []
    for one in tried:
        if (one.settings, one.engine, one.engine_version, one.device) == ran_on:
            alike.append(one)
    last_held = max(one.last_held for one in alike)
    last_failed = max(one.last_failed or 0 for one in alike)
    held = sum(one.held for one in alike)
    failed = sum(one.failed for one in alike)
    has_failed_since = known.has_failed_since or last_failed > last_held
    return replace(known, held=held, failed=failed, has_failed_since=has_failed_since)


def _explicit(engine: EnvLauncher, launch: Launch) -> Mapping[str, FactValue | None]:
    return {name: setting.value for name, setting in engine.settings_in_force(launch).items()}


def _differs(known: KnownGood, version: str | None, device: str | None) -> str | None:
    """Return how the known machine differs from this one; an unknown version is no difference."""
    if known.device != device:
        return (
            f"it ran on {known.device or 'a machine without GPUs'}, but this machine has "
            f"{device or 'no GPU that NVML reports'}"
        )
    if (
        known.engine_version is not None
        and version is not None
        and _public(known.engine_version) != _public(version)
    ):
        return f"it ran on {known.engine} {known.engine_version}, but this engine is {version}"
    return None


def _by(run: KnownRun) -> dict[str, str]:
    """Return who measured it, if it was another user or host."""
    if run.who is None or (run.who, run.host) == (user_name(), host_name()):
        return {}
    return {"by": "@".join(filter(None, (run.who, run.host)))}


def _unsure(known: KnownGood) -> dict[str, str]:
    if known.settings and known.engine_version is None:
        return {"engine_version": "not recorded"}
    return {}


def _public(version: str) -> str:
    return version.partition("+")[0].removeprefix("v")


def _moment(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s).astimezone().strftime("%Y-%m-%d %H:%M")
