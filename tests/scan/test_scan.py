"""Finding incidents in logs: once each, with the process and the facts around them, and never in a healthy log."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import oomguard.scan.pattern_search as search_time
from oomguard.core.facts import GIB
from oomguard.core.incident import Diagnosis, Incident, SettingInForce
from oomguard.diagnosis import default_rules
from oomguard.rules.rule_files import RuleSet
from oomguard.rules.signature import Quotation, Signature, Wording, compile_pattern
from oomguard.scan.incidents import MAX_ALIKE
from oomguard.scan.scan import MAX_EVIDENCE_CHARS, Scanner, scan
from oomguard.scan.source import Gap, Line, LineSplitter

CORE = "(EngineCore_DP0 pid=771) ERROR 03-04 10:00:07 [core.py:708] "
CORE_INFO = "(EngineCore_DP0 pid=771) INFO 03-04 10:00:05 [gpu_worker.py:298] "
API = "(APIServer pid=770) "
TOO_LONG = (
    "ValueError: To serve at least one request with the model's max seq len (40960), (5.00 GiB KV cache is needed, "
    "which is larger than the available KV cache memory (3.25 GiB). Based on the available memory, the estimated "
    "maximum model length is 26624. Try increasing `gpu_memory_utilization` or decreasing `max_model_len` when "
    "initializing."
)
NONE_LEFT = "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when starting."
WRAPPER = "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore_DP0': 1}"
CUDA = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.69 GiB "
    "of which 512.00 MiB is free. Including non-PyTorch memory, this process has 23.10 GiB memory in use. Of the "
    "allocated memory 22.00 GiB is allocated by PyTorch, and 100.00 MiB is reserved by PyTorch but unallocated."
)
HEALTHY = (
    "INFO 03-04 10:00:01 [gpu_worker.py:300] Free memory on device (78.57/79.18 GiB) on startup. Desired GPU memory "
    "utilization is (0.9, 71.26 GiB). Actual usage is 15.2 GiB for weight."
)


def look(*log: str, rules: RuleSet | None = None, **kwargs) -> Diagnosis:
    raw = "\n".join(log).encode("utf-8", "surrogatepass")
    splitter = LineSplitter()
    return scan(
        [*splitter.feed(raw), *splitter.feed(b"", final=True)],
        rules or default_rules(),
        "a.log",
        **kwargs,
    )


def only(diagnosis: Diagnosis) -> Incident:
    (incident,) = diagnosis.incidents
    return incident


def values(incident: Incident) -> dict[str, object]:
    return {name: fact.value for name, fact in incident.facts.items()}


def echo(**arguments: object) -> str:
    return f"{API}INFO 03-04 10:00:00 [utils.py:233] non-default args: {arguments}"


def test_a_message_gives_its_kind_facts_and_place():
    incident = only(look("booting", CORE + TOO_LONG))

    assert (incident.kind, incident.framework, incident.phase) == (
        "kv_cache_too_small_for_max_len",
        "vllm",
        "kv_cache_init",
    )
    assert (incident.location.line, incident.location.byte) == (2, 8)
    assert incident.location.process == "EngineCore_DP0 pid=771"
    assert values(incident) == {
        "max_model_len_tokens": 40960,
        "kv_cache_needed_bytes": 5 * GIB,
        "kv_cache_available_bytes": round(3.25 * GIB),
        "estimated_max_model_len_tokens": 26624,
    }
    assert incident.message.startswith("To serve at least one request")
    assert incident.evidence[0].text == (CORE + TOO_LONG)[:MAX_EVIDENCE_CHARS]


def test_the_rounding_of_a_printed_size_is_kept_as_slack():
    assert only(look(TOO_LONG)).slack("kv_cache_needed_bytes") == 0.005 * GIB


def test_the_same_failure_of_several_processes_is_told_once():
    incident = only(look(CORE + TOO_LONG, "Traceback", CORE + TOO_LONG, API + TOO_LONG))

    assert incident.repeated == 3
    assert incident.location.line == 1


def test_failures_with_other_numbers_are_told_each():
    diagnosis = look(CUDA, "", CUDA.replace("allocate 2.00 GiB", "allocate 3.00 GiB"))

    assert [incident.facts["tried_bytes"].value for incident in diagnosis.incidents] == [
        2 * GIB,
        3 * GIB,
    ]
    assert [incident.repeated for incident in diagnosis.incidents] == [1, 1]


def test_incidents_come_in_the_order_of_time():
    diagnosis = look(CUDA, "", NONE_LEFT, "", TOO_LONG)

    assert [incident.location.line for incident in diagnosis.incidents] == [1, 3, 5]


def test_the_wrapper_is_dropped_beside_its_cause():
    assert (
        only(look(CORE + TOO_LONG, "Traceback", API + WRAPPER)).kind
        == "kv_cache_too_small_for_max_len"
    )
    assert only(look(API + WRAPPER, "", CORE + TOO_LONG)).kind == "kv_cache_too_small_for_max_len"


def test_the_wrapper_alone_is_a_dead_engine_and_no_oom():
    diagnosis = look(API + WRAPPER)

    assert only(diagnosis).kind == "engine_dead"
    assert not only(diagnosis).is_oom
    assert diagnosis.verdict == "no_oom"


DIED = "Worker proc VllmWorker-0 died unexpectedly (exit code: {}), shutting down executor."


@pytest.mark.parametrize("code", [-4, -9, -11])
@pytest.mark.parametrize("order", [1, -1], ids=["the worker first", "the wrapper first"])
def test_signal_that_ended_a_worker_is_a_fact_of_its_engine(code, order):
    lines = [
        CORE + DIED.format(code),
        API + "EngineDeadError: EngineCore encountered an issue. See stack trace (above).",
    ]
    diagnosis = look(*lines[::order])

    assert only(diagnosis).kind == "engine_dead"
    assert only(diagnosis).facts["exit_signal"].value == -code
    assert diagnosis.verdict == "no_oom"


@pytest.mark.parametrize("code", [1, 0, None])
def test_an_exit_code_of_its_own_is_no_signal(code):
    assert "exit_signal" not in only(look(CORE + DIED.format(code))).facts


def test_killed_worker_next_to_a_memory_failure_wraps_it():
    assert only(look(CORE + NONE_LEFT, CORE + DIED.format(-9))).kind == "kv_cache_none_left"
    assert only(look(CORE + DIED.format(-9), CORE + NONE_LEFT)).kind == "kv_cache_none_left"


@pytest.mark.parametrize("width", [100, 140, 90])
def test_an_allocator_s_message_wrapped_over_lines_is_read_whole(width):
    words, lines = CUDA.split(), [""]
    for word in words:
        if len(lines[-1]) + len(word) > width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()

    incident = only(look(*lines))

    assert len(lines) > 2
    assert values(incident) == values(only(look(CUDA)))
    assert incident.message == only(look(CUDA)).message


def test_a_wrapped_message_of_one_process_is_read_whole():
    first, second = CUDA.split(" of which ", 1)

    assert values(only(look(CORE + first, f"{CORE}of which {second}"))) == values(only(look(CUDA)))


def test_an_anchor_cut_over_two_lines_is_found_on_the_first():
    incident = only(
        look(
            "x",
            "ValueError: No available memory for the",
            "cache blocks. Try increasing",
            "`gpu_memory_utilization`",
        )
    )

    assert incident.kind == "kv_cache_none_left"
    assert incident.location.line == 2


def test_allocator_anchor_cut_over_two_lines_is_on_the_first():
    first, second = CUDA.split(" Including", 1)[0].split(" allocate ")

    incident = only(look("x", first, f"allocate {second}"))

    assert incident.location.line == 2
    assert incident.facts["tried_bytes"].value == 2 * GIB


def test_an_anchor_cut_by_the_end_of_a_segment_is_found():
    head, tail = CUDA[:30], CUDA[30:]
    diagnosis = scan(
        [Line(1, 0, "x" * 500 + head), Line(1, 530, tail, continued=True)], default_rules()
    )

    assert only(diagnosis).kind == "cuda_oom"


def test_cut_anchor_is_found_next_to_another_anchor():
    head, tail = NONE_LEFT.split(" blocks.")

    assert [incident.kind for incident in look(head, f"blocks.{tail}").incidents] == [
        "kv_cache_none_left"
    ]


def test_a_message_wrapped_before_its_anchor_is_found():
    first, second = TOO_LONG.split("(5.00 GiB", 1)

    found = look(first, f"(5.00 GiB{second}").incidents

    assert [incident.kind for incident in found] == ["kv_cache_too_small_for_max_len"]


def test_messages_of_interleaved_processes_are_kept_apart():
    first, second = CUDA.split(" of which ", 1)
    zero, one = "(Worker_TP0 pid=10) ", "(Worker_TP1 pid=11) "

    diagnosis = look(
        zero + first,
        one + first.replace("GPU 0", "GPU 1"),
        f"{zero}of which {second}",
        f"{one}of which {second}",
    )

    incident = only(diagnosis)  # ranks of one job fail together: one incident, the others named
    assert incident.location.process == "Worker_TP0 pid=10"
    assert incident.also_in == ("Worker_TP1 pid=11",)
    assert incident.facts["gpu_index"].value == 0
    assert incident.facts["allocated_bytes"].value == 22 * GIB


def test_windows_line_ends_change_nothing():
    log = [CORE_INFO + "Available KV cache memory: -1.50 GiB", CORE + NONE_LEFT, API + WRAPPER]

    assert values(only(look("\r\n".join(log)))) == values(only(look("\n".join(log))))


def test_colours_change_nothing():
    coloured = f"\x1b[1;36m(EngineCore_DP0 pid=771)\x1b[0;0m \x1b[31mERROR\x1b[0m 03-04 10:00:07 [core.py:708] {TOO_LONG}"

    incident = only(look(coloured))

    assert values(incident) == values(only(look(CORE + TOO_LONG)))
    assert incident.location.process == "EngineCore_DP0 pid=771"
    assert "\x1b" not in incident.evidence[0].text


def test_a_colour_inside_the_message_changes_nothing():
    marked = NONE_LEFT.replace("memory", "\x1b[01;31m\x1b[Kmemory\x1b[m\x1b[K")

    assert [incident.kind for incident in look(marked).incidents] == ["kv_cache_none_left"]


def test_context_before_and_after_a_failure_is_known_to_it():
    incident = only(
        look(
            CORE_INFO + "Model loading took 15.25 GiB and 3.1 seconds",
            CORE_INFO + "Available KV cache memory: -1.50 GiB",
            CORE + NONE_LEFT,
            f"{API}INFO 03-04 10:00:09 [model.py:7] Using max model len 4096",
        )
    )

    assert values(incident) == {
        "model_weights_bytes": round(15.25 * GIB),
        "kv_cache_available_bytes": round(-1.5 * GIB),
        "max_model_len_tokens": 4096,
    }
    assert [evidence.line for evidence in incident.evidence] == [3, 1, 2]


def test_what_the_message_says_wins_over_context():
    incident = only(
        look("Available KV cache memory: 9.99 GiB", TOO_LONG, "Available KV cache memory: 8.88 GiB")
    )

    assert incident.facts["kv_cache_available_bytes"].value == round(3.25 * GIB)


def test_the_context_that_came_last_before_the_failure_counts():
    incident = only(
        look(
            "Available KV cache memory: 9.99 GiB", "Available KV cache memory: -1.00 GiB", NONE_LEFT
        )
    )

    assert incident.facts["kv_cache_available_bytes"].value == -GIB


def test_context_before_the_failure_wins_over_context_after_it():
    incident = only(
        look(
            "Available KV cache memory: -1.00 GiB",
            NONE_LEFT,
            "x",
            "Available KV cache memory: 9.99 GiB",
        )
    )

    assert incident.facts["kv_cache_available_bytes"].value == -GIB


def test_the_version_the_engine_printed_is_the_incident_s():
    start = f"{CORE_INFO}Initializing a V1 LLM engine (v0.11.2) with config: model='m'"

    assert only(look(start, CORE + NONE_LEFT)).framework_version == "0.11.2"
    assert only(look(CORE + NONE_LEFT)).framework_version is None


def test_an_echo_gives_settings_and_what_was_not_set():
    incident = only(
        look(echo(model="org/m", max_model_len=40960, gpu_memory_utilization=0.5), CORE + NONE_LEFT)
    )

    assert {name: setting.value for name, setting in incident.settings.items()} == {
        "model": "org/m",
        "max_model_len": 40960,
        "gpu_memory_utilization": 0.5,
    }
    assert all(setting.set_by_user for setting in incident.settings.values())
    assert incident.settings_complete
    facts = values(incident)
    assert facts["gpu_memory_utilization_ratio"] == 0.5
    assert facts["gpu_memory_utilization_set"] is True
    assert facts["max_model_len_set"] is True
    assert facts["kv_cache_memory_bytes_set"] is False
    assert facts["num_gpu_blocks_override_set"] is False


def test_without_an_echo_nothing_is_said_of_what_was_set():
    incident = only(look(CORE + NONE_LEFT))

    assert not incident.settings_complete
    assert not [name for name in incident.facts if name.endswith("_set")]


def test_echo_of_odd_objects_gives_only_plain_values():
    line = echo(model=True, gpu_memory_utilization="much", max_model_len=None, enforce_eager=True)
    incident = only(look(line[:-1] + ", 'compilation_config': <object at 0x7f>}", CORE + NONE_LEFT))

    assert "compilation_config" not in incident.settings
    assert "gpu_memory_utilization_ratio" not in incident.facts
    assert "max_model_len_tokens" not in incident.facts
    assert incident.facts["enforce_eager"].value is True


def test_given_settings_win_over_the_echo():
    given_settings = {
        "gpu_memory_utilization": SettingInForce("gpu_memory_utilization", 0.7, True, "command")
    }

    incident = only(look(echo(gpu_memory_utilization=0.5), CORE + NONE_LEFT, given=given_settings))

    assert incident.facts["gpu_memory_utilization_ratio"].value == 0.7
    assert incident.settings["gpu_memory_utilization"].source == "command"


def test_a_command_line_says_all_that_the_user_set():
    given_settings = {"max_model_len": SettingInForce("max_model_len", 8192, True, "command")}

    incident = only(look(CORE + NONE_LEFT, given=given_settings))

    assert incident.settings_complete
    assert incident.facts["gpu_memory_utilization_set"].value is False


def test_the_message_s_own_facts_win_over_all_settings():
    given_settings = {"max_model_len": SettingInForce("max_model_len", 1234, True, "command")}

    incident = only(look(echo(max_model_len=8192), CORE + TOO_LONG, given=given_settings))

    assert incident.facts["max_model_len_tokens"].value == 40960


def test_an_echo_wrapped_over_lines_does_not_deny_what_was_set():
    first, second = echo(model="org/m", gpu_memory_utilization=0.5).split(" 'gpu", 1)

    incident = only(look(first, f" 'gpu{second}", CORE + NONE_LEFT))

    said = incident.facts.get("gpu_memory_utilization_set")
    assert said is None or said.value is not False


def test_the_memory_of_all_other_processes_is_added_up():
    both = CUDA.replace(
        "Including",
        "Process 12 has 1.00 GiB memory in use. Process 13 has 2.00 GiB memory in use. Including",
    )

    assert only(look(both)).facts["other_process_in_use_bytes"].value == 3 * GIB


@pytest.mark.parametrize(
    "log",
    [
        HEALTHY,
        f"{CORE_INFO}Available KV cache memory: 50.10 GiB",
        f"{CORE_INFO}GPU KV cache size: 2,013,440 tokens",
        "except torch.cuda.OutOfMemoryError: print('CUDA out of memory.')",
        "user asks: what does 'CUDA out of memory' mean?",
        "WARNING: the bloom filter has no room",
        "INFO 127.0.0.1 POST /v1/completions 200 OK",
        "",
    ],
)
def test_a_healthy_log_has_no_incident(log):
    diagnosis = look(log)

    assert diagnosis.incidents == ()
    assert diagnosis.verdict == "no_oom"


def test_start_below_its_utilization_differs_from_a_healthy_one():
    line = (
        "ValueError: Free memory on device cuda:0 (7.57/23.64 GiB) on startup is less than desired GPU memory "
        "utilization (0.92, 21.75 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes."
    )

    assert only(look(HEALTHY, line)).kind == "startup_free_memory_below_utilization"


def test_first_failures_of_a_wording_and_the_newest_are_kept():
    sizes = range(1, 2 * MAX_ALIKE)
    diagnosis = look("\n\n".join(CUDA.replace("2.00 GiB", f"{size}.00 GiB") for size in sizes))

    tried = [incident.facts["tried_bytes"].value >> 30 for incident in diagnosis.incidents]
    assert tried == [*range(1, MAX_ALIKE), sizes[-1]]
    assert any(note.startswith(f"{MAX_ALIKE - 1} more lines") for note in diagnosis.notes)


def test_what_was_last_seen_before_a_time_can_be_left_out():
    scanner = Scanner(default_rules())
    scanner.push(Line(1, 0, CUDA))
    scanner.flush()
    later = time.monotonic()
    time.sleep(0.01)
    scanner.push(Line(2, 0, NONE_LEFT))

    assert [incident.kind for incident in scanner.diagnosis(newer_than_s=later).incidents] == [
        "kv_cache_none_left"
    ]


def test_measured_holds_the_numbers_of_healthy_lines():
    scanner = Scanner(default_rules())
    for number, text in enumerate(
        ["Available KV cache memory: 2.00 GiB", "Resolved architecture: LlamaForCausalLM"]
    ):
        scanner.push(Line(number, 0, text))
    scanner.flush()

    assert scanner.measured == {"kv_cache_available_bytes": 2 * GIB}


def test_a_pattern_that_takes_too_long_is_left_out_and_noted(monkeypatch):
    monkeypatch.setattr(search_time, "SEARCH_TIMEOUT_S", 0.2)
    slow = compile_pattern("slow: (?:a|a|aa)+b", path="slow.toml", key="pattern")
    fast = compile_pattern("boom (?P<tried_bytes>[0-9]+)", path="fast.toml", key="pattern")
    rules = RuleSet(
        (
            Signature(
                "slow.toml", "cuda_oom", "torch", "unknown", (Wording("slow: ", slow, "here"),), ()
            ),
            Signature(
                "fast.toml", "cuda_oom", "torch", "unknown", (Wording("boom ", fast, "here"),), ()
            ),
        ),
        (),
    )
    start = time.process_time()

    diagnosis = look(*["slow: " + "a" * 4000, ""] * 20, "boom 12", rules=rules)

    assert time.process_time() - start < 5
    assert diagnosis.notes == (
        "slow.toml: a pattern for 'slow: ' exceeded its time limit, so oomguard skipped it",
    )
    assert only(diagnosis).facts["tried_bytes"].value == 12


def slow_signatures(count: int) -> tuple[Signature, ...]:
    slow = [
        compile_pattern(f"slow {n}: (?:a|a|aa)+b", path="s.toml", key="pattern")
        for n in range(count)
    ]
    return tuple(
        Signature(
            f"slow{n}.toml",
            "cuda_oom",
            "torch",
            "unknown",
            (Wording(f"slow {n}: ", pattern, "here"),),
            (),
        )
        for n, pattern in enumerate(slow)
    )


def test_many_slow_patterns_share_one_limit(monkeypatch):
    monkeypatch.setattr(search_time, "SHARED_S", 0.5)
    fast = compile_pattern("boom (?P<tried_bytes>[0-9]+)", path="fast.toml", key="pattern")
    own = Signature(
        "fast.toml", "cuda_oom", "torch", "unknown", (Wording("boom ", fast, "here"),), ()
    )
    log = [line for n in range(60) for line in (f"slow {n}: {'a' * 4000}", "")]
    start = time.process_time()

    diagnosis = look(*log, "boom 12", rules=RuleSet((*slow_signatures(60), own), ()))

    # Half a second for each of them would be 30 seconds; here it is the shared one and 0.02 for each.
    assert time.process_time() - start < 10
    told = [
        f"slow{n}.toml: a pattern for 'slow {n}: ' exceeded its time limit, so oomguard skipped it"
        for n in range(60)
    ]
    assert (
        diagnosis.notes[0]
        == "slow patterns took 0.5 s in total; after that oomguard skipped each search after 20 ms"
    )
    assert list(diagnosis.notes[1:]) == told
    assert only(diagnosis).facts["tried_bytes"].value == 12


def test_a_quotation_that_takes_too_long_is_left_out_and_noted(monkeypatch):
    monkeypatch.setattr(search_time, "SEARCH_TIMEOUT_S", 0.1)
    slow = compile_pattern(r"(?:a|a|aa)+\d\Z", path="q.toml", key="pattern")
    boom = compile_pattern("boom (?P<tried_bytes>[0-9]+)", path="boom.toml", key="pattern")
    own = Signature(
        "boom.toml", "cuda_oom", "torch", "unknown", (Wording("boom ", boom, "here"),), ()
    )
    start = time.process_time()

    log = [line for n in range(50) for line in (f"{'a' * 4000} boom {n}", "")]
    diagnosis = look(
        *log, rules=RuleSet((own,), (), (Quotation("slow one", slow, "before", (), ()),))
    )

    assert time.process_time() - start < 5
    assert diagnosis.notes == (
        "quotation 'slow one': its pattern exceeded its time limit, so oomguard skipped it",
    )


def test_a_size_beyond_any_double_is_left_out():
    assert "tried_bytes" not in only(look(CUDA.replace("2.00", "9" * 400))).facts


def test_an_echo_of_a_number_of_thousands_of_digits_is_left_out():
    look(f"non-default args: {{'max_model_len': {'9' * 5000}}}", NONE_LEFT)


# Laws -----------------------------------------------------------------------------------------------------------

pieces = st.sampled_from(
    [
        CORE,
        API,
        TOO_LONG,
        NONE_LEFT,
        WRAPPER,
        CUDA,
        HEALTHY,
        echo(max_model_len=1),
        "\x1b[31m",
        "\r",
        " ",
        "(",
        "1.2.3",
        "GiB",
    ]
)
fragments = pieces | st.builds(
    lambda text, start, end: text[start:end], pieces, st.integers(0, 60), st.integers(60, 400)
)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.text(max_size=40) | fragments | st.just("\n"), max_size=25).map("".join))
def test_scanning_any_text_never_raises(text):
    for incident in look(text).incidents:
        assert incident.repeated >= 1
        assert incident.location.line is not None


@settings(deadline=None, max_examples=50)
@given(
    st.lists(
        st.sampled_from(
            ["booting", "", HEALTHY, "Traceback (most recent call last):", '  File "x.py"']
        ),
        max_size=30,
    )
)
def test_lines_around_a_failure_do_not_change_it(noise):
    incident = only(look(*noise, "", TOO_LONG, *noise))

    assert values(incident) == values(only(look(TOO_LONG)))
    assert incident.location.line == len(noise) + 2


def test_line_after_a_gap_does_not_continue_the_one_before():
    pattern = compile_pattern(
        r"boom of(?:\s(?P<tried_bytes>[0-9]+))?", path="boom.toml", key="pattern"
    )
    boom = Signature(
        "boom.toml", "cuda_oom", "torch", "unknown", (Wording("boom of", pattern, "here"),), ()
    )

    def tried(*between: Gap) -> int | None:
        lines = [Line(1, 0, "boom of"), *between, Line(2, 8, "12"), Line(3, 11, "")]
        facts = only(scan(lines, RuleSet((boom,), ()))).facts
        return int(facts["tried_bytes"].value) if "tried_bytes" in facts else None

    assert tried() == 12
    assert tried(Gap()) is None


def test_frames_between_a_cause_and_its_wrapper_lead_to_both():
    """The sampler's failure is printed first, with few frames; those above it say that the engine was profiling."""
    found = only(
        look(
            "[rank0]: Traceback (most recent call last):",
            '[rank0]:   File "vllm/v1/sample/sampler.py", line 289, in sample',
            f"[rank0]: {CUDA}",
            "[rank0]: ",
            "[rank0]: The above exception was the direct cause of the following exception:",
            "[rank0]: Traceback (most recent call last):",
            *['[rank0]:   File "vllm/v1/executor/abstract.py", line 163, in collective_rpc'] * 20,
            '[rank0]:   File "vllm/v1/worker/gpu_worker.py", line 693, in determine_available_memory',
            *['[rank0]:   File "vllm/v1/worker/gpu_model_runner.py", line 6220, in call'] * 20,
            "[rank0]: RuntimeError: CUDA out of memory occurred when warming up sampler with 1024 dummy requests. Please "
            "try lowering `max_num_seqs` or `gpu_memory_utilization` when initializing the engine.",
        )
    )
    assert found.kind == "sampler_warmup_oom"
    assert values(found)["profiling_frames"] is True


def test_frames_far_behind_the_only_message_are_its_own():
    between = "\n".join(f"  line {number} of a report" for number in range(30))
    frames = 'Traceback (most recent call last):\n  File "fit.py", line 9, in main\n    loss.backward()\n'
    told = "RuntimeError: CUDA error: out of memory\n"

    def phases(text):
        lines = (Line(number, 0, line) for number, line in enumerate(text.split("\n"), 1))
        return [one.phase for one in scan(lines, default_rules()).incidents]

    assert phases(f"{told}{between}\n{frames}") == ["training"]
    assert (
        phases(f"{told}{between}\n{frames}ValueError: No available memory for the cache blocks.\n")[
            0
        ]
        == "unknown"
    )
