"""Peeling one raw line: escapes and prefixes go, words stay, the process that a prefix names is kept."""

from __future__ import annotations

import json
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oomguard.scan.lines import peel, strip_escapes, unwrap, without_escaped_breaks

ERROR = "ERROR 03-04 10:00:01 [core.py:700] "


@pytest.mark.parametrize(
    ("raw", "plain"),
    [
        ("\x1b[31mERROR\x1b[0m boom", "ERROR boom"),
        ("\x1b[38;5;208;1mboom\x1b[m", "boom"),
        ("\x1b[2K\x1b[1Gboom", "boom"),
        ("\x1b[?25lboom\x1b[?25h", "boom"),
        ("\x1b]0;a window title\x07boom", "boom"),
        ("\x1b]8;;http://example.org\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("a\x08b\x00c\x7fd", "abcd"),
        ("a\x85b\x9bc", "abc"),
        ("boom\x1b", "boom"),
        ("a\tb", "a\tb"),
        ("naïve 显存 🚀", "naïve 显存 🚀"),
    ],
)
def test_escapes_and_control_characters_are_peeled(raw, plain):
    assert strip_escapes(raw) == plain


@settings(deadline=None)
@given(st.text(st.characters(exclude_characters="\n")))
def test_no_control_character_but_tab_is_left(line):
    left = strip_escapes(line)

    assert [char for char in left if unicodedata.category(char) == "Cc" and char != "\t"] == []


@settings(deadline=None)
@given(st.text(st.characters(exclude_characters="\n")))
def test_stripping_twice_is_stripping_once(line):
    assert strip_escapes(strip_escapes(line)) == strip_escapes(line)


@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=["Cc"])))
def test_a_line_without_control_characters_is_left_alone(line):
    assert strip_escapes(line) == line


@pytest.mark.parametrize(
    ("prefix", "process"),
    [
        ("(EngineCore pid=1) ", "EngineCore pid=1"),
        ("(EngineCore_DP0 pid=1) ", "EngineCore_DP0 pid=1"),
        ("(APIServer pid=4321) ", "APIServer pid=4321"),
        ("(VllmWorker rank=0 pid=1) ", "VllmWorker rank=0 pid=1"),
        ("(VllmWorker TP0 pid=1) ", "VllmWorker TP0 pid=1"),
        ("(VllmWorker-0 pid=1) ", "VllmWorker-0 pid=1"),
        ("(Worker_TP0_EP0 pid=1) ", "Worker_TP0_EP0 pid=1"),
        ("(VllmWorkerProcess pid=1) ", "VllmWorkerProcess pid=1"),
        ("[rank0]: ", "rank0"),
        ("[rank12]: ", "rank12"),
        (ERROR, None),
        ("INFO 03-04 10:00:01.123 [a/b/core.py:7] ", None),
        (f"(EngineCore pid=1) {ERROR}", "EngineCore pid=1"),
        (f"{ERROR}(EngineCore pid=1) ", "EngineCore pid=1"),
        ("[rank0]: (EngineCore pid=1) ", "rank0"),
        (f"(EngineCore pid=1) [rank0]: {ERROR}", "EngineCore pid=1"),
        (f"\x1b[1;36m(EngineCore_DP0 pid=1)\x1b[0;0m {ERROR}", "EngineCore_DP0 pid=1"),
        ("(EngineCore pid=1) (RayWorkerWrapper pid=2) ", "EngineCore pid=1"),
    ],
)
def test_prefixes_are_peeled_and_the_first_process_is_kept(prefix, process):
    plain = peel(f"{prefix}ValueError: boom (a) [b]")

    assert plain.text == "ValueError: boom (a) [b]"
    assert plain.process == process


def test_the_indent_after_a_prefix_is_kept():
    assert peel("(EngineCore pid=1)     raise ValueError(").text == "    raise ValueError("


def test_a_line_that_is_only_a_prefix_is_empty():
    assert peel("(EngineCore pid=1)").text == ""


@pytest.mark.parametrize(
    "line",
    [
        "ValueError: (EngineCore pid=1) is in the middle",
        "(an aside) ValueError",
        "(pid=1) ValueError",
        "rank0: ValueError",
        "[rankx]: ValueError",
        "ERROR in core",
        "",
    ],
)
def test_what_is_no_prefix_stays(line):
    assert peel(line) == type(peel(""))(line, None)


@settings(deadline=None)
@given(st.text(st.characters(exclude_characters="\n\\^#␛{"), max_size=80))
def test_peeling_only_ever_removes_from_the_front(line):
    assert strip_escapes(line).endswith(peel(line).text)


