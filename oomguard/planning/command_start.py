"""The start that a command line is: what ``plan`` is asked for by the user's own words, on the
devices of this machine.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

from oomguard.core.errors import UsageError
from oomguard.core.facts import FactValue
from oomguard.engines.command import Launch
from oomguard.engines.protocol import Launcher
from oomguard.engines.registry import insight_of, launcher_of
from oomguard.estimate.constants import constant
from oomguard.estimate.start.start import StartBudget
from oomguard.estimate.start.start_budget import budget_start
from oomguard.planning.setting_values import START_SETTINGS
from oomguard.planning.start import AskedStart, StartPlan, ask_for_start, plan_start

# The engine whose starts are modelled (memory/vllm).
_MODELLED: Final = "vllm"
# Settings of which each takes devices of its own: their product is how many a start needs.
_RANKS: Final = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
# Any size does to ask with: each device's own takes its place.
_SOME_BYTES: Final = 1 << 40


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """A device to budget for: ``free_bytes`` is what is free of it now, None for one that nobody
    uses.
    """

    total_bytes: int
    free_bytes: int | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class CommandStart:
    """A command that starts an engine whose memory is modelled."""

    launch: Launch
    launcher: Launcher
    asked: AskedStart

    def on(self, device: DeviceMemory) -> StartBudget:
        """Budget the start on such a device, or on several alike."""
        return budget_start(self.asked.model, self._asked_on(device).settings)

    def plan_on(self, device: DeviceMemory) -> StartPlan:
        """Plan it there: with what would make it fit where it does not."""
        return plan_start(self._asked_on(device))

    def over(self, tensor_parallel_size: int, device: DeviceMemory) -> StartPlan:
        """Plan it over another number of devices that share each layer."""
        asked = self._asked_on(device)
        return plan_start(
            replace(
                asked, settings=replace(asked.settings, tensor_parallel_size=tensor_parallel_size)
            )
        )

    def changed(self, plan: StartPlan) -> str:
        """Return the user's own command over a plan's ranks and with its changes, as a line to
        paste.
        """
        new: dict[str, FactValue] = {
            patch.setting: patch.new for patch in plan.changes if patch.new is not None
        }
        ranks = plan.budget.settings.tensor_parallel_size
        if ranks != self.asked.settings.tensor_parallel_size:
            new["tensor_parallel_size"] = ranks
        return self.launcher.shown(replace(self.launch, env={}), new)

    def _asked_on(self, device: DeviceMemory) -> AskedStart:
        settings = replace(
            self.asked.settings, gpu_total_bytes=device.total_bytes, gpu_name=device.name
        )
        if device.free_bytes is not None:
            # What the engine's own CUDA context takes is gone before it looks.
            free = device.free_bytes - int(constant("context", settings.version)["bytes"])
            settings = replace(settings, device_free_bytes=max(0, free))
        return replace(self.asked, settings=settings)


def engine_version(launch: Launch) -> str | None:
    """Return the version of the engine that a launch would start, None where it is not found."""
    return launch.engine_version or insight_of(launcher_of(launch)).version(launch)


def devices_needed(launch: Launch) -> tuple[int, int] | None:
    """Return how many devices a command's own flags ask for, and how many engines; None where it is
    no engine's own command.
    """
    launcher = launcher_of(launch)
    if not launcher.is_own_command(launch.argv):
        return None
    given = launcher.settings_in_force(launch)
    ranks = [given[name].value if name in given else 1 for name in _RANKS]
    if not all(isinstance(count, int) and count > 0 for count in ranks):
        return None
    tensor, pipeline, data = (int(count) for count in ranks if isinstance(count, int))
    return tensor * pipeline * data, data


def start_of_command(launch: Launch, version: str | None) -> CommandStart | str:
    """Return the start that a command is, or why its memory is not known before it runs.

    Args:
        launch: the command as the user gave it.
        version: the engine's; None takes the installed one, else the newest known.
    """
    launcher = launcher_of(launch)
    if not launcher.is_own_command(launch.argv):
        return "the command is no engine's own: what it will take is not known before it runs"
    if launcher.NAME != _MODELLED:
        return f"the memory of {launcher.NAME} is not modelled"
    given = launcher.settings_in_force(launch)
    unread = [
        name for name, setting in given.items() if setting.value is None and name in START_SETTINGS
    ]
    if "model" in given:
        model = given["model"].value
    else:
        model = None
    if not isinstance(model, str):
        return "the command names no model that can be read"
    if unread:
        return f"{', '.join(unread)}: only the shell knows the value"
    values: dict[str, Any] = {
        name: setting.value for name, setting in given.items() if name in START_SETTINGS
    }
    try:
        return CommandStart(
            launch,
            launcher,
            ask_for_start(model, gpu_memory=_SOME_BYTES, engine_version=version, **values),
        )
    except UsageError as error:
        return f"the command cannot be planned: {error}"
