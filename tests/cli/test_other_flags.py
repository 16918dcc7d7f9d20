"""vLLM's other flags on a plan's command line: set aside with their values, whatever order they come in."""

from __future__ import annotations

import pytest

from oomguard.cli.other_flags import split_off

KNOWN = {"--max-model-len", "--enforce-eager"}


@pytest.mark.parametrize(
    ("line", "own", "others"),
    [
        ("m --trust-remote-code", "m", ["--trust-remote-code"]),
        ("--trust-remote-code m", "m", ["--trust-remote-code"]),
        ("m --swap-space 4 --max-model-len 8", "m --max-model-len 8", ["--swap-space 4"]),
        ("--swap-space 4 m", "m", ["--swap-space 4"]),
        ("--swap-space=4 m", "m", ["--swap-space=4"]),
        ("m --no-enable-chunked-prefill --enforce-eager", "m --enforce-eager", ["--no-enable-chunked-prefill"]),
        ("m --max-model-len 8 --seed 0", "m --max-model-len 8", ["--seed 0"]),
        ("--max-model-len 8 --trust-remote-code m", "--max-model-len 8 m", ["--trust-remote-code"]),
        ("m --max-modle-len 8", "m --max-modle-len 8", []),
        ("-- --seed", "-- --seed", []),
        ("", "", []),
    ],
)
def test_a_flag_that_is_not_counted_is_set_aside_with_its_value(line, own, others):
    assert split_off(line.split(), KNOWN) == (own.split(), others)
