from vllm import LLM

import oomguard

CONVERT = {
    "architectures": ["Qwen3ForSequenceClassification"],
    "classifier_from_token": ["n", "y"],
    "is_original_qwen3_reranker": True,
}
QUERY = "<Instruct>: find the passage\n<Query>: {}\n"
PASSAGE = "<Document>: {}"


class Reranker:
    def __init__(self, path, **limits):
        with oomguard.guard(allow="reduces-capacity"):
            self.llm = LLM(
                model=path,
                runner="pooling",
                hf_overrides=CONVERT,
                dtype="float32",
                load_format="dummy",
                enforce_eager=True,
                enable_prefix_caching=False,
                **limits,
            )

    def rank(self, query, passages):
        outputs = self.llm.score(QUERY.format(query), [PASSAGE.format(text) for text in passages], use_tqdm=False)
        assert len(outputs) == len(passages)
        scores = [output.outputs.score for output in outputs]
        assert all(score == score for score in scores)
        return sorted(range(len(passages)), key=scores.__getitem__, reverse=True), scores


def main():
    reranker = Reranker("./judge", max_model_len=32_768, max_num_seqs=8, kv_cache_memory_bytes=42_000_000)
    passages = ["the cat sat", "on the mat " * 30, "dogs", "a mat", "cats and mats " * 80]
    order, scores = reranker.rank("where is the cat?", passages)
    assert sorted(order) == [0, 1, 2, 3, 4]
    again, same = reranker.rank("where is the cat?", passages[::-1])
    assert all(abs(a - b) < 1e-3 for a, b in zip(scores, same[::-1], strict=True)), (scores, same)
    config = reranker.llm.llm_engine.vllm_config
    print("VALUE max_model_len", config.model_config.max_model_len)
    print("VALUE max_num_seqs", config.scheduler_config.max_num_seqs)
    print("VALUE kv_cache_memory_bytes", config.cache_config.kv_cache_memory_bytes)


if __name__ == "__main__":
    main()
    print("INPROC-DONE")
