"""Let the installed vLLM lay out a budget's KV cache, which also works for unread fields."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from packaging.version import Version

from oomguard.core.errors import SettingError
from oomguard.estimate.child_python import call_child
from oomguard.estimate.start.start import StartBudget, VllmSettings
from oomguard.probe.host import multiplies_in_bfloat16

_LIMIT_S: Final = 300
_ENVIRONMENT: Final = {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
_PASSED: Final = (
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "kv_cache_dtype",
    "mamba_ssm_cache_dtype",
    "dtype",
    "quantization",
    "block_size",
    "enforce_eager",
    "enable_prefix_caching",
    "tensor_parallel_size",
    "pipeline_parallel_size",
)


def lay_out_with_engine(budget: StartBudget, model_path: str) -> StartBudget:
    """Return a budget with its KV cache as the installed vLLM lays it out.

    This takes about ten seconds and loads no weights. LoRA slots and copies of the model change the
    size of the pool, which already includes them, but not its layout.

    Raises:
        SettingError: the installed vLLM has another version or device than the budget.
        InputError: vLLM cannot run.
    """
    settings = budget.settings
    length = settings.max_model_len or 1
    pools = [max(0, stage.pool_bytes) for stage in budget.stages]
    found = _ask(settings, model_path, pools, max(budget.longest_request_tokens, length))
    _check_installed(settings, found)
    blocks = found["blocks"]
    tokens = found["block_tokens"]
    longest = found["longest_tokens"]
    if blocks:
        block_bytes = budget.kv_cache_pool_bytes // blocks
    else:
        block_bytes = 0
    reasons = []
    if longest < length and budget.kv_cache_pool_bytes > 0:
        reasons.append(
            f"by vLLM's own layout a request of {length} tokens does not fit, but one of "
            f"{longest} does"
        )
    for reason in budget.reasons:
        # The estimate's own sentence about one request follows oomguard's layout, not the engine's.
        if not reason.startswith("one request of "):
            reasons.append(reason)
    stages = []
    for stage in budget.stages:
        stages.append(replace(stage, request_bytes=found["needed_bytes"], block_bytes=0))
    return replace(
        budget,
        kv_cache_blocks=blocks,
        block_tokens=tokens,
        max_concurrency=found["max_concurrency"],
        kv_cache_tokens=int(found["max_concurrency"] * (settings.max_model_len or 0)),
        longest_request_tokens=longest,
        kv_bytes_per_token=budget.kv_bytes_per_token or block_bytes // max(1, tokens),
        stages=tuple(stages),
        reasons=tuple(reasons),
        assumptions=(*budget.assumptions, "KV cache: the installed vLLM's own layout"),
    )


def _check_installed(settings: VllmSettings, found: Mapping[str, Any]) -> None:
    if found["device"] != settings.device:
        raise SettingError(
            f"the installed vLLM is for {found['device']}, not {settings.device}",
            hint=f"--device {found['device']}",
        )
    if Version(found["version"]).release[:2] != settings.version.release[:2]:
        raise SettingError(
            f"the installed vLLM is {found['version']}, not {settings.version}",
            hint="omit --engine-version",
        )


def _ask(
    settings: VllmSettings, model_path: str, pools_bytes: list[int], limit_tokens: int
) -> dict[str, Any]:
    arguments = {}
    for name in _PASSED:
        value = getattr(settings, name)
        if value is not None:
            arguments[name] = value
    if (
        settings.device == "cpu"
        and settings.mamba_ssm_cache_dtype == "auto"
        and multiplies_in_bfloat16()
    ):
        arguments["mamba_ssm_cache_dtype"] = "float32"  # the CPU backend's kernels need this
    path = Path(model_path)
    if settings.speculative_config is not None:
        arguments["speculative_config"] = json.loads(settings.speculative_config)
    arguments["model"] = str(path.parent if path.is_file() else path)
    with tempfile.TemporaryDirectory(prefix="oomguard-") as folder:
        question = {
            "arguments": {**arguments, "kv_cache_memory_bytes": max([1, *pools_bytes])},
            "pools_bytes": pools_bytes,
            "limit_tokens": limit_tokens,
            "rendezvous": str(Path(folder) / "rendezvous"),
        }
        return call_child(
            "oomguard.estimate.start.engine_layout",
            question,
            limit_s=_LIMIT_S,
            environment=_ENVIRONMENT,
            failed="vLLM could not compute the layout",
            late="vLLM did not answer in {} seconds",
            late_hint="omit --ask-engine",
            hint=(
                "--ask-engine needs vLLM in the Python that runs oomguard. Omit it to "
                "use the closed form"
            ),
        )


# The child process: it runs vLLM's own KV cache planning for a model and a pool, without weights or
# a device. It reads one JSON object on standard input and prints one on the last line of standard
# output. It builds the model on the meta device, so its attention layers report their caches, and
# ``get_kv_cache_configs`` lays them out. Tested with 0.32. If another version lacks a name, the
# process fails, and the caller reports the error.

_ANY_POOL_BYTES: Final = 1 << 44


def answer(asked: dict[str, Any]) -> dict[str, Any]:
    """Return the pool's blocks, its concurrency, its longest request and the smallest pool.

    The smallest pool is the one for the requested length.
    """
    import vllm
    from vllm.config import get_layers_from_vllm_config, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends import utils as backends
    from vllm.v1.core.kv_cache_utils import (
        get_kv_cache_configs,
        get_max_concurrency_for_kv_cache_config,
    )

    stages = len(asked["pools_bytes"])
    ranks = asked["arguments"].get("tensor_parallel_size", 1)
    if stages * ranks > 1:
        # this backend does not search for a device
        asked["arguments"]["distributed_executor_backend"] = "mp"
    config = EngineArgs(
        **asked["arguments"], load_format="dummy", skip_tokenizer_init=True
    ).create_engine_config()
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{asked['rendezvous']}", 0, "gloo")
        initialize_model_parallel(1, 1)
        models = _built(config, stages, ranks)
        if hasattr(
            current_platform, "update_block_size_for_backend"
        ):  # blocks grow until one can store a state
            current_platform.update_block_size_for_backend(config)
        layers = get_layers_from_vllm_config(config, AttentionLayerBase)
        # Layers that reuse another's cache have none (get_kv_cache_spec of the model runner).
        specs = {}
        for name, layer in layers.items():
            if getattr(layer, "kv_sharing_target_layer_name", None):
                continue
            spec = layer.get_kv_cache_spec(config)
            if spec is not None:
                specs[name] = spec
        if hasattr(
            backends, "resolve_kv_cache_layout"
        ):  # the order of a block's bytes, not their number
            backends.resolve_kv_cache_layout(config, [["LBNHC"]], specs.values())
        of_stages = [_specs_of(stage, specs, layers) for stage in models]
        left_out = specs.keys() - set().union(*of_stages)
        if left_out:
            raise RuntimeError(f"no stage has the layers {', '.join(sorted(left_out))}")
        # A layout that no pool can have fails here, because no length would help.
        get_kv_cache_configs(config, of_stages, [_ANY_POOL_BYTES] * stages)

        def planned(max_model_len: int, pools_bytes: list[int]) -> Any:
            config.model_config.max_model_len = max_model_len
            try:
                return get_kv_cache_configs(config, of_stages, pools_bytes)[0]
            except ValueError:
                return None

        length = config.model_config.max_model_len
        pools = asked["pools_bytes"]
        longest = _largest(lambda tokens: planned(tokens, pools) is not None, asked["limit_tokens"])
        smallest = (
            _largest(lambda size: planned(length, [size] * stages) is None, _ANY_POOL_BYTES) + 1
        )
        # If the requested length does not fit in the pool, count the blocks of the longest length
        # that does.
        if longest:
            found = planned(min(length, longest), pools)
        else:
            found = None
        if found is None:
            concurrency = 0.0
        else:
            concurrency = get_max_concurrency_for_kv_cache_config(config, found)
        return {
            "device": "cpu" if current_platform.is_cpu() else "cuda",
            "version": vllm.__version__,
            "blocks": 0 if found is None else found.num_blocks,
            "max_concurrency": concurrency if longest >= length else 0.0,
            "block_tokens": config.cache_config.block_size,
            "longest_tokens": longest,
            "needed_bytes": smallest,
            "weights_bytes": list(map(_weights_bytes, models)),
        }


def _specs_of(stage: list[Any], specs: Mapping[str, Any], layers: Mapping[str, Any]) -> Any:
    """Return the caches of the layers that a stage's models hold."""
    modules: set[int] = set()
    for model in stage:
        modules.update(map(id, model.modules()))
    found = {}
    for name, spec in specs.items():
        if id(layers[name]) in modules:
            found[name] = spec
    return found


