"""Put a model's weights on a device by ``from_pretrained`` or ``to``, also with less memory."""

from __future__ import annotations

import functools
import importlib
import re
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Protocol

from oomguard.core.errors import OomguardError
from oomguard.core.facts import Fact, FactValue, format_gib
from oomguard.core.files import read_tables
from oomguard.core.incident import Incident, SettingInForce
from oomguard.core.log import get_logger
from oomguard.engines.protocol import RestartEngine, StartResult
from oomguard.estimate.call.call_budget import generate_row_bytes
from oomguard.estimate.model.files import ModelFiles, find_model
from oomguard.estimate.model.model import read_model
from oomguard.estimate.model.shape import ModelShape, read_shape
from oomguard.probe import torch_memory
from oomguard.probe.host import read_available_bytes
from oomguard.remedy.failed_call import ON_DEVICE, LighterWeights, LoadModel, Weights
from oomguard.scan.exceptions import chain, exception_lines, may_be_oom

# Values of device_map for which accelerate chooses the devices.
AUTOMATIC: Final = frozenset({"auto", "balanced", "balanced_low_0", "sequential"})


class NotOneDeviceError(Exception):
    """The weights go to several devices, or to none that oomguard watches."""


@dataclass(frozen=True, slots=True)
class WeightDevice:
    """The device that a program puts a model's weights on.

    Attributes:
        index: its CUDA index.
        is_simulated: whether it is simulated; then its tensors are on the CPU.
        is_chosen: whether the program named it.
    """

    index: int
    is_simulated: bool
    is_chosen: bool

    @property
    def name(self) -> str:
        """Its name in ``max_memory``."""
        return str(self.index)


def weight_device_of(given: Any) -> WeightDevice:
    """Return the device that a ``device_map`` or a device means.

    Raises:
        NotOneDeviceError: it means several devices, or none that oomguard watches.
    """
    import torch

    is_chosen = given is not None and not (isinstance(given, str) and given in AUTOMATIC)
    # A simulated device has one index, and its tensors are on the CPU, whatever the program names.
    if torch_memory.is_simulated():
        return WeightDevice(0, True, is_chosen)
    if isinstance(given, dict):
        values = {str(value) for value in given.values()}
        if len(values) != 1:
            raise NotOneDeviceError
        given = next(iter(given.values()))
    if not is_chosen:
        if given is None or torch.cuda.device_count() != 1:
            raise NotOneDeviceError
        given = 0
    if isinstance(given, int):
        device = torch.device("cuda", given)
    else:
        device = torch.device(given)
    if device.type != "cuda" or not torch.cuda.is_available():
        raise NotOneDeviceError
    if device.index is None:
        index = torch.cuda.current_device()
    else:
        index = device.index
    if index != torch.cuda.current_device():
        # Allocated memory is counted on the current device only.
        raise NotOneDeviceError
    return WeightDevice(index, False, is_chosen)


# The bytes of a model's weights by layer, from checkpoint headers or from a loaded model.

# Next to the weights there must be space for one row with this many tokens.
WORK_TOKENS: Final = 1024
_LAYER: Final = re.compile(r"^(.*?\.?(?:layers?|h|blocks?|layer_stack)\.\d+)\.")


def weights_of(files: ModelFiles, dtype: str, quantization: str | None = None) -> Weights | None:
    """Return the weights of a checkpoint loaded with a data type; None if its files do not tell."""
    own = dtype if dtype in _KNOWN else _named_dtype(files)
    try:
        model = read_model(files, dtype=own or "auto", quantization=quantization)
    except OomguardError:
        return None
    # Without a named type each tensor keeps the one in its file, and the headers have its bytes.
    if own is None and quantization is None and files.parameters is not None:
        return _weights(((p.name, p.bytes) for p in files.parameters), model.shape)
    if files.parameters is None and not model.exact:
        return None
    return _weights(((p.name, p.bytes) for p in model.parameters), model.shape)


