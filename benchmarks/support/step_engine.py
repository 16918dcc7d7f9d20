"""A real vLLM engine in this process whose steps run out of memory at random moments; eight clients
keep it busy. Run in the environment of the real vLLM, in a folder with ./tiny; the argument is a
JSON object of the mode. The last line printed is a JSON object.

Failures are raised in the forward pass, in the sampler and in the computation of prompt logprobs.
Some requests are offenders: they fail whenever they run, in one of the three.
"""

import ctypes
import gc
import json
import os
import random
import sys
import tempfile
import time
import types
from pathlib import Path
from typing import Any

CLIENTS = 8
# A prompt with so many of these tokens in a row cannot run; random prompts have none.
BAD_TOKEN = 499
BAD_RUN = 60
# A request that asks for so many prompt logprobs cannot run.
BAD_LOGPROBS = 9
MESSAGE = (
    "CUDA out of memory. Tried to allocate {:.2f} MiB. GPU 0 has a total capacity of 79.25 GiB of "
    "which 6.40 MiB is free."
)
GRAMMAR = {"json": {"type": "object", "properties": {"a": {"type": "integer"}}}}


class Failures:
    """Raises out-of-memory errors in vLLM's model runner while ``rate`` is above zero."""

    def __init__(self, seed: int) -> None:
        self.rate = 0.0
        self.bad = False
        self.limit_tokens = 0
        self.limit_rows = 0
        self.passing = 0
        self.count = 0
        self._random = random.Random(seed)

    def install(self) -> None:
        """Wrap the forward pass, the sampler and the prompt logprobs of both runners."""
        from vllm.model_executor.models.llama import LlamaModel
        from vllm.v1.worker.cpu_worker import CPUWorker
        from vllm.v1.worker.gpu.model_runner import GPUModelRunner as SecondRunner
        from vllm.v1.worker.gpu.sample.prompt_logprob import PromptLogprobsWorker
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

        self._wrap(CPUWorker, "determine_available_memory", self._check)
        self._wrap(LlamaModel, "forward", self._check_forward)
        self._wrap(GPUModelRunner, "_sample", self._check_sampler)
        self._wrap(SecondRunner, "sample", self._check)
        self._wrap(GPUModelRunner, "_get_prompt_logprobs_dict", self._check_first)
        self._wrap(PromptLogprobsWorker, "compute_prompt_logprobs", self._check_second)

    def _wrap(self, owner: type, name: str, check: Any) -> None:
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            check(*args, **kwargs)
            return original(*args, **kwargs)

        call.__name__ = name
        setattr(owner, name, call)

    def _check(self, *_args: Any, **_kwargs: Any) -> None:
        if self.rate and self._random.random() < self.rate:
            self._fail(self._random.uniform(1, 500))

    def _check_forward(
        self, _model: Any, input_ids: Any, positions: Any, *_: Any, **__: Any
    ) -> None:
        self._check()
        if self.passing:
            self.passing -= 1
            self._fail(96.0)
        if self.limit_tokens and positions.shape[-1] > self.limit_tokens:
            self._fail(positions.shape[-1] / 10)
        if self.bad and input_ids is not None and (input_ids == BAD_TOKEN).sum() >= 3:
            self._fail(96.0)

    def _check_sampler(self, _runner: Any, logits: Any, *_: Any, **__: Any) -> None:
        self._check()
        if self.limit_rows and logits is not None and logits.shape[0] > self.limit_rows:
            self._fail(logits.shape[0] * 64.0)

    def _check_first(self, runner: Any, _hidden: Any, scheduled: Any, *_: Any) -> None:
        asked = runner.num_prompt_logprobs
        if asked:
            self._check()
        if self.bad and any(asked.get(name) == BAD_LOGPROBS for name in scheduled):
            self._fail(2048.0)

    def _check_second(self, worker: Any, *args: Any, **_: Any) -> None:
        if worker.uses_prompt_logprobs.any():
            self._check()

    def _fail(self, mib: float) -> None:
        import torch

        self.count += 1
        raise torch.OutOfMemoryError(MESSAGE.format(mib))


