"""How a server of vLLM tells that it works, from its data file."""

from __future__ import annotations

from oomguard.engines.server import serving_names

VLLM = serving_names("vllm")
SERVE = ("vllm", "serve", "org/model")


def test_an_engine_without_a_file_has_no_names():
    assert serving_names("transformers") is None


def test_the_flag_that_turns_its_counters_off_is_read():
    assert VLLM.counts_nothing((*SERVE, "--disable-log-stats"))
    assert not VLLM.counts_nothing(SERVE)


def test_its_key_is_the_flag_s_or_the_variable_s(subtests):
    for name, flags, environ, key in [
        ("none", (), {}, None),
        ("flag", ("--api-key", "a"), {}, "a"),
        ("flag over variable", ("--api-key=a",), {"VLLM_API_KEY": "b"}, "a"),
        ("variable", (), {"VLLM_API_KEY": "b"}, "b"),
    ]:
        with subtests.test(name):
            assert VLLM.key((*SERVE, *flags), environ) == key


def test_a_certificate_makes_it_speak_tls():
    assert VLLM.speaks_tls((*SERVE, "--ssl-certfile", "c", "--ssl-keyfile", "k"))
    assert not VLLM.speaks_tls(SERVE)
