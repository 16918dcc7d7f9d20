"""`make vllm-versions`: what is stated of a version and not borne out by its sources is told, and turns the target red."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

import vllm_versions
from oomguard.core.settings import SETTINGS, surfaces, unmanaged_arguments
from oomguard.engines.command import all_flags
from oomguard.engines.vllm.package import added_arguments, parsed, read_sources
from support.vllm_defaults import batch_defaults
from support.vllm_guard import guard_rows
from support.vllm_printed import Looked, log_rows
from support.vllm_printed import text_row as row_of
from support.vllm_rows import ABSENT, THERE, Row, argument_rows, caller_rows
from support.vllm_texts import printed_texts, traced_lines
from support.vllm_wheels import cached

VERSION = "0.32.0"
HOOK = ("hook", "EngineArgs.create_engine_config")


def rows(package: Path, version: str = VERSION, **only_in: str) -> dict[tuple[str, str], Row]:
    return {(row.kind, row.name): row for row in argument_rows(package, version, only_in)}


def test_what_the_sources_have_as_stated_holds(vllm_tree):
    found = rows(vllm_tree())

    assert found[HOOK].holds
    assert found["flag", "--max-model-len"].holds
    assert found["default", "gpu_memory_utilization"] == Row(
        "default", "gpu_memory_utilization", "0.92", "0.92"
    )


def test_a_hook_that_is_removed_is_told(vllm_tree):
    found = rows(vllm_tree("def create_engine_config", "def make_engine_config"))[HOOK]

    assert (found.holds, found.found) == (False, "its EngineArgs has no create_engine_config")


def test_a_default_that_differs_is_told(vllm_tree):
    found = rows(vllm_tree("default=0.92", "default=0.93"))["default", "gpu_memory_utilization"]

    assert (found.holds, found.stated, found.found) == (False, "0.92", "0.93")


def test_a_default_is_that_of_the_version(vllm_tree):
    assert rows(vllm_tree("default=0.92", "default=0.9"), "0.14.0")[
        "default", "gpu_memory_utilization"
    ].holds


def test_a_flag_that_is_gone_and_one_that_comes_early_are_told(vllm_tree):
    gone = rows(vllm_tree("--max-model-len", "--max-length"))["flag", "--max-model-len"]
    early = rows(vllm_tree(), "0.14.0", **{"--device-memory-utilization": ">=0.31"})[
        "flag", "--device-memory-utilization"
    ]

    assert (gone.stated, gone.found) == (THERE, ABSENT)
    assert (early.stated, early.found) == (ABSENT, THERE)


def test_a_flag_of_some_versions_is_stated_absent_in_the_others(vllm_tree):
    package = vllm_tree()

    assert rows(package, "0.9.2")["flag", "--kv-cache-memory-bytes"].holds
    assert not rows(package, "0.10.2")["flag", "--kv-cache-memory-bytes"].holds


def test_a_module_that_no_longer_reaches_the_hook_is_told(vllm_tree):
    package = vllm_tree()
    (package / "llm.py").write_text("config = engine_args.create_engine_config(context)\n")
    (package / "server.py").write_text("config = engine_args.create_model_config()\n")

    found = list(
        caller_rows(
            package, VERSION, {"vllm/llm.py": "", "vllm/server.py": "", "vllm/gone.py": "<0.20"}
        )
    )

    assert [row.holds for row in found] == [True, False, True]


BATCH = """
class EngineArgs:
    def get_batch_defaults(cls, world_size):
        if device_memory >= 70 * GiB_bytes and "a100" not in device_name:
            default_max_num_seqs = {UsageContext.LLM_CLASS: 2048, UsageContext.OPENAI_API_SERVER: 1024}
        else:
            default_max_num_seqs = {UsageContext.LLM_CLASS: 512, UsageContext.OPENAI_API_SERVER: 256}
        if current_platform.is_cpu():
            default_max_num_seqs = {UsageContext.OPENAI_API_SERVER: 128 * world_size}
