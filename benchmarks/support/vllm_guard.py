"""What the guard holds on to inside a vLLM that a program starts: the calls that it wraps, the
client whose place it takes.
"""

import ast
import itertools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from packaging.version import Version

from oomguard.engines.vllm.in_process import core_restart
from oomguard.engines.vllm.in_process.start import FREED
from oomguard.engines.vllm.in_process.step_recovery import relied_on
from oomguard.engines.vllm.package import parsed
from oomguard.engines.vllm.watched_starts import WATCHED
from support.vllm_names import defines
from support.vllm_printed import Looked, text_row
from support.vllm_rows import Row, is_in, presence
from support.vllm_texts import printed_texts

_CLIENTS = "vllm.v1.engine.core_client"
_LLM = "vllm.v1.engine.llm_engine"
_ASYNC = "vllm.v1.engine.async_llm"
_RUN = "vllm.v1.engine.output_processor"
# Module, class, and what of it is used: a method, or a name that its own code uses.
_USED = (
    (_CLIENTS, "MPClient", "resources"),
    (_CLIENTS, "BackgroundResources", "engine_dead"),
    (_CLIENTS, "SyncMPClient", "outputs_queue"),
    (_CLIENTS, "SyncMPClient", "add_request"),
    (_CLIENTS, "SyncMPClient", "abort_requests"),
    (_CLIENTS, "SyncMPClient", "get_output"),
    (_CLIENTS, "AsyncMPClient", "outputs_queue"),
    (_CLIENTS, "AsyncMPClient", "add_request_async"),
    (_CLIENTS, "AsyncMPClient", "abort_requests_async"),
    (_CLIENTS, "AsyncMPClient", "get_output_async"),
    (_LLM, "LLMEngine", "engine_core"),
    (_ASYNC, "AsyncLLM", "engine_core"),
    (_ASYNC, "AsyncLLM", "output_handler"),
    (_ASYNC, "AsyncLLM", "_run_output_handler"),
    (_RUN, "OutputProcessor", "request_states"),
    (_RUN, "OutputProcessor", "abort_requests"),
    (_RUN, "RequestState", "queue"),
    ("vllm.v1.core.sched.output", "SchedulerOutput", "num_scheduled_tokens"),
)
# With what stands behind them: of the scheduler's output its own form (``SchedulerOutput`` above).
_PRINTED = (
    ("Dumping scheduler output", re.compile("scheduler output")),
    ("Sleep mode freed", FREED),
)


def guard_rows(package: Path, version: str, only_in: Mapping[str, str]) -> Iterator[Row]:
    """Yield each of them; ``only_in`` has the versions of those that not all have."""
    wrapped = ((module, *name.split(".")) for module, name in WATCHED)
    for module, owner, name in itertools.chain(wrapped, _USED):
        said = f"{module}.{owner}.{name}"
        found = _has(package, module, owner, name)
        yield presence("guard", said, stated=is_in(only_in.get(said), version), found=found)
    for path in (core_restart.__file__,):
        for node in ast.walk(parsed(Path(path))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm."):
                for alias in node.names:
                    said = f"{node.module}.{alias.name}"
                    found = defines(package, node.module or "", alias.name)
                    yield presence(
                        "guard", said, stated=is_in(only_in.get(said), version), found=found
                    )
    texts = printed_texts(package, {anchor for anchor, _ in _PRINTED})
    for anchor, pattern in _PRINTED:
        looked = Looked(anchor, (anchor,), only_in.get(anchor), pattern.search)
        yield text_row(looked, texts, stated=is_in(looked.versions, version))


def recovery_rows(package: Path, version: str) -> Iterator[Row]:
    """Yield what the recovery of a step holds on to; it acts on no version that lacks one."""
    known = relied_on()
    for row in known["hooks"]:
        for name, parameters in row["functions"].items():
            found = _parameters(package, row["module"], row["owner"], name)
            yield Row(
                "step recovery",
                f"{row['module']}.{row['owner']}.{name}",
                ", ".join(parameters),
                ", ".join(found[: len(parameters)]),
            )
    for row in known["uses"]:
        for name in row["names"]:
            said = f"{row['module']}.{row['owner']}.{name}"
            found = _has(package, row["module"], row["owner"], name)
            yield presence("step recovery", said, stated=True, found=found)


def recovers(version: str) -> bool:
    """Return whether the recovery of a step acts on this version."""
    known = relied_on()
    minor = Version(version).release[:2]
    return Version(known["first"]).release <= minor <= Version(known["newest"]).release


def _parameters(package: Path, module: str, owner: str, name: str) -> list[str]:
    """Return the parameters of a method; none if it is not there."""
    path = (package.parent / Path(*module.split("."))).with_suffix(".py")
    if not path.is_file():
        return []
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.ClassDef) and node.name == owner:
            for one in node.body:
                if isinstance(one, ast.FunctionDef) and one.name == name:
                    return [argument.arg for argument in (*one.args.posonlyargs, *one.args.args)]
    return []


def _has(package: Path, module: str, owner: str, name: str) -> bool:
    path = (package.parent / Path(*module.split("."))).with_suffix(".py")
    if not path.is_file():
        path = path.with_suffix("") / "__init__.py"
    if not path.is_file():
        return False
    found = next(
        (n for n in parsed(path).body if isinstance(n, ast.ClassDef) and n.name == owner), None
    )
    if found is not None:
        inside = list(ast.walk(found))
    else:
        inside = []
    if found is not None:
        body = found.body
    else:
        body = []
    named = {
        node.name for node in body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    }
    named |= {node.attr for node in inside if isinstance(node, ast.Attribute)}
    named |= {
        target.id
        for node in body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    named |= {ast.unparse(node.target) for node in inside if isinstance(node, ast.AnnAssign)}
    return name in named
