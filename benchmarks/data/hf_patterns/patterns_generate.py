"""``generate`` over batches, with the options that the generation guide shows."""

import torch
from parts import byte_tokenizer, llama, prompts, t5, tokenizer, words
from registry import ANY_SAFE, Job, pattern

GUIDE = "transformers docs, Text generation"
ROWS = "split by rows; every token the same"


@pattern(GUIDE, ROWS, exact=True)
def left_padded_greedy(rows):
    """tokenizer(padding=True), generate, batch_decode."""
    model = llama()
    batch = prompts(rows)
    tok = tokenizer()

    def call():
        tokens = model.generate(**batch, max_new_tokens=8, do_sample=False)
        return tokens, tok.batch_decode(tokens, skip_special_tokens=True)

    return Job(call, [model])


@pattern(GUIDE + ": padding side", ROWS, exact=True)
def right_padded_greedy(rows):
    """The wrong side, with a mask: wrong, but the same wrong."""
    model = llama()
    batch = prompts(rows, side="right")
    return Job(lambda: model.generate(**batch, max_new_tokens=8, do_sample=False), [model])


@pattern(GUIDE + ": eos", "rows that end early are padded as before", exact=True)
def rows_that_end_early(rows):
    """Several rows meet eos before the others."""
    model = llama()
    batch = prompts(rows)
    free = model.generate(**prompts(16), max_new_tokens=12, do_sample=False)[:, -12:]
    model.generation_config.eos_token_id = [int(free[1, 2]), int(free[2, 4])]
    return Job(lambda: model.generate(**batch, max_new_tokens=12, do_sample=False), [model])


@pattern(GUIDE + ": return_dict_in_generate", "split and joined with all fields, or a clear no", ANY_SAFE)
def dict_with_scores_and_logits(rows):
    """output_scores, output_logits, then compute_transition_scores."""
    model = llama()
    batch = prompts(rows)

    def call():
        flags = dict(return_dict_in_generate=True, output_scores=True, output_logits=True)
        out = model.generate(**batch, max_new_tokens=4, do_sample=False, **flags)
        return out, model.compute_transition_scores(out.sequences, out.scores, normalize_logits=True)

    return Job(call, [model])


@pattern(GUIDE + ": return_dict_in_generate", "split and joined with all fields, or a clear no", ANY_SAFE)
def dict_with_hidden_states_and_attentions(rows):
    """output_hidden_states, output_attentions."""
    model = llama(eager=True, intermediate_size=2048, num_hidden_layers=1)
    batch = prompts(rows, 48)

    def call():
        flags = dict(return_dict_in_generate=True, output_hidden_states=True, output_attentions=True)
        return model.generate(**batch, max_new_tokens=3, do_sample=False, **flags)

    return Job(call, [model])


@pattern(GUIDE + ": sampling", "the draws of the unsplit batch cannot be had by splitting: the same, or a clear no", ANY_SAFE, exact=True)
def several_samples_of_each_row(rows):
    """do_sample, num_return_sequences=3, a seed."""
    model = llama()
    batch = prompts(rows)

    def call():
        torch.manual_seed(7)
        return model.generate(**batch, max_new_tokens=8, do_sample=True, temperature=0.9, num_return_sequences=3)

    return Job(call, [model])


@pattern(GUIDE + ": sampling", "the draws of the unsplit batch cannot be had by splitting: the same, or a clear no", ANY_SAFE, exact=True)
def sampling_with_a_seed(rows):
    """set_seed(42); generate(do_sample=True, top_p)."""
    from transformers import set_seed

    model = llama()
    batch = prompts(rows)

    def call():
        set_seed(42)
        return model.generate(**batch, max_new_tokens=8, do_sample=True, top_p=0.9, top_k=20)

    return Job(call, [model])


@pattern(GUIDE + ": beams", ROWS, exact=True)
def beams_with_returned_sequences(rows):
    """num_beams=4, num_return_sequences=2."""
    model = llama()
    batch = prompts(rows)
    return Job(lambda: model.generate(**batch, max_new_tokens=8, num_beams=4, num_return_sequences=2, do_sample=False), [model])


@pattern("transformers docs, Summarization", ROWS, exact=True)
def t5_summaries_with_beams(rows):
    """T5, num_beams=4, early_stopping, no_repeat_ngram_size (the pipeline is gone in v5)."""
    model = t5()
    tok = tokenizer("t5", "right")
    batch = tok(words(rows, 96), return_tensors="pt", padding=True, return_token_type_ids=False)
    options = dict(num_beams=4, early_stopping=True, no_repeat_ngram_size=2, max_new_tokens=10, do_sample=False)
    return Job(lambda: tok.batch_decode(model.generate(**batch, **options), skip_special_tokens=True), [model])


@pattern("transformers docs, Translation", ROWS, exact=True)
def t5_translation_greedy(rows):
    """T5, greedy, forced_bos_token_id."""
    model = t5()
    tok = tokenizer("t5", "right")
    batch = tok(words(rows, 96), return_tensors="pt", padding=True, return_token_type_ids=False)
    return Job(lambda: model.generate(**batch, max_new_tokens=10, forced_bos_token_id=9, do_sample=False), [model])


@pattern("transformers docs, "
         "LogitsProcessor", "no state: split; or a clear no", ANY_SAFE, exact=True)
