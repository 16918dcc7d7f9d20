"""The list of all flags: what each is, how it may be spelled, and how many words are its own."""

from __future__ import annotations

from oomguard.core.settings import surfaces, unmanaged_arguments
from oomguard.engines.command import all_flags

FLAGS = all_flags("vllm")


def test_a_flag_is_known_in_every_spelling_that_the_parser_takes(subtests):
    for word, name in [
        ("--max_model_len=8", "max-model-len"),
        ("--trust-rem", "trust-remote-code"),
        ("--no-enable-dbo", "no-enable-dbo"),
        ("--compilation-config.cudagraph_mode", "compilation-config"),
        ("-dcp", "decode-context-parallel-size"),
        ("-O3", "optimization-level"),
        ("--enable-", None),
        ("--frobnicate", None),
        ("--no-max-model-len", None),
        ("--", None),
    ]:
        with subtests.test(word=word, name=name):
            assert FLAGS.name_of(word) == name


def test_a_flag_has_as_many_words_as_the_parser_gives_it(subtests):
    for words, end in [
        ("--enforce-eager m", 1),
        ("--no-enable-dbo m", 1),
        ("--seed 0 m", 2),
        ("--seed=0 m", 1),
        ("--api-key a b c --port 1", 4),
        ("--hf-token --port 1", 1),
        ("--hf-token x m", 2),
        ("-O3 m", 1),
        ("-O 3 m", 2),
    ]:
        with subtests.test(words=words, end=end):
            split = words.split()
            name = FLAGS.name_of(split[0])

            assert name is not None
            assert FLAGS.end_of(split, 0, name) == end


def test_no_flag_takes_words_in_two_ways():
    kinds = (FLAGS.alone, FLAGS.perhaps, FLAGS.one, FLAGS.many)

    assert sum(map(len, kinds)) == len(FLAGS.names)


def test_every_reason_and_short_form_is_of_a_flag():
    assert {name.removeprefix("no-") for name in FLAGS.takes_memory} | set(
        FLAGS.short.values()
    ) <= FLAGS.names
    assert set(FLAGS.means) <= FLAGS.names


def test_every_setting_s_flag_is_among_them():
    flags = {flag for own in surfaces("vllm").values() for flag in (*own.flags, *own.aliases)}

    assert [flag for flag in flags if FLAGS.name_of(flag) is None] == []


def test_argument_left_alone_is_a_flag_or_never_was_one():
    assert {name.replace("_", "-") for name in unmanaged_arguments()} - FLAGS.names == {
        "mamba-config",
        "model-weights",
    }
