"""An engine that a program starts under a guard: started again where it failed for memory, left alone in all other cases."""

from __future__ import annotations

import json

LENGTH = "max_model_len 32768 -> 1953"

WAYS = {
    "keywords": 'LLM(model="org/model", **SMALL)',
    "a subclass": "Own(32768)",
    "EngineArgs": 'LLM.from_engine_args(EngineArgs("org/model", **SMALL))',
    "LLMEngine": 'LLMEngine.from_engine_args(EngineArgs("org/model", **SMALL))',
    "AsyncLLM": 'AsyncLLM.from_engine_args(AsyncEngineArgs("org/model", **SMALL))',
    "a subclass of AsyncLLM": 'OwnAsync.from_engine_args(AsyncEngineArgs("org/model", **SMALL))',
}


def test_every_front_end_gets_a_working_engine_with_one_start(program):
    made = ", ".join(f"{way!r}: lambda: {code}" for way, code in WAYS.items())
    ran = program(f"""
        from vllm.v1.engine.llm_engine import LLMEngine
        from vllm.v1.engine.async_llm import AsyncLLM
        class Own(LLM):
            def __init__(self, length):
                self.mine = ["made once"]
                super().__init__("org/model", max_model_len=length, kv_cache_memory_bytes=1_000_000)
        class OwnAsync(AsyncLLM):
            pass
        def main():
            found = {{}}
            for way, make in {{{made}}}.items():
                with oomguard.guard(allow="reduces-capacity") as g:
                    made = make()
                engine = getattr(made, "llm_engine", made)
                found[way] = [type(made).__name__, engine.vllm_config["max_model_len"], shown(g)]
                engine.engine_core.shutdown()
            print(json.dumps(found))
    """)
    found = json.loads(ran.stdout.splitlines()[-1])
    attempts = [[1, [], "RuntimeError"], [2, [LENGTH], ""]]
    assert {way: (length, tried) for way, (_, length, tried) in found.items()} == dict.fromkeys(
        WAYS, (1953, attempts)
    )
    assert (found["a subclass"][0], found["a subclass of AsyncLLM"][0]) == ("Own", "OwnAsync")


def test_engines_that_outlived_their_program_have_an_end_command(program):
    ran = program("""
        from oomguard.probe import checks
        def main():
            checks.vllm_orphans = lambda: ({4711: "VLLM::EngineCore"}, False)
            with oomguard.guard(allow="reduces-capacity"):
                llm = LLM("org/model", **SMALL)
            llm.llm_engine.engine_core.shutdown()
    """)
    assert (
        "vLLM processes without the process that started them: 4711 (VLLM::EngineCore)"
        in ran.stderr
    )
    assert "kill 4711" in ran.stderr


def test_next_start_waits_for_the_devices_memory(program):
    ran = program("""
        from oomguard import retry
        from oomguard.probe import nvml
        asked, since_failed = [], []
        def devices():
            asked.append(1)
            held = since_failed and len(asked) < since_failed[0] + 4
            return (nvml.Device(0, "GPU", 24 << 30, (4 if held else 20) << 30, {}),)
        nvml.devices, retry.FREE_POLL_S = devices, 0.01
        def main():
            waited = retry.wait_until_free
            def noted(*args, **options):
                since_failed.append(len(asked))
                return waited(*args, **options)
            retry.wait_until_free = noted
            with oomguard.guard(allow="reduces-capacity") as g:
                llm = LLM("org/model", **SMALL)
            print(json.dumps([len(since_failed), len(asked) - since_failed[0] >= 4, shown(g)]))
            llm.llm_engine.engine_core.shutdown()
    """)
    waits, was_asked_until_free, attempts = json.loads(ran.stdout.splitlines()[-1])
    assert (waits, was_asked_until_free) == (1, True)
    assert [error for _, _, error in attempts] == ["RuntimeError", ""]


