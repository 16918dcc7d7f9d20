"""Print the bytes of the largest array or tensor that vLLM's own classes make at their start, by what makes it; no engine runs."""

import json
from types import SimpleNamespace

import numpy as np
import torch
from vllm.lora.layers.logits_processor import LogitsProcessorWithLoRA
from vllm.lora.layers.vocab_parallel_embedding import VocabParallelEmbeddingWithLoRA
from vllm.v1.spec_decode import ngram_proposer
from vllm.v1.worker.block_table import MultiGroupBlockTable

SEQS, LENGTH, BLOCK, SLOTS, RANK, VOCABULARY, WIDTH = 7, 4999, 16, 3, 8, 1009, 61


def n_gram_table() -> int:
    made, zeros = [], np.zeros

    def counted(*args, **kwargs):
        made.append(zeros(*args, **kwargs))
        return made[-1]

    config = SimpleNamespace(
        speculative_config=SimpleNamespace(
            prompt_lookup_min=2, prompt_lookup_max=4, num_speculative_tokens=5
        ),
        model_config=SimpleNamespace(max_model_len=LENGTH),
        scheduler_config=SimpleNamespace(max_num_seqs=SEQS),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
    )
    ngram_proposer.NgramProposer.propose = lambda *_: None  # nothing is compiled
    np.zeros = counted
    ngram_proposer.NgramProposer(config)
    np.zeros = zeros
    return max(array.nbytes for array in made)


def block_numbers() -> int:
    blocks = -(-LENGTH // BLOCK)
    tables = MultiGroupBlockTable(SEQS, 64, False, torch.device("cpu"), [BLOCK], [blocks])
    return tables.block_tables[0].block_table.cpu.nbytes


def slots(layer_class: type, **attributes) -> list[int]:
    layer = layer_class.__new__(layer_class)
    torch.nn.Module.__init__(layer)
    for name, value in attributes.items():
        setattr(layer, name, value)
    layer.create_lora_weights(SLOTS, SimpleNamespace(max_lora_rank=RANK, lora_dtype=torch.float16))
    return [layer.lora_a_stacked.nbytes, layer.lora_b_stacked.nbytes]


embedding = SimpleNamespace(org_vocab_size=VOCABULARY, embedding_dim=WIDTH, weight=torch.empty(1))
head = SimpleNamespace(vocab_size=VOCABULARY)
of_head = {
    "base_layer": head,
    "hidden_size": WIDTH,
    "device": "cpu",
    "sharded_to_full_mapping": None,
}
print(
    json.dumps(
        {
            "ngram_rows": n_gram_table(),
            "request_blocks": block_numbers(),
            "embedding": slots(VocabParallelEmbeddingWithLoRA, base_layer=embedding),
            "head": slots(LogitsProcessorWithLoRA, **of_head),
        }
    )
)
