"""transformers pipelines over lists, data sets and generators."""

from parts import WORDS, bert, llama, tokenizer, words
from registry import Job, pattern

GUIDE = "transformers docs, Pipelines: batching"


def _generation(**options):
    from transformers import pipeline

    model = llama(vocab_size=512)
    return pipeline("text-generation", model=model, tokenizer=tokenizer(), device="cpu", **options), model


@pattern(GUIDE, "the batch of 8 inside is split; the same texts", rows=16, exact=True)
def text_generation_over_a_list(rows):
    """pipe(list, batch_size=8)."""
    pipe, model = _generation()
    texts = words(rows, 64)
    return Job(lambda: pipe(texts, batch_size=8, max_new_tokens=6, do_sample=False), [model])


@pattern(GUIDE, "as for a list", rows=16, exact=True)
def text_generation_over_a_keydataset(rows):
    """for out in pipe(KeyDataset(ds, "text"), batch_size=8)."""
    from datasets import Dataset
    from transformers.pipelines.pt_utils import KeyDataset

    pipe, model = _generation()
    data = Dataset.from_dict({"text": words(rows, 64)})

    def call():
        found = []
        for out in pipe(KeyDataset(data, "text"), batch_size=8, max_new_tokens=6, do_sample=False):
            found.extend(out)
        return found

    return Job(call, [model])


@pattern(GUIDE, (
    "as for a list; the generator is consumed once, no text lost "
    "or doubled"
), rows=16, exact=True)
def text_generation_over_a_generator(rows):
    """for out in pipe(generator())."""
    pipe, model = _generation()
    texts = words(rows, 64)

    def data():
        yield from texts

    return Job(lambda: list(pipe(data(), batch_size=8, max_new_tokens=6, do_sample=False, return_full_text=False)), [model])


@pattern("transformers docs, "
         "Chat basics", "conversations batched: the batch is split", rows=12, exact=True)
def text_generation_of_chats(rows):
    """pipe([[{"role": "user", ...}], ...], batch_size=12)."""
    template = "{% for m in messages %}{{ '<s> ' + m['content'] + ' </s> ' }}{% endfor %}"
    from transformers import pipeline

    model = llama(vocab_size=512)
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer(chat_template=template), device="cpu")
    chats = [[{"role": "user", "content": text}] for text in words(rows, 64)]
    return Job(lambda: pipe(chats, batch_size=12, max_new_tokens=6, do_sample=False), [model])


@pattern("transformers docs, "
         "FeatureExtractionPipeline", "forward split by rows; nested lists as before", rows=16)
def feature_extraction(rows):
    """pipe(texts, batch_size=16)."""
    from transformers import pipeline

    model = bert("BertModel")
    pipe = pipeline("feature-extraction", model=model, tokenizer=tokenizer("bert", "right"), device="cpu")
    texts = words(rows, 120)
    return Job(lambda: pipe(texts, batch_size=16), [model])


def _classifier():
    from transformers import pipeline

    model = bert("BertForSequenceClassification", id2label={0: "neg", 1: "neutral", 2: "pos"})
    return pipeline("text-classification", model=model, tokenizer=tokenizer("bert", "right"), device="cpu"), model


@pattern("transformers docs, "
         "TextClassificationPipeline", "forward split by rows; the same scores", rows=16)
def text_classification(rows):
    """pipe(texts, top_k=None, batch_size=16)."""
    pipe, model = _classifier()
    texts = words(rows, 120)
    return Job(lambda: pipe(texts, top_k=None, batch_size=16), [model])


@pattern("transformers docs, "
         "TextClassificationPipeline: text "
         "pairs", "forward split by rows; the same scores", rows=16)
def text_classification_of_pairs(rows):
    """pipe([{"text": ..., "text_pair": ...}])."""
    pipe, model = _classifier()
    pairs = [{"text": a, "text_pair": b} for a, b in zip(words(rows, 60), words(rows, 60, seed=1), strict=True)]
    return Job(lambda: pipe(pairs, batch_size=16), [model])


@pattern("transformers docs, ZeroShotClassificationPipeline", "forward split by rows; the same labels and scores", rows=16)
def zero_shot_classification(rows):
    """pipe(texts, candidate_labels=[...], batch_size=16)."""
    from transformers import pipeline

    names = {0: "contradiction", 1: "neutral", 2: "entailment"}
    model = bert("BertForSequenceClassification", id2label=names, label2id={v: k for k, v in names.items()})
    pipe = pipeline("zero-shot-classification", model=model, tokenizer=tokenizer("bert", "right"), device="cpu")
    texts = words(rows, 100)
    labels = WORDS[:4]
    return Job(lambda: pipe(texts, candidate_labels=labels, batch_size=16), [model])


@pattern("transformers docs, "
         "TokenClassificationPipeline", "forward split by rows; the same entities", rows=16)
def token_classification(rows):
    """pipe(texts, aggregation_strategy="simple")."""
    from transformers import pipeline

    names = {0: "O", 1: "B-PER", 2: "I-PER"}
    model = bert("BertForTokenClassification", id2label=names)
    pipe = pipeline("token-classification", model=model, tokenizer=tokenizer("bert", "right"), device="cpu")
    texts = words(rows, 120)
    return Job(lambda: pipe(texts, aggregation_strategy="simple", batch_size=16), [model])


@pattern("transformers docs, "
         "FillMaskPipeline", "forward split by rows; the same candidates", rows=16)
def fill_mask(rows):
    """pipe(texts with [MASK], top_k=3)."""
    from transformers import pipeline

    model = bert("BertForMaskedLM")
    pipe = pipeline("fill-mask", model=model, tokenizer=tokenizer("bert", "right"), device="cpu")
    texts = [f"{text} [MASK] ." for text in words(rows, 110)]
    return Job(lambda: pipe(texts, top_k=3, batch_size=16), [model])


@pattern("transformers docs, "
         "ImageClassificationPipeline", "forward split by rows; the same labels", rows=16)
def image_classification(rows):
    """pipe(list of PIL images, batch_size=16)."""
    import numpy
    from PIL import Image
    from transformers import ViTConfig, ViTForImageClassification, pipeline
    from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil
    import torch

    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    model = ViTForImageClassification(ViTConfig(**sizes, image_size=32, patch_size=4, num_labels=3)).eval()
    processor = ViTImageProcessorPil(size={"height": 32, "width": 32})
    pipe = pipeline("image-classification", model=model, image_processor=processor, device="cpu")
    pixels = numpy.random.default_rng(0).integers(0, 255, (rows, 40, 40, 3), dtype=numpy.uint8)
    images = [Image.fromarray(p) for p in pixels]
    return Job(lambda: pipe(images, batch_size=16, top_k=2), [model])
