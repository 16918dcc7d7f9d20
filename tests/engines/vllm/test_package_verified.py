"""An engine of a known version gets what that version has; one of an unknown version only what its own sources show."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from oomguard.engines.command import Launch
from oomguard.engines.vllm import package
from oomguard.engines.vllm.package import installed_package, is_known, may_carry, verified_versions

SERVE = ("vllm", "serve", "m")
UNKNOWN = "9.9.9"


@pytest.fixture(autouse=True)
def _said_anew():
    for cached in (package._say, package._read):
        cached.cache_clear()


@pytest.fixture
def environment(vllm_environment, monkeypatch) -> Path:
    """The package of an environment whose vllm program is on PATH."""
    folder = vllm_environment()
    monkeypatch.setenv("PATH", f"{folder / 'bin'}{os.pathsep}{os.defpath}")
    (package,) = folder.glob("lib/*/site-packages/vllm")
    return package


def scripts_of(package: Path) -> Path:
    return package.parents[3] / "bin"


def test_a_version_of_the_table_is_known(subtests):
    for version in [*verified_versions(), "0.32.7", "0.20.2.dev3+g1a2b", "0.12.0.post2"]:
        with subtests.test(version=version):
            assert is_known(version)


def test_any_other_version_is_not(subtests):
    for version in ["0.8.4", "0.6.6", "1.0.0", UNKNOWN, "0.320.0", "main", ""]:
        with subtests.test(version=version):
            assert not is_known(version)


def test_a_known_version_gets_what_it_has(subtests):
    for argv in [SERVE, ("python", "script.py")]:
        for name, version, carried in [
            ("max_model_len", "0.8.5", True),
            ("kv_cache_memory_bytes", "0.10.1", False),
            ("kv_cache_memory_bytes", "0.10.2", True),
            ("mamba_ssm_cache_dtype", "0.9.2", False),
            ("kv_cache_memory_bytes", None, True),  # not printed: the newest is assumed
        ]:
            with subtests.test(argv=argv, name=name, version=version, carried=carried):
                assert may_carry(Launch(argv, engine_version=version), name) is carried


def test_what_a_version_does_not_have_is_said_once():
    launch = Launch(SERVE, engine_version="0.9.2")
    with capture_logs() as logs:
        assert not [may_carry(launch, "kv_cache_memory_bytes") for _ in range(3)].count(True)

    assert [line["reason"] for line in logs] == ["vLLM 0.9.2 has no kv_cache_memory_bytes"]


def test_an_unknown_version_gets_the_flags_that_its_sources_show(environment):
    launch = Launch(SERVE, engine_version=UNKNOWN)

    assert may_carry(launch, "max_model_len")
    assert may_carry(launch, "gpu_memory_utilization")
    assert not may_carry(launch, "kv_cache_memory_bytes")


def test_script_of_an_unknown_version_uses_its_sources(environment):
    launch = Launch(("python3", "script.py"), engine_version=UNKNOWN)

    assert may_carry(launch, "max_model_len")
    assert not may_carry(launch, "enable_prefix_caching")  # a flag, and no argument


def test_script_of_an_unknown_version_without_hook_is_unchanged(environment, vllm_tree):
    vllm_tree("def create_engine_config", "def make_engine_config", at=environment.parent)
    with capture_logs() as logs:
        assert not may_carry(
            Launch(("python3", "script.py"), engine_version=UNKNOWN), "max_model_len"
        )

    assert "EngineArgs has no create_engine_config" in logs[0]["reason"]
    assert may_carry(Launch(SERVE, engine_version=UNKNOWN), "max_model_len")  # a flag needs no hook


def test_unknown_version_without_sources_is_unchanged(subtests, tmp_path, monkeypatch):
    for argv in [
        SERVE,
        ("python3", "script.py"),
        ("docker", "run", "vllm/vllm-openai", "--model", "m"),
    ]:
        with subtests.test(argv=argv):
            monkeypatch.setenv("PATH", str(tmp_path))
            package._say.cache_clear()
            with capture_logs() as logs:
                assert not may_carry(Launch(argv, engine_version=UNKNOWN), "max_model_len")

            assert (
                logs[0]["reason"]
                == f"oomguard does not know vLLM {UNKNOWN} and did not find its sources on this machine"
            )


def test_sources_that_are_no_python_are_left_alone(environment):
    (environment / "engine" / "arg_utils.py").write_text("class EngineArgs(:\n")

    assert not may_carry(Launch(SERVE, engine_version=UNKNOWN), "max_model_len")


def test_the_package_is_found_behind_what_keeps_the_python(subtests, environment):
    for before in [
        (),
        ("env", "X=1"),
        ("nice", "-n", "5"),
        ("timeout", "60"),
        ("python3",),
        ("python3", "-m", "vllm.entrypoints.cli.main"),
    ]:
        with subtests.test(before=before):
            argv = (
                (*before, "serve", "m")
                if before[-1:] == ("vllm.entrypoints.cli.main",)
                else (*before, *SERVE)
            )
            if before == ("python3",):
                argv = ("python3", "script.py", "--model", "m")

            assert (
                installed_package(Launch(argv), {"PATH": str(scripts_of(environment))})
                == environment
            )


def test_the_package_of_another_program_s_python_is_found(subtests, environment):
    scripts, before = scripts_of(environment), "vllm"
    for program, words in [
        ("lm_eval", ("--model", "vllm", "--model_args", "pretrained=m")),
        ("torchrun", ("--nproc-per-node", "2", "s.py")),
    ]:
        with subtests.test(program=program):
            (scripts / before).rename(scripts / program)
            before = program

            assert (
                installed_package(Launch((program, *words)), {"PATH": str(scripts)}) == environment
            )


def test_named_python_runs_a_script_whatever_its_first_line(environment, tmp_path):
    (tmp_path / "s.py").write_text("#!/usr/bin/python3\n")
    (tmp_path / "s.py").chmod(0o700)
    python = scripts_of(environment) / "python3"

    assert installed_package(Launch((str(python), str(tmp_path / "s.py"))), {}) == environment


def test_arguments_that_a_command_takes_need_no_hook(environment, vllm_tree):
    vllm_tree("def create_engine_config", "def make_engine_config", at=environment.parent)
    (scripts_of(environment) / "vllm").rename(scripts_of(environment) / "lm_eval")
    launch = Launch(
        ("lm_eval", "--model", "vllm", "--model_args", "pretrained=m"), engine_version=UNKNOWN
    )

    assert may_carry(launch, "max_model_len")


def test_interpreter_with_a_too_long_first_line_is_found(environment):
    scripts = scripts_of(environment)
    (scripts / "vllm").write_text(f"#!/bin/sh\n'''exec' {scripts}/python3 \"$0\" \"$@\"\n' '''\n")

    assert installed_package(Launch(SERVE), {"PATH": str(scripts)}) == environment


def test_no_package_is_named_where_another_python_may_run(subtests, environment):
    for argv in [
        ("uv", "run", *SERVE),
        ("conda", "run", "-n", "x", *SERVE),
        ("bash", "-c", "vllm serve m"),
    ]:
        with subtests.test(argv=argv):
            assert installed_package(Launch(argv), {"PATH": str(scripts_of(environment))}) is None


def test_folder_or_fifo_as_a_program_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "vllm", 0o700)

    assert installed_package(Launch(SERVE), {"PATH": str(tmp_path)}) is None
