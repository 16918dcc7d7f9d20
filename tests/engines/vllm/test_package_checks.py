"""Whether vLLM finds the plugin, in this environment and by its variable."""

from __future__ import annotations

from oomguard.engines.vllm.package import plugin_checks


def test_the_plugin_is_seen_where_oomguard_is_installed():
    seen, variable = plugin_checks({})

    assert seen.status == "ok"
    assert variable.text == "VLLM_PLUGINS is not set: vLLM loads every plugin"


def test_a_list_of_plugins_has_to_name_ours(subtests):
    for value, status, advice in [
        ("oomguard", "ok", ""),
        ("mine,oomguard", "ok", ""),
        ("mine", "problem", 'export VLLM_PLUGINS="$VLLM_PLUGINS,oomguard"'),
        (
            "mine, oomguard",
            "problem",
            'export VLLM_PLUGINS="$VLLM_PLUGINS,oomguard"',
        ),  # vLLM strips no blanks
        ("", "problem", "export VLLM_PLUGINS=oomguard"),
    ]:
        with subtests.test(value=value, status=status, advice=advice):
            *_, check = plugin_checks({"VLLM_PLUGINS": value})

            assert (check.status, check.advice) == (status, advice)