"""


def test_defaults_by_size_of_device_are_read_from_the_branches(tmp_path):
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "arg_utils.py").write_text(BATCH)

    values = {"large": 1024, "huge": 1024, "small": 256, "cpu": 128}
    assert batch_defaults(tmp_path) == {
        ("max_num_seqs", size): value for size, value in values.items()
    }


PRINTS = '''
"""No available memory, says a docstring."""
logger.info("KV cache size: %s tokens, " "at %.2fx", tokens, share)
raise ValueError(f"length {length} is more than {format_gib(free)} GiB" + (" here" if here else ""))
message = "Free {:.2f} of {total}".format(free, total=total)
parts = ["prompt %.1f tokens/s", "generation %.1f tokens/s"]
@dataclass
class Output:
    blocks: list[int]
def load():
    logger.info("Loading %s", model)
for item in tqdm(items, desc="Loading shards"):
    output = self.visual(item)
'''


def test_a_text_is_found_however_it_is_put_together(subtests, tmp_path):
    for pattern in [
        r"KV cache size: [\d,]+ tokens, at \d\.\d+x",
        r"length \d+ is more than \d\.\d+ GiB here",
        r"Free \d\.\d\d of \d+",
        r"prompt \d\.\d+ tokens/s, generation \d\.\d+ tokens/s",
        r"Output\(blocks=\[\d",
        r"Loading \w+$",
        r"Loading shards:",
    ]:
        with subtests.test(pattern=pattern):
            assert text_row(pattern, tmp_path).found == THERE


def test_a_text_that_is_not_printed_so_is_told(subtests, tmp_path):
    for pattern, found in [
        (r"No available memory", ABSENT),  # a docstring prints nothing
        (r"KV cache size: \d+ blocks", "its words are there, the pattern matches none of them"),
        (r"something else", ABSENT),
    ]:
        with subtests.test(pattern=pattern, found=found):
            assert text_row(pattern, tmp_path).found == found


def text_row(pattern: str, folder: Path) -> Row:
    package = folder / "vllm"
    package.mkdir(exist_ok=True)
    (package / "prints.py").write_text(PRINTS)
    anchor = re.split(r"[\\(\[]", pattern)[0].removesuffix("\\").removesuffix("=")
    return row_of(
        Looked("x", (anchor,), None, re.compile(pattern).search),
        printed_texts(package, [anchor]),
        stated=True,
    )


def test_a_traceback_shows_functions_and_lines(tmp_path):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "prints.py").write_text(PRINTS)

    shown = {
        line.strip()
        for _module, line in traced_lines(tmp_path / "vllm", {"self.visual(", "in load"})
    }

    frame = 'File "vllm/prints.py", line 1, in load'
    assert shown > {frame, "output = self.visual(item)"}
    assert {line.partition("\n")[0] for line in shown} == {frame, "output = self.visual(item)"}
    assert f"{frame}\n    output = self.visual(item)" in shown


def test_another_form_of_a_log_line_is_told(subtests, tmp_path):
    for form, holds in [
        (
            '_FORMAT = (f"{PREFIX}%(levelname)s %(asctime)s " "[%(fileinfo)s:%(lineno)d] %(message)s")',
            True,
        ),
        (
            '_FORMAT = (f"{PREFIX}(%(vllm_process_name)s " "pid=%(process)d) %(levelname)s %(asctime)s [%(fileinfo)s:%(lineno)d] %(message)s")',
            True,
        ),
        ('_FORMAT = f"{PREFIX}<<%(levelname)s>> %(message)s"', False),
    ]:
        with subtests.test(form=form, holds=holds):
            package = tmp_path / "vllm"
            package.mkdir(exist_ok=True)
            (package / "logger.py").write_text(form + "\n")
            (package / "prefix.py").write_text(
                'prefix = f"{CYAN}({worker_name} pid={pid}){RESET} "\n'
            )

            assert [row.holds for row in log_rows(package, VERSION)] == [holds, True]


def test_what_moved_is_told_and_what_stayed_is_not():
    before = [
        Row("flag", "--a", THERE, ABSENT),
        Row("text", "b", THERE, THERE, "vllm/old.py"),
        Row("flag", "--c", THERE, THERE),
    ]
    after = [
        Row("flag", "--a", THERE, THERE),
        Row("text", "b", THERE, THERE, "vllm/new.py"),
        Row("flag", "--c", THERE, THERE),
    ]

    assert list(vllm_versions.moved(before, after)) == [
        "flag --a: absent -> there",
        "text b: vllm/old.py -> vllm/new.py",
    ]


def test_target_is_red_for_differences_and_unread_versions(subtests, monkeypatch, capsys):
    def check(version, found, status, said):
        monkeypatch.setattr(vllm_versions, "package_of", lambda *_: Path("vllm"))
        monkeypatch.setattr(
            vllm_versions, "relied_on", lambda *_: iter([Row("flag", "--a", THERE, found)])
        )
        monkeypatch.setattr("sys.argv", ["vllm_versions.py", version])

        with pytest.raises(SystemExit) as ended:
            vllm_versions.main()

        assert ended.value.code == status
        assert said in capsys.readouterr().out

    for version, found, status, said in [
        ("0.32.0", THERE, 0, "1 of 1 as stated (goal: all): met"),
        ("0.32.0", ABSENT, 1, "NOT AS STATED  flag --a: stated there, found absent"),
        ("9.9.9", THERE, 1, "NOT IN THE TABLE"),
    ]:
        with subtests.test(version=version, found=found, status=status, said=said):
            check(version, found, status, said)


def no_registry(*_: object) -> str:
    raise subprocess.CalledProcessError(
        1, "pip", stderr="WARNING: x\nERROR: no registry is reached\n"
    )


def test_newest_version_in_the_registry_is_read_if_reachable(monkeypatch, capsys):
    monkeypatch.setattr(vllm_versions, "newest", lambda _cache: "0.9.1")
    assert vllm_versions.asked_versions([], ["0.8.5", "0.10.0"]) == ["0.8.5", "0.9.1", "0.10.0"]
    assert vllm_versions.asked_versions(["0.10.0"], ["0.8.5"]) == ["0.10.0"]

    monkeypatch.setattr(vllm_versions, "newest", no_registry)
    assert vllm_versions.asked_versions([], ["0.8.5"]) == ["0.8.5"]
    assert (
        capsys.readouterr().out
        == "the newest version is not known: ERROR: no registry is reached\n"
    )


def test_without_all_wheels_the_target_is_not_green(subtests, monkeypatch, capsys):
    def check(kept, status, said):
        monkeypatch.setattr(
            vllm_versions,
            "package_of",
            lambda version, _cache: Path() if version in kept else no_registry(),
        )
        monkeypatch.setattr(
            vllm_versions, "relied_on", lambda *_: iter([Row("flag", "--a", THERE, THERE)])
        )
        monkeypatch.setattr("sys.argv", ["vllm_versions.py", "0.14.0", "0.32.0"])

        with pytest.raises(SystemExit) as ended:
            vllm_versions.main()

        assert ended.value.code == status
        assert said in capsys.readouterr().out

    for kept, status, said in [
        ({}, 77, "skipped: no wheel can be had"),
        ({"0.32.0"}, 1, "1 of 2 versions"),
    ]:
        with subtests.test(kept=kept, status=status, said=said):
            check(kept, status, said)


@pytest.fixture
def real() -> Path:
    """The real sources, where the target has unzipped them."""
    found = cached(vllm_versions.CACHE).get(VERSION) or _installed()
    if found is None:
        pytest.skip(f"the sources of vLLM {VERSION} are not in .sources: make vllm-versions")
    return found


def test_real_sources_match_and_a_missing_hook_is_reported(real, tmp_path):
    data = vllm_versions.stated()
    package = tmp_path / "vllm"
    for part in ("engine", "plugins", "config"):
        shutil.copytree(real / part, package / part)

    assert [row for row in argument_rows(package, VERSION, data["flags"]) if not row.holds] == []
    arguments = package / "engine" / "arg_utils.py"
    arguments.write_text(
        arguments.read_text(encoding="utf-8").replace(
            "def create_engine_config(", "def make_config("
        )
    )
    assert not rows(package)[HOOK].holds


def _installed() -> Path | None:
    """The package in the environment of the tests with the real engine, which a path file leads to."""
    files = Path(vllm_versions.HERE.parent).glob(".venv-vllm/lib/python*/site-packages/*.pth")
    lines = (line for path in files for line in path.read_text(encoding="utf-8").splitlines())
    return next(
        (found for line in lines if (found := Path(line) / "vllm").is_dir() and VERSION in line),
        None,
    )


TAKEN = {
    "def from_engine_args(": "vllm.v1.engine.llm_engine.LLMEngine.from_engine_args",
    "class SyncMPClient(": "vllm.v1.engine.core_client.SyncMPClient.add_request",
    "self.resources": "vllm.v1.engine.core_client.MPClient.resources",
    "self.output_handler": "vllm.v1.engine.async_llm.AsyncLLM.output_handler",
    "class EngineCoreOutput(": "vllm.v1.engine.EngineCoreOutput",
    "Sleep mode freed": "Sleep mode freed",
    "Dumping scheduler output": "Dumping scheduler output",
}


def test_guard_reserve_is_present_and_reported_if_missing(real, tmp_path):
    package, only_in = tmp_path / "vllm", vllm_versions.stated()["guard"]
    for part in ("v1/engine", "v1/core", "v1/executor", "v1/worker", "logging_utils"):
        shutil.copytree(
            real / part, package / part, ignore=shutil.ignore_patterns("*.so", "__pycache__")
        )
    assert [row for row in guard_rows(package, VERSION, only_in) if not row.holds] == []

    for path in package.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for taken in TAKEN:
            text = text.replace(taken, taken[:-1] + "x" + taken[-1:])
        path.write_text(text, encoding="utf-8")
    missed = {row.name for row in guard_rows(package, VERSION, only_in) if not row.holds}
    assert set(TAKEN.values()) <= missed


ARGUMENTS = vllm_versions.HERE.parent / "oomguard" / "engines" / "vllm" / "arguments.toml"
PARTS = set(tomllib.loads(ARGUMENTS.read_text(encoding="utf-8"))["parts_of_settings"])


def test_every_argument_is_a_setting_or_one_that_is_left_alone(real):
    rows = [own for newest in surfaces("vllm").values() for own in (newest, *newest.others)]
    inside = {
        flag.removeprefix("--").replace("-", "_") for own in rows for flag, _key in own.inside
    }
    known = (
        {own.kwarg for own in rows}
        | unmanaged_arguments()
        | inside
        | set(SETTINGS)
        | {"model"}
        | PARTS
    )
    assert [
        name
        for name in read_sources(real).arguments
        if name not in known and not name.startswith("_")
    ] == []
    assert not unmanaged_arguments() & set(SETTINGS)


def test_every_flag_of_the_server_is_known_to_a_plan(real):
    files = [real / "engine" / "arg_utils.py", real / "entrypoints" / "launchers" / "cli_args.py"]
    trees = [parsed(path) for path in (*files, real / "entrypoints" / "cli" / "serve.py")]
    added = {flag for tree in trees for flags, _call in added_arguments(tree) for flag in flags}
    fields = {
        f"--{line.target.id.replace('_', '-')}"
        for owner in trees[1].body
        for line in (
            owner.body
            if isinstance(owner, ast.ClassDef) and owner.name.endswith("FrontendArgs")
            else ()
        )
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    }
    flags = all_flags("vllm")

    assert len(added) > 200
    assert len(fields) > 30
    exact = {*(f"--{name}" for name in flags.names), *flags.short}
    assert added | fields <= exact
