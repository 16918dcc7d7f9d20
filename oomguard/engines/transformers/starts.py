"""Intercept loads of models on a device, and moves of models to a device.

``pipeline(...)`` loads and then moves a model, like ``from_pretrained(...).to("cuda")``.
"""

from __future__ import annotations

import functools
import importlib
import sys
import traceback
from collections.abc import Mapping
from typing import Any, Final, Protocol

from oomguard.core.facts import Fact, FactValue
from oomguard.core.incident import Incident, SettingInForce
from oomguard.engines.start_attempt import EndedStart, MakeAgain, ReadStart, StartHandler
from oomguard.engines.transformers.weights import WeightDevice
from oomguard.probe import torch_memory
from oomguard.probe.host import read_available_bytes
from oomguard.remedy.failed_load import ON_DEVICE, Lighter, LoadModel, Weights
from oomguard.scan.exceptions import chain, exception_lines, may_be_oom

# The share of free host memory that weights may use.
_HOST_SHARE: Final = 0.9


class WeightPlacement(Protocol):
    """A load of a model on a device, or a move to one."""

    place: WeightDevice

    @property
    def is_chosen(self) -> bool:
        """Whether the program named the device; then layers need permission to wait elsewhere."""

    @property
    def why_not_on_host(self) -> str | None:
        """Why layers cannot wait on the host; None if they can."""

    def make(self, changed: Mapping[str, FactValue], host_bytes: int | None) -> Any:
        """Return the model on its device with these settings changed.

        ``host_bytes`` is the host memory for its other layers; None: unknown.
        """

    def weights(self) -> Weights | None:
        """Return the weights; None if they are unknown."""

    def lighter(self) -> tuple[Lighter, ...]:
        """Return the weights in fewer bits, with the most bits first."""


class WeightsStart:
    """A load or a move under a guard: a start without an engine to watch afterwards."""

    phase = "load_weights"
    tells_success = False

    def __init__(self, placing: WeightPlacement) -> None:
        self._placing = placing
        self._base_bytes: int | None = None

    def attempt(
        self, changed: Mapping[str, FactValue], within_s: float | None = None
    ) -> EndedStart:
        """Load the weights with these settings changed.

        If a failure released unused memory, try again with the same settings.
        """
        del within_s
        ended = self._once(changed)
        while ended.error is not None and may_be_oom(ended.error):
            before = self._base_bytes
            lines = ended.lines
            _let_go(ended.error)
            torch_memory.release()
            self._base_bytes = torch_memory.live_bytes()
            if before is None or self._base_bytes is None or self._base_bytes >= before:
                return EndedStart(error=ended.error, lines=lines)
            ended = self._once(changed)
        return ended

    def _once(self, changed: Mapping[str, FactValue]) -> EndedStart:
        self._base_bytes = torch_memory.live_bytes()
        try:
            return EndedStart(result=self._placing.make(changed, _host_bytes()))
        except Exception as error:  # noqa: BLE001
            # The guard judges it, and raises it again if there is no remedy.
            own = error.__traceback__
            return EndedStart(
                error=error.with_traceback(own and own.tb_next), lines=tuple(exception_lines(error))
            )

    def behind(self, incident: Incident) -> LoadModel:
        """Return the memory model of the failed load."""
        del incident
        placing = self._placing
        return LoadModel(
            placing.weights(),
            self._base_bytes,
            _host_bytes(),
            placing.place.name,
            torch_memory.is_cached(),
            placing.why_not_on_host,
            placing.lighter(),
        )

    def attend(self, engine: Any, make_again: MakeAgain) -> None:
        """Do nothing: a loaded model does not die."""

    def is_given_up(self) -> bool:
        """Return False: the caller of a load waits for it."""
        return False

    def leave_nothing(self) -> None:
        """Release the memory of the last attempt."""
        torch_memory.release()

    def settings_in_force(self) -> dict[str, SettingInForce]:
        """Return whether the program named the device, as a setting."""
        chosen = self._placing.is_chosen
        return {
            ON_DEVICE: SettingInForce(ON_DEVICE, None, chosen, "given" if chosen else "default")
        }

    def carries(self, name: str, facts: Mapping[str, Fact]) -> bool:
        """Return whether a load has this setting."""
        del facts
        return name == ON_DEVICE or name in {way.setting for way in self._placing.lighter()}


def _let_go(error: BaseException) -> None:
    """Release what a failure's frames hold: the part of the model that was loaded."""
    for link in chain(error):
        traceback.clear_frames(link.__traceback__)


def _host_bytes() -> int | None:
    free = read_available_bytes()
    if free is None:
        return None
    return int(free * _HOST_SHARE)


_MODULE: Final = "transformers.modeling_utils"
_OWNER: Final = "PreTrainedModel"
_handlers: list[StartHandler] = []


def watch(handler: StartHandler) -> None:
    """Route loads and moves of models through ``handler``, now or once transformers is imported.

    Only the first call in a process has an effect.
    """
    if _handlers:
        return
    _handlers.append(handler)
    import wrapt

    if _MODULE in sys.modules:
        _wrap(importlib.import_module(_MODULE))  # waits if another thread is still importing it
    else:
        wrapt.register_post_import_hook(_wrap, _MODULE)


def _wrap(module: Any) -> None:
    import wrapt

    for name, read in _WATCHED.items():
        if hasattr(getattr(module, _OWNER, None), name):
            # A partial adds no frame between the user's code and the engine's.
            wrapt.wrap_function_wrapper(
                module, f"{_OWNER}.{name}", functools.partial(_handlers[0], read)
            )


def _load(wrapped: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    from oomguard.engines.transformers.weights import load_of

    return WeightsStart(load_of(wrapped, args, kwargs))


def _move(wrapped: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    from oomguard.engines.transformers.weights import move_of

    return WeightsStart(move_of(wrapped, args, kwargs))


_WATCHED: Final[dict[str, ReadStart]] = {"from_pretrained": _load, "to": _move, "cuda": _move}
