"""A client that outlives its core: whoever adds requests and takes outputs sees no death, or the exception that told of it."""

from __future__ import annotations

import asyncio
import gc
import queue
import sys
import threading
import time
import types
from dataclasses import dataclass, field
from typing import Any

import pytest

from oomguard.engines.vllm.in_process import attended
from oomguard.engines.vllm.in_process.attended import attend, may_attend
from oomguard.engines.watched_start import MadeAgain


class EngineDeadError(Exception):
    """As vLLM's: it is known by its name."""


@dataclass
class Params:
    temperature: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 3
    min_tokens: int = 0
    __struct_fields__ = ("temperature", "seed", "max_tokens", "min_tokens")


@dataclass
class Request:
    request_id: str
    prompt_token_ids: list[int] = field(default_factory=lambda: [1])
    sampling_params: Params | None = field(default_factory=Params)


@dataclass
class Output:
    request_id: str
    new_token_ids: list[int]
    finish_reason: Any = None
    stop_reason: Any = None
    new_logprobs: Any = None


@dataclass
class Outputs:
    outputs: list[Output]


class Core:
    """What a core does with its requests: a token a step, counted up from the prompt's length; it dies after so many steps."""

    def __init__(self, dies_after: int | None = None, dies_of: str | None = None) -> None:
        self.dies_after, self.dies_of = dies_after, dies_of
        self.open: dict[str, Request] = {}
        self.asked: list[str] = []

    def step(self) -> Outputs:
        if self.dies_after == 0 or self.dies_of in self.open:
            raise EngineDeadError
        if self.dies_after is not None:
            self.dies_after -= 1
        outputs = []
        for name, request in list(self.open.items()):
            request.prompt_token_ids = [*request.prompt_token_ids, len(request.prompt_token_ids)]
            request.sampling_params = Params(max_tokens=request.sampling_params.max_tokens - 1)
            is_last = request.sampling_params.max_tokens == 0
            outputs.append(Output(name, request.prompt_token_ids[-1:], "length" if is_last else None))
            if is_last:
                del self.open[name]
        return Outputs(outputs)

    def add(self, request: Request) -> None:
        self.asked.append(request.request_id)
        self.open[request.request_id] = Request(
            request.request_id, list(request.prompt_token_ids), request.sampling_params
        )


class SyncMPClient:
    def __init__(self, core: Core) -> None:
        self.core = core
        self.resources = types.SimpleNamespace(engine_dead=False)
        self.outputs_queue: queue.Queue[Any] = queue.Queue()

    def add_request(self, request: Request) -> None:
        if self.resources.engine_dead:
            raise EngineDeadError
        self.core.add(request)

    def abort_requests(self, names: list[str]) -> None:
        for name in names:
            self.core.open.pop(name, None)

    def get_output(self) -> Outputs:
        return self.core.step()

    def anything_else(self) -> str:
        return "the inner client's"


class AsyncMPClient(SyncMPClient):
    async def add_request_async(self, request: Request) -> None:
        self.add_request(request)

    async def abort_requests_async(self, names: list[str]) -> None:
        self.abort_requests(names)

    async def get_output_async(self) -> Outputs:
        await asyncio.sleep(0)
        return self.core.step()


class Engine:
    def __init__(self, client: Any) -> None:
        self.engine_core = client
        self.output_handler = None


@pytest.fixture(autouse=True)
def engine_module(monkeypatch):
    """The classes of vLLM's outputs, which tell of a request that failed."""
    module = types.SimpleNamespace(
        EngineCoreOutput=Output, EngineCoreOutputs=Outputs, FinishReason=types.SimpleNamespace(ERROR="error")
    )
    for name in ("vllm", "vllm.v1"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "vllm.v1.engine", module)
    exceptions = types.SimpleNamespace(EngineDeadError=EngineDeadError)
    monkeypatch.setitem(sys.modules, "vllm.v1.engine.exceptions", exceptions)


def attended_engine(*cores: Core, kind: type = SyncMPClient, **made: bool) -> tuple[Engine, list[Exception]]:
    """An engine whose core is followed by others after each death; with the deaths that were told."""
    first, *others = cores
    engine, deaths, left = Engine(kind(first)), [], list(others)

    def make_again(error: Exception, client: Any) -> MadeAgain | None:
        deaths.append(error)
        return MadeAgain(Engine(kind(left.pop(0))), **made) if left else None

    attend(engine, make_again)
    return engine, deaths


def run(engine: Engine, *names: str) -> dict[str, tuple[list[int], Any]]:
    """Ask for these and take outputs until all have finished: tokens and why each ended."""
    for name in names:
        engine.engine_core.add_request(Request(name))
    had: dict[str, list[int]] = {name: [] for name in names}
    ended: dict[str, Any] = {}
    while len(ended) < len(names):
        for output in engine.engine_core.get_output().outputs:
            had[output.request_id] += output.new_token_ids
            if output.finish_reason is not None:
                assert output.request_id not in ended
                ended[output.request_id] = output.finish_reason
    return {name: (had[name], ended[name]) for name in names}


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_death_is_not_seen_and_every_token_comes_once(steps):
    engine, deaths = attended_engine(Core(steps), Core())
    assert run(engine, "a", "b") == {"a": ([1, 2, 3], "length"), "b": ([1, 2, 3], "length")}
    assert len(deaths) == 1


