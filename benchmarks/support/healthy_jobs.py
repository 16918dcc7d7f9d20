# ruff: noqa: SIM905 (commands and lists of names, one a line)
"""The commands whose output is the healthy corpus: (name of the file, argv, seconds it may take).

Everything is real output of programs on this machine: builds, tests, tracebacks, help,
documentation, system logs.
"""

import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

from support.commands import ROOT

HERE = Path(__file__).parent
PYTHON = sys.executable
BIN = Path(PYTHON).parent
Job = tuple[str, list[str], int]

MODULES = (
    "abc argparse array ast asyncio base64 bisect bz2 calendar cmath cmd code codecs collections "
    "compileall concurrent.futures "
    "configparser contextlib copy csv ctypes curses datetime dbm decimal difflib dis doctest email "
    "enum errno faulthandler fcntl filecmp "
    "fileinput fnmatch fractions ftplib functools gc getopt getpass gettext glob graphlib gzip "
    "hashlib heapq hmac html http http.client "
    "http.server imaplib importlib inspect io ipaddress itertools json keyword linecache locale "
    "logging logging.config logging.handlers "
    "lzma mailbox marshal math mimetypes mmap multiprocessing multiprocessing.pool "
    "multiprocessing.shared_memory netrc numbers operator "
    "optparse os pathlib pdb pickle pickletools pkgutil platform plistlib poplib posix pprint "
    "profile pstats pty pwd py_compile pyclbr "
    "pydoc queue quopri random re readline reprlib resource runpy sched secrets select selectors "
    "shelve shlex shutil signal site smtplib "
    "socket socketserver sqlite3 ssl stat statistics string struct subprocess symtable sys "
    "sysconfig syslog tarfile tempfile termios "
    "textwrap threading time timeit tkinter token tokenize tomllib trace traceback tracemalloc tty "
    "turtle types typing unicodedata "
    "unittest unittest.mock urllib.parse urllib.request uuid venv warnings wave weakref webbrowser "
    "wsgiref xml.dom xml.etree.ElementTree "
    "xml.sax xmlrpc.client zipapp zipfile zipimport zlib zoneinfo numpy numpy.linalg numpy.ma "
    "numpy.random numpy.fft torch.nn torch.cuda "
    "torch.cuda.memory torch.optim torch.utils.data torch.distributed torch.profiler "
    "torch.multiprocessing torch.xpu torch.mps "
    "transformers.trainer transformers.generation.utils transformers.modeling_utils "
    "transformers.utils.logging hypothesis pytest "
    "click rich regex psutil yaml jinja2 networkx sympy.core tqdm packaging.version pydantic"
).split()
STDLIB_TESTS = (
    "test_json test_dict test_list test_set test_string test_bytes test_float test_int test_iter "
    "test_generators test_exceptions "
    "test_traceback test_logging test_re test_struct test_array test_copy test_deque test_enum "
    "test_fractions test_functools test_heapq "
    "test_io test_itertools test_math test_operator test_pickle test_random test_range test_scope "
    "test_slice test_sort test_statistics "
    "test_subprocess test_syntax test_textwrap test_tuple test_types test_typing test_unicode "
    "test_userdict test_weakref test_zlib test_gc "
    "test_memoryview test_tracemalloc test_resource test_mmap test_warnings test_contextlib "
    "test_dataclasses test_decimal"
).split()
PYTEST_PACKAGES = {
    "numpy": "numpy/lib/tests numpy/linalg/tests numpy/ma/tests numpy/fft/tests numpy/random/tests numpy/polynomial/tests",
    "networkx": "networkx/algorithms/tests networkx/classes/tests networkx/generators/tests networkx/utils/tests",
    "sympy": "sympy/sets/tests sympy/strategies/tests sympy/utilities/tests sympy/printing/tests sympy/logic/tests sympy/tensor/tests",
}
OWN_TESTS = ("remedy", "memory", "report", "cli", "supervise", "engines", "rules")
FAILING_INSTALLS = (
    ["no-such-package-of-ours==9.9.9", "--no-index"],
    ["./no-such-folder"],
    ["numpy==0.0.1", "--no-index"],
    [
        "six",
        "--python-version",
        "4.0",
        "--only-binary=:all:",
        "--no-deps",
        "--target",
        "t",
        "--no-index",
    ],
    ["git+file:///no/such/repository"],
    ["-r", "no-such-requirements.txt"],
    ["--index-url", "http://127.0.0.1:9/simple", "--retries", "0", "six==1.0.0"],
    ["bad name!"],
)
C_ERRORS = {
    "undeclared": "int main(){return x;}",
    "syntax": "int main({",
    "types": 'int main(){int *p="a"; return p*2.0;}',
    "undefined": "int f(void); int main(){return f();}",
    "missing_header": "#include <no/such/header.h>\n",
    "warnings": "int f(int a){int b; if(a=1) return b; } int main(){unsigned u=-1; return f(u);}",
    "overflow": 'char a[2]="abcdef"; int main(){return a[10];}',
    "redefined": "int a; double a; int main(){return a;}",
    "large_array": "double big[1ul<<40]; int main(){return big[5];}",
    "malloc": "#include <stdlib.h>\nint main(){char*p=malloc(10); p[20]=1; free(p); return *p;}",
}
CXX = (
    "#include <bits/stdc++.h>\nint main(){std::map<std::string,std::vector<int>> m; "
    "std::sort(m.begin(), m.end()); std::unique_ptr<int> p, q=p;}"
)
TRANSFORMERS = (
    "llama",
    "gpt2",
    "bert",
    "t5",
    "bloom",
    "opt",
    "qwen2",
    "mistral",
    "gpt_neox",
    "gemma",
)


