"""The look at the whole machine: one that fails must not end the others."""

from __future__ import annotations

from oomguard.cli import doctor


def test_failed_check_is_unknown_and_the_others_still_run(monkeypatch):
    def broken(*_: object) -> None:
        raise RuntimeError("no such machine")

    monkeypatch.setattr(doctor, "plugin_checks", broken)
    checks = list(doctor.check_machine())

    (failed,) = [check for check in checks if check.id == "vllm_plugin"]
    assert (failed.status, failed.text) == (
        "unknown",
        "vllm_plugin: this check failed: RuntimeError: no such machine",
    )
    assert {"versions", "journal", "rules", "scanner"} <= {check.id for check in checks}
