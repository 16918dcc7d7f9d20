"""What runs inside vLLM: changes the engine arguments of an unchanged script, told by one environment variable.

vLLM calls ``register`` through the entry-point group ``vllm.general_plugins`` in every process it starts, in every
environment where oomguard is installed. So: standard library only, nothing at all unless our variable is set, and no
exception ever (vLLM does not guard the call). The hook, ``EngineArgs.create_engine_config``, is where every front end
turns arguments into a configuration (vLLM 0.8.5 to 0.33).
"""

import json
import logging
import os

OVERRIDES = "OOMGUARD_VLLM_OVERRIDES"
ACKNOWLEDGE = "OOMGUARD_VLLM_ACKNOWLEDGE"


def register() -> None:
    """Hook vLLM's engine arguments where overrides are set; never raises."""
    raw = os.environ.get(OVERRIDES)
    if not raw or os.environ.get("OOMGUARD_DISABLE", "").lower() in ("1", "true", "yes", "on"):
        return
    try:
        _hook(json.loads(raw))
    except Exception:
        logging.getLogger("oomguard").exception("the overrides did not reach vLLM")


def _hook(overrides: dict[str, object]) -> None:
    import functools

    from vllm.engine.arg_utils import EngineArgs

    original = EngineArgs.create_engine_config
    if getattr(original, "_oomguard", False):
        return

    @functools.wraps(original)
    def create_engine_config(self: object, *args: object, **kwargs: object) -> object:
        applied = {name: value for name, value in overrides.items() if hasattr(self, name)}
        for name, value in applied.items():
            setattr(self, name, value)
        _acknowledge(applied)
        return original(self, *args, **kwargs)

    create_engine_config._oomguard = True  # type: ignore[attr-defined]
    EngineArgs.create_engine_config = create_engine_config


def _acknowledge(applied: dict[str, object]) -> None:
    """Tell the supervisor which overrides arrived: one line appended to the file it named."""
    path = os.environ.get(ACKNOWLEDGE)
    if not path:
        return
    try:
        with open(path, "a", encoding="utf-8") as file:  # noqa: PTH123 - no import that vLLM would not do anyway
            file.write(json.dumps({"pid": os.getpid(), "applied": applied}) + "\n")
    except OSError:
        logging.getLogger("oomguard").debug("cannot acknowledge", exc_info=True)