def prepare(mode: dict[str, Any]) -> dict[str, Any]:
    """Set what the mode needs before vLLM is imported, and return the engine's arguments."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("OOMGUARD_VLLM_STEP_RECOVERY", "1")
    os.environ.setdefault("OOMGUARD_VLLM_SAID", str(Path(tempfile.mkdtemp(), "said.jsonl")))
    if mode.get("runner") == 2:
        # The second runner needs Triton, which has no CPU backend; its interpreter runs the kernels.
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
        os.environ["TRITON_INTERPRET"] = "1"
        from triton.backends import backends

        driver = types.SimpleNamespace(is_active=lambda: True)
        backends["cpu"] = types.SimpleNamespace(driver=driver)
    if mode.get("async"):
        _keep_async()
    arguments = {
        "model": "./tiny",
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 2048,
        "max_num_batched_tokens": 2048,
        "kv_cache_memory_bytes": 64_000_000,
        "max_num_seqs": 16,
        "disable_log_stats": True,
        "max_logprobs": 20,
    }
    return {**arguments, **mode.get("arguments", {})}


def _keep_async() -> None:
    """Let the CPU platform keep asynchronous scheduling, which it turns off."""
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.check_and_update_config.__func__

    def check(cls: type, config: Any) -> None:
        original(cls, config)
        config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(check)


class Clients:
    """Eight clients that send one request after another to an engine in this process."""

    def __init__(self, llm: Any, mode: dict[str, Any]) -> None:
        self.llm = llm
        self.engine = llm.llm_engine
        self.mode = mode
        self.tokens = mode.get("tokens", 16)
        self._number = 0
        self.gaps_s: list[float] = []

    def request(self, number: int) -> tuple[dict[str, Any], Any]:
        """Return the prompt and the parameters of one of the harmless requests."""
        from vllm import SamplingParams
        from vllm.sampling_params import StructuredOutputsParams

        chance = random.Random(number)
        length = chance.choice(self.mode.get("lengths", [20, 60, 200, 500]))
        prompt = [chance.randrange(5, 490) for _ in range(length)]
        more: dict[str, Any] = {}
        if number % 5 == 1 and not self.mode.get("lora"):
            # vLLM's own LoRA layers on the CPU cannot compute logits of a prompt.
            more["prompt_logprobs"] = 2
        if number % 5 == 2:
            more["logprobs"] = 3
        if number % 5 == 3 and self.mode.get("structured"):
            more["structured_outputs"] = StructuredOutputsParams(**GRAMMAR)
        if number % 4 == 0 and self.mode.get("seeded"):
            more |= {"temperature": 1.0, "seed": number}
        params = {"temperature": 0.0, "max_tokens": self.tokens, "ignore_eos": True}
        return {"prompt_token_ids": prompt}, SamplingParams(**{**params, **more})

    def offender(self, number: int) -> tuple[dict[str, Any], Any]:
        """Return a request that cannot run: its forward pass, or its prompt logprobs."""
        from vllm import SamplingParams

        chance = random.Random(-1 - number)
        prompt = [chance.randrange(5, 490) for _ in range(chance.choice([40, 300]))]
        has_second_kind = self.mode.get("runner") != 2 and not self.mode.get("lora")
        if number % 2 and has_second_kind:
            more = {"prompt_logprobs": BAD_LOGPROBS}
        else:
            prompt += [BAD_TOKEN] * BAD_RUN
            more = {}
        return {"prompt_token_ids": prompt}, SamplingParams(temperature=0.0, max_tokens=8, **more)

    def run(self, jobs: list[tuple[Any, Any]]) -> list[Any]:
        """Run jobs, eight at a time; return each output."""
        # All of them: without an adapter a request gets other tokens beside one that has one, on the
        # CPU and without any failure.
        lora = self.mode.get("lora")
        waiting = list(enumerate(jobs))
        active: dict[str, int] = {}
        outputs: list[Any] = [None] * len(jobs)
        last: dict[str, float] = {}
        while waiting or active:
            while waiting and len(active) < CLIENTS:
                index, (prompt, params) = waiting.pop(0)
                name = f"r{self._number}"
                self._number += 1
                more = {}
                if lora:
                    from vllm.lora.request import LoRARequest

                    more["lora_request"] = LoRARequest("one", 1, lora)
                # vLLM gives a request another name inside.
                active[self.engine.add_request(name, prompt, params, **more) or name] = index
            for output in self.engine.step():
                now_s = time.perf_counter()
                name = output.request_id
                if name in last:
                    self.gaps_s.append(now_s - last[name])
                last[name] = now_s
                if output.finished:
                    index = active.pop(name) if name in active else self._by_prefix(active, name)
                    outputs[index] = output
        return outputs

    @staticmethod
    def _by_prefix(active: dict[str, int], name: str) -> int:
        found = next(one for one in active if one.startswith(f"{name}-") or name.startswith(one))
        return active.pop(found)


def told(output: Any) -> list[Any]:
    """Return what a client sees of an output."""
    logprobs = output.prompt_logprobs
    one = output.outputs[0]
    shown = None
    if logprobs is not None:
        shown = [sorted(row) if row else None for row in logprobs]
    return [list(one.token_ids), one.finish_reason, shown]


def main() -> None:
    mode = json.loads(sys.argv[1])
    arguments = prepare(mode)
    failures = Failures(mode.get("seed", 0))
    failures.install()
    from vllm import LLM

    if mode.get("lora"):
        mode["lora"] = write_adapter(Path("adapter"))
        arguments |= {"enable_lora": True, "max_lora_rank": 8}
    failures.rate = mode.get("start_rate", 0.0)
    llm = LLM(**arguments)
    failures.rate = 0.0
    core = llm.llm_engine.engine_core.engine_core
    clients = Clients(llm, mode)
    ways = {"survive": survive, "edges": edges, "leak": leak, "cost": cost, "job": job}
    found = ways[mode.get("way", "survive")](clients, core, failures, mode)
    found["scheduler"] = type(core.scheduler).__name__
    print("RESULT", json.dumps(found))


def write_adapter(folder: Path) -> str:
    """Write a LoRA adapter of random weights for ./tiny; return its path."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(exist_ok=True)
    random_numbers = torch.Generator().manual_seed(0)
    weights = {}
    for layer in range(2):
        for name, rows in (("q_proj", 128), ("v_proj", 64)):
            head = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            a = torch.randn(8, 128, generator=random_numbers) / 4
            b = torch.randn(rows, 8, generator=random_numbers) / 4
            weights |= {f"{head}.lora_A.weight": a, f"{head}.lora_B.weight": b}
    save_file(weights, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 8,
        "lora_alpha": 16,
        "target_modules": ["q_proj", "v_proj"],
        "base_model_name_or_path": "./tiny",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder.absolute())