def _weights_bytes(stage: list[Any]) -> int:
    total = 0
    for model in stage:
        for parameter in model.parameters():
            total += parameter.numel() * parameter.element_size()
    return total


def _built(config: Any, stages: int, ranks: int) -> list[list[Any]]:
    """Build each stage's first rank on the meta device, with the draft on the last.

    One process represents all of them, because layers only ask the groups for the number of ranks.
    """
    import torch
    from vllm.distributed import get_pp_group, get_tp_group
    from vllm.model_executor.model_loader.utils import initialize_model

    before = torch.get_default_dtype()
    torch.set_default_dtype(config.model_config.dtype)
    models = []
    with torch.device("meta"):
        for stage in range(stages):
            _pretend(get_tp_group(), ranks, 0)
            _pretend(get_pp_group(), stages, stage)
            models.append([initialize_model(config)])
        if (
            config.speculative_config is not None
            and config.speculative_config.draft_model_config is not None
        ):
            _pretend(get_pp_group(), 1, 0)  # the draft is whole on the last stage
            models[-1].append(_draft(config))
    torch.set_default_dtype(before)
    return models


def _draft(config: Any) -> Any:
    """Build the draft model like its proposer does.

    Sources: v1/spec_decode/draft_model.py and llm_base_proposer.py.
    """
    from vllm.compilation.backends import set_model_tag
    from vllm.config.utils import replace
    from vllm.model_executor.model_loader.utils import initialize_model

    spec = config.speculative_config
    if spec.method != "draft_model":
        with set_model_tag("eagle_head"):
            return initialize_model(config, model_config=spec.draft_model_config)
    own = replace(
        config,
        quant_config=None,
        parallel_config=replace(spec.draft_parallel_config, rank=config.parallel_config.rank),
        model_config=spec.draft_model_config,
    )
    with set_model_tag("draft_model"):
        return initialize_model(own, prefix="draft_model")


