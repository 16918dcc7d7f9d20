"""``generate`` of one row: long prompts, streamers, speculative decoding, a cache that is carried
on.
"""

import threading

import oomguard
import torch
from device import on_device
from parts import llama, long_prompt, tokenizer
from registry import ANY_SAFE, Job, pattern

GUIDE = "transformers docs, Generation strategies"
CHUNKS = "one row: chunked prefill with the same tokens, or a clear no"


@pattern("transformers docs, "
         "prefill_chunk_size", CHUNKS, ANY_SAFE, rows=1024, small=512, exact=True)
def one_very_long_prompt(size):
    """generate of one long row."""
    model = llama(eager=True)
    ids = long_prompt(size)
    return Job(lambda: model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False), [model])


@pattern("transformers docs, "
         "prefill_chunk_size", CHUNKS, ANY_SAFE, rows=1024, small=512, exact=True)
def one_very_long_prompt_sdpa(size):
    """generate of one long row, default attention, a wide MLP."""
    model = llama(intermediate_size=512)
    ids = long_prompt(size)
    return Job(lambda: model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False), [model])


@pattern(GUIDE + ": assisted decoding", CHUNKS, ANY_SAFE, rows=1024, small=512, exact=True)
def assisted_generation(size):
    """generate(assistant_model=...)."""
    model = llama(eager=True)
    small = llama(eager=True, seed=1, num_hidden_layers=1)
    ids = long_prompt(size)
    mask = torch.ones_like(ids)
    return Job(lambda: model.generate(ids, attention_mask=mask, assistant_model=small, max_new_tokens=8, do_sample=False), [model, small])


@pattern(GUIDE + ": prompt lookup", CHUNKS, ANY_SAFE, rows=1024, small=512, exact=True)
def prompt_lookup(size):
    """generate(prompt_lookup_num_tokens=3)."""
    model = llama(eager=True)
    ids = long_prompt(size)
    mask = torch.ones_like(ids)
    return Job(lambda: model.generate(ids, attention_mask=mask, prompt_lookup_num_tokens=3, max_new_tokens=8, do_sample=False), [model])


@pattern("transformers docs, Streaming", "chunked prefill, every word printed once; or a clear no", ANY_SAFE, rows=1024, small=512, exact=True)
def text_streamer(size):
    """TextStreamer to stdout."""
    import contextlib
    import io

    from transformers import TextStreamer

    model = llama(eager=True)
    ids = long_prompt(size)
    tok = tokenizer()

    def call():
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            streamer = TextStreamer(tok, skip_prompt=True)
            tokens = model.generate(ids, attention_mask=torch.ones_like(ids), streamer=streamer, max_new_tokens=8, do_sample=False)
        return tokens, printed.getvalue()

    return Job(call, [model])


@pattern("transformers docs, TextIteratorStreamer", "chunked prefill in the thread, each word once; or the thread's own error", ANY_SAFE, rows=1024, small=512, exact=True)
def iterator_streamer_in_a_thread(size):
    """Thread(target=model.generate); the target is guarded, since a guard sees only its
    own thread.
    """
    from transformers import TextIteratorStreamer

    model = llama(eager=True)
    ids = long_prompt(size)
    tok = tokenizer()

    def stream(**hooks):
        streamer = TextIteratorStreamer(tok, skip_prompt=True, timeout=60)
        options = dict(inputs=ids, attention_mask=torch.ones_like(ids), streamer=streamer, max_new_tokens=8, do_sample=False)
        if hooks:
            generate = oomguard.guard(**hooks)(model.generate)
        else:
            generate = model.generate
        failure = []

        def target():
            try:
                generate(**options)
            except BaseException as error:
                failure.append(error)
                streamer.end()

        thread = threading.Thread(target=on_device(target))
        thread.start()
        text = "".join(streamer)
        thread.join()
        if failure:
            raise failure[0]
        return text

    return Job(stream, [model], guarded=stream)


@pattern("transformers docs, Iterative "
         "generation with a cache", CHUNKS, ANY_SAFE, rows=1024, small=512, exact=True)
def chat_with_a_carried_cache(size):
    """A DynamicCache of the user's over three turns; the second one is long."""
    from transformers import DynamicCache

    model = llama(eager=True)
    turns = [long_prompt(32, seed=1), long_prompt(size, seed=2), long_prompt(16, seed=3)]

    def call():
        cache = DynamicCache(config=model.config)
        ids = torch.empty((1, 0), dtype=torch.long)
        lengths = []
        for turn in turns:
            ids = torch.cat([ids, turn], 1)
            ids = model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=4, do_sample=False)
            lengths.append(cache.get_seq_length())
        return ids, lengths

    return Job(call, [model])


@pattern("transformers docs, Iterative "
         "generation with a cache", CHUNKS, ANY_SAFE, rows=1024, small=512, exact=True)
def one_prompt_many_samples(size):
    """One long row with num_return_sequences=4 and beams: rows exist only inside generate."""
    model = llama(eager=True)
    ids = long_prompt(size)
    mask = torch.ones_like(ids)
    return Job(lambda: model.generate(ids, attention_mask=mask, num_beams=4, num_return_sequences=4, max_new_tokens=6, do_sample=False), [model])


@pattern("transformers docs, Continuous batching", "untouched: it pages its own memory", ("equal",), rows=8, exact=True, must_fail=False)
def continuous_batching(rows):
    """model.generate_batch(inputs)."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    model = llama(eos=6)
    inputs = [long_prompt(20 + i, seed=i)[0].tolist() for i in range(rows)]
    config = GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=6, pad_token_id=0)
    pages = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64)

    def call():
        found = model.generate_batch(inputs, generation_config=config, continuous_batching_config=pages, progress_bar=False)
        return [found[key].generated_tokens for key in sorted(found, key=lambda k: int(k.split("_")[-1]))]

    return Job(call, [model])
