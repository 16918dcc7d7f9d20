"""Libraries on top: Trainer, sentence-transformers, PEFT, accelerate."""

import tempfile

import torch
from parts import bert, llama, prompts, tokenizer, words
from registry import ANY_SAFE, Job, pattern

ROWS = "the model's calls inside are split by rows; the same results"


def _trainer(rows):
    from datasets import Dataset
    from transformers import DataCollatorWithPadding, PrinterCallback, Trainer, TrainingArguments

    model = bert("BertForSequenceClassification")
    tok = tokenizer("bert", "right")
    data = Dataset.from_dict(dict(tok(words(rows, 120)), labels=[i % 3 for i in range(rows)]))
    arguments = TrainingArguments(tempfile.mkdtemp(), per_device_eval_batch_size=max(1, rows // 2), report_to=[], use_cpu=True, disable_tqdm=True)

    def metrics(found):
        return {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())}

    trainer = Trainer(model, arguments, eval_dataset=data, compute_metrics=metrics, data_collator=DataCollatorWithPadding(tok))
    trainer.remove_callback(PrinterCallback)
    return trainer, data, model


@pattern("transformers docs, "
         "Trainer", ROWS + ", the loss a mean over all", ANY_SAFE, rows=30, small=2)
def trainer_evaluate(rows):
    """trainer.evaluate() with compute_metrics; 15 rows a batch."""
    trainer, _, model = _trainer(rows)

    def call():
        found = trainer.evaluate()
        return {k: v for k, v in found.items() if not k.endswith(("runtime", "per_second", "_time"))}

    return Job(call, [model])


@pattern("transformers docs, Trainer", ROWS, ANY_SAFE, rows=30, small=2)
def trainer_predict(rows):
    """trainer.predict(dataset)."""
    trainer, data, model = _trainer(rows)

    def call():
        found = trainer.predict(data)
        return found.predictions, found.label_ids, found.metrics["test_loss"]

    return Job(call, [model])


@pattern("transformers docs, Trainer: eval_accumulation_steps", "logits of all batches pile up: split cannot help; a clear no is right", ANY_SAFE, rows=64, small=2, keeps=1.0)
def trainer_predict_logits_pile_up(rows):
    """A masked language model: the logits of all batches stay on the device."""
    from transformers import Trainer, TrainingArguments

    model = bert("BertForMaskedLM")
    batch = tokenizer("bert", "right")(words(rows, 64, ragged=False))
    data = [{k: torch.tensor(v[i]) for k, v in batch.items()} for i in range(rows)]
    arguments = TrainingArguments(tempfile.mkdtemp(), per_device_eval_batch_size=max(1, rows // 8), report_to=[], use_cpu=True, disable_tqdm=True)
    trainer = Trainer(model, arguments)
    return Job(lambda: trainer.predict(data).predictions, [model])


def _sentence_transformer():
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    folder = tempfile.mkdtemp()
    model = bert("BertModel")
    model.save_pretrained(folder)
    tokenizer("bert", "right").save_pretrained(folder)
    inner = Transformer(folder, model_kwargs={"attn_implementation": "eager"})
    size = model.config.hidden_size
    return SentenceTransformer(modules=[inner, Pooling(size)], device="cpu")


@pattern("sentence-transformers docs, encode", ROWS)
def encode(rows):
    """model.encode(sentences): numpy, sorted by length inside."""
    model = _sentence_transformer()
    texts = words(rows, 120)
    return Job(lambda: model.encode(texts, batch_size=16), [model])


@pattern("sentence-transformers docs, encode", ROWS)
def encode_normalized_tensor(rows):
    """normalize_embeddings=True, convert_to_tensor=True."""
    model = _sentence_transformer()
    texts = words(rows, 120)
    return Job(lambda: model.encode(texts, batch_size=16, normalize_embeddings=True, convert_to_tensor=True), [model])


@pattern("sentence-transformers docs, encode: output_value", ROWS)
def encode_all_outputs(rows):
    """output_value=None: a list of dicts with token and sentence embeddings."""
    model = _sentence_transformer()
    texts = words(rows, 120)
    return Job(lambda: model.encode(texts, batch_size=16, output_value=None), [model])


@pattern("sentence-transformers docs, CrossEncoder", ROWS)
def cross_encoder_predict(rows):
    """CrossEncoder.predict(pairs)."""
    from sentence_transformers import CrossEncoder

    folder = tempfile.mkdtemp()
    bert("BertForSequenceClassification", labels=1).save_pretrained(folder)
    tokenizer("bert", "right").save_pretrained(folder)
    model = CrossEncoder(folder, device="cpu", model_kwargs={"attn_implementation": "eager"})
    pairs = list(zip(words(rows, 60), words(rows, 60, seed=1), strict=True))
    return Job(lambda: model.predict(pairs, batch_size=16), [model])


def _lora(seed=0):
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(llama(eager=True), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False))
    return model.eval()


@pattern("peft docs, Quicktour: inference", ROWS, exact=True)
def lora_generate(rows):
    """PeftModel.generate(**batch)."""
    model = _lora()
    batch = prompts(rows)
    return Job(lambda: model.generate(**batch, max_new_tokens=8, do_sample=False), [model])


@pattern("peft docs, LoRA forward", ROWS)
def lora_forward(rows):
    """PeftModel(**batch).logits."""
    model = _lora()
    batch = prompts(rows, 160)

    def call():
        with torch.no_grad():
            return model(**batch, use_cache=False).logits

    return Job(call, [model])


@pattern("peft docs, Mixed "
         "batches", "each row keeps its adapter, or a clear no", ANY_SAFE, exact=True)
def lora_generate_with_adapter_names(rows):
    """generate(adapter_names=[...]) with one adapter for each row."""
    from peft import LoraConfig

    model = _lora()
    batch = prompts(rows)
    for seed, name in enumerate(("french", "german")):
        torch.manual_seed(10 + seed)
        model.add_adapter(name, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False))
    names = [("__base__", "default", "french", "german")[(i * 7 + i // 3) % 4] for i in range(rows)]
    model.eval()
    return Job(lambda: model.generate(**batch, adapter_names=names, max_new_tokens=8, do_sample=False), [model])


@pattern("accelerate docs, Big model inference", ROWS)
def accelerate_hooks_forward(rows):
    """A model with accelerate's AlignDevicesHook on each module."""
    from accelerate import dispatch_model

    model = llama(eager=True)
    batch = prompts(rows, 160)
    model = dispatch_model(model, device_map={"": "cpu"}, main_device="cpu", force_hooks=True)

    def call():
        with torch.inference_mode():
            return model(**batch, use_cache=False).logits

    return Job(call, [model])


@pattern("accelerate docs, Big model inference", ROWS, exact=True)
def accelerate_hooks_generate(rows):
    """generate of a model with accelerate's hooks and a device map."""
    from accelerate import dispatch_model

    model = llama(eager=True)
    batch = prompts(rows)
    places = {"model.embed_tokens": "cpu", "model.layers": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    model = dispatch_model(model, device_map=places, main_device="cpu", force_hooks=True)
    return Job(lambda: model.generate(**batch, max_new_tokens=8, do_sample=False), [model])