def _pretend(group: Any, size: int, rank: int) -> None:
    """Make a group of one report ``size`` ranks."""
    group.world_size, group.ranks, group.rank_in_group, group.rank = (
        size,
        list(range(size)),
        rank,
        rank,
    )


def _largest(holds: Callable[[int], bool], limit: int) -> int:
    """Return the largest number up to ``limit`` for which ``holds`` is true, or 0."""
    low = 0
    high = limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


def refuse_code() -> None:
    """Prevent every part of the engine from loading code that a configuration names.

    ``trust_remote_code`` is off here, but vLLM 0.10.1 to 0.17 ran such files anyway
    (CVE-2026-22807, CVE-2026-27893). All of them load through one function of transformers, which
    this blocks.
    """
    from transformers import dynamic_module_utils

    def refused(class_name: str, *_: object, **__: object) -> None:
        raise RuntimeError(f"{class_name} is code of the model, which oomguard does not run")

    dynamic_module_utils.get_class_in_module = refused


def inspect_here() -> None:
    """Make vLLM inspect a model's class in this process.

    A second process would import vLLM again and double the time. vLLM uses one so that the first
    stays without a CUDA context, but this process ends after its answer.
    """
    from vllm.model_executor.models import registry

    if hasattr(registry, "_run_in_subprocess"):
        registry._run_in_subprocess = lambda look: look()


def main() -> None:
    """Compute the layout from standard input."""
    asked = json.load(sys.stdin)
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the engine's own output is not part of the answer
    refuse_code()
    inspect_here()
    found = answer(asked)
    out.write(json.dumps(found) + "\n")
    out.flush()
    os._exit(0)  # an initialized process group needs seconds to end, and there is nothing to save