def _named_dtype(files: ModelFiles) -> str | None:
    """Return the data type in the configuration; None without one.

    Without one each tensor is loaded with the type in its file.
    """
    # A model of several parts may name the type in the part with the text.
    for part in (files.config, *_parts(files.config)):
        name = str(part.get("dtype") or part.get("torch_dtype"))
        if name in _KNOWN:
            return name
    return None


def weights_in(model: Any) -> Weights:
    """Return the weights of a loaded model."""
    sizes = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        sizes[name] = tensor.nbytes
    try:
        shape = read_shape(model.config.to_dict())
    except (OomguardError, AttributeError):
        shape = None
    return _weights(sizes.items(), shape)


def _weights(sizes: Iterable[tuple[str, int]], shape: ModelShape | None) -> Weights:
    blocks: defaultdict[str, int] = defaultdict(int)
    for name, size in sizes:
        found = _LAYER.match(name)
        block = found.group(1) if found else name.rpartition(".")[0]
        blocks[block] += size
    tokens = WORK_TOKENS
    if shape is not None and shape.max_positions:
        tokens = min(WORK_TOKENS, shape.max_positions)
    return Weights(
        sum(blocks.values()), max(blocks.values(), default=0), _work_bytes(shape, tokens), tokens
    )


def _work_bytes(shape: ModelShape | None, tokens: int) -> int:
    """Return what one row takes next to the weights, by a formula or from the model's sizes."""
    if shape is None:
        return 0
    try:
        return generate_row_bytes(shape, tokens - 1, 1)
    except OomguardError:
        return (
            tokens
            * shape.dtype_bytes
            * (2 * shape.layers * shape.kv_heads * shape.head_dim + 16 * shape.hidden)
        )


_KNOWN: Final = frozenset({"float32", "float16", "bfloat16"})


# Load a checkpoint's weights in fewer bits: 16 instead of 32, or 8 and 4 with an installed library.

_FILE: Final = Path(__file__).with_name("lighter_weights.toml")
# bfloat16 has the range of float32, so nothing overflows.
_HALF: Final = "bfloat16"
_BITS: Final = (8, 4)


@dataclass(frozen=True, slots=True)
class LighterLoad:
    """A way to load weights in fewer bits: its entry in the plan, and its argument's value."""

    plan: LighterWeights
    config: Callable[[], Any]


def lighter_loads(
    files: ModelFiles | None, dtype: str, place: WeightDevice, *, is_quantized: bool
) -> tuple[LighterLoad, ...]:
    """Return the ways to load a checkpoint in fewer bits, with the most bits first.

    Args:
        files: the checkpoint's files; None if they are unknown.
        dtype: the data type that the program asks for; ``auto``: the checkpoint's own.
        place: the device of the weights.
        is_quantized: whether the program already quantizes them.
    """
    if is_quantized:
        return ()
    if files is not None:
        for part in (files.config, *_parts(files.config)):
            if "quantization_config" in part:
                return ()
    return (*_half(files, dtype), *(_quantized(bits, files, dtype, place) for bits in _BITS))