MESSAGE = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."


@pytest.mark.parametrize(
    "prefix",
    [
        "2026-01-01T00:00:00.123456789Z stderr F ",
        "2026-01-01T00:00:00.123456789+01:00 stdout P ",
        "2026-01-01T00:00:00.123456789Z ",
        "[pod/vllm-7d9c8b-x/vllm] ",
        "[pod/vllm-7d9c8b-x/vllm] 2026-01-01T00:00:00.123456789Z ",
        "Jan 01 00:00:00 node-1 vllm[123]: ",
        "Jan  1 00:00:00 ip-10-0-0-1.ec2.internal docker/vllm[123]: ",
        "2026-01-01T00:00:00+0000 node-1 vllm[123]: ",
        "2026-01-01T00:00:00.123456+0000 node-1 vllm[123]: ",
        "0: ",
        "12: ",
        " 3: ",
        "vllm-1  | ",
        "vllm-1  | 2026-01-01T00:00:00.123456789Z ",
        "\x1b[36mvllm-1  | \x1b[0m",
        "vllm.1.abc123@node1    | ",
        "12:00:01 web.1  | ",
        "0|vllm  | ",
        "[2026-01-01, 10:00:00 UTC] {subprocess.py:93} INFO - ",
        "[2026-01-01T10:00:00.123+0000] {subprocess.py:93} INFO - ",
        "[2026-01-01 00:00:00,123] [INFO] [launch.py:3:main] ",
        "2026-01-01 10:00:00,123 - root - ERROR - ",
        "2026-01-01 10:00:00,123 - ERROR - ",
        "2026-01-01 10:00:00,123 ERROR ",
        "2026-01-01 10:00:00.123 | ERROR    | run:main:12 - ",
        "I1121 07:14:52.123456 140 core.cc:12] ",
        "> ",
        "> > ",
        "# ",
        "// ",
    ],
)
@pytest.mark.parametrize(
    "inner",
    ["(EngineCore_DP0 pid=812) ERROR 11-21 07:14:52 [core.py:708] ", "(EngineCore_DP0 pid=812) "],
)
def test_what_a_collector_puts_before_a_line_is_peeled(prefix, inner):
    assert peel(prefix + inner + MESSAGE) == type(peel(""))(MESSAGE, "EngineCore_DP0 pid=812")


@pytest.mark.parametrize(
    "prefix",
    [
        "2026-01-01T00:00:00.1Z ",
        "2026-01-01T00:00:00.1Z stderr F ",
        "vllm-1  | ",
        "Jan 01 00:00:00 n vllm[1]: ",
    ],
)
def test_an_old_loggers_own_prefix_behind_a_collectors_is_peeled(prefix):
    assert (
        peel(f"{prefix}INFO 01-01 00:00:00 llm_engine.py:70] Initializing").text == "Initializing"
    )


@pytest.mark.parametrize(
    ("prefix", "process"),
    [
        ("[default0]:", "default0"),
        ("[rank3]: ", "rank3"),
        ("[1,0]<stderr>:", "1,0"),
        ("[2026-04-26 14:38:11 TP0] ", "TP0"),
        ("[2026-04-26 14:38:11 DP0 TP1 EP0] ", "DP0 TP1 EP0"),
        ("[2026-04-26 14:38:11] ", None),
        ("(RayWorkerWrapper pid=7, ip=10.0.0.2) ", "RayWorkerWrapper pid=7"),
        (
            "(RayWorkerWrapper pid=7, ip=10.0.0.2) [repeated 3x across cluster] ",
            "RayWorkerWrapper pid=7",
        ),
        ("(ServeReplica:default:VLLM pid=7, ip=10.0.0.2) ", "ServeReplica:default:VLLM pid=7"),
        ("#033[36m(RayWorkerWrapper pid=7)#033[0m ", "RayWorkerWrapper pid=7"),
        ("\\x1b[36m(RayWorkerWrapper pid=7)\\x1b[0m ", "RayWorkerWrapper pid=7"),
        ("\\u001b[36m(RayWorkerWrapper pid=7)\\u001b[0m ", "RayWorkerWrapper pid=7"),
        ("^[[36m(RayWorkerWrapper pid=7)^[[0m ", "RayWorkerWrapper pid=7"),
    ],
)
def test_the_process_that_a_launchers_prefix_names_is_kept(prefix, process):
    assert peel(prefix + MESSAGE) == type(peel(""))(MESSAGE, process)


