"""Plain calls of a model, ``model(**batch)``, as in the task guides."""

import torch
from parts import bert, llama, long_prompt, prompts, t5, tokenizer, words
from registry import ANY_SAFE, Job, pattern

QUICK = "transformers docs, Quickstart: model(**inputs)"
FORWARD = "split by rows and joined: same type, same fields"


@pattern(QUICK, FORWARD)
def logits_under_no_grad(rows):
    """with torch.no_grad(): model(**batch).logits."""
    model = llama(eager=True)
    batch = prompts(rows, 160)

    def call():
        with torch.no_grad():
            return model(**batch).logits

    return Job(call, [model])


@pattern(QUICK, FORWARD)
def whole_output_under_inference_mode(rows):
    """The whole ModelOutput, its cache with it."""
    model = llama(eager=True)
    batch = prompts(rows, 160, side="right")

    @torch.inference_mode()
    def call():
        return model(**batch)

    return Job(call, [model])


@pattern(QUICK, FORWARD)
def hidden_states(rows):
    """model(..., output_hidden_states=True).hidden_states[-1] and all of them."""
    model = llama(eager=True)
    batch = prompts(rows, 192)

    def call():
        with torch.no_grad():
            return model(**batch, output_hidden_states=True, use_cache=False)

    return Job(call, [model])


@pattern("transformers docs, "
         "Caching", "split and joined, and the joined cache works in the next call")
def past_key_values_used_again(rows):
    """Prefill, then one decoding step with the cache that came back."""
    model = llama(eager=True)
    batch = prompts(rows, 160)

    def call():
        with torch.no_grad():
            first = model(**batch, use_cache=True)
            token = first.logits[:, -1:].argmax(-1)
            mask = torch.cat([batch["attention_mask"], torch.ones_like(token)], 1)
            second = model(input_ids=token, attention_mask=mask, past_key_values=first.past_key_values)
            return token, second.logits, second.past_key_values

    return Job(call, [model])


@pattern(QUICK, "split and joined, a tuple as before")
def tuple_output(rows):
    """model(**batch, return_dict=False)."""
    model = bert("BertModel")
    batch = tokenizer("bert", "right")(words(rows, 160), return_tensors="pt", padding=True)

    def call():
        with torch.no_grad():
            return model(**batch, return_dict=False)

    return Job(call, [model])


@pattern(QUICK, FORWARD)
def positional_ids_without_a_mask(rows):
    """model(input_ids)."""
    model = llama(eager=True)
    ids = torch.cat([long_prompt(160, seed=i) for i in range(rows)])

    def call():
        with torch.inference_mode():
            return model(ids).logits

    return Job(call, [model])


@pattern("transformers "
         "docs, "
         "Perplexity", "weighted mean of the parts, or a clear no; never another mean", ANY_SAFE)