def test_programs_other_arguments_and_object_stay(program):
    ran = program("""
        from vllm.v1.engine.llm_engine import LLMEngine
        def main():
            given = EngineArgs("org/model", **SMALL, enforce_eager=True, compilation_config={"mode": 3})
            with oomguard.guard(allow="reduces-capacity"):
                engine = LLMEngine.from_engine_args(given, usage_context="mine")
            engine.engine_core.shutdown()
            print(json.dumps([engine.vllm_config, given.max_model_len]))
    """)
    config, length = json.loads(ran.stdout.splitlines()[-1])
    assert (config["enforce_eager"], config["usage_context"]) == (True, "mine")
    assert config["compilation_config"] == {"mode": 3, "sizes": [1, 2, 4]}
    assert length == 32768


def test_restarted_engine_ends_when_the_program_releases_it(program):
    ran = program("""
        import gc, weakref
        def work():
            with oomguard.guard(allow="reduces-capacity"):
                llm = LLM("org/model", **SMALL)
            llm.shutdown()
            return weakref.ref(llm)
        def main():
            gc.disable()
            print("gone", work()() is None)
    """)
    assert ran.stdout.splitlines()[-1] == "gone True"


# What other programs left on this machine is named too.
ORPHANS = "vLLM processes without the process that started them"


def test_the_log_says_what_failed_and_what_is_changed(program):
    ran = program("""
        def main():
            with oomguard.guard(allow="reduces-capacity"):
                LLM("org/model", **SMALL).shutdown()
    """)
    said = [
        line
        for line in ran.stderr.splitlines()
        if line.startswith("oomguard: ") and ORPHANS not in line
    ]
    assert said[0].startswith("oomguard: Out of memory: kind=kv_cache_too_small_for_max_len")
    assert 'process="EngineCore pid=' in said[0]
    assert (
        said[1]
        == 'oomguard: This engine starts with reduced settings: max_model_len="32768 -> 1953"'
    )


def test_callbacks_and_the_guards_own_records_tell_what_happened(program):
    ran = program("""
        def main():
            told = []
            call = dict(on_incident=lambda i: told.append(i.kind), on_patch=lambda p: told.append(p.setting))
            with oomguard.guard(allow="reduces-capacity", **call) as g:
                LLM("org/model", **SMALL).shutdown()
            print(json.dumps([told, g.diagnosis.first_cause.framework_version, g.attempts[1].settings["max_model_len"]]))
    """)
    assert json.loads(ran.stdout.splitlines()[-1]) == [
        ["kv_cache_too_small_for_max_len", "max_model_len"],
        "0.32.0",
        1953,
    ]


POLICIES = {
    "": "you set it",
    'allow="reduces-capacity", pin=["max_model_len"]': "pinned",
    'allow="reduces-capacity", floors={"max_model_len": 4096}': "below your floor of 4096",
    'allow="output-preserving"': "does not permit",
    'allow="reduces-capacity", max_attempts=1': "max_model_len=1953",
}


def test_first_exception_has_cause_process_and_plan_at_the_end(subtests, program):
    ran = program(f"""
        def main():
            for policy in {list(POLICIES)}:
                try:
                    with eval(f"oomguard.guard({{policy}})") as g:
                        LLM("org/model", **SMALL)
                except RuntimeError as error:
                    frames = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
                    print(json.dumps([type(error).__name__, str(error), error.__notes__, frames, shown(g)]))
    """)
    found = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("[")]
    for (policy, why), (kind, message, notes, frames, attempts) in zip(
        POLICIES.items(), found, strict=True
    ):
        with subtests.test(policy=policy):
            assert kind == "RuntimeError"
            assert message.startswith("Engine core initialization failed. See root cause above.")
            (note,) = notes
            assert note.startswith(
                "oomguard: One request of 32,768 tokens needs about 20 MiB of KV cache, but 0.95 MiB is available"
            )
            assert "max_model_len_too_large" in note
            assert "  where: vllm 0.32.0, kv cache init, EngineCore pid=" in note
            assert why in note
            engines = [
                "__init__",
                "started",
                "from_engine_args",
                "started",
                "__init__",
                "__init__",
                "receive_ready",
            ]
            assert frames == ["main", *engines]
            assert attempts == [[1, [], "RuntimeError"]]


