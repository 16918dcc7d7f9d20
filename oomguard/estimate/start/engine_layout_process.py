"""Run by the Python that has vLLM: what its own planning code makes of a model and a pool, without
weights and without a device.

It reads one JSON object on standard input and prints one on the last line of standard output. The
model is built on the meta device, its attention layers tell what they cache, and
``get_kv_cache_configs`` lays that out. Tried with 0.32; a name that another version lacks ends in
an error, which the caller reports.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

_ANY_POOL_BYTES = 1 << 44


def answer(asked: dict[str, Any]) -> dict[str, Any]:
    """Answer with the pool's blocks, its requests at once, the longest request in it, and the
    smallest pool for the asked length.
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
        asked["arguments"]["distributed_executor_backend"] = "mp"  # no device is looked for
    config = EngineArgs(
        **asked["arguments"], load_format="dummy", skip_tokenizer_init=True
    ).create_engine_config()
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{asked['rendezvous']}", 0, "gloo")
        initialize_model_parallel(1, 1)
        models = _built(config, stages, ranks)
        if hasattr(
            current_platform, "update_block_size_for_backend"
        ):  # blocks grow until one holds a state
            current_platform.update_block_size_for_backend(config)
        layers = get_layers_from_vllm_config(config, AttentionLayerBase)
        # Layers that read another's cache have none of their own (get_kv_cache_spec of the model
        # runner).
        own = {
            n: layer
            for n, layer in layers.items()
            if not getattr(layer, "kv_sharing_target_layer_name", None)
        }
        specs = {
            n: spec
            for n, layer in own.items()
            if (spec := layer.get_kv_cache_spec(config)) is not None
        }
        if hasattr(
            backends, "resolve_kv_cache_layout"
        ):  # where a block's bytes lie, not how many they are
            backends.resolve_kv_cache_layout(config, [["LBNHC"]], specs.values())
        owners = [{id(module) for model in stage for module in model.modules()} for stage in models]
        of_stages = [
            {name: spec for name, spec in specs.items() if id(layers[name]) in owner}
            for owner in owners
        ]
        left_out = specs.keys() - {name for stage in of_stages for name in stage}
        if left_out:
            raise RuntimeError(f"no stage has the layers {', '.join(sorted(left_out))}")
        # What it cannot lay out in any pool ends here: no length would help.
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
        # Of a pool in which the asked length does not fit, the blocks are those of the longest that
        # does.
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
            "weights_bytes": [
                sum(p.numel() * p.element_size() for m in stage for p in m.parameters())
                for stage in models
            ],
        }


def _built(config: Any, stages: int, ranks: int) -> list[list[Any]]:
    """Build the models of each stage's first rank on the meta device, a draft with the last.

    One process stands for all of them: layers only ask the groups how many ranks there are.
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
            _pretend(get_pp_group(), 1, 0)  # the draft stands whole on the last stage
            models[-1].append(_draft(config))
    torch.set_default_dtype(before)
    return models


def _draft(config: Any) -> Any:
    """Build the draft model as its proposer does (v1/spec_decode/draft_model.py and
    llm_base_proposer.py).
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
    """Let a group of one answer as if it had ``size`` ranks."""
    group.world_size, group.ranks, group.rank_in_group, group.rank = (
        size,
        list(range(size)),
        rank,
        rank,
    )


def _largest(holds: Callable[[int], bool], limit: int) -> int:
    """Return the largest number up to ``limit`` for which it holds, 0 where it holds for none."""
    low = 0
    high = limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


def refuse_code() -> None:
    """Let no class be loaded from files that a configuration names, whichever part of the engine
    asks for it.

    ``trust_remote_code`` is off here, and vLLM 0.10.1 to 0.17 ran such files all the same
    (CVE-2026-22807, CVE-2026-27893): this stops at the one function of transformers through which
    all of them load.
    """
    from transformers import dynamic_module_utils

    def refused(class_name: str, *_: object, **__: object) -> None:
        raise RuntimeError(f"{class_name} is code that the model brings, and is not run")

    dynamic_module_utils.get_class_in_module = refused


def inspect_here() -> None:
    """Let vLLM look at a model's class in this process: another one would import vLLM again, for as
    long as the whole answer takes.

    vLLM takes another so that the importing one stays without a CUDA context; this one ends when it
    has answered.
    """
    from vllm.model_executor.models import registry

    if hasattr(registry, "_run_in_subprocess"):
        registry._run_in_subprocess = lambda look: look()


def main() -> None:
    """Answer the question on standard input."""
    asked = json.load(sys.stdin)
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the engine prints is no answer
    refuse_code()
    inspect_here()
    found = answer(asked)
    out.write(json.dumps(found) + "\n")
    out.flush()
    os._exit(
        0
    )  # an initialised process group takes seconds to end, and nothing is left to be saved