@pytest.mark.parametrize(
    "line",
    [
        "2026-01-01 00:00:00 oom-kill:constraint=CONSTRAINT_MEMCG",
        "2026-01-01T00:00:00Z Out-of-memory: killed",
        "2026-01-01T00:00:00Z non-default args: {}",
    ],
)
def test_a_hyphen_within_the_first_word_does_not_end_a_prefix(line):
    assert peel(line).text == line.split(" ", 2 if line[10] == " " else 1)[-1]


@pytest.mark.parametrize(
    "record",
    [
        {"log": MESSAGE + "\n", "stream": "stderr", "time": "2026"},
        {"log": MESSAGE, "kubernetes": {"pod": "x"}},
        {"message": MESSAGE, "levelname": "ERROR", "asctime": "2026"},
        {"event": MESSAGE, "level": "error", "timestamp": "2026"},
        {"msg": MESSAGE, "ts": 1.0},
        {"MESSAGE": MESSAGE, "PRIORITY": "3", "_PID": "12"},
        {"textPayload": MESSAGE, "severity": "ERROR", "timestamp": "2026"},
        {"jsonPayload": {"message": MESSAGE}, "severity": "ERROR", "timestamp": "2026"},
        {"text": MESSAGE, "record": {"level": {"name": "ERROR"}, "message": "short"}},
    ],
)
def test_the_line_in_a_collectors_object_is_unwrapped(record):
    assert unwrap(json.dumps(record))[0] == MESSAGE


@pytest.mark.parametrize(
    "fields",
    [
        {"exc_info": "Traceback\n" + MESSAGE},
        {"error": MESSAGE},
        {"err": {"type": "Error", "message": "m", "stack": MESSAGE}},
        {"error": {"stack_trace": MESSAGE}},
        {"exception": MESSAGE},
    ],
)
def test_error_field_is_on_its_own_lines_after_the_message(fields):
    plain = peel(json.dumps({"message": "failed", "level": "error", **fields}))

    assert plain.text.split("\n")[0] == "failed"
    assert plain.text.split("\n")[-1] == MESSAGE


def test_each_line_in_a_collectors_object_loses_its_prefix():
    first, second = (
        "(EngineCore pid=1) ERROR 11-21 07:14:52 [core.py:7] a",
        "(EngineCore pid=1) ERROR 11-21 07:14:52 [core.py:7] b",
    )

    assert peel(json.dumps({"log": f"{first}\n{second}\n", "stream": "stderr"})) == type(peel(""))(
        "a\nb", "EngineCore pid=1"
    )


@pytest.mark.parametrize(
    "record",
    [
        {"role": "user", "content": MESSAGE, "timestamp": "2026"},
        {"messages": [{"role": "user", "content": MESSAGE}], "level": "info"},
        {"prompt": MESSAGE, "time": 1},
        {"message": MESSAGE, "question": "why", "time": 1},
        {"title": "help", "body": MESSAGE, "labels": []},
        {"message": {"role": "assistant", "content": MESSAGE}, "time": 1},
        {"message": MESSAGE},
        {"text": MESSAGE},
        {"time": 1},
        [MESSAGE],
        MESSAGE,
    ],
)
def test_a_chat_or_any_other_object_is_left_as_it_is(record):
    line = json.dumps(record)

    assert unwrap(line) == (line, None)


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "{}",
        '{"log": "x',
        "{" * 5000 + '"',
        '{"log": 1, "stream": "x"}',
        '{"a": NaN, "time": 1}',
    ],
)
def test_what_is_no_whole_object_is_left_as_it_is(line):
    assert unwrap(line) == (line, None)


def test_line_breaks_that_were_written_out_are_breaks():
    assert without_escaped_breaks("a\\nb\\r\\nc") == "a\nb\nc"


@pytest.mark.parametrize(
    "line",
    [
        "C:\\new\\torch\\nn\\modules.py",
        "in D:\\\\a\\\\nn",
        "lib\\site-packages\\nn\\x.py",
        "no break",
        "",
    ],
)
def test_a_windows_path_is_not_broken(line):
    assert without_escaped_breaks(line) == line


@pytest.mark.parametrize(
    ("raw", "plain"),
    [
        ("ERROR    app: CUDA      handler.py:57", "ERROR    app: CUDA"),
        (
            "         out of memory. Tried to allocate 2.00 GiB.             ",
            "         out of memory. Tried to allocate 2.00 GiB.",
        ),
        ("a line that a terminal cut behind a word ", "a line that a terminal cut behind a word "),
        ("see handler.py:57", "see handler.py:57"),
    ],
)
def test_the_margin_of_rich_s_console_is_peeled(raw, plain):
    assert peel(raw).text == plain