def logits_processor_without_state(rows):
    """A processor of the user's that raises one token's score."""
    from transformers import LogitsProcessor, LogitsProcessorList

    class Favour(LogitsProcessor):
        """Adds to the score of one token."""

        def __call__(self, input_ids, scores):
            scores = scores.clone()
            scores[:, 11] += 0.05
            return scores

    model = llama()
    batch = prompts(rows)
    favour = LogitsProcessorList([Favour()])
    return Job(lambda: model.generate(**batch, max_new_tokens=8, do_sample=False, logits_processor=favour), [model])


@pattern("transformers docs, "
         "LogitsProcessor", "state by row: must not be split silently", ANY_SAFE, exact=True)
def logits_processor_with_state_by_row(rows):
    """A processor with another forbidden token for each row of the batch."""
    from transformers import LogitsProcessor, LogitsProcessorList

    class Forbid(LogitsProcessor):
        """Row i may not say ``tokens[i]``."""

        def __init__(self, tokens):
            self.tokens = tokens

        def __call__(self, input_ids, scores):
            scores = scores.clone()
            for row in range(len(scores)):
                scores[row, self.tokens[row]] = -float("inf")
            return scores

    model = llama()
    batch = prompts(rows)
    free = model.generate(**batch, max_new_tokens=1, do_sample=False)[:, -1].tolist()
    forbid = LogitsProcessorList([Forbid(free)])
    return Job(lambda: model.generate(**batch, max_new_tokens=8, do_sample=False, logits_processor=forbid), [model])


@pattern("transformers docs, prefix_allowed_tokens_fn", "batch_id must stay that of the whole batch", ANY_SAFE, exact=True)
def allowed_tokens_by_batch_id(rows):
    """prefix_allowed_tokens_fn(batch_id, ids): other tokens for each row."""
    model = llama()
    batch = prompts(rows)

    def allowed(batch_id, ids):
        return [7 + batch_id * 2, 8 + batch_id * 2, 45]

    return Job(lambda: model.generate(**batch, max_new_tokens=8, do_sample=False, prefix_allowed_tokens_fn=allowed), [model])


@pattern("transformers docs, "
         "StoppingCriteria", "by row: the same, or a clear no", ANY_SAFE, exact=True)
def stopping_criteria_by_row(rows):
    """A criteria that ends a row after one of two tokens."""
    from transformers import StoppingCriteria, StoppingCriteriaList

    class Stop(StoppingCriteria):
        """Ends a row at one of these tokens."""

        def __call__(self, input_ids, scores, **kwargs):
            return (input_ids[:, -1] % 5) == 0

    model = llama()
    batch = prompts(rows)
    stop = StoppingCriteriaList([Stop()])
    return Job(lambda: model.generate(**batch, max_new_tokens=10, do_sample=False, stopping_criteria=stop), [model])


@pattern("transformers docs, StoppingCriteria", "ends all rows at once when any ends: never split silently", ANY_SAFE, exact=True)
def stopping_criteria_over_the_batch(rows):
    """The old form of criteria: one row's stop word ends the batch."""
    from transformers import StoppingCriteria, StoppingCriteriaList

    class StopAll(StoppingCriteria):
        """Ends the batch when any row says one of these tokens."""

        def __call__(self, input_ids, scores, **kwargs):
            done = bool((input_ids[:, -1] % 13 == 0).any())
            return torch.full((len(input_ids),), done, dtype=torch.bool)

    model = llama()
    batch = prompts(rows)
    stop = StoppingCriteriaList([StopAll()])
    return Job(lambda: model.generate(**batch, max_new_tokens=10, do_sample=False, stopping_criteria=stop), [model])


@pattern(GUIDE + ": stop_strings", ROWS, exact=True)
def stop_strings(rows):
    """stop_strings with a byte-level tokenizer."""
    tok = byte_tokenizer()
    model = llama(vocab_size=len(tok))
    texts = words(16, 24)
    batch = tok(texts[:rows], return_tensors="pt", padding=True)
    whole = tok(texts, return_tensors="pt", padding=True)
    free = model.generate(**whole, max_new_tokens=8, do_sample=False)[:, -8:]
    stops = [tok.decode([int(free[1, 3])]), tok.decode([int(free[4, 2])])]
    return Job(lambda: model.generate(**batch, max_new_tokens=8, do_sample=False, stop_strings=stops, tokenizer=tok), [model])


@pattern("transformers docs, KV cache strategies", ROWS, exact=True)
def static_cache(rows):
    """cache_implementation="static"."""
    model = llama()
    batch = prompts(rows)
    options = dict(cache_implementation="static", disable_compile=True)
    return Job(lambda: model.generate(**batch, max_new_tokens=8, do_sample=False, **options), [model])


@pattern("transformers docs, inputs_embeds", ROWS, exact=True)
def inputs_embeds(rows):
    """generate(inputs_embeds=..., attention_mask=...), as soft prompts are used."""
    model = llama()
    batch = prompts(rows)
    with torch.no_grad():
        embeds = model.get_input_embeddings()(batch["input_ids"])
    mask = batch["attention_mask"]
    return Job(lambda: model.generate(inputs_embeds=embeds, attention_mask=mask, max_new_tokens=8, do_sample=False), [model])


@pattern("transformers docs, penalties", ROWS, exact=True)
def repetition_penalty_and_min_tokens(rows):
    """A GenerationConfig of the user's with built-in processors."""
    from transformers import GenerationConfig

    model = llama()
    batch = prompts(rows)
    config = GenerationConfig(max_new_tokens=10, min_new_tokens=6, repetition_penalty=1.2, no_repeat_ngram_size=2, pad_token_id=0, eos_token_id=9)
    return Job(lambda: model.generate(**batch, generation_config=config), [model])
