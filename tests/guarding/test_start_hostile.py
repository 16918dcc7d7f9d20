"""A guarded start where things are odd: what it left, who else is there, how it is called, and a user who stops it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import oomguard

FITS = '[[1, [], "RuntimeError"], [2, ["max_model_len 32768 -> 1953"], ""]]'
START = """
    def main():
        with oomguard.guard(allow="reduces-capacity") as g:
            llm = LLM("org/model", **SMALL)
        print(json.dumps(shown(g)))
        llm.shutdown()
"""
LEFT = """
    import gc, psutil
    from oomguard.engines.vllm.in_process import start
    start._ENDS_BY_ITSELF_S = start._ENDS_AFTER_TERM_S = 0.3
    def left():
        me = psutil.Process()
        names = [c.cmdline() for c in me.children(recursive=True) if c.status() != "zombie"]
        processes = [n for n in names if not any("resource_tracker" in word for word in n)]
        threads = [t.name for t in threading.enumerate() if t.name != "oomguard-pump" or t.join(5) or t.is_alive()]
        return [len(processes), me.num_fds(), threads, sorted(os.listdir(os.environ["TMPDIR"]))]
"""


@pytest.fixture
def tmp(tmp_path):
    folder = tmp_path / "tmp"
    folder.mkdir()
    return {"TMPDIR": str(folder)}


def test_of_failed_starts_nothing_is_left(program, tmp):
    ran = program(
        f"""{LEFT}
    def fail():
        try:
            with oomguard.guard():
                LLM("org/model", **SMALL)
        except RuntimeError:
            pass
        gc.collect()
    def main():
        fail()
        first = left()
        fail()
        with oomguard.guard(allow="reduces-capacity"):
            LLM("org/model", **SMALL).shutdown()
        gc.collect()
        print(json.dumps([first, left()]))
    """,
        FAKE_DIES="leaves a worker",
        **tmp,
    )
    first, last = json.loads(ran.stdout.splitlines()[-1])
    made = [line.split()[1] for line in ran.stdout.splitlines() if line.startswith("segment ")]
    assert len(made) == 4
    assert not set(made) & {path.name for path in Path("/dev/shm").iterdir()}
    assert first[0] == last[0] == 0
    assert abs(last[1] - first[1]) <= 2
    assert first[2] == last[2] == ["MainThread"]
    assert first[3] == last[3] == []
    assert "leaked shared_memory" not in ran.stderr


def test_left_worker_of_an_inner_engine_is_ended_and_no_child(program, tmp):
    ran = program(
        f"""{LEFT}
    import subprocess
    def main():
        own = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        with contextlib.suppress(ValueError), oomguard.guard():
            LLM("org/model", **SMALL)
        print(json.dumps([left()[0], own.poll()]))
        own.kill()
        own.wait()
    """,
        FAKE_DIES="leaves a worker",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        **tmp,
    )
    assert json.loads(ran.stdout.splitlines()[-1]) == [1, None]


def test_an_odd_environment_is_no_hindrance_and_stays_as_it_was(program):
    ran = program(
        """
    def main():
        before = dict(os.environ)
        with oomguard.guard(allow="reduces-capacity") as g:
            llm = LLM("org/model", **SMALL)
        assert dict(os.environ) == before
        print(json.dumps([shown(g), g.attempts[0].incident.location.process]))
        llm.shutdown()
    """,
        VLLM_PLUGINS="other",
        VLLM_WORKER_MULTIPROCESSING_METHOD="fork",
    )
    attempts, process = json.loads(ran.stdout.splitlines()[-1])
    assert json.dumps(attempts) == FITS
    assert process.startswith("EngineCore pid=")


def test_engine_in_this_process_restarts_after_its_error(program):
    ran = program(START, VLLM_ENABLE_V1_MULTIPROCESSING="0", check=False)
    assert FITS.replace("RuntimeError", "ValueError") in ran.stdout


def test_printed_text_gives_the_cause_without_a_listener(program):
    ran = program("""
    import tempfile
    def main():
        tempfile.tempdir = '/proc'
        with oomguard.guard(allow="reduces-capacity") as g:
            llm = LLM("org/model", **SMALL)
        print(json.dumps(shown(g)))
        llm.shutdown()
    """)
    assert FITS in ran.stdout
    assert "EngineCore failed to start." in ran.stdout


def test_failed_core_that_waits_forever_is_ended_and_restarted(program):
    ran = program(
        """
    def main():
        from oomguard.engines.vllm.in_process import start
        start.ENDS_WITHIN_S = 0.5
        with oomguard.guard(allow="reduces-capacity") as g:
            LLM("org/model", **SMALL).shutdown()
        print(json.dumps(shown(g)))
    """,
        FAKE_DIES="waits for its worker",
    )
    assert json.loads(ran.stdout.splitlines()[-1]) == [
        [1, [], "RuntimeError"],
        [2, ["max_model_len 32768 -> 1953"], ""],
    ]
    assert "The engine failed and does not end" in ran.stderr


def test_hanging_start_is_ended_with_vllms_own_exception(program):
    ran = program(
        """
    def main():
        try:
            with oomguard.guard(start_within_s=3) as g:
                LLM("org/model")
        except RuntimeError as error:
            print(json.dumps([str(error), error.__notes__, shown(g)]))
    """,
        FAKE_DIES="hangs",
    )
    error, notes, attempts = json.loads(ran.stdout.splitlines()[-1])
    assert "Engine core initialization failed" in error
    assert notes == ["oomguard: stopped the start, because it took over 3 s"]
    assert attempts == [[1, [], "RuntimeError"]]


def test_a_time_that_is_none_is_refused(subtests):
    for seconds in [0, -1, float("nan")]:
        with (
            subtests.test(seconds=seconds),
            pytest.raises(oomguard.SettingError, match="start_within_s"),
        ):
            oomguard.guard(start_within_s=seconds)


def test_a_process_that_is_killed_is_told_with_its_signal(program):
    ran = program(
        """
    def main():
        try:
            with oomguard.guard() as g:
                LLM("org/model")
        except RuntimeError as error:
            print(json.dumps([error.__notes__[0], shown(g)]))
    """,
        FAKE_DIES="killed",
    )
    note, attempts = json.loads(ran.stdout.splitlines()[-1])
    assert "was killed by SIGKILL" in note
    assert attempts == [[1, [], "RuntimeError"]]


def test_other_failure_is_unchanged_after_a_memory_failure(program):
    ran = program(
        """
    def main():
        try:
            with oomguard.guard() as g:
                LLM("org/model")
        except RuntimeError as error:
            print(json.dumps([getattr(error, "__notes__", []), shown(g), g.diagnosis is None]))
    """,
        FAKE_DIES="other",
    )
    notes, attempts, is_silent = json.loads(ran.stdout.splitlines()[-1])
    assert attempts == [[1, [], "RuntimeError"]]
    assert notes == []
    assert is_silent


def test_later_failure_of_another_kind_does_not_hide_the_first(program):
    ran = program("""
    def main():
        change = lambda patch: os.environ.update(FAKE_DIES="other")
        try:
            with oomguard.guard(allow="reduces-capacity", on_patch=change) as g:
                LLM("org/model", **SMALL)
        except RuntimeError as error:
            print(json.dumps([error.__notes__[0], shown(g)]))
    """)
    note, attempts = json.loads(ran.stdout.splitlines()[-1])
    assert note.startswith("oomguard: One request of 32,768 tokens needs about")
    assert "  tried: max_model_len 32768 -> 1953: RuntimeError" in note
    assert len(attempts) == 2


def test_ctrl_c_while_the_engine_starts_leaves_nothing(program, tmp):
    ran = program(
        f"""{LEFT}
    import signal
    def main():
        before = dict(os.environ), logging.getLogRecordFactory(), os.readlink("/proc/self/fd/2")
        def stop():
            while not any("spawn_main" in " ".join(c.cmdline()) for c in psutil.Process().children()):
                time.sleep(0.05)
            time.sleep(1)
            os.kill(os.getpid(), signal.SIGINT)
        threading.Thread(target=stop).start()
        try:
            with oomguard.guard() as g:
                LLM("org/model")
        except KeyboardInterrupt as error:
            assert not hasattr(error, "__notes__")
            error = None
        gc.collect()
        assert (dict(os.environ), logging.getLogRecordFactory(), os.readlink("/proc/self/fd/2")) == before
        processes, _, threads, folders = left()
        print(json.dumps([processes, threads, folders, shown(g)]))
    """,
        FAKE_DIES="hangs",
        **tmp,
    )
    assert json.loads(ran.stdout.splitlines()[-1]) == [0, ["MainThread"], [], []]


def test_program_that_is_no_file_starts_its_engine_too(program):
    assert FITS in program(START, is_file=False).stdout


TROUBLE = """
    import oomguard.guarding.engine_start
    from oomguard.engines.vllm.in_process import start
    def trouble(*args, **kwargs):
        raise RuntimeError("trouble of ours")
"""


def test_trouble_of_ours_does_not_cost_the_program_its_engine(program):
    ran = program(f"""{TROUBLE}
    def main():
        oomguard.guarding.engine_start.StartRun._measured = start.remove_segments = trouble
        with oomguard.guard(allow="reduces-capacity") as g:
            llm = LLM("org/model", **SMALL)
        print(json.dumps(shown(g)))
        llm.shutdown()
    """)
    assert FITS in ran.stdout
    assert "trouble of ours" in ran.stderr


def test_trouble_of_ours_leaves_vllms_own_exception_as_it_is(program):
    ran = program(f"""{TROUBLE}
    def main():
        places = [
            (oomguard.guarding.engine_start, "scan_start"),
            (start.StartArguments, "settings_in_force"),
            (start, "_position"),
        ]
        for owner, name in places:
            own = getattr(owner, name)
            setattr(owner, name, trouble)
            try:
                with oomguard.guard(allow="reduces-capacity") as g:
                    LLM("org/model", **SMALL)
            except RuntimeError as error:
                print(json.dumps(str(error)))
            setattr(owner, name, own)
    """)
    errors = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith('"')]
    assert len(errors) == 3
    assert all(error.startswith("Engine core initialization failed.") for error in errors)
