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

from oomguard.engines.protocol import RestartedEngine
from oomguard.engines.vllm.in_process import core_restart
from oomguard.engines.vllm.in_process.core_restart import (
    can_restart_core,
    install_restarting_client,
)


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
    pooling_output: Any = None


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
            if request.sampling_params is None:  # a vector: done in one step
                outputs.append(Output(name, [], "stop", pooling_output=f"vector of {name}"))
                del self.open[name]
                continue
            request.prompt_token_ids = [*request.prompt_token_ids, len(request.prompt_token_ids)]
            request.sampling_params = Params(max_tokens=request.sampling_params.max_tokens - 1)
            is_last = request.sampling_params.max_tokens == 0
            outputs.append(
                Output(name, request.prompt_token_ids[-1:], "length" if is_last else None)
            )
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

    def shutdown(self) -> None:
        self.resources.engine_dead = True

    def collective_rpc(self, method: str) -> str:
        return method

    def wake_up(self, tags: list[str] | None = None) -> str:
        return f"woken {tags}"

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
        EngineCoreOutput=Output,
        EngineCoreOutputs=Outputs,
        FinishReason=types.SimpleNamespace(ERROR="error"),
    )
    for name in ("vllm", "vllm.v1"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "vllm.v1.engine", module)
    exceptions = types.SimpleNamespace(EngineDeadError=EngineDeadError)
    monkeypatch.setitem(sys.modules, "vllm.v1.engine.exceptions", exceptions)


def attended_engine(
    *cores: Core, kind: type = SyncMPClient, **made: bool
) -> tuple[Engine, list[Exception]]:
    """An engine whose core is followed by others after each death; with the deaths that were told."""
    first, *others = cores
    engine, deaths, left = Engine(kind(first)), [], list(others)

    def make_again(error: Exception, client: Any) -> RestartedEngine | None:
        deaths.append(error)
        return RestartedEngine(Engine(kind(left.pop(0))), **made) if left else None

    install_restarting_client(engine, make_again)
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


def test_a_death_is_not_seen_and_every_token_comes_once(subtests):
    for steps in [0, 1, 2]:
        with subtests.test(steps=steps):
            engine, deaths = attended_engine(Core(steps), Core())
            assert run(engine, "a", "b") == {"a": ([1, 2, 3], "length"), "b": ([1, 2, 3], "length")}
            assert len(deaths) == 1


def test_deaths_in_a_row_are_not_seen_either():
    engine, deaths = attended_engine(Core(1), Core(0), Core(1), Core())
    assert run(engine, "a") == {"a": ([1, 2, 3], "length")}
    assert len(deaths) == 3


def test_engine_that_is_not_restarted_raises_its_death():
    engine, deaths = attended_engine(Core(1))
    with pytest.raises(EngineDeadError) as raised:
        run(engine, "a")
    assert raised.value is deaths[0]


def test_core_that_died_idle_is_restarted_by_the_next_request():
    engine, deaths = attended_engine(Core(), Core())
    engine.engine_core.inner.resources.engine_dead = True
    assert run(engine, "a") == {"a": ([1, 2, 3], "length")}
    assert len(deaths) == 1


def test_request_on_a_socket_closed_by_the_death_is_resent():
    engine, deaths = attended_engine(Core(), Core())
    inner = engine.engine_core.inner

    def closed(_):  # between the look at the core and the sending
        inner.resources.engine_dead = True
        raise OSError("Socket operation on non-socket")

    inner.add_request = closed
    assert run(engine, "a") == {"a": ([1, 2, 3], "length")}
    assert [type(death) for death in deaths] == [EngineDeadError]


def test_an_error_of_sending_that_is_no_death_comes_out():
    engine, deaths = attended_engine(Core(), Core())

    def broken(_):
        raise OSError("Socket operation on non-socket")

    engine.engine_core.inner.add_request = broken
    with pytest.raises(OSError, match="non-socket"):
        run(engine, "a")
    assert deaths == []


def test_request_that_kills_each_core_fails_alone():
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

    engine.engine_core.inner.get_output = fail
    with pytest.raises(KeyError):
        engine.engine_core.get_output()
    assert deaths == []


def test_everything_else_is_the_engines_own_client_s():
    engine, _ = attended_engine(Core(), Core())
    assert engine.engine_core.anything_else() == "the inner client's"
    assert not engine.engine_core.resources.engine_dead


