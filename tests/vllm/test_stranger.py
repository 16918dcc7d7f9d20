"""``plan --ask-engine`` in a stranger's model folder: vLLM reads its configuration and runs none of its Python."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 4000,
    "max_position_embeddings": 1024,
    "torch_dtype": "float16",
}
ASK = (
    "plan",
    ".",
    "--gpu-memory",
    "4GiB",
    "--device",
    "cpu",
    "--kv-cache-memory-bytes",
    "1GiB",
    "--max-num-seqs",
    "4",
    "--max-num-batched-tokens",
    "512",
    "--ask-engine",
)


def asked(
    stranger, env: dict[str, str], *program: str
) -> tuple[subprocess.CompletedProcess[str], int]:
    """The answer, and the number of the process that gave it; whoever is asked for permission says yes."""
    with subprocess.Popen(
        ["python", *program, *ASK],
        cwd=stranger.folder,
        env=env,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        out, err = process.communicate("y\n" * 9, timeout=300)
    return subprocess.CompletedProcess(program, process.returncode, out, err), process.pid


def test_no_module_of_the_working_directory_runs(stranger, vllm_env, tmp_path):
    (stranger.folder / "config.json").write_text(json.dumps(CONFIG))
    script = tmp_path / "oomguard"
    script.write_text("from oomguard.__main__ import main\nmain()\n")
    (tmp_path / "nothing.py").touch()
    # An empty cache: vLLM inspects the model in a Python of its own.
    env = {**vllm_env, "PYTHONPATH": f".:{ROOT}", "VLLM_CACHE_ROOT": str(tmp_path / "cache")}
    subprocess.run(
        ["python", str(tmp_path / "nothing.py")],
        cwd=stranger.folder,
        env=env,
        check=True,
        timeout=60,
    )
    before_us = set(stranger.ran())
    (stranger.folder / "oomguard.py").unlink()  # the script's own import would take it
    answer, pid = asked(stranger, env, str(script))
    assert answer.returncode == 0, answer.stderr
    assert "the installed vLLM's own layout" in answer.stdout
    ran = stranger.ran()
    assert set(ran) <= before_us
    assert set().union(*ran.values()) <= {pid}


def test_no_class_that_a_configuration_names_is_loaded(stranger, vllm_env, tmp_path):
    named = dict.fromkeys(
        ("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoTokenizer"), "evil.Evil"
    )
    config = {
        **CONFIG,
        "architectures": ["EvilForCausalLM"],
        "auto_map": named,
        "name_or_path": str(stranger.folder),
    }
    (stranger.folder / "config.json").write_text(json.dumps(config))
    stranger.plant("evil")
    env = {**vllm_env, "PYTHONPATH": str(ROOT), "HF_MODULES_CACHE": str(tmp_path / "modules")}
    (tmp_path / "run.py").write_text("from oomguard.__main__ import main\nmain()\n")
    answer, _ = asked(stranger, env, str(tmp_path / "run.py"))
    assert "run the custom code" not in answer.stdout
    assert not stranger.ran()
    assert not list((tmp_path / "modules").glob("**/evil.py"))