def edges(clients: Clients, core: Any, failures: Failures, _mode: dict[str, Any]) -> dict[str, Any]:
    """Fail while a request is aborted, with a broken recovery, and at one token; tell the ends."""
    import torch

    engine = clients.engine
    jobs = [clients.request(number) for number in range(6)]
    calm = [told(output) for output in clients.run(jobs)]
    core.scheduler.reset_prefix_cache()
    recovery = core._oomguard_recovery

    # A request is aborted between the failure of its step and the next one.
    names = [engine.add_request(f"e{n}", *job) or f"e{n}" for n, job in enumerate(jobs)]
    engine.step()
    failures.rate = 1.0
    engine.step()
    engine.abort_request([names[0]], internal=True)
    failures.rate = 0.0
    found = {}
    while engine.has_unfinished_requests():
        found |= {one.request_id: told(one) for one in engine.step() if one.finished}
    after_abort = sum(row in calm[1:] for row in found.values())
    idle = engine.step()  # no request runs
    paused = finish_after_pause(clients, core, failures, jobs)
    without_requests = fail_without_requests(clients, core, failures, jobs)

    # Whatever a recovery raises, vLLM sees the error of the step.
    recovery._roll_back = lambda _dropped: 1 / 0
    failures.rate = 1.0
    broken = ""
    try:
        clients.run(jobs[:1])
    except torch.OutOfMemoryError:
        broken = "OutOfMemoryError"
    except Exception as error:  # noqa: BLE001 - which one is the result
        broken = type(error).__name__
    del recovery._roll_back
    recovery._in_flight.clear()
    core.scheduler.finish_requests(None, _aborted())
    return {
        "after_abort": after_abort,
        "finished": len(found),
        "idle": len(idle),
        "after_pause": sum(row in calm for row in paused),
        "without_requests": without_requests,
        "broken": broken,
        "at_one_token": at_one_token(clients, core, failures),
    }