def test_a_caller_at_an_empty_queue_is_woken(monkeypatch):
    monkeypatch.setattr(core_restart, "LOOKS_EVERY_S", 0.01)
    monkeypatch.setattr(core_restart, "EMPTY_FOR_S", 0.05)
    client = SyncMPClient(Core())
    client.get_output = lambda: raised(client.outputs_queue.get(timeout=10))
    engine, deaths = Engine(client), []
    install_restarting_client(engine, lambda error, _: deaths.append(error))
    threading.Timer(0.05, lambda: setattr(client.resources, "engine_dead", True)).start()
    with pytest.raises(EngineDeadError):
        engine.engine_core.get_output()
    assert len(deaths) == 1


def raised(found: Any) -> Any:
    if isinstance(found, Exception):
        raise found
    return found


def test_nothing_watches_an_engine_that_the_program_let_go(monkeypatch):
    monkeypatch.setattr(core_restart, "LOOKS_EVERY_S", 0.01)
    engine, _ = attended_engine(Core())
    del engine
    gc.collect()
    until_s = time.monotonic() + 5
    while (
        any(thread.name == "oomguard-waker" for thread in threading.enumerate())
        and time.monotonic() < until_s
    ):
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


def test_after_a_shutdown_no_core_is_made_again():
    engine, deaths = attended_engine(Core(0), Core())
    engine.engine_core.shutdown()
    with pytest.raises(EngineDeadError):
        engine.engine_core.add_request(Request("a"))
    assert deaths == []
    assert engine.engine_core.resources.engine_dead


def test_engine_shut_down_during_a_restart_leaves_no_core():
    engine = Engine(SyncMPClient(Core(0)))
    fresh = SyncMPClient(Core())

    def make_again(error: Exception, client: Any) -> RestartedEngine:
        client.shutdown()
        return RestartedEngine(Engine(fresh))

    install_restarting_client(engine, make_again)
    with pytest.raises(EngineDeadError):
        run(engine, "a")
    assert fresh.resources.engine_dead


def test_core_whose_state_a_call_changed_is_not_restarted(subtests):
    for method, deaths in [("load_weights", 0), ("get_model_inspection", 1)]:
        with subtests.test(method=method, deaths=deaths):
            engine, told = attended_engine(Core(0))
            assert engine.engine_core.collective_rpc(method) == method
            with pytest.raises(EngineDeadError):
                run(engine, "a")
            assert len(told) == deaths