def jobs(scratch: Path) -> Iterator[Job]:
    """Every command; ``scratch`` is a folder that they may write to."""
    for part in (
        _system,
        _git,
        _compilers,
        _transformers,
        _linters,
        _pip,
        _python,
        _tests,
    ):  # the slow ones last
        yield from part(scratch)


def _python(scratch: Path) -> Iterator[Job]:
    yield "python/this", [PYTHON, "-m", "this"], 10
    yield "python/verbose_import_torch", [PYTHON, "-v", "-c", "import torch"], 90
    for name in MODULES:
        yield f"pydoc/{name}", [PYTHON, "-m", "pydoc", name], 30
    for name in (
        "json",
        "asyncio",
        "torch",
        "transformers",
        "numpy",
        "sympy",
        "http.server",
        "unittest.mock",
        "sqlite3",
        "rich.console",
    ):
        yield f"importtime/{name}", [PYTHON, "-X", "importtime", "-c", f"import {name}"], 60
    yield (
        "tracebacks/run",
        [PYTHON, str(HERE / "healthy_programs.py"), "tracebacks", str(scratch)],
        60,
    )
    yield (
        "compileall/stdlib",
        [
            "env",
            f"PYTHONPYCACHEPREFIX={scratch / 'pyc'}",
            PYTHON,
            "-m",
            "compileall",
            "-f",
            str(Path(argparse_file()).parent),
        ],
        120,
    )
    yield "python/help_option", [PYTHON, "--help-all"], 10


def argparse_file() -> str:
    import argparse

    return argparse.__file__


def _pip(scratch: Path) -> Iterator[Job]:
    pip = [PYTHON, "-m", "pip", "--no-input", "--disable-pip-version-check"]
    for options in (
        ["list", "-v"],
        ["freeze"],
        ["debug", "-v"],
        ["check"],
        ["inspect"],
        ["config", "debug"],
        ["cache", "info"],
        ["help", "install"],
    ):
        yield f"pip/{'_'.join(options)}", [*pip, *options], 60
    for name in ("torch", "transformers", "numpy", "rich", "pytest", "hypothesis"):
        yield f"pip/show_{name}", [*pip, "show", "-f", name], 60
    for name in ("six", "attrs", "requests", "flask"):
        yield (
            f"pip/dry_run_{name}",
            [*pip, "install", "-v", "--dry-run", "--ignore-installed", name],
            60,
        )
        yield (
            f"pip/download_{name}",
            [*pip, "download", "-vv", "--no-deps", "-d", str(scratch / "wheels"), name],
            60,
        )
    for i, options in enumerate(FAILING_INSTALLS):
        yield f"pip/failing_{i}", [*pip, "install", "-v", *options], 60