NOTE = (
    "oomguard: max_model_len is 1953, not 32768, because the engine ran out of memory with more; a request of this run needs 3001; "
    "floors={'max_model_len': 3001} keeps the guard from going below it"
)


REFUSALS = {
    "The decoder prompt (length 3000) is longer than the maximum model length of 1953.": True,
    "The decoder prompt (length 3000) is longer than the maximum model length of 500.": False,
    "The decoder prompt (length 40000) is longer than the maximum model length of 1953.": False,
    "something else": False,
}


def test_refused_request_after_our_change_names_the_change(program):
    ran = program(f"""
        def main():
            notes = []
            with oomguard.guard(allow="reduces-capacity") as g:
                LLM("org/model", **SMALL)
                for refusal in {list(REFUSALS)}:
                    try:
                        with g:
                            raise ValueError(refusal)
                    except ValueError as error:
                        notes.append(getattr(error, "__notes__", []))
            print(json.dumps(notes), flush=True)
            os._exit(0)
    """)
    notes = json.loads(ran.stdout.splitlines()[-1])
    assert notes == [[NOTE] * told for told in REFUSALS.values()]


def test_setting_left_alone_by_the_program_needs_no_permission(program):
    ran = program("""
        def main():
            with oomguard.guard() as g:
                LLM("org/model", kv_cache_memory_bytes=1_000_000).shutdown()
            print(json.dumps(shown(g)))
    """)
    assert json.loads(ran.stdout.splitlines()[-1])[1][1][0].endswith("-> 1953")


def test_existing_configuration_is_explained_and_not_changed(program):
    ran = program("""
        from vllm.v1.engine.llm_engine import LLMEngine
        def main():
            try:
                with oomguard.guard(allow="reduces-capacity") as g:
                    LLMEngine.from_vllm_config(EngineArgs("org/model", **SMALL).create_engine_config())
            except RuntimeError as error:
                print(json.dumps([error.__notes__, shown(g)]))
    """)
    (note,), attempts = json.loads(ran.stdout.splitlines()[-1])
    assert "max_model_len_too_large" in note
    assert attempts == [[1, [], "RuntimeError"]]


def test_a_start_that_works_is_left_as_it_is(program):
    ran = program("""
        def main():
            before = dict(os.environ), logging.getLogRecordFactory(), os.readlink("/proc/self/fd/2")
            with oomguard.guard() as g:
                llm = LLM("org/model")
            assert (dict(os.environ), logging.getLogRecordFactory(), os.readlink("/proc/self/fd/2")) == before
            print("own", round(sum(a.seconds for a in g.attempts), 3), json.dumps(shown(g)))
            llm.shutdown()
    """)
    assert ran.stdout.splitlines()[-1].endswith('[[1, [], ""]]')
    assert "event=" not in ran.stderr
    assert "core started" in ran.stderr


def test_without_a_guard_or_switched_off_a_failure_is_vllms_own(subtests, program):
    for env in [{"OOMGUARD_DISABLE": "1"}, {}]:
        with subtests.test(env=env):
            guard = (
                "oomguard.guard(allow='reduces-capacity')" if env else "contextlib.nullcontext()"
            )
            ran = program(
                f"""
        def main():
            oomguard.guard().__enter__().__exit__(None, None, None)
            with {guard}:
                LLM("org/model", **SMALL)
        """,
                check=False,
                **env,
            )
            assert ran.returncode == 1
            assert "oomguard:" not in ran.stderr
            assert "event=" not in ran.stderr


def test_a_thread_outside_the_guard_is_not_watched(program):
    ran = program("""
        def main():
            failed = []
            def start():
                try:
                    LLM("org/model", **SMALL)
                except RuntimeError as error:
                    failed.append(getattr(error, "__notes__", None))
            with oomguard.guard(allow="reduces-capacity") as g:
                thread = threading.Thread(target=start)
                thread.start()
                thread.join()
            print(json.dumps([failed, shown(g)]))
    """)
    assert json.loads(ran.stdout.splitlines()[-1]) == [[None], []]