def test_ctrl_c_during_a_core_restart_makes_nothing_after_it():
    engine, asked = Engine(SyncMPClient(Core(0))), []

    def interrupted(error: Exception, client: Any) -> RestartedEngine:
        asked.append(error)
        raise KeyboardInterrupt

    install_restarting_client(engine, interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(engine, "a")
    with pytest.raises(EngineDeadError):
        engine.engine_core.get_output()
    assert len(asked) == 1


def test_after_it_was_given_up_once_nothing_is_made_again():
    engine, deaths = attended_engine(Core(0))
    for _ in range(3):
        with pytest.raises(EngineDeadError):
            engine.engine_core.get_output()
    assert len(deaths) == 1


def test_embedding_request_that_kills_each_core_raises():
    engine, _ = attended_engine(*[Core(dies_of="b") for _ in range(4)], alone=True, of_memory=True)
    engine.engine_core.add_request(Request("b", sampling_params=None))
    with pytest.raises(EngineDeadError):
        engine.engine_core.get_output()
    with pytest.raises(EngineDeadError):
        engine.engine_core.add_request(Request("c"))


def test_exception_has_all_vectors_except_the_killing_one():
    engine, _ = attended_engine(
        Core(dies_of="b"), *[Core(dies_of="b") for _ in range(6)], alone=True, of_memory=True
    )
    for name in "abcd":
        engine.engine_core.add_request(Request(name, sampling_params=None))
    had = []
    with pytest.raises(EngineDeadError) as caught:
        while True:
            had += [output.request_id for output in engine.engine_core.get_output().outputs]
    assert sorted(had) == ["a", "c", "d"]
    assert caught.value.partial.result == ["vector of a", None, "vector of c", "vector of d"]
    assert (caught.value.partial.done, caught.value.partial.rows) == (3, 4)
    assert "3 of 4 requests are done" in caught.value.__notes__[0]


def test_vectors_are_kept_no_longer_than_until_all_are_done():
    engine, _ = attended_engine(Core())
    for _ in range(2):
        for name in "ab":
            engine.engine_core.add_request(Request(name, sampling_params=None))
        engine.engine_core.get_output()
        assert engine.engine_core.unfinished.vectors() == []


def test_awaited_vectors_raise_only_for_the_killing_one():
    cores = [Core(dies_of="b") for _ in range(7)]
    engine, _ = attended_engine(*cores, kind=AsyncMPClient, alone=True, of_memory=True)
    told: dict[str, list[Any]] = {name: [] for name in "abc"}
    states = {
        name: types.SimpleNamespace(queue=types.SimpleNamespace(put=told[name].append))
        for name in told
    }
    aborted: list[str] = []
    engine.output_processor = types.SimpleNamespace(
        request_states=states, abort_requests=lambda names, internal: aborted.extend(names)
    )

    async def all_of_them() -> list[str]:
        had: list[str] = []
        for name in told:
            await engine.engine_core.add_request_async(Request(name, sampling_params=None))
        while len(had) < 2:
            had += [
                output.request_id
                for output in (await engine.engine_core.get_output_async()).outputs
            ]
        return had

    assert sorted(asyncio.run(all_of_them())) == ["a", "c"]
    assert aborted == ["b"]
    assert [type(error) for error in told["b"]] == [EngineDeadError]
    assert told["a"] == told["c"] == []


def test_front_end_knows_what_the_new_core_has_not_seen():
    engine, fresh = Engine(SyncMPClient(Core(0))), Engine(SyncMPClient(Core()))
    cleared = []
    for one, most in ((engine, 100), (fresh, 50)):
        one.vllm_config = types.SimpleNamespace(
            model_config=types.SimpleNamespace(max_model_len=most, dtype="torch.float32"),
            scheduler_config=types.SimpleNamespace(
                max_num_batched_tokens=most // 2, max_num_seqs=4
            ),
        )
    engine.renderer = types.SimpleNamespace(clear_mm_cache=lambda: cleared.append(1))
    install_restarting_client(engine, lambda *_: RestartedEngine(fresh))
    for name, length in (("short", 1), ("long", 60)):
        engine.engine_core.add_request(Request(name, prompt_token_ids=[1] * length))
    (failed,) = engine.engine_core.get_output().outputs
    assert failed.request_id == "long"
    assert "60 tokens" in failed.stop_reason
    assert engine.vllm_config.model_config.max_model_len == 50
    assert engine.vllm_config.scheduler_config.max_num_batched_tokens == 25
    assert cleared == [1]


def test_refused_restart_fails_later_requests_at_once():
    engine, _ = attended_engine(Core(0), kind=AsyncMPClient)

    async def both() -> None:
        await engine.engine_core.add_request_async(Request("a"))
        with pytest.raises(EngineDeadError):
            await engine.engine_core.get_output_async()
        engine.engine_core.inner.resources.engine_dead = True
        with pytest.raises(EngineDeadError):
            await engine.engine_core.add_request_async(Request("b"))

    asyncio.run(both())


def test_engine_with_an_inner_or_several_cores_is_left_alone(subtests):
    for name in ["InprocClient", "DPAsyncMPClient"]:
        with subtests.test(name=name):
            client = type(name, (SyncMPClient,), {})(Core())
            assert not can_restart_core(Engine(client))
            assert can_restart_core(Engine(SyncMPClient(Core())))
            ranked = SyncMPClient(Core())
            ranked.is_dp = True
            assert not can_restart_core(Engine(ranked))


def test_core_without_room_is_not_woken_but_a_part_always_is():
    engine = Engine(SyncMPClient(Core()))
    install_restarting_client(engine, lambda *_: None)

    def refuses() -> None:
        raise MemoryError("no room")

    engine.engine_core.before_waking = refuses
    with pytest.raises(MemoryError, match="no room"):
        engine.engine_core.wake_up()
    assert (
        engine.engine_core.wake_up(["weights"])
        == engine.engine_core.wake_up(tags=["weights"])
        == "woken ['weights']"
    )