def loss_with_labels(rows):
    """model(input_ids, labels=labels).loss where rows have different numbers of labels."""
    model = llama(eager=True)
    batch = prompts(rows, 160, side="right")
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    labels[: rows // 2, :100] = -100

    def call():
        with torch.no_grad():
            return model(**batch, labels=labels).loss

    return Job(call, [model])


@pattern("evaluate: metrics/perplexity", "the model's call split; the user's own cross entropy as before", ANY_SAFE)
def perplexity_by_row(rows):
    """Logits, then CrossEntropyLoss(reduction="none") by hand, summed by row."""
    model = llama(eager=True)
    batch = prompts(rows, 160, side="right")

    def call():
        loss = torch.nn.CrossEntropyLoss(reduction="none")
        with torch.no_grad():
            logits = model(**batch).logits[..., :-1, :].contiguous()
        labels = batch["input_ids"][..., 1:].contiguous()
        mask = batch["attention_mask"][..., 1:].contiguous()
        return torch.exp((loss(logits.transpose(1, 2), labels) * mask).sum(1) / mask.sum(1)).tolist()

    return Job(call, [model])


@pattern("transformers docs, "
         "Perplexity of "
         "fixed-length models", "one row: chunked, or a clear no", ANY_SAFE, rows=512, small=256)
def sliding_window_perplexity(size):
    """Windows of max_length with a stride over one long text; -100 for what was scored before."""
    model = llama(eager=True)
    ids = long_prompt(size * 2)

    def call():
        nlls = []
        last = 0
        for begin in range(0, ids.size(1), size // 2):
            end = min(begin + size, ids.size(1))
            window = ids[:, begin:end]
            target = window.clone()
            target[:, : -(end - last)] = -100
            with torch.no_grad():
                nlls.append(model(window, labels=target).loss * (target != -100).sum())
            last = end
            if end == ids.size(1):
                break
        return torch.exp(torch.stack(nlls).sum() / end)

    return Job(call, [model])


@pattern("transformers docs, logits_to_keep", "one row: chunked prefill, or a clear no", ANY_SAFE, rows=1024, small=512)
def next_token_of_a_long_prompt(size):
    """model(ids, logits_to_keep=1) of one long row."""
    model = llama(eager=True)
    ids = long_prompt(size)

    def call():
        with torch.inference_mode():
            return model(input_ids=ids, logits_to_keep=1, use_cache=False).logits

    return Job(call, [model])


@pattern("transformers "
         "docs, Sequence "
         "classification", "logits joined, the mean loss exact, or a clear no", ANY_SAFE, rows=15)
def classification_with_labels(rows):
    """Loss and logits of a classifier; 15 rows, so that equal parts do not exist."""
    model = bert("BertForSequenceClassification")
    batch = tokenizer("bert", "right")(words(rows, 160), return_tensors="pt", padding=True)
    labels = torch.arange(rows) % 3

    def call():
        with torch.no_grad():
            return model(**batch, labels=labels)

    return Job(call, [model])


@pattern("sentence-transformers docs: usage with transformers", FORWARD)
def mean_pooled_embeddings(rows):
    """Token embeddings, mean pooling over the mask, normalize."""
    model = bert("BertModel")
    batch = tokenizer("bert", "right")(words(rows, 160), return_tensors="pt", padding=True)

    def call():
        with torch.no_grad():
            output = model(**batch)
        mask = batch["attention_mask"].unsqueeze(-1).expand(output[0].size()).float()
        mean = torch.sum(output[0] * mask, 1) / torch.clamp(mask.sum(1), min=1e-9)
        return torch.nn.functional.normalize(mean, p=2, dim=1)

    return Job(call, [model])


@pattern("transformers docs, Question answering", "start and end logits joined; the same answers")
def question_answering(rows):
    """Start and end logits of pairs (the pipeline is gone in v5)."""
    model = bert("BertForQuestionAnswering", labels=2)
    batch = tokenizer("bert", "right")(words(rows, 20), words(rows, 140, seed=1), return_tensors="pt", padding=True)

    def call():
        with torch.no_grad():
            output = model(**batch)
        return output, output.start_logits.argmax(-1).tolist(), output.end_logits.argmax(-1).tolist()

    return Job(call, [model])


@pattern("transformers "
         "docs, T5: "
         "training loss", "encoder-decoder split, weighted loss exact, or a clear no", ANY_SAFE)
def encoder_decoder_forward(rows):
    """t5(**inputs, labels=labels)."""
    model = t5()
    batch = tokenizer("t5", "right")(words(rows, 160), return_tensors="pt", padding=True, return_token_type_ids=False)
    labels = tokenizer("t5", "right")(words(rows, 24, seed=2), return_tensors="pt", padding=True)["input_ids"]
    labels[labels == 0] = -100

    def call():
        with torch.no_grad():
            return model(**batch, labels=labels)

    return Job(call, [model])


@pattern("transformers docs, torch.compile", FORWARD)
def compiled_forward(rows):
    """model.forward = torch.compile(model.forward)."""
    model = llama(eager=True)
    batch = prompts(rows, 160)
    model.forward = torch.compile(model.forward, backend="eager")

    def call():
        with torch.inference_mode():
            return model(**batch, use_cache=False).logits

    return Job(call, [model])


@pattern("transformers docs, "
         "Evaluate: a loop "
         "over a DataLoader", "each batch's call split; the same predictions", rows=32, small=2)
def loop_over_a_dataloader(rows):
    """for batch in loader: argmax of the logits; half the rows in each batch."""
    from torch.utils.data import DataLoader

    model = bert("BertForSequenceClassification")
    batch = tokenizer("bert", "right")(words(rows, 160), return_tensors="pt", padding=True)
    items = [{k: v[i] for k, v in batch.items()} for i in range(rows)]
    loader = DataLoader(items, batch_size=max(1, rows // 2))

    def call():
        found = []
        with torch.no_grad():
            for part in loader:
                found += model(**part).logits.argmax(-1).tolist()
        return found

    return Job(call, [model])
