from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomguard.engines.command import Launch
from oomguard.engines.command import settings_given as given_to
from oomguard.engines.command import with_flag as flag_changed


def settings_given(argv):
    return given_to(argv, "vllm")


def with_flag(launch, name, value):
    return flag_changed(launch, name, value, "vllm")


def test_a_flag_is_read_in_every_spelling(subtests):
    for words in [
        ("--max-model-len", "8192"),
        ("--max_model_len", "8192"),
        ("--max-model-len=8192",),
        ("--max_model_len=8192",),
    ]:
        with subtests.test(words=words):
            assert settings_given(("vllm", "serve", "m", *words))["max_model_len"].value == 8192


def test_of_a_repeated_flag_the_last_one_counts():
    given_ = settings_given(("vllm", "serve", "m", "--max-model-len", "1", "--max_model_len=2"))
    assert given_["max_model_len"].value == 2


def test_yes_no_flags_have_both_forms():
    assert settings_given(("vllm", "serve", "m", "--enforce-eager"))["enforce_eager"].value is True
    assert (
        settings_given(("vllm", "serve", "m", "--no-enable-prefix-caching"))[
            "enable_prefix_caching"
        ].value
        is False
    )


def test_a_changed_flag_stays_in_its_place():
    launch = with_flag(
        Launch(("vllm", "serve", "m", "--max-model-len", "32768", "--port", "1")),
        "max_model_len",
        1792,
    )
    assert launch.argv == ("vllm", "serve", "m", "--max-model-len", "1792", "--port", "1")


def test_other_spellings_of_a_changed_flag_are_removed():
    launch = with_flag(
        Launch(("vllm", "serve", "m", "--max_model_len=9", "--port", "1", "--max-model-len", "8")),
        "max_model_len",
        7,
    )
    assert launch.argv == ("vllm", "serve", "m", "--port", "1", "--max-model-len", "7")


def test_a_new_flag_goes_to_the_end():
    assert (
        with_flag(Launch(("vllm", "serve", "m")), "enforce_eager", True).argv[-1]
        == "--enforce-eager"
    )


def test_a_setting_without_a_flag_cannot_be_given_on_the_command():
    with pytest.raises(KeyError):
        with_flag(Launch(("vllm", "serve", "m")), "batch_size", 3)


def test_a_launch_is_shown_as_a_line_for_a_shell():
    assert Launch(("python", "a b.py"), {"X": "1 2"}).shell() == "X='1 2' python 'a b.py'"


SPELLINGS = st.sampled_from(["--max-model-len", "--max_model_len"])


@given(
    st.lists(st.tuples(SPELLINGS, st.integers(1, 10**6), st.booleans()), max_size=4),
    st.lists(
        st.sampled_from(["--host", "localhost", "--trust-remote-code", "--served-model-name=x"]),
        max_size=4,
    ),
    st.integers(1, 10**6),
)
def test_change_sets_the_value_once_and_leaves_the_rest(flags, others, new):
    argv = ["vllm", "serve", "m"]
    for name, value, joined in flags:
        argv += [f"{name}={value}"] if joined else [name, str(value)]
    argv += others
    changed = with_flag(Launch(tuple(argv)), "max_model_len", new).argv
    assert settings_given(changed)["max_model_len"].value == new
    assert sum("max-model-len" in word or "max_model_len" in word for word in changed) == 1
    assert [word for word in changed if word in {"vllm", "serve", "m", *others}] == [
        "vllm",
        "serve",
        "m",
        *others,
    ]