def _parts(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    parts: list[Mapping[str, Any]] = []
    for part in config.values():
        if isinstance(part, Mapping):
            parts.append(part)
    return parts


def _half(files: ModelFiles | None, dtype: str) -> Iterator[LighterLoad]:
    if files is None:
        return
    whole = weights_of(files, dtype)
    half = weights_of(files, _HALF)
    if whole is not None and half is not None and half.total_bytes < whole.total_bytes:
        yield LighterLoad(
            LighterWeights("dtype", _HALF, f'dtype="{_HALF}"', half.total_bytes), lambda: None
        )


def _quantized(bits: int, files: ModelFiles | None, dtype: str, place: WeightDevice) -> LighterLoad:
    packages = []
    row = None
    for way in _rows():
        # Some libraries have kernels for CUDA only, which a simulated device cannot run.
        if way["bits"] != bits or (way["cuda"] and place.is_simulated):
            continue
        packages.append(way["package"])
        if _is_installed(way.get("module", way["package"])):
            row = way
            break
    if row is None:
        why = (
            f"weights of {bits} bits need one of {', '.join(packages)}. Install one: pip install "
            f"{packages[0]}"
        )
        return LighterLoad(
            LighterWeights("quantization", f"{bits}bit", None, None, why), lambda: None
        )
    return LighterLoad(
        LighterWeights(
            "quantization",
            f"{row['package']}-{bits}bit",
            _as_kwarg(row),
            _need_bytes(files, dtype, row),
        ),
        lambda: _config(row),
    )


def _need_bytes(files: ModelFiles | None, dtype: str, row: Mapping[str, Any]) -> int | None:
    """Return the bytes during a load: all weights in fewer bits, and the largest file tensor."""
    if files is None or files.parameters is None:
        return None
    if dtype == "auto":
        half = _HALF
    else:
        half = dtype
    found = weights_of(files, half, row["as_counted"])
    if found is None:
        return None
    return found.total_bytes + max((p.bytes for p in files.parameters), default=0)


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ImportError:  # optimum.quanto without optimum
        return False


def _config(row: Mapping[str, Any]) -> Any:
    import transformers

    made = {}
    for name, (module, kind) in row.get("made", {}).items():
        made[name] = getattr(importlib.import_module(module), kind)()
    return getattr(transformers, row["config"])(**row.get("options", {}), **made)


def _as_kwarg(row: Mapping[str, Any]) -> str:
    given = [f"{name}={value!r}" for name, value in row.get("options", {}).items()]
    given += [f"{name}={kind}()" for name, (_, kind) in row.get("made", {}).items()]
    return f"quantization_config={row['config']}({', '.join(given)})"


def _rows() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = next(iter(read_tables("lighter weights", [_FILE]).values()))["way"]
    return rows


# Layers wait on the host and come to the device when they run, by accelerate's hooks. A simulated
# device works in the same way.

# More than any host has: host memory does not limit a simulated device.
_ANY_BYTES = 1 << 62


def offload_layers(
    model: Any, place: WeightDevice, share_bytes: int, host_bytes: int | None = None
) -> None:
    """Put layers that fit in ``share_bytes`` on the device, and leave the others on the host.

    The model must be on the host. accelerate chooses the layers, and leaves space for the largest
    of the others. ``host_bytes`` None: no limit.
    """
    from accelerate import dispatch_model, infer_auto_device_map

    limits = {place.index: share_bytes, "cpu": _ANY_BYTES if host_bytes is None else host_bytes}
    no_split = getattr(model, "_no_split_modules", None)
    found = infer_auto_device_map(
        model, max_memory=limits, no_split_module_classes=list(no_split or ())
    )
    if not place.is_simulated:
        dispatch_model(
            model, device_map=found, skip_keys=getattr(model, "_skip_keys_device_placement", None)
        )
        return
    waiting = []
    for name, where in found.items():
        if where == "cpu":
            waiting.append(name)
    _hook(model, waiting, list(found))
    model.hf_device_map = found


def count_on_simulated(model: Any) -> None:
    """Count a model's weights on the simulated device; raises its error if they do not fit."""
    torch_memory.place([*model.parameters(), *model.buffers()])


class _Waiting(Mapping[str, Any]):
    """Weights on the host; reading one makes a temporary copy on the simulated device."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self._tensors = tensors

    def __getitem__(self, name: str) -> Any:
        tensor = self._tensors[name]
        return torch_memory.from_host(tensor, tensor.device)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def _hook(model: Any, waiting: list[str], names: list[str]) -> None:
    from accelerate.hooks import attach_align_device_hook_on_blocks
    from accelerate.utils import find_tied_parameters, retie_parameters

    def waits(tensor: str) -> bool:
        return any(tensor == name or tensor.startswith(f"{name}.") for name in waiting)

    with torch_memory.on_host():
        tensors = {}
        for name, weight in model.state_dict().items():
            if waits(name):
                tensors[name] = weight.detach()
        # The hooks replace each parameter by a placeholder, which unties shared ones.
        tied = find_tied_parameters(model)
        attach_align_device_hook_on_blocks(
            model,
            execution_device=dict.fromkeys(["", *names], "cpu"),
            offload={name: name in waiting for name in names},
            weights_map=_Waiting(tensors),
            skip_keys=getattr(model, "_skip_keys_device_placement", None),
        )
        retie_parameters(model, tied)
    size = sum(tensor.nbytes for tensor in tensors.values())
    get_logger().debug("layers wait on the host", size=format_gib(size))


def read_move(
    wrapped: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Move:
    """Read a call of ``to`` or ``cuda``.

    Raises:
        NotOneDeviceError: it moves nothing to a device that oomguard watches.
    """
    import torch

    if wrapped.__name__ == "cuda":
        if args:
            given = args[0]
        else:
            given = kwargs.get("device")
        return Move(wrapped, args, kwargs, weight_device_of("cuda" if given is None else given))
    # `to` has several signatures, and only torch's own parser knows them all.
    device = torch._C._nn._parse_to(*args, **kwargs)[0]
    # Such a call changes only the data type.
    if device is None:
        raise NotOneDeviceError
    return Move(wrapped, args, kwargs, weight_device_of(device))


class Move:
    """A move of a model from the host to a device, as by ``model.to("cuda")``."""

    def __init__(
        self,
        wrapped: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        place: WeightDevice,
    ) -> None:
        self._wrapped = wrapped
        self._args = args
        self._kwargs = kwargs
        self.place = place
        self._model: Any = wrapped.__self__  # type: ignore[attr-defined]  # a bound method

    @property
    def is_chosen(self) -> bool:
        """Whether the program named the device; a move always does."""
        return self.place.is_chosen

    @property
    def why_not_on_host(self) -> str | None:
        """Why layers cannot wait on the host; None if they can."""
        from importlib.util import find_spec

        if getattr(self._model, "hf_quantizer", None) is not None:
            return "its weights are quantized"
        if find_spec("accelerate") is not None:
            return None
        return "accelerate is not installed: pip install accelerate"

    def make(self, changed: Mapping[str, FactValue], host_bytes: int | None) -> Any:
        """Move the model with these settings changed.

        If it does not fit, the parts that have moved go back to the host.
        """
        import torch

        share = changed.get(ON_DEVICE)
        if "dtype" in changed:
            torch.nn.Module.to(self._model, dtype=getattr(torch, str(changed["dtype"])))
        if share is not None:
            offload_layers(self._model, self.place, int(share), host_bytes)
        if share is not None:
            moved = self._model
        else:
            moved = self._moved()
        if self.place.is_simulated:
            count_on_simulated(moved)
        return moved

    def _moved(self) -> Any:
        import torch

        try:
            return self._wrapped(*self._args, **self._kwargs)
        except Exception as error:
            # Weights that have moved would take the memory that the next attempt needs.
            if may_be_oom(error) and not self.place.is_simulated:
                torch.nn.Module.to(self._model, "cpu")
            raise

    def weights(self) -> Weights:
        """Return the model's weights."""
        return weights_in(self._model)

    def lighter(self) -> tuple[LighterWeights, ...]:
        """Return the weights in 16 bits, if some have 32."""
        tensors = [*self._model.parameters(), *self._model.buffers()]
        need = 0
        for tensor in tensors:
            if tensor.is_floating_point() and tensor.element_size() == 4:
                need += tensor.nbytes // 2
            else:
                need += tensor.nbytes
        if need == sum(tensor.nbytes for tensor in tensors):
            return ()
        return (LighterWeights("dtype", "bfloat16", 'dtype="bfloat16"', need),)


_NAME: Final = "pretrained_model_name_or_path"
# With these arguments the program places or shards the weights itself.
_OWN: Final = (
    "max_memory",
    "tp_plan",
    "tp_size",
    "device_mesh",
    "distributed_config",
    "gguf_file",
    "state_dict",
)
_DTYPES: Final = ("dtype", "torch_dtype")


def read_load(
    wrapped: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Load:
    """Read a call of ``from_pretrained``.

    Raises:
        NotOneDeviceError: its weights go to no device that oomguard watches.
    """
    return Load(wrapped, args, kwargs, weight_device_of(kwargs.get("device_map")))


class Load:
    """A call of ``from_pretrained``."""

    def __init__(
        self,
        wrapped: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        place: WeightDevice,
    ) -> None:
        self._wrapped = wrapped
        self._args = args
        self._kwargs = kwargs
        self.place = place

    @property
    def is_chosen(self) -> bool:
        """Whether the program named the device."""
        return self.place.is_chosen

    @property
    def why_not_on_host(self) -> str | None:
        """Why layers cannot wait on the host; None if they can."""
        for name in _OWN:
            if self._kwargs.get(name) is not None:
                return f"{name} places the weights"
        if _has_accelerate():
            return None
        return "accelerate is not installed: pip install accelerate"

    def make(self, changed: Mapping[str, FactValue], host_bytes: int | None) -> Any:
        """Load the model with these settings changed."""
        import torch

        kwargs = dict(self._kwargs)
        share = changed.get(ON_DEVICE)
        for setting, value in changed.items():
            if setting == "dtype":
                # The program may have used the argument's older name.
                for name in _DTYPES:
                    kwargs.pop(name, None)
                kwargs["dtype"] = getattr(torch, str(value))
            elif setting != ON_DEVICE:
                kwargs["quantization_config"] = self._quantization(value)
        if self.place.is_simulated:
            return self._simulated(kwargs, share)
        if share is not None:
            limits: dict[int | str, int] = {self.place.index: int(share)}
            if host_bytes is not None:
                limits["cpu"] = host_bytes
            # "sequential" fills the device up to its limit before it uses the host.
            kwargs |= {"device_map": "sequential", "max_memory": limits}
        return self._wrapped(*self._args, **kwargs)

    def _quantization(self, value: FactValue) -> Any:
        for way in self._lighter():
            if way.plan.value == value:
                return way.config()
        raise LookupError(value)

    def _simulated(self, kwargs: dict[str, Any], share: FactValue | None) -> Any:
        """Load the model on the host, then count it on the simulated device."""
        with torch_memory.on_host():
            # accelerate does not know the simulated device; the layers are placed below instead.
            kwargs.pop("device_map", None)
            loaded = self._wrapped(*self._args, **kwargs)
        if isinstance(loaded, tuple):
            model = loaded[0]
        else:
            model = loaded
        if share is not None:
            offload_layers(model, self.place, int(share))
        count_on_simulated(model)
        return loaded

    def weights(self) -> Weights | None:
        """Return the weights by the checkpoint's headers; None if its files are not found."""
        files = self._files
        if files is None:
            return None
        return weights_of(files, self._dtype)

    def lighter(self) -> tuple[LighterWeights, ...]:
        """Return the weights in fewer bits."""
        return tuple(way.plan for way in self._lighter())

    def _lighter(self) -> Any:
        given = self._kwargs.get("quantization_config") is not None
        return lighter_loads(self._files, self._dtype, self.place, is_quantized=given)

    @property
    def _dtype(self) -> str:
        for name in _DTYPES:
            given = self._kwargs.get(name)
            if given is not None:
                return str(given).removeprefix("torch.")
        return "auto"

    @functools.cached_property
    def _files(self) -> ModelFiles | None:
        if self._args:
            name = self._args[0]
        else:
            name = self._kwargs.get(_NAME)
        if name is None:
            folder = None
        else:
            folder = _folder_of(str(name), self._kwargs)
        try:
            if folder is None:
                return None
            return find_model(str(folder))
        except Exception:  # noqa: BLE001
            # Any error in a foreign folder means that its weights are unknown.
            return None


def _has_accelerate() -> bool:
    from importlib.util import find_spec

    return find_spec("accelerate") is not None


def _folder_of(name: str, kwargs: Mapping[str, Any]) -> Path | None:
    """Return a model's folder, local or in the Hub's cache; nothing is downloaded."""
    sub = str(kwargs.get("subfolder") or "")
    if Path(name).is_dir():
        return Path(name, sub)
    from huggingface_hub import try_to_load_from_cache

    if sub:
        within = f"{sub}/config.json"
    else:
        within = "config.json"
    options = {}
    for key in ("cache_dir", "revision"):
        if kwargs.get(key) is not None:
            options[key] = kwargs[key]
    found = try_to_load_from_cache(name, within, **options)
    if isinstance(found, str):
        return Path(found).parent
    return None


# The share of free host memory that weights may use.
_HOST_SHARE: Final = 0.9


class WeightPlacement(Protocol):
    """A load of a model on a device, or a move to one."""

    place: WeightDevice

    @property
    def is_chosen(self) -> bool:
        """Whether the program named the device; then layers need permission to wait elsewhere."""

    @property
    def why_not_on_host(self) -> str | None:
        """Why layers cannot wait on the host; None if they can."""

    def make(self, changed: Mapping[str, FactValue], host_bytes: int | None) -> Any:
        """Return the model on its device with these settings changed.

        ``host_bytes`` is the host memory for its other layers; None: unknown.
        """

    def weights(self) -> Weights | None:
        """Return the weights; None if they are unknown."""

    def lighter(self) -> tuple[LighterWeights, ...]:
        """Return the weights in fewer bits, with the most bits first."""


class WeightsStart:
    """A load or a move under a guard: a start without an engine to watch afterwards."""

    phase = "load_weights"
    reports_success = False

    def __init__(self, placing: WeightPlacement) -> None:
        self._placing = placing
        self._base_bytes: int | None = None

    def attempt(
        self, changed: Mapping[str, FactValue], within_s: float | None = None
    ) -> StartResult:
        """Load the weights with these settings changed.

        If a failure released unused memory, try again with the same settings.
        """
        del within_s
        ended = self._once(changed)
        while ended.error is not None and may_be_oom(ended.error):
            before = self._base_bytes
            lines = ended.lines
            _let_go(ended.error)
            torch_memory.release()
            self._base_bytes = torch_memory.live_bytes()
            if before is None or self._base_bytes is None or self._base_bytes >= before:
                return StartResult(error=ended.error, lines=lines)
            ended = self._once(changed)
        return ended

    def _once(self, changed: Mapping[str, FactValue]) -> StartResult:
        self._base_bytes = torch_memory.live_bytes()
        try:
            return StartResult(result=self._placing.make(changed, _host_bytes()))
        except Exception as error:  # noqa: BLE001
            # The guard judges it, and raises it again if there is no remedy.
            own = error.__traceback__
            return StartResult(
                error=error.with_traceback(own and own.tb_next), lines=tuple(exception_lines(error))
            )

    def memory_model(self, incident: Incident) -> LoadModel:
        """Return the memory model of the failed load."""
        del incident
        placing = self._placing
        return LoadModel(
            placing.weights(),
            self._base_bytes,
            _host_bytes(),
            placing.place.name,
            torch_memory.is_cached(),
            placing.why_not_on_host,
            placing.lighter(),
        )

    def attend(self, engine: Any, make_again: RestartEngine) -> None:
        """Do nothing: a loaded model does not die."""

    def is_given_up(self) -> bool:
        """Return False: the caller of a load waits for it."""
        return False

    def clean_up(self) -> None:
        """Release the memory of the last attempt."""
        torch_memory.release()

    def settings_in_force(self) -> dict[str, SettingInForce]:
        """Return whether the program named the device, as a setting."""
        chosen = self._placing.is_chosen
        return {
            ON_DEVICE: SettingInForce(ON_DEVICE, None, chosen, "given" if chosen else "default")
        }

    def carries(self, name: str, facts: Mapping[str, Fact]) -> bool:
        """Return whether a load has this setting."""
        del facts
        return name == ON_DEVICE or name in {way.setting for way in self._placing.lighter()}


def _let_go(error: BaseException) -> None:
    """Release what a failure's frames hold: the part of the model that was loaded."""
    for link in chain(error):
        traceback.clear_frames(link.__traceback__)


def _host_bytes() -> int | None:
    free = read_available_bytes()
    if free is None:
        return None
    return int(free * _HOST_SHARE)