def test_deaths_in_a_row_are_not_seen_either():
    engine, deaths = attended_engine(Core(1), Core(0), Core(1), Core())
    assert run(engine, "a") == {"a": ([1, 2, 3], "length")}
    assert len(deaths) == 3


def test_an_engine_that_is_not_made_again_raises_what_told_of_its_death():
    engine, deaths = attended_engine(Core(1))
    with pytest.raises(EngineDeadError) as raised:
        run(engine, "a")
    assert raised.value is deaths[0]


def test_a_core_that_died_while_nothing_was_asked_is_made_again_with_the_next_request():
    engine, deaths = attended_engine(Core(), Core())
    engine.engine_core._inner.resources.engine_dead = True
    assert run(engine, "a") == {"a": ([1, 2, 3], "length")}
    assert len(deaths) == 1


def test_a_request_that_no_core_survives_fails_alone_and_the_others_have_their_results():
    cores = [Core(dies_of="b") for _ in range(3)]
    engine, _ = attended_engine(*cores, Core(), alone=True, of_memory=True)
    assert run(engine, "a", "b", "c") == {
        "a": ([1, 2, 3], "length"),
        "b": ([], "error"),
        "c": ([1, 2, 3], "length"),
    }


def test_what_was_given_up_is_not_asked_again():
    second = Core()
    engine, _ = attended_engine(Core(1), second)
    for name in "ab":
        engine.engine_core.add_request(Request(name))
    engine.engine_core.get_output()
    engine.engine_core.abort_requests(["a"])
    engine.engine_core.get_output()
    assert second.asked == ["b"]


def test_another_error_is_raised_as_it_is():
    engine, deaths = attended_engine(Core(), Core())

    def fail() -> Outputs:
        raise KeyError("of the engine")

    engine.engine_core._inner.get_output = fail
    with pytest.raises(KeyError):
        engine.engine_core.get_output()
    assert deaths == []


def test_everything_else_is_the_engines_own_client_s():
    engine, _ = attended_engine(Core(), Core())
    assert engine.engine_core.anything_else() == "the inner client's"
    assert not engine.engine_core.resources.engine_dead


def test_a_caller_at_an_empty_queue_is_woken(monkeypatch):
    monkeypatch.setattr(attended, "_LOOKS_EVERY_S", 0.01)
    monkeypatch.setattr(attended, "_EMPTY_FOR_S", 0.05)
    client = SyncMPClient(Core())
    client.get_output = lambda: raised(client.outputs_queue.get(timeout=10))
    engine, deaths = Engine(client), []
    attend(engine, lambda error, _: deaths.append(error))
    threading.Timer(0.05, lambda: setattr(client.resources, "engine_dead", True)).start()
    with pytest.raises(EngineDeadError):
        engine.engine_core.get_output()
    assert len(deaths) == 1


def raised(found: Any) -> Any:
    if isinstance(found, Exception):
        raise found
    return found


def test_nothing_watches_an_engine_that_the_program_let_go(monkeypatch):
    monkeypatch.setattr(attended, "_LOOKS_EVERY_S", 0.01)
    engine, _ = attended_engine(Core())
    del engine
    gc.collect()
    until_s = time.monotonic() + 5
    while any(thread.name == "oomguard-waker" for thread in threading.enumerate()) and time.monotonic() < until_s:
        time.sleep(0.01)
    assert not [thread for thread in threading.enumerate() if thread.name == "oomguard-waker"]


def test_streams_go_on_and_the_loop_meanwhile(monkeypatch):
    engine, deaths = attended_engine(Core(1), Core(), kind=AsyncMPClient)

    async def both() -> dict[str, list[int]]:
        had: dict[str, list[int]] = {"a": [], "b": []}
        for name in had:
            await engine.engine_core.add_request_async(Request(name))
        while any(len(tokens) < 3 for tokens in had.values()):
            for output in (await engine.engine_core.get_output_async()).outputs:
                had[output.request_id] += output.new_token_ids
        return had

    assert asyncio.run(both()) == {"a": [1, 2, 3], "b": [1, 2, 3]}
    assert len(deaths) == 1


@pytest.mark.parametrize("name", ["InprocClient", "DPAsyncMPClient"])
def test_an_engine_whose_core_is_no_process_of_its_own_or_one_of_many_is_left_alone(name):
    client = type(name, (SyncMPClient,), {})(Core())
    assert not may_attend(Engine(client))
    assert may_attend(Engine(SyncMPClient(Core())))