def finish_after_pause(
    clients: Clients, core: Any, failures: Failures, jobs: list[Any]
) -> list[Any]:
    """Fail a step while the scheduler is paused; return what the requests got after the pause."""
    from vllm.v1.core.sched.interface import PauseState

    engine = clients.engine
    for number, job in enumerate(jobs):
        engine.add_request(f"p{number}", *job)
    engine.step()
    core.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    failures.rate = 1.0
    engine.step()
    failures.rate = 0.0
    outputs = [one for _ in range(3) for one in engine.step()]
    core.pause_scheduler("keep")  # as for a sleep: the device must be idle
    core.resume_scheduler()
    while engine.has_unfinished_requests():
        outputs += engine.step()
    return [told(one) for one in outputs if one.finished]


def fail_without_requests(
    clients: Clients, core: Any, failures: Failures, jobs: list[Any]
) -> int | None:
    """Abort all requests while their step fails; return how many the engine finishes afterwards.

    None without asynchronous scheduling, because then no step is in flight between two calls.
    """
    if core.batch_queue is None:
        return None
    engine = clients.engine
    names = [engine.add_request(f"z{n}", *job) or f"z{n}" for n, job in enumerate(jobs)]
    failures.rate = 1.0
    count = failures.count
    engine.step()
    assert failures.count > count
    engine.abort_request(names, internal=True)
    failures.rate = 0.0
    engine.step()
    return sum(output is not None for output in clients.run(jobs))


def at_one_token(clients: Clients, core: Any, failures: Failures) -> dict[str, Any]:
    """Let every step fail; return how the engine ended, and after how many failures."""
    core._oomguard_recovery._alone = None
    failures.rate = 1.0
    failures.count = 0
    for number in range(8):
        clients.engine.add_request(f"last{number}", *clients.request(100 + number))
    began_s = time.perf_counter()
    try:
        while clients.engine.has_unfinished_requests():
            clients.engine.step()
        ended = "went on"
    except Exception as error:  # noqa: BLE001 - which one is the result
        ended = type(error).__name__
    return {
        "ended": ended,
        "failures": failures.count,
        "seconds": round(time.perf_counter() - began_s, 2),
    }


def job(clients: Clients, core: Any, failures: Failures, mode: dict[str, Any]) -> dict[str, Any]:
    """Run requests as a user's program under `oomguard run`; an engine that ends ends the program.

    The file ``fault`` shows a later attempt that there was one before.
    """
    is_first = not Path("fault").exists()
    Path("fault").touch()
    jobs = [clients.request(number) for number in range(16)]
    fault = mode["fault"]
    if fault in {"large step", "gone"}:
        failures.limit_tokens = 512
    elif fault == "large batch":
        failures.limit_rows = 4
    elif fault == "passing" and is_first:
        failures.passing = 2
    elif fault == "one request":
        failures.bad = True
        jobs.append(clients.offender(1))
    outputs = clients.run(jobs)
    failed_steps = failures.count
    if fault == "gone" and is_first:
        # Another process takes the memory now, and has returned it when the next attempt starts.
        failures.rate = 1.0
        outputs = clients.run(jobs)
    finished = sum(one.outputs[0].finish_reason == "length" for one in outputs)
    tokens = core.vllm_config.scheduler_config.max_num_batched_tokens
    return {"finished": finished, "failed_steps": failed_steps, "most_tokens": tokens}


def _aborted() -> Any:
    from vllm.v1.request import RequestStatus

    return RequestStatus.FINISHED_ABORTED


def rows() -> list[dict[str, Any]]:
    """Return the recoveries that the engine reported."""
    path = Path(os.environ["OOMGUARD_VLLM_SAID"])
    if not path.exists():
        return []
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line["step_recovery"] for line in lines if "step_recovery" in line]


