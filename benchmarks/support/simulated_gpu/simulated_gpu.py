"""A vLLM plugin for tests: the real engine on the CPU starts as its GPU worker would, on a device
of a stated size.

With this folder on PYTHONPATH and SIMULATED_GPU set, the CPU worker runs the GPU worker's own
methods: request_memory, load_model, profile_run, the KV cache's size, capture and warm-up. What
they measure is counted from the tensors that the engine really makes
(oomguard.testing.SimulatedDevice), so what fails is vLLM's own code, in vLLM's own words, with the
true bytes.

SIMULATED_GPU is a JSON object:
  total_bytes     the device
  others_bytes    what other processes hold on it when the engine starts
  freed_bytes     what they give back while the engine profiles
  taken_bytes     what they take once it has profiled
  graph_bytes     what one captured graph keeps; graphs are not captured without it
"""

import functools
import json
import os
from types import SimpleNamespace

import torch

from oomguard.testing import SimulatedDevice

# What the CPU worker believes that this machine has: the device decides, not the host.
PLENTY_BYTES = 1 << 50


def register() -> None:
    """Put a device behind the engine's worker; nothing without SIMULATED_GPU."""
    asked = os.environ.get("SIMULATED_GPU")
    if not asked:
        return
    from vllm.v1.worker import cpu_worker

    if not isinstance(getattr(cpu_worker.CPUWorker, "device_behind", None), SharedDevice):
        device = SharedDevice(json.loads(asked))
        cpu_worker.CPUWorker.device_behind = device
        put_behind_torch(device)
        put_behind_worker(device)


class SharedDevice(SimulatedDevice):
    """A device of which others hold a part; torch's message tells its whole size."""

    def __init__(self, asked: dict) -> None:
        super().__init__(asked["total_bytes"] - asked.get("others_bytes", 0))
        self.asked = asked
        self.total_bytes = asked["total_bytes"]

    def others_take(self, size_bytes: int) -> None:
        """Let the others hold so much more, or less below zero."""
        self.capacity_bytes -= size_bytes

    @property
    def _total_bytes(self) -> int:
        return self.total_bytes

    @property
    def free_bytes(self) -> int:
        return max(0, self.capacity_bytes - self.live_bytes)


def put_behind_torch(device: SharedDevice) -> None:
    """Let torch and vLLM's platform tell the device's figures."""
    from vllm.config import VllmConfig
    from vllm.platforms import current_platform

    torch.accelerator.get_memory_info = lambda *_: (device.free_bytes, device.total_bytes)
    torch.accelerator.memory_stats = lambda *_: {
        "allocated_bytes.all.peak": device.peak_bytes,
        "allocated_bytes.all.current": device.live_bytes,
    }
    torch.accelerator.memory_reserved = lambda *_: device.live_bytes
    torch.accelerator.max_memory_allocated = lambda *_: device.peak_bytes
    torch.accelerator.reset_peak_memory_stats = lambda *_: device.reset_peak()
    type(current_platform).get_current_memory_usage = classmethod(lambda *_: device.live_bytes)
    type(current_platform).is_integrated_gpu = classmethod(lambda *_: False)
    written = VllmConfig.__str__
    VllmConfig.__str__ = lambda self: written(self).replace(
        "device_config=cpu", "device_config=cuda"
    )


def put_behind_worker(device: SharedDevice) -> None:
    """Run the GPU worker's methods in place of the CPU worker's, on the device."""
    from vllm.utils.mem_utils import MemorySnapshot
    from vllm.v1.worker import cpu_worker, gpu_worker
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    from vllm.v1.worker.utils import request_memory

    worker = cpu_worker.CPUWorker
    gpu = gpu_worker.Worker
    on_device = functools.partial(_inside, device)
    init_device = worker.init_device

    def init_then_request(self):
        init_device(self)
        self.init_snapshot = MemorySnapshot(device=torch.device("cuda:0"))
        self.requested_memory = request_memory(self.init_snapshot, self.cache_config)

    def profile(self):
        device.others_take(-device.asked.get("freed_bytes", 0))
        left = gpu.determine_available_memory(self)
        device.others_take(device.asked.get("taken_bytes", 0))
        return left

    plenty = SimpleNamespace(total_memory=PLENTY_BYTES, available_memory=PLENTY_BYTES)
    cpu_worker.get_memory_node_info = lambda *_: plenty
    gpu_worker.kernel_warmup = lambda *_: None  # tunes kernels that a CPU has not
    worker.init_device = init_then_request
    worker.load_model = on_device(gpu.load_model)
    worker.determine_available_memory = on_device(profile)
    worker.initialize_from_config = on_device(gpu.initialize_from_config)
    worker.compile_or_warm_up_model = on_device(gpu.compile_or_warm_up_model)
    worker.execute_model = on_device(worker.execute_model)
    CPUModelRunner.load_model = GPUModelRunner.load_model
    if device.asked.get("graph_bytes"):
        capture_on(device, CPUModelRunner)


def capture_on(device: SharedDevice, runner: type) -> None:
    """Let each captured size keep its bytes, in the runner's own loop over the sizes."""
    from vllm.config import CUDAGraphMode
    from vllm.forward_context import BatchDescriptor

    graphs: list[torch.Tensor] = []

    def capture_one(self, desc, **_):
        self._dummy_run(desc.num_tokens, skip_eplb=True, remove_lora=False)
        graphs.append(torch.zeros(device.asked["graph_bytes"], dtype=torch.uint8))

    def capture_model(self):
        sizes = self.compilation_config.cudagraph_capture_sizes or [
            size for size in (1, 2, 4, *range(8, 257, 8)) if size <= self.max_num_reqs
        ]
        descriptors = [BatchDescriptor(size) for size in sorted(sizes, reverse=True)]
        self._capture_cudagraphs(descriptors, CUDAGraphMode.PIECEWISE)
        return sum(graph.numel() for graph in graphs)

    runner._warmup_and_capture = capture_one
    runner.capture_model = capture_model


def _inside(device: SharedDevice, function):
    """Return the function, run on the device."""

    @functools.wraps(function)
    def on_device(*args, **kwargs):
        with device:
            return function(*args, **kwargs)

    return on_device
