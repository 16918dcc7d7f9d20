"""vLLM's compile cache on disk: without an entry of the model's table on as many ranks the next start compiles for certain."""

from __future__ import annotations

import json
from pathlib import Path

from oomguard.estimate.model.shape import read_shape
from oomguard.estimate.start.calibration import cache_root, has_entry

SHAPE = read_shape(
    {
        "model_type": "qwen2",
        "num_hidden_layers": 2,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_attention_heads": 14,
        "vocab_size": 151_930,
        "max_position_embeddings": 4096,
    }
)
# The first lines of a graph as print_readable writes them.
GRAPH = """from __future__ import annotations
import torch
class GraphModule(torch.nn.Module):
    def forward(self, s72: "Sym(s72)", L_input_ids_: "i32[s72]", L_self_modules_embed_tokens_parameters_weight_: "bf16[{rows}, {hidden}]"):
        submod_0 = self.submod_0(L_input_ids_, s72, L_self_modules_embed_tokens_parameters_weight_)
"""


def entry(
    root: Path, rows: int = 151_936, hidden: int = 896, ranks: int = 1, name: str = "0a1b2c3d4e"
) -> Path:
    """Lay an entry out as VllmBackend.__call__ of 0.32 does."""
    for rank in range(ranks):
        folder = root / "torch_compile_cache" / name / f"rank_{rank}_0" / "backbone"
        folder.mkdir(parents=True)
        (folder / "computation_graph.py").write_text(GRAPH.format(rows=rows, hidden=hidden))
        (folder / "cache_key_factors.json").write_text(
            json.dumps({"env": {}, "config_hash": "x", "code_hash": "y"})
        )
        (folder / "vllm_compile_cache.py").write_text("{}")
    return root


def test_an_entry_with_the_table_may_be_of_the_start(tmp_path):
    assert has_entry(entry(tmp_path), SHAPE, 1, environ={})


def test_without_a_folder_the_next_start_compiles(tmp_path):
    assert not has_entry(tmp_path, SHAPE, 1, environ={})


def test_entry_of_another_table_is_of_another_start(subtests, tmp_path):
    for other in [{"rows": 128_256}, {"hidden": 1024}, {"ranks": 2}]:
        with subtests.test(other=other):
            assert not has_entry(entry(tmp_path / str(other), **other), SHAPE, 1, environ={})


def test_on_several_ranks_the_table_is_a_share_of_the_vocabulary(tmp_path):
    entry(tmp_path, rows=151_936 // 2, ranks=2)
    assert has_entry(tmp_path, SHAPE, 2, environ={})
    assert not has_entry(tmp_path, SHAPE, 2, stages=2, environ={})


def test_one_entry_of_many_is_enough(tmp_path):
    entry(tmp_path, rows=1, name="ffffffffff")
    assert has_entry(entry(tmp_path), SHAPE, 1, environ={})


def test_a_cache_that_is_switched_off_has_no_entry(tmp_path):
    assert not has_entry(entry(tmp_path), SHAPE, 1, environ={"VLLM_DISABLE_COMPILE_CACHE": "1"})


def test_a_folder_that_cannot_be_read_has_no_entry(tmp_path):
    (tmp_path / "torch_compile_cache").write_text("a file")
    assert not has_entry(tmp_path, SHAPE, 1, environ={})


def test_the_folder_is_where_vllm_has_it(subtests):
    for environ, root in [
        ({"VLLM_CACHE_ROOT": "/data/vllm"}, "/data/vllm"),
        ({"XDG_CACHE_HOME": "/data/cache"}, "/data/cache/vllm"),
    ]:
        with subtests.test(environ=environ, root=root):
            assert cache_root(environ) == Path(root)
