import pathlib

from vllm.v1.sample.logits_processor import LogitsProcessor

SLOTS = 4096


class BanWords(LogitsProcessor):
    def __init__(self, vllm_config, device, is_pin_memory):
        words = pathlib.Path("banned.txt").read_text().split()
        if len(words) > SLOTS:
            raise RuntimeError(f"word list out of memory slots: {len(words)} words, {SLOTS} slots in the memory table; shorten banned.txt")
        self.words = words

    @classmethod
    def validate_params(cls, params):
        return None

    def is_argmax_invariant(self):
        return False

    def update_state(self, batch_update):
        return None

    def apply(self, logits):
        return logits
