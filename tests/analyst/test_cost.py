"""What a run costs before its command starts; ``benchmarks/run_cost.py`` measures its time."""

from __future__ import annotations

import os

import run_cost


def test_run_loads_little_and_nothing_that_explains_failures(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    env = {**os.environ, "XDG_STATE_HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}
    found, others = run_cost.modules(env)

    assert others == set()
    assert len(found) <= run_cost.GOAL_MODULES
    assert run_cost.resident_mib(env) <= run_cost.GOAL_MIB


def test_every_option_of_run_has_a_variable_of_the_supervisor():
    from oomguard.cli.run import command
    from oomguard.supervisor.options import _OPTION_VARIABLES

    of_options = {param.envvar for param in command.params if getattr(param, "envvar", None)}
    assert of_options == _OPTION_VARIABLES