def _tests(scratch: Path) -> Iterator[Job]:
    import numpy

    site = Path(numpy.__file__).parents[1]
    for name in STDLIB_TESTS:
        yield f"unittest/{name}", [PYTHON, "-m", "unittest", "-v", f"test.{name}"], 40
    for name, folders in PYTEST_PACKAGES.items():
        for folder in folders.split():
            for path in sorted((site / folder).glob("test_*.py"))[:12]:
                options = [
                    "-v",
                    "-p",
                    "no:cacheprovider",
                    "--import-mode=importlib",
                    "-c",
                    str(scratch / "pytest.ini"),
                ]
                yield (
                    f"pytest/{name}_{path.stem}",
                    [PYTHON, "-m", "pytest", *options, str(path)],
                    40,
                )
    for name in OWN_TESTS:
        yield (
            f"pytest/own_{name}",
            [PYTHON, "-m", "pytest", "-v", "-p", "no:cacheprovider", str(ROOT / "tests" / name)],
            90,
        )
    yield (
        "pytest/failing",
        [
            PYTHON,
            "-m",
            "pytest",
            "-vv",
            "-l",
            "-p",
            "no:cacheprovider",
            "-c",
            str(scratch / "pytest.ini"),
            str(HERE / "healthy_programs.py"),
        ],
        60,
    )


def _compilers(scratch: Path) -> Iterator[Job]:
    for name, text in C_ERRORS.items():
        path = scratch / f"{name}.c"
        path.write_text(text)
        yield (
            f"gcc/{name}",
            ["gcc", "-v", "-Wall", "-Wextra", "-O2", "-o", str(scratch / name), str(path)],
            30,
        )
    (scratch / "templates.cpp").write_text(CXX)
    (scratch / "good.cpp").write_text(
        '#include <bits/stdc++.h>\nint main(){std::regex r("a+"); return 0;}'
    )
    good = str(scratch / "good.cpp")
    yield "gcc/templates", ["g++", "-std=c++20", str(scratch / "templates.cpp")], 60
    yield "gcc/headers", ["g++", "-H", "-fsyntax-only", good], 60
    yield (
        "gcc/time_report",
        ["g++", "-ftime-report", "-fmem-report", "-c", "-o", str(scratch / "good.o"), good],
        60,
    )
    yield "gcc/assembly", ["g++", "-O1", "-S", "-o", "-", good], 60
    yield "gcc/preprocessed", ["g++", "-E", good], 60
    for what in ("optimizers", "warnings", "target", "params", "common"):
        yield f"gcc/help_{what}", ["gcc", "-Q", f"--help={what}"], 20
    (scratch / "Makefile").write_text(
        "all: a b\na:\n\tgcc -c good.c -o a\nb: a missing\n\tcp a b\n"
    )
    for options in (["-n"], ["-d", "-n"], ["-p", "-n"], ["all"], ["-k", "all"]):
        yield f"make/{'_'.join(options)}", ["make", "-C", str(scratch), *options], 20
    yield "ld/verbose", ["ld", "--verbose"], 10


def _transformers(scratch: Path) -> Iterator[Job]:
    for name in TRANSFORMERS:
        for level in ("info", "debug"):
            yield (
                f"transformers/{name}_{level}",
                [
                    "env",
                    f"TRANSFORMERS_VERBOSITY={level}",
                    "HF_HUB_OFFLINE=1",
                    PYTHON,
                    str(HERE / "healthy_programs.py"),
                    "transformers",
                    name,
                ],
                90,
            )
    for name in ("trainer", "missing", "too_long"):
        yield (
            f"transformers/{name}",
            [
                "env",
                "HF_HUB_OFFLINE=1",
                PYTHON,
                str(HERE / "healthy_programs.py"),
                name,
                str(scratch),
            ],
            90,
        )


def _git(scratch: Path) -> Iterator[Job]:
    copy = str(scratch / "clone")
    yield "git/clone", ["git", "clone", "--progress", "--no-hardlinks", str(ROOT), copy], 60
    for options in (
        ["log", "--stat"],
        ["log", "--graph", "--format=fuller"],
        ["shortlog", "-sne"],
        ["count-objects", "-vH"],
        ["fsck", "--verbose"],
        ["ls-files", "-s"],
        ["config", "--list", "--show-origin"],
        ["gc", "--auto"],
        ["rev-parse", "nonsense"],
        ["checkout", "nonsense"],
    ):
        yield (
            f"git/{'_'.join(options)}",
            ["git", "-C", str(ROOT) if options[0] != "gc" else copy, *options],
            60,
        )


