"""Exceptions as lines: every link of the chain that can be an OOM, the first cause first."""

from __future__ import annotations

import pytest

from oomguard.diagnosis import diagnose
from oomguard.scan.exceptions import chain, exception_lines, may_be_oom

OOM = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.69 GiB of which 512.00 MiB is "
    "free. Including non-PyTorch memory, this process has 23.10 GiB memory in use."
)


class OutOfMemoryError(RuntimeError):
    """Stands for torch's own class."""


def raised(function) -> BaseException:
    with pytest.raises(BaseException) as caught:  # noqa: PT011
        function()
    return caught.value


def texts(error: BaseException) -> list[str]:
    return [line.text for line in exception_lines(error)]


def from_cause():
    try:
        raise OutOfMemoryError(OOM)
    except OutOfMemoryError as error:
        raise KeyError("layer") from error


def in_context():
    try:
        raise OutOfMemoryError(OOM)
    except OutOfMemoryError:
        raise ValueError("while cleaning up")


def suppressed():
    try:
        raise OutOfMemoryError(OOM)
    except OutOfMemoryError:
        raise ValueError("on its own") from None


def test_the_chain_goes_from_the_latest_to_the_first_cause():
    assert [type(link) for link in chain(raised(from_cause))] == [KeyError, OutOfMemoryError]


def test_the_chain_follows_the_context():
    assert [type(link) for link in chain(raised(in_context))] == [ValueError, OutOfMemoryError]


def test_the_chain_ends_where_the_context_is_suppressed():
    assert [type(link) for link in chain(raised(suppressed))] == [ValueError]


def test_a_chain_that_bites_its_tail_ends():
    first, second = RuntimeError("1"), RuntimeError("2")
    first.__cause__, second.__cause__ = second, first

    assert 2 <= len(list(chain(first))) <= 10


def test_the_first_cause_is_the_first_message():
    lines = [text for text in texts(raised(in_context)) if not text.startswith("  ")]

    assert lines[0].endswith(f"OutOfMemoryError: {OOM}")
    assert lines[1].endswith("ValueError: while cleaning up")


def test_a_cause_behind_another_type_is_found():
    assert diagnose(raised(from_cause)).verdict == "oom"
    assert may_be_oom(raised(from_cause))


def test_a_suppressed_context_is_no_cause():
    assert diagnose(raised(suppressed)).verdict == "no_oom"


@pytest.mark.parametrize(
    "error", [KeyError(OOM), OSError(OOM), AssertionError(OOM), KeyboardInterrupt(OOM)]
)
def test_a_type_that_cannot_be_an_oom_is_none_whatever_it_quotes(error):
    assert not may_be_oom(error)
    assert texts(error) == []
    assert diagnose(error).verdict == "no_oom"


@pytest.mark.parametrize(
    "error", [RuntimeError(OOM), OutOfMemoryError(OOM), MemoryError(OOM), ValueError(OOM)]
)
def test_a_type_that_can_be_an_oom_is_read(error):
    assert may_be_oom(error)

    diagnosis = diagnose(error)

    assert [incident.kind for incident in diagnosis.incidents] == ["cuda_oom"]
    assert diagnosis.source == type(error).__name__


def test_a_runtime_error_of_another_matter_is_no_incident():
    assert may_be_oom(RuntimeError("shapes do not match"))
    assert diagnose(RuntimeError("shapes do not match")).incidents == ()


def test_an_empty_message_is_one_line():
    assert texts(MemoryError()) == ["builtins.MemoryError: "]


def test_each_line_of_a_message_is_a_numbered_line():
    lines = list(exception_lines(RuntimeError("one\ntwo")))

    assert [(line.number, line.text) for line in lines] == [
        (1, "builtins.RuntimeError: one"),
        (2, "two"),
    ]


def test_a_message_of_several_lines_is_read_as_one():
    (incident,) = diagnose(RuntimeError(OOM.replace(". ", ".\n"))).incidents

    assert incident.facts["process_in_use_bytes"].value == round(23.10 * 2**30)


def test_an_exception_whose_text_cannot_be_made_says_nothing():
    class Broken(RuntimeError):
        def __str__(self) -> str:
            return str(1 / 0)

    assert isinstance(texts(Broken()), list)


def test_an_oom_inside_a_group_is_found():
    assert diagnose(ExceptionGroup("tasks", [OutOfMemoryError(OOM)])).verdict == "oom"
