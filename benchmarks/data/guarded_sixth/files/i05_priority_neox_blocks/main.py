import argparse

from vllm import LLM, SamplingParams

import oomguard

parser = argparse.ArgumentParser(fromfile_prefix_chars="@")
parser.add_argument("--window", type=int)
parser.add_argument("--cache-blocks", type=int)
parser.add_argument("--seats", type=int, default=5)
parser.add_argument("--cache-mb", type=int, default=200)


class Desk:
    """Urgent mail is answered before the rest."""

    def __init__(self, options):
        self.options = options

    def open(self):
        return LLM(
            "./clerk",
            dtype="float16",
            load_format="dummy",
            enforce_eager=True,
            scheduling_policy="priority",
            max_model_len=self.options.window,
            num_gpu_blocks_override=self.options.cache_blocks,
            max_num_seqs=self.options.seats,
            kv_cache_memory_bytes=self.options.cache_mb * 1_000_000,
        )


def main():
    options = parser.parse_args(["@desk.args"])
    with oomguard.guard():
        llm = Desk(options).open()
    mail = [("late parcel", 3), ("fire!", 0), ("newsletter", 9), ("invoice", 2), ("complaint", 1), ("thanks", 9), ("spam", 9)]
    outputs = llm.generate(
        [text for text, _ in mail],
        [SamplingParams(max_tokens=4 + urgency, ignore_eos=True) for _, urgency in mail],
        priority=[urgency for _, urgency in mail],
        use_tqdm=False,
    )
    for (text, urgency), output in zip(mail, outputs, strict=True):
        assert output.prompt == text and len(output.outputs[0].token_ids) == 4 + urgency, output
    config = llm.llm_engine.vllm_config
    print("VALUE num_gpu_blocks_override", config.cache_config.num_gpu_blocks_override)
    print("VALUE max_model_len", config.model_config.max_model_len)
    print("VALUE max_num_seqs", config.scheduler_config.max_num_seqs)
    print("VALUE kv_cache_memory_bytes", config.cache_config.kv_cache_memory_bytes)


if __name__ == "__main__":
    main()
    print("INPROC-DONE")
