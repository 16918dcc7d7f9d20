"""Code of the user's own: decorated functions, threads, tasks, training, functions that cannot be
split.
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import oomguard
import torch
from device import on_device
from parts import bert, llama, prompts, tokenizer, words
from registry import ANY_SAFE, NOT_SPLIT, Job, pattern

PAGE = "oomguard docs, Guard a function"
OWN = "split along the named argument, the others with it; the same result"


def _decorated(function, batch, *values):
    """A job that calls ``function(*values)`` bare, or under ``@oomguard.guard(batch=batch)``."""

    def guarded(**hooks):
        return oomguard.guard(batch=batch, **hooks)(function)(*values)

    return lambda: function(*values), guarded


def _classify(model, texts):
    batch = tokenizer("bert", "right")(texts, return_tensors="pt", padding="max_length", max_length=160, truncation=True)
    with torch.no_grad():
        return model(**batch).logits


@pattern(PAGE, OWN)
def own_function_over_texts(rows):
    """@guard(batch="texts"): list in, tensor out."""
    model = bert("BertForSequenceClassification")

    def classify(texts):
        return _classify(model, texts)

    call, guarded = _decorated(classify, "texts", words(rows, 150))
    return Job(call, [model], guarded)


@pattern(PAGE, (
    "labels must go with their texts, or a clear no; never labels of other "
    "rows"
), ANY_SAFE)
def own_function_with_texts_and_labels(rows):
    """@guard(batch="texts"): a second argument has one entry for each text."""
    model = bert("BertForSequenceClassification")

    def losses(texts, labels):
        return torch.nn.functional.cross_entropy(_classify(model, texts), torch.tensor(labels[: len(texts)]), reduction="none")

    call, guarded = _decorated(losses, "texts", words(rows, 150), [(i * i) % 3 for i in range(rows)])
    return Job(call, [model], guarded)


@pattern(PAGE, "texts and labels split together, or a clear no", ANY_SAFE)
def own_function_zip_of_texts_and_labels(rows):
    """The same with zip(texts, labels, strict=True) and a list of dicts out."""
    model = bert("BertForSequenceClassification")

    def score(texts, labels):
        found = _classify(model, texts).softmax(-1).tolist()
        return [{"text": t, "p": p[y]} for t, p, y in zip(texts, found, labels, strict=True)]

    call, guarded = _decorated(score, "texts", words(rows, 150), [(i * i) % 3 for i in range(rows)])
    return Job(call, [model], guarded)


@pattern(PAGE, "a frame split by rows and joined, its index too; or a clear no", ANY_SAFE)
def own_function_over_a_data_frame(rows):
    """@guard(batch="frame"): frame.assign(...)."""
    import pandas

    model = bert("BertForSequenceClassification")

    def score(frame):
        return frame.assign(label=_classify(model, frame["text"].tolist()).argmax(-1).numpy())

    frame = pandas.DataFrame({"text": words(rows, 150), "id": range(100, 100 + rows)}, index=range(50, 50 + rows))
    call, guarded = _decorated(score, "frame", frame)
    return Job(call, [model], guarded)


@pattern(PAGE, "a dict of tensors joined field by field, or a clear no", ANY_SAFE)
def own_function_with_a_dict_out(rows):
    """Returns {"logits": tensor, "label": list}."""
    model = bert("BertForSequenceClassification")

    def classify(texts):
        logits = _classify(model, texts)
        return {"logits": logits, "label": logits.argmax(-1).tolist()}

    call, guarded = _decorated(classify, "texts", words(rows, 150))
    return Job(call, [model], guarded)


@pattern(PAGE, (
    "each part of the tuple joined, or a clear no; never a tuple of twice "
    "the length"
), ANY_SAFE)
def own_function_with_a_tuple_out(rows):
    """Returns (logits, labels)."""
    model = bert("BertForSequenceClassification")

    def classify(texts):
        logits = _classify(model, texts)
        return logits, logits.argmax(-1)

    call, guarded = _decorated(classify, "texts", words(rows, 150))
    return Job(call, [model], guarded)


@pattern(PAGE, "arrays joined along the rows, or a clear no", ANY_SAFE)
def own_function_with_numpy_out(rows):
    """Returns logits.numpy()."""
    model = bert("BertForSequenceClassification")

    def classify(texts):
        return _classify(model, texts).numpy()

    call, guarded = _decorated(classify, "texts", words(rows, 150))
    return Job(call, [model], guarded)


@pattern(PAGE, (
    "a number over all rows cannot be joined: a clear no, never a list or a "
    "sum"
), ANY_SAFE)
def own_function_with_a_mean_out(rows):
    """Returns one float for the batch."""
    model = bert("BertForSequenceClassification")

    def confidence(texts):
        return float(_classify(model, texts).softmax(-1).max(-1).values.mean())

    call, guarded = _decorated(confidence, "texts", words(rows, 150))
    return Job(call, [model], guarded)


@pattern(PAGE, (
    "split, but never into parts below 4 rows; or the function's "
    "own complaint is not shown"
), ANY_SAFE, small=4)
def own_function_that_needs_four_rows(rows):
    """Raises ValueError below 4 rows; each row's result is independent."""
    model = bert("BertForSequenceClassification")

    def classify(texts):
        if len(texts) < 4:
            raise ValueError(f"at least 4 texts, not {len(texts)}")
        return _classify(model, texts)

    call, guarded = _decorated(classify, "texts", words(rows, 150))
    return Job(call, [model], guarded)