def _system(scratch: Path) -> Iterator[Job]:
    # What the kernel prints later may be true incidents: other programs of this machine die for
    # memory.
    yield "system/dmesg", ["sh", "-c", "dmesg | awk -F '[][]' '$2 + 0 <= 60'"], 10
    for i, path in enumerate(
        p
        for p in sorted(Path("/var/log").rglob("*"))
        if p.is_file() and p.suffix in {".log", ".gz", ""} and p.stat().st_size
    ):
        yield f"system/varlog_{i}_{path.name}", ["zcat", "-f", str(path)], 10
    for name in (
        "meminfo",
        "vmstat",
        "zoneinfo",
        "buddyinfo",
        "cpuinfo",
        "interrupts",
        "modules",
        "kallsyms",
        "config.gz",
        "self/status",
        "self/smaps",
    ):
        yield f"system/proc_{name}", ["zcat", "-f", f"/proc/{name}"], 10
    for argv in (
        ["sysctl", "-a"],
        ["ps", "auxww"],
        ["mount"],
        ["df", "-h"],
        ["free", "-m"],
        ["lscpu"],
        ["dpkg", "-l"],
        ["apt-cache", "policy"],
        ["apt-cache", "stats"],
        ["apt-get", "-s", "install", "no-such-package"],
        ["apt-get", "-s", "install", "cmake"],
        ["locale", "-a"],
        ["journalctl", "-n", "1000", "--no-pager"],
        ["vmstat", "-s"],
    ):
        yield f"system/{'_'.join(argv)}", argv, 30
    yield "system/strace", ["strace", "-f", PYTHON, "-c", "import json"], 30
    yield "system/strace_numpy", ["strace", "-f", PYTHON, "-c", "import numpy"], 60
    for name in ("python3", "ruff", "git", "gcc"):
        yield (
            f"system/ldd_{name}",
            ["sh", "-c", f"LD_DEBUG=all ldd $(command -v {name}) 2>&1 | head -c 3000000"],
            30,
        )
    for package in (
        "coreutils",
        "util-linux",
        "git",
        "binutils",
        "grep",
        "sed",
        "tar",
        "findutils",
        "procps",
        "make",
        "diffutils",
        "gzip",
        "dpkg",
        "apt",
        "openssl",
        "curl",
        "strace",
    ):
        listing = Path(f"/var/lib/dpkg/info/{package}.list")
        if listing.is_file():
            files = listing.read_text().splitlines()
        else:
            files = []
        for command in sorted(
            f for f in files if f.startswith(("/usr/bin/", "/bin/")) and Path(f).is_file()
        ):
            yield f"help/{Path(command).name}", [command, "--help"], 5
    for command in sorted(
        p for p in BIN.iterdir() if p.is_file() and not p.name.lower().startswith("activate")
    ):
        yield f"help/venv_{command.name}", [str(command), "--help"], 30
    for module in (
        "pip",
        "pytest",
        "unittest",
        "compileall",
        "timeit",
        "zipfile",
        "tarfile",
        "json.tool",
        "http.server",
        "venv",
        "torch.distributed.run",
        "torch.utils.collect_env",
        "cProfile",
        "dis",
        "ast",
    ):
        yield f"help/module_{module}", [PYTHON, "-m", module, "--help"], 30
    pages = sorted(Path("/usr/share/man").glob("man[1578]/*.gz"))
    for path in pages[:: max(1, len(pages) // 250)]:
        yield f"man/{path.name}", ["zcat", str(path)], 10
    changes = sorted(Path("/usr/share/doc").glob("*/changelog*.gz"))
    for path in changes[:: max(1, len(changes) // 200)]:
        yield f"changelog/{path.parent.name}", ["zcat", str(path)], 10


def _linters(scratch: Path) -> Iterator[Job]:
    import numpy

    site = Path(numpy.__file__).parents[1]
    ruff = [str(BIN / "ruff"), "check", "--no-cache", "--isolated"]
    for name in (
        "rich",
        "click",
        "psutil",
        "networkx",
        "pydantic",
        "transformers/generation",
        "torch/optim",
        "torch/cuda",
    ):
        yield (
            f"ruff/{name.replace('/', '_')}",
            [
                "sh",
                "-c",
                (
                    f"{shlex.join([*ruff, '--select', 'E,F,W,B,D,UP,RET', str(site / name)])} | head "
                    "-c 4000000"
                ),
            ],
            60,
        )
    yield "ruff/statistics", [*ruff, "--select", "ALL", "--statistics", str(site / "rich")], 60
    yield (
        "mypy/own",
        [
            str(BIN / "mypy"),
            "--cache-dir",
            str(scratch / "mypy"),
            "--strict",
            str(ROOT / "oomguard" / "facts.py"),
        ],
        90,
    )
    yield (
        "mypy/psutil",
        [str(BIN / "mypy"), "--cache-dir", str(scratch / "mypy"), "--strict", str(site / "click")],
        90,
    )
