"""Every slot of the batch gets a row of biases of its own."""
import torch
from vllm.v1.sample.logits_processor import LogitsProcessor


class BiasTable(LogitsProcessor):
    def __init__(self, vllm_config, device, is_pin_memory):
        seqs = vllm_config.scheduler_config.max_num_seqs
        vocab = vllm_config.model_config.get_vocab_size()
        self.table = torch.zeros((seqs, vocab), dtype=torch.float32, device=device)
        self.used = set()

    def is_argmax_invariant(self):
        return False

    def update_state(self, batch_update):
        if batch_update is None:
            return
        for index, params, _, _ in batch_update.added:
            bias = (params.extra_args or {}).get("bias")
            if bias is not None:
                self.table[index] = float(bias)
                self.used.add(index)

    def apply(self, logits):
        if not self.used:
            return logits
        return logits + self.table[: logits.shape[0]]
