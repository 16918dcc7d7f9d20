import csv
import io

from vllm import LLM, SamplingParams

import oomguard

TABLE = """id,text
1,Der Hund schläft.
2,Die Katze sieht aus dem Fenster und wartet auf den Regen.
3,Wo ist der Bahnhof?
4,Ich hätte gern ein Kilo Äpfel.
"""


class Translation:
    settings = {
        "max_model_len": 16384,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 8192,
        "kv_cache_memory_bytes": 40_000_000,
        "dtype": "float32",
        "load_format": "dummy",
        "enforce_eager": True,
    }

    def __init__(self, model):
        self.model = model
        self.config = None

    @oomguard.guard
    def rows(self, table, size=2):
        """Yield translated rows, some at a time."""
        llm = LLM(self.model, **self.settings)
        self.config = llm.llm_engine.vllm_config
        sampling = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)
        reader = list(csv.DictReader(io.StringIO(table)))
        for start in range(0, len(reader), size):
            part = reader[start : start + size]
            outputs = llm.generate([f"German: {row['text']}\nEnglish:" for row in part], sampling, use_tqdm=False)
            for row, output in zip(part, outputs, strict=True):
                yield row | {"english": output.outputs[0].text, "tokens": len(output.outputs[0].token_ids)}


def main():
    job = Translation("./polyglot")
    done = {row["id"]: row["tokens"] for row in job.rows(TABLE)}
    print("rows", done)
    assert list(done) == ["1", "2", "3", "4"]
    config = job.config
    print("VALUE max_num_batched_tokens", config.scheduler_config.max_num_batched_tokens)
    print("VALUE max_model_len", config.model_config.max_model_len)
    print("VALUE max_num_seqs", config.scheduler_config.max_num_seqs)
    print("VALUE kv_cache_memory_bytes", config.cache_config.kv_cache_memory_bytes)


if __name__ == "__main__":
    main()
    print("INPROC-DONE")
