import signal
import sys

from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.inputs import TokensPrompt
from vllm.utils.argparse_utils import FlexibleArgumentParser

import oomguard


class Batcher:
    """Feeds requests as seats become free, hands each finished one to a callback."""

    def __init__(self, engine, on_done):
        self.engine = engine
        self.on_done = on_done

    def pump(self, requests, seats):
        pending = list(requests)
        open_requests = 0
        while pending or open_requests:
            while pending and open_requests < seats:
                key, tokens, length = pending.pop(0)
                sampling = SamplingParams(max_tokens=length, min_tokens=length, temperature=0)
                self.engine.add_request(key, TokensPrompt(prompt_token_ids=tokens), sampling)
                open_requests += 1
            for output in self.engine.step():
                if output.finished:
                    open_requests -= 1
                    self.on_done(output.request_id, output.outputs[0].token_ids)


def main(argv):
    signal.signal(signal.SIGUSR1, lambda *_: None)
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    args = EngineArgs.from_cli_args(parser.parse_args(argv))
    with oomguard.guard():
        engine = LLMEngine.from_engine_args(args)
    done = {}
    requests = [(f"r{n}", [9 + n] * (n + 1), 2 + n % 3) for n in range(11)]
    Batcher(engine, on_done=done.__setitem__).pump(requests, seats=3)
    assert {key: len(tokens) for key, tokens in done.items()} == {key: length for key, _, length in requests}
    config = engine.vllm_config
    print("VALUE gpu_memory_utilization", config.cache_config.gpu_memory_utilization)
    print("VALUE max_model_len", config.model_config.max_model_len)
    print("VALUE max_num_seqs", config.scheduler_config.max_num_seqs)


if __name__ == "__main__":
    FLAGS = (
        "--model ./pocket --dtype float16 --load-format dummy --enforce-eager --max-model-len 8192 "
        "--max-num-seqs 10"
    )
    main(sys.argv[1:] or [*FLAGS.split(), "--gpu-memory-utilization", "0.02"])
    print("INPROC-DONE")
