import json
import math
from pathlib import Path

import numpy as np
from vllm import LLM, SamplingParams

import oomguard

RATE = 16_000


def prepare(folder):
    """The checkpoint came without the file that says how audio is read."""
    about = {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "processor_class": "WhisperProcessor",
        "chunk_length": 30,
        "feature_size": 80,
        "hop_length": 160,
        "n_fft": 400,
        "n_samples": 480_000,
        "nb_max_frames": 3000,
        "padding_side": "right",
        "padding_value": 0.0,
        "return_attention_mask": False,
        "sampling_rate": RATE,
    }
    Path(folder, "preprocessor_config.json").write_text(json.dumps(about))
    return folder


def tone(hertz, seconds):
    return np.sin(2 * math.pi * hertz * np.arange(int(RATE * seconds)) / RATE).astype(np.float32)


class Dictation:
    # below 1,500 a clip would not be heard in one step
    @oomguard.guard(pin=["max_num_batched_tokens"])
    def __init__(self, folder):
        self.llm = LLM(
            prepare(folder),
            dtype="float16",
            load_format="dummy",
            enforce_eager=True,
            max_model_len=448,
            max_num_seqs=2,
            max_num_batched_tokens=2048,
            num_gpu_blocks_override=14,
            kv_cache_memory_bytes=40_000_000,
            limit_mm_per_prompt={"audio": 1},
        )

    def transcribe(self, clips):
        prompts = [
            {
                "encoder_prompt": {"prompt": "", "multi_modal_data": {"audio": (clip, RATE)}},
                "decoder_prompt": {"prompt_token_ids": [1, 30, 31, 32]},
            }
            for clip in clips
        ]
        return self.llm.generate(prompts, SamplingParams(max_tokens=9, ignore_eos=True, temperature=0), use_tqdm=False)


def main():
    dictation = Dictation("./dictation")
    clips = [tone(220, 1.0), tone(440, 4.5), tone(330, 0.5)]
    outputs = dictation.transcribe(clips)
    assert len(outputs) == 3
    assert all(len(output.outputs) == 1 and len(output.outputs[0].token_ids) == 9 for output in outputs)
    config = dictation.llm.llm_engine.vllm_config
    print("VALUE num_gpu_blocks_override", config.cache_config.num_gpu_blocks_override)
    print("VALUE max_model_len", config.model_config.max_model_len)
    print("VALUE max_num_seqs", config.scheduler_config.max_num_seqs)
    print("VALUE max_num_batched_tokens", config.scheduler_config.max_num_batched_tokens)
    print("VALUE kv_cache_memory_bytes", config.cache_config.kv_cache_memory_bytes)


if __name__ == "__main__":
    main()
    print("INPROC-DONE")