@pattern("BatchNorm in train mode and the like", "nothing can know that rows depend on each other where the user named the batch", ("equal", "refused", "original error", "wrong"), small=4)
def own_function_that_centres_over_the_batch(rows):
    """Embeddings minus the mean of the batch: the user named a batch that is none."""
    model = bert("BertForSequenceClassification")

    def centred(texts):
        logits = _classify(model, texts)
        return logits - logits.mean(0)

    call, guarded = _decorated(centred, "texts", words(rows, 150))
    return Job(call, [model], guarded)


def _train(model, batch, labels):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loss = model(**batch, labels=labels).loss
    loss.backward()
    optimizer.step()
    return float(loss.detach()), model.classifier.weight.detach().clone()


@pattern("transformers "
         "docs, "
         "Fine-tuning: a "
         "training loop", "must not be split: the original error, weights untouched", NOT_SPLIT)
def training_step(rows):
    """loss.backward(); optimizer.step() in a block."""
    model = bert("BertForSequenceClassification").eval()
    batch = tokenizer("bert", "right")(words(rows, 160), return_tensors="pt", padding=True)
    labels = torch.arange(rows) % 3
    return Job(lambda: _train(model, batch, labels), [model])


@pattern("transformers docs, saliency", "activations of all parts stay for backward: no use in a split; a clear no, or equal", ANY_SAFE, keeps=1.0)
def forward_under_grad(rows):
    """Gradients of the embeddings, as saliency maps need them."""
    model = llama(eager=True)
    batch = prompts(rows, 160)

    def call():
        embeds = model.get_input_embeddings()(batch["input_ids"]).detach().requires_grad_(True)
        logits = model(inputs_embeds=embeds, attention_mask=batch["attention_mask"], use_cache=False).logits[:, -1]
        return torch.autograd.grad(logits.max(-1).values.sum(), embeds)[0].norm(dim=-1)

    return Job(call, [model])


def _answers(model, batch):
    return model.generate(**batch, max_new_tokens=8, do_sample=False)


@pattern("concurrent.futures docs", "each thread's calls are split on their own", exact=True)
def threads_of_a_pool(rows):
    """A decorated function, mapped by a ThreadPoolExecutor over two batches."""
    model = llama()
    batches = [prompts(rows), prompts(rows, 48)]

    def run(**hooks):
        if hooks:
            answers = oomguard.guard(**hooks)(_answers)
        else:
            answers = _answers
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(on_device(lambda batch: answers(model, batch)), batches))

    return Job(run, [model], run)


@pattern("asyncio docs, to_thread", "the guard's block reaches the thread that asyncio copies the context to", exact=True)
def asyncio_to_thread(rows):
    """with guard(): await asyncio.to_thread(model.generate, ...)."""
    model = llama()
    batch = prompts(rows)
    work = on_device(lambda: _answers(model, batch))

    async def main():
        return await asyncio.to_thread(work)

    return Job(lambda: asyncio.run(main()), [model])


@pattern(PAGE, "async functions are guarded too", exact=True)
def decorated_async_function(rows):
    """@guard over an async function that generates for two batches in turn."""
    model = llama()
    batches = [prompts(rows), prompts(rows, 48)]

    async def answer():
        found = []
        for batch in batches:
            await asyncio.sleep(0)
            found.append(_answers(model, batch))
        return found

    return Job(lambda: asyncio.run(answer()), [model], lambda **hooks: asyncio.run(oomguard.guard(**hooks)(answer)()))


@pattern(PAGE, "generators are guarded too; nothing yielded twice", exact=True)
def decorated_generator_function(rows):
    """@guard over a generator that yields each batch's tokens."""
    model = llama()
    batches = [prompts(rows, 48), prompts(rows), prompts(rows, 40)]

    def answers():
        for number, batch in enumerate(batches):
            yield number, _answers(model, batch)

    return Job(lambda: list(answers()), [model], lambda **hooks: list(oomguard.guard(**hooks)(answers)()))
