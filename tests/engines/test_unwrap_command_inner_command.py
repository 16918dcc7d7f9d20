"""The command that a command line runs in the end, behind wrappers, and a change of its words put back where they stand."""

from __future__ import annotations

import shlex

from oomguard.engines.unwrap_command import Edit, inner_commands


def inner(line):
    return inner_commands(shlex.split(line))[-1]


def test_a_wrapped_command_is_found_and_changed_in_its_place(subtests):
    for wrapped in [
        "{}",
        "/opt/env/bin/{}",
        "nohup {}",
        "nice -n 5 {}",
        "nice -10 {}",
        "timeout -k 5 --signal=TERM 1h {}",
        "stdbuf -oL -e 0 {}",
        "env A=1 B=2 {}",
        "env -u A -i PATH=/x {}",
        "time -p {}",
        "taskset -c 0-3 {}",
        "numactl --cpunodebind=0 -m 0 {}",
        "flock -n -E 5 /tmp/lock {}",
        "tini -s -g -p SIGTERM -- {}",
        "dumb-init -c {}",
        "gosu app {}",
        "setpriv --reuid=1000 --clear-groups {}",
        "oomguard run -v --allow reduces-capacity -- {}",
        "uv run --with vllm==0.32 -- {}",
        "uv run -p 3.12 {}",
        "poetry run {}",
        "conda run -n vllm --no-capture-output {}",
        "bash -c '{}'",
        "bash -lc 'exec {}'",
        "sh -e -c 'cd /x && {} > log 2>&1'",
        "env A=1 nohup timeout 5 bash -c 'B=2 uv run {}'",
        "python /opt/env/bin/{}",
        "python3.11 -u -X dev {}",
    ]:
        with subtests.test(wrapped=wrapped):
            found = inner(wrapped.format("vllm serve m --max-model-len 9"))
            assert (found.program, found.args) == ("vllm", ("serve", "m", "--max-model-len", "9"))
            assert found.change([Edit(3, 4, ("7",))]) == tuple(
                shlex.split(wrapped.format("vllm serve m --max-model-len 7"))
            )
            added = found.change([Edit(4, 4, ("--port", "1"))])
            assert added == tuple(
                shlex.split(wrapped.format("vllm serve m --max-model-len 9 --port 1"))
            )


def test_what_python_and_launchers_run_is_told(subtests):
    for line, program, args in [
        (
            "python -m vllm.entrypoints.openai.api_server --model m",
            "module:vllm.entrypoints.openai.api_server",
            ("--model", "m"),
        ),
        ("uv run -m lm_eval --model vllm", "module:lm_eval", ("--model", "vllm")),
        ("torchrun --nproc-per-node=2 train.py --x", "train", ("--x",)),
        ("torchrun --standalone -m lm_eval -a b", "module:lm_eval", ("-a", "b")),
        ("python -m torch.distributed.run --nproc_per_node 2 s.py 1", "s", ("1",)),
        (
            "accelerate launch --num_processes 2 -m lm_eval --model vllm",
            "module:lm_eval",
            ("--model", "vllm"),
        ),
        ("python a/script.py --x", "script", ("--x",)),
        ("python -c 'import vllm' x", "python", ("-c", "import vllm", "x")),
        ("bash run.sh m", "bash", ("run.sh", "m")),
    ]:
        with subtests.test(line=line, program=program, args=args):
            found = inner(line)
            assert (found.program, found.args) == (program, args)


def test_wrapper_with_an_unknown_option_is_the_command():
    assert inner("uv run --strange vllm serve m").program == "uv"
    assert inner("nsys profile -o x vllm serve m").program == "nsys"


def test_the_variables_that_wrappers_set_and_take_away_are_told():
    found = inner("env -u GONE -i A=1 bash -c 'export B=2; C=3 vllm serve m'")
    assert found.variables == {"GONE": None, "A": "1", "B": "2", "C": "3"}
    assert found.has_no_others


def test_a_variable_is_set_in_the_innermost_place():
    assert inner("env -i A=1 nice vllm x").set_variables({"B": "2 3"}) == (
        "env",
        "-i",
        "A=1",
        "B=2 3",
        "nice",
        "vllm",
        "x",
    )
    assert (
        inner("bash -c 'A=1 vllm x'").set_variables({"B": '{"k": 1}'})[2]
        == """A=1 B='{"k": 1}' vllm x"""
    )
    assert inner("nice vllm x").set_variables is None


def test_each_command_of_a_shell_s_text_is_found():
    found = inner_commands(("bash", "-c", "vllm serve a & vllm serve b; wait"))
    assert [(one.program, one.args) for one in found] == [
        ("vllm", ("serve", "a")),
        ("vllm", ("serve", "b")),
        ("wait", ()),
    ]


def test_words_known_only_to_the_shell_stay_as_written():
    found = inner("""bash -c 'vllm serve "$MODEL" --max-model-len 9'""")
    assert found.has_unread
    assert found.change([Edit(3, 4, ("7",))])[2] == 'vllm serve "$MODEL" --max-model-len 7'


def test_shell_words_are_removed_with_the_blank_before():
    found = inner("bash -c 'vllm serve m --max-model-len 9 > log'")
    assert found.change([Edit(2, 4, ())])[2] == "vllm serve m > log"


def test_a_command_line_that_runs_nothing_raises_nothing(subtests):
    for argv in [
        (),
        ("",),
        ("env",),
        ("env", "A=1"),
        ("timeout", "5"),
        ("bash", "-c"),
        ("bash", "-c", ""),
        ("python", "-m"),
        ("python",),
    ]:
        with subtests.test(argv=argv):
            assert all(isinstance(one.program, str) for one in inner_commands(argv))


def test_every_option_of_an_inner_run_is_known():
    from oomguard.cli.run import command

    for option in command.params:
        for name in (
            name for name in (*option.opts, *option.secondary_opts) if name.startswith("-")
        ):
            value = "" if option.is_flag else "value"
            assert (
                inner(f"env A=1 oomguard run {name} {value} -- vllm serve m").program == "vllm"
            ), name
