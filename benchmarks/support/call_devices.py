"""The devices on which generated calls run: the simulated one, whose tensors are the CPU's, and a
real GPU with a limit.
"""

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

from support.batch_tools import device_with, weights_bytes

# A whole call's most on a real GPU: as many processes share it as the machine has cores.
MOST_BYTES = int(4.5 * 2**30)


class Simulated:
    """A device whose memory oomguard.testing counts while the CPU computes."""

    kind, rounds_by_rows = "cpu", False

    def prepare(self) -> None:
        """Do nothing: there is nothing to start."""

    def enlarged(self, case: dict[str, Any]) -> dict[str, Any]:
        """Return the case as it is drawn."""
        return case

    def limit(self, model: Any, capacity: int) -> contextlib.AbstractContextManager[Any]:
        """Return a device of that many bytes with the weights on it."""
        return device_with(model, capacity)

    def has_room(self, model: Any, call: Callable[[], Any]) -> bool:
        """Return whether a whole call may run here: any may."""
        return True

    def measured(self, model: Any, call: Callable[[], Any]) -> tuple[Any, int, int]:
        """Return a call's result, the bytes on the device before it, and the most during it."""
        with self.limit(model, 2**40) as device:
            result = call()
            return result, weights_bytes(model), device.peak_bytes

    def live_bytes(self) -> int | None:
        """Return None: what is alive here is the tests' to hold."""
        return None

    def name(self) -> str | None:
        """Return None: it has none."""
        return None


class Cuda:
    """The first GPU. Other processes may use it too: the limit is on what this one's allocator
    reserves.
    """

    # How a sum is made depends on how many rows run together, so that a token may turn where two
    # are nearly as likely.
    kind, rounds_by_rows = "cuda", True

    def prepare(self) -> None:
        """Start CUDA and its libraries, with products in full float32."""
        import torch

        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
        square = torch.ones(64, 64, device="cuda")
        float((square @ square).sum())

    def enlarged(self, case: dict[str, Any]) -> dict[str, Any]:
        """Return the case in larger sizes: its allocator takes segments of 2 and 20 MiB, which tiny
        tensors only fill in part.
        """
        return {
            **case,
            "rows": 4 * case["rows"],
            "hidden": 4 * case["hidden"],
            "vocab": 4 * case["vocab"],
            "prompt": 2 * case["prompt"],
            "image": 224,
            "channels": 4 * case["channels"],
        }

    @contextlib.contextmanager
    def limit(self, model: Any, capacity: int) -> Iterator[None]:
        """Let this process reserve that many bytes; the weights are among them."""
        from support.cuda_limit import limit_cuda

        del model
        gc.collect()  # a failed call's tensors must not stand in the next one's way
        with limit_cuda(capacity):
            yield

    def has_room(self, model: Any, call: Callable[[], Any]) -> bool:
        """Return whether a whole call takes no more than every process has."""
        with self.limit(model, MOST_BYTES):
            return runs(call)

    def measured(self, model: Any, call: Callable[[], Any]) -> tuple[Any, int, int]:
        """Return a call's result, the bytes reserved before it, and the most during it."""
        import torch

        del model
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_reserved()
        result = call()
        return result, before, torch.cuda.max_memory_reserved()

    def live_bytes(self) -> int | None:
        """Return the bytes of live tensors as they were asked for; ``memory_allocated`` counts the
        blocks, of whole 512 bytes and more.
        """
        import torch

        return int(torch.cuda.memory_stats()["requested_bytes.all.current"])

    def name(self) -> str | None:
        """Return the GPU's name."""
        import torch

        return str(torch.cuda.get_device_name())


DEVICES = {"simulated": Simulated, "cuda": Cuda}


def runs(call: Callable[[], Any]) -> bool:
    """Return whether a call has room."""
    import torch

    try:
        call()
    except RuntimeError as error:
        # cuDNN tries one algorithm after another, and says so where none of them found room for its
        # scratch memory.
        if isinstance(error, torch.OutOfMemoryError) or "unable to find an engine" in str(error):
            return False
        raise
    return True