def survive(
    clients: Clients, core: Any, failures: Failures, mode: dict[str, Any]
) -> dict[str, Any]:
    """Run batches until enough steps failed; compare each output with an undisturbed run."""
    count = mode.get("requests", 40)
    jobs = [clients.request(number) for number in range(count)]
    calm = [told(output) for output in clients.run(jobs)]
    core.scheduler.reset_prefix_cache()
    free = core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    finished = equal = total = ended = offenders = with_numbers = refused = 0
    began_s = time.perf_counter()
    failures.bad = True
    turn = 0
    while failures.count < mode["failures"] and turn < 200:
        failures.rate = mode.get("rate", 0.02)
        bad = [clients.offender(2 * turn + one) for one in range(2)]
        mixed = [*jobs[: count // 2], *bad, *jobs[count // 2 :]]
        outputs = clients.run(mixed)
        ours = outputs[count // 2 : count // 2 + 2]
        others = outputs[: count // 2] + outputs[count // 2 + 2 :]
        total += count
        finished += sum(one.outputs[0].finish_reason != "error" for one in others)
        equal += sum(told(one) == before for one, before in zip(others, calm, strict=True))
        offenders += 2
        ended += sum(one.outputs[0].finish_reason == "error" for one in ours)
        with_numbers += sum("MiB" in str(one.outputs[0].stop_reason) for one in ours)
        failures.rate = 0.0
        again = clients.run(bad)
        refused += sum("not run again" in str(one.outputs[0].stop_reason) for one in again)
        turn += 1
    core.scheduler.reset_prefix_cache()
    return {
        "failures": failures.count,
        "recoveries": len(rows()),
        "requests": total,
        "finished": finished,
        "equal": equal,
        "offenders": offenders,
        "ended": ended,
        "with_numbers": with_numbers,
        "refused": refused,
        "took_ms": [row["took_ms"] for row in rows()],
        "blocks_lost": free - core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
        "seconds": round(time.perf_counter() - began_s, 1),
        "most_tokens": core.scheduler.max_num_scheduled_tokens,
    }


def leak(clients: Clients, core: Any, failures: Failures, mode: dict[str, Any]) -> dict[str, Any]:
    """Fail very often; compare the memory after many recoveries with that after a few."""
    import psutil
    import torch

    measured = []
    number = 0
    for goal in (mode["failures"] // 10, mode["failures"]):
        while failures.count < goal:
            failures.rate = 0.1
            # Always others: one that fails twice alone by chance is refused when it comes again.
            jobs = [clients.request(number + more) for more in range(24)]
            number += len(jobs)
            clients.run(jobs)
        failures.rate = 0.0
        clients.run(jobs)
        core.scheduler.reset_prefix_cache()
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what the allocator keeps for later is no leak
        tensors = sum(isinstance(one, torch.Tensor) for one in gc.get_objects())
        rss = psutil.Process().memory_info().rss
        free = core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        measured.append({"failures": failures.count, "rss": rss, "tensors": tensors, "free": free})
    return {
        "measured": measured,
        "requests_left": len(core.scheduler.requests),
        "runner_requests": len(core.model_executor.driver_worker.worker.model_runner.requests),
        "took_ms": [row["took_ms"] for row in rows()],
    }


def cost(clients: Clients, core: Any, _failures: Failures, mode: dict[str, Any]) -> dict[str, Any]:
    """Take turns with the recovery in place and without; return the seconds of each.

    Beside the seconds of the clock stand those of the processor, which other programs disturb less.
    """
    jobs = [clients.request(number) for number in range(16)]
    clients.run(jobs)
    recovery = core._oomguard_recovery
    scheduler = core.scheduler
    runner = core.model_executor.driver_worker.worker.model_runner
    ours = {
        (holder, name): vars(holder)[name]
        for holder, names in (
            (core, ("log_error_detail", "step_fn")),
            (scheduler, ("schedule", "update_from_output")),
            (runner, ("execute_model", "sample_tokens")),
        )
        for name in names
    }
    taken: dict[str, list[float]] = {"with": [], "without": []}
    busy: dict[str, list[float]] = {"with": [], "without": []}
    for turn in range(mode.get("turns", 20)):
        order = ["with", "without"] if turn % 2 else ["without", "with"]
        for way in order:
            for (holder, name), value in ours.items():
                if way == "with":
                    setattr(holder, name, value)
                elif name == "step_fn":
                    core.step_fn = type(core).step.__wrapped__.__get__(core)
                else:
                    vars(holder).pop(name, None)
            core._oomguard_recovery = recovery if way == "with" else None
            scheduler.reset_prefix_cache()
            began_s = time.perf_counter()
            began_busy_s = time.process_time()
            clients.run(jobs)
            taken[way].append(time.perf_counter() - began_s)
            busy[way].append(time.process_time() - began_busy_s)
    return {"taken": taken, "busy": busy}


if __name__ == "__main__":
    main()
