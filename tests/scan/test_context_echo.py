"""Settings as the engine lists them: what it is to find itself is no number."""

from __future__ import annotations

from oomguard.scan.context import read_echo, setting_facts


def test_a_length_that_the_engine_is_to_find_itself_is_no_number():
    echo = read_echo("non-default args: {'max_model_len': -1, 'seed': -1}")
    assert (echo.settings["max_model_len"].value, echo.settings["max_model_len"].set_by_user) == (
        None,
        True,
    )
    assert "max_model_len_tokens" not in setting_facts(echo.settings, complete=True)
