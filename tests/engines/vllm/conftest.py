"""A small tree of vLLM's sources, in the shapes of the real ones: what reads sources is tried on it, with a part taken out."""

from __future__ import annotations

import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ARGUMENTS = '''\
"""Arguments."""
from vllm.config import CacheConfig, get_field

@dataclass
class EngineArgs:
    """Arguments for the engine."""

    model: str = "org/model"
    max_model_len: int | None = None
    gpu_memory_utilization: float = CacheConfig.gpu_memory_utilization
    enforce_eager: bool = False
    limit_mm_per_prompt: dict[str, int] = get_field(CacheConfig, "limit_per_prompt")

    def __post_init__(self):
        from vllm.plugins import load_general_plugins

        load_general_plugins()

    @staticmethod
    def add_cli_args(parser):
        parser.add_argument("--max-model-len", type=int)
        group.add_argument(
            "--gpu-memory-utilization", "--device-memory-utilization", **cache_kwargs["gpu_memory_utilization"]
        )
        parser.add_argument("--enforce-eager", action="store_true")
        parser.add_argument("--enable-prefix-caching", **cache_kwargs["enable_prefix_caching"])

    def create_engine_config(self, usage_context=None, headless: bool = False):
        return VllmConfig()
'''
TREE = {
    "__init__.py": "raise ImportError('the sources are read, not run')\n",
    "engine/arg_utils.py": ARGUMENTS,
    "plugins/__init__.py": 'DEFAULT_PLUGINS_GROUP = "vllm.general_plugins"\n\ndef load_general_plugins():\n    pass\n',
    "config.py": (
        "@config\nclass CacheConfig:\n    gpu_memory_utilization: float = Field(default=0.92, gt=0)\n"
        "    limit_per_prompt: dict[str, int] = field(default_factory=dict)\n\n"
        "class VllmConfig:\n    cache_config: CacheConfig = None\n"
    ),
}


@pytest.fixture
def vllm_tree(tmp_path: Path) -> Callable[..., Path]:
    """Write the tree, with a text of it in place of another; return the package's folder."""

    def write(old: str = "", new: str = "", at: Path | None = None) -> Path:
        package = (at or tmp_path / "wheel") / "vllm"
        for name, text in TREE.items():
            path = package / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text.replace(old, new) if old else text)
        assert not old or any(old in text for text in TREE.values())
        return package

    return write


@pytest.fixture
def vllm_environment(tmp_path: Path, vllm_tree) -> Callable[..., Path]:
    """Make a virtual environment whose vLLM is the tree, and its program this text; return the environment's folder."""

    def make(program: str = "", old: str = "", new: str = "", *, sources: bool = True) -> Path:
        folder = tmp_path / "venv"
        scripts, site = (
            folder / "bin",
            f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages",
        )
        scripts.mkdir(parents=True)
        (folder / site).mkdir(parents=True)
        real = Path(sys.executable).resolve()
        (folder / "pyvenv.cfg").write_text(
            f"home = {real.parent}\ninclude-system-site-packages = false\n"
        )
        (scripts / "python3").symlink_to(real)
        (scripts / "vllm").write_text(f"#!{scripts}/python3\n{program}")
        (scripts / "vllm").chmod(stat.S_IRWXU)
        if sources:
            vllm_tree(old, new, at=folder / site)
        return folder

    return make
