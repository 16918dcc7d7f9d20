from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from oomguard.cluster.fleet import FleetSummary, IncidentSummary, SettingChange, summarize_findings
from oomguard.scan.inputs import Writer, writer_of


def change(
    new: int | str, old: int | None = 32768, setting: str = "max_model_len"
) -> SettingChange:
    return SettingChange(setting, old, new, f"--{setting} {new}", "reduces-capacity")


def finding(
    *changes: SettingChange, source: str = "a.log", cause: str = "kv_cache_budget", model: str | None = "org/m", at: float | None = None, version: str = "0.32.0"
) -> IncidentSummary:  # fmt: skip
    writer: Writer = writer_of(source)
    return IncidentSummary(
        source,
        7,
        None,
        writer,
        "cuda_oom",
        True,
        cause,
        "",
        "vllm",
        version,
        model,
        at,
        at and "line",
        changes,
    )


def of(*findings: IncidentSummary, since: float | None = None) -> FleetSummary:
    return summarize_findings(
        findings, inputs=9, failed=len({one.source for one in findings}), since=since
    )


def test_incidents_of_equal_cause_model_setting_are_one_group():
    same = finding(change(1000)), finding(change(2000), source="b.log")
    others = (
        finding(change(1, setting="max_num_seqs")),
        finding(model="org/n"),
        finding(cause="lora"),
        finding(version="0.9"),
    )
    summary = of(*same, *others)
    assert [group.incidents for group in summary.groups] == [2, 1, 1, 1, 1]
    assert summary.groups[0].inputs == 2


def test_lowest_value_fixes_a_lowered_setting():
    lowered = of(finding(change(1000)), finding(change(2000))).groups[0].fix
    raised = (
        of(*(finding(change(n, old=1, setting="tensor_parallel_size")) for n in (2, 4)))
        .groups[0]
        .fix
    )
    assert lowered is not None
    assert raised is not None
    assert (lowered.changes[0].new, lowered.fixes) == (1000, 2)
    assert (raised.changes[0].new, raised.fixes) == (4, 2)


def test_most_frequent_unordered_value_fixes_only_its_own():
    fix = (
        of(
            *(
                finding(change(value, old=None, setting="kv_cache_dtype"))
                for value in ("fp8", "fp8", "fp16")
            )
        )
        .groups[0]
        .fix
    )
    assert fix is not None
    assert (fix.changes[0].new, fix.fixes) == ("fp8", 2)


def test_incidents_without_a_solved_value_have_no_fix():
    summary = of(finding(), finding())
    assert summary.groups[0].fix is None
    assert summary.best is None


def test_best_group_fixes_most_and_need_not_be_the_largest():
    summary = of(*(finding(cause="lora") for _ in range(5)), finding(change(9)), finding(change(8)))
    assert summary.groups[0].cause == "lora"
    assert summary.best is summary.groups[1]


def test_first_and_last_seen_use_incidents_with_known_times():
    group = of(finding(at=5.0), finding(at=None), finding(at=2.0)).groups[0]
    assert (group.first_at, group.last_at) == (2.0, 5.0)


def test_since_leaves_out_what_is_known_to_be_older():
    summary = of(
        finding(at=5.0), finding(at=None, source="b"), finding(at=2.0, source="c"), since=3.0
    )
    assert summary.incidents == 2
    assert summary.failed == 2


def test_the_writers_with_most_incidents_come_first():
    sources = [
        "slurm-1.out",
        "slurm-2.out",
        "slurm-2.out",
        "slurm-3.out",
        "slurm-4.out",
        "slurm-5.out",
    ]
    group = of(*(finding(source=source) for source in sources)).groups[0]
    assert group.writers == (("job 2", 2), ("job 1", 1), ("job 3", 1))
    assert group.other_writers == 2


VALUES = st.one_of(
    st.none(),
    st.integers(1, 63).map(lambda n: change(512 * n)),
    st.integers(2, 9).map(lambda n: change(n, 1, "tensor_parallel_size")),
)


@given(
    st.lists(
        st.tuples(VALUES, st.sampled_from(["a", "b"]), st.one_of(st.none(), st.floats(0, 1e9))),
        max_size=30,
    )
)
def test_every_incident_is_in_one_group_with_bounded_fixes(
    made: list[tuple[SettingChange | None, str, float | None]],
):
    findings = [finding(*([one] if one else []), cause=cause, at=at) for one, cause, at in made]
    summary = of(*findings)
    assert summary.incidents == len(findings)
    for group in summary.groups:
        assert group.fix is None or 0 < group.fix.fixes <= group.incidents
        assert group.first_at is None or group.first_at <= (group.last_at or 0)


@given(st.lists(st.integers(1, 63), min_size=1))
def test_of_one_setting_that_is_lowered_one_value_fixes_all(values: list[int]):
    (group,) = of(*(finding(change(512 * value)) for value in values)).groups
    assert group.fix is not None
    assert group.fix.fixes == len(values)
    assert all(group.fix.changes[0].new <= 512 * value for value in values)


@given(st.permutations([finding(change(n), source=f"{n}.log", at=float(n)) for n in range(1, 7)]))
def test_the_order_of_the_inputs_changes_nothing(findings: list[IncidentSummary]):
    assert of(*findings) == of(*sorted(findings, key=lambda one: one.source))
