"""Trainer and its kin, accelerate, PEFT, pipelines of one's own, a server, lm-evaluation-harness tasks."""

import asyncio
import json
import pathlib
import tempfile

import numpy
import torch
from parts import bart, bert, llama, t5, tokenizer, words
from registry import Job, pattern

F = torch.nn.functional
ROWS = "the model's calls inside are split by rows; the same results"


def _arguments(kind, rows, **options):
    return kind(tempfile.mkdtemp(), per_device_eval_batch_size=max(1, rows // 2), report_to=[], use_cpu=True, disable_tqdm=True, **options)


def _quiet(trainer):
    from transformers import PrinterCallback

    trainer.remove_callback(PrinterCallback)
    return trainer


def _metrics(found):
    return {k: v for k, v in found.items() if not k.endswith(("runtime", "per_second", "_time"))}


@pattern("transformers examples/pytorch/language-modeling/run_clm.py: preprocess_logits_for_metrics", ROWS + ", the loss a mean over tokens", rows=30, small=2)
def trainer_with_preprocessed_logits(rows):
    """trainer.evaluate() of a causal model; logits.argmax before they are gathered, shifted accuracy, perplexity."""
    from transformers import DataCollatorForLanguageModeling, Trainer

    from transformers import TrainingArguments

    model, tok = llama(eager=True), tokenizer(side="right")
    data = [{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in tok(words(rows, 150), return_token_type_ids=False)["input_ids"]]

    def preprocess_logits_for_metrics(logits, labels):
        return (logits[0] if isinstance(logits, tuple) else logits).argmax(dim=-1)

    def compute_metrics(found):
        predicted, labels = found.predictions[:, :-1].reshape(-1), found.label_ids[:, 1:].reshape(-1)
        keep = labels != -100
        return {"accuracy": float((predicted[keep] == labels[keep]).mean()), "counted": int(keep.sum())}

    collator = DataCollatorForLanguageModeling(tok, mlm=False)
    options = dict(compute_metrics=compute_metrics, preprocess_logits_for_metrics=preprocess_logits_for_metrics)
    trainer = _quiet(Trainer(model, _arguments(TrainingArguments, rows), eval_dataset=data, data_collator=collator, **options))

    def call():
        found = _metrics(trainer.evaluate())
        return found | {"perplexity": float(numpy.exp(found["eval_loss"]))}

    return Job(call, [model])


@pattern("transformers docs, Subclassing Trainer methods: compute_loss with class weights", ROWS + "; the loss is the user's own, outside the model", rows=30, small=2)
def trainer_subclass_with_weighted_loss(rows):
    """class WeightedTrainer(Trainer): compute_loss pops the labels, calls the model, weights the classes; predict."""
    from transformers import DataCollatorWithPadding, Trainer, TrainingArguments

    class WeightedTrainer(Trainer):
        """Cross entropy with weights."""

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            loss = F.cross_entropy(outputs.logits.view(-1, 3), labels.view(-1), weight=torch.tensor([1.0, 2.0, 0.5]))
            return (loss, outputs) if return_outputs else loss

    model, tok = bert("BertForSequenceClassification"), tokenizer("bert", "right")
    encoded = tok(words(rows, 130))
    data = [{k: v[i] for k, v in encoded.items()} | {"labels": (i * i) % 3} for i in range(rows)]
    arguments = _arguments(TrainingArguments, rows, label_names=["labels"], remove_unused_columns=False)
    trainer = _quiet(WeightedTrainer(model, arguments, data_collator=DataCollatorWithPadding(tok)))

    def call():
        found = trainer.predict(data)
        return found.predictions, found.label_ids, found.metrics["test_loss"]

    return Job(call, [model])


@pattern("transformers docs, Summarization and Translation: Seq2SeqTrainer, predict_with_generate", ROWS, rows=30, small=2)
def seq2seq_trainer_predict_with_generate(rows):
    """trainer.predict(dataset, max_length, num_beams): tokens, labels, the loss, sacrebleu's score."""
    import sacrebleu
    from transformers import DataCollatorForSeq2Seq, Seq2SeqTrainer, Seq2SeqTrainingArguments

    model, tok = bart(), tokenizer("t5", "right")
    sources = tok(words(rows, 120), return_token_type_ids=False)["input_ids"]
    targets = tok(words(rows, 12, seed=6), return_token_type_ids=False)["input_ids"]
    data = [{"input_ids": s, "attention_mask": [1] * len(s), "labels": t} for s, t in zip(sources, targets, strict=True)]

    def compute_metrics(found):
        predicted = numpy.where(found.predictions != -100, found.predictions, tok.pad_token_id)
        labels = numpy.where(found.label_ids != -100, found.label_ids, tok.pad_token_id)
        said, wanted = tok.batch_decode(predicted, skip_special_tokens=True), tok.batch_decode(labels, skip_special_tokens=True)
        return {"bleu": sacrebleu.corpus_bleu(said, [wanted]).score, "length": float(numpy.mean([len(s.split()) for s in said]))}

    arguments = _arguments(Seq2SeqTrainingArguments, rows, predict_with_generate=True)
    trainer = _quiet(Seq2SeqTrainer(model, arguments, data_collator=DataCollatorForSeq2Seq(tok, model=model), compute_metrics=compute_metrics))

    def call():
        found = trainer.predict(data, max_length=14, num_beams=2)
        return found.predictions, found.label_ids, _metrics(found.metrics)

    return Job(call, [model])


@pattern("transformers docs, Add a new pipeline: PairClassificationPipeline", ROWS)
def pipeline_class_of_the_users_own(rows):
    """Pipeline subclass with _sanitize_parameters, preprocess, _forward, postprocess; called with batch_size."""
    from transformers import Pipeline

    class PairClassificationPipeline(Pipeline):
        """Softmax in numpy over pairs."""

        def _sanitize_parameters(self, **kwargs):
            return ({"second_text": kwargs["second_text"]} if "second_text" in kwargs else {}), {}, {}

        def preprocess(self, text, second_text=None):
            return self.tokenizer(text, text_pair=second_text, return_tensors="pt")

        def _forward(self, model_inputs):
            return self.model(**model_inputs)

        def postprocess(self, model_outputs):
            logits = model_outputs.logits[0].numpy()
            shifted = numpy.exp(logits - logits.max(-1, keepdims=True))
            probabilities = shifted / shifted.sum(-1, keepdims=True)
            best = int(numpy.argmax(probabilities))
            return {"label": self.model.config.id2label[best], "score": probabilities[best].item(), "logits": logits.tolist()}

    model = bert("BertForSequenceClassification", id2label={0: "different", 1: "same", 2: "unknown"})
    pipe = PairClassificationPipeline(model=model, tokenizer=tokenizer("bert", "right"), device="cpu")
    texts = words(rows, 120)
    return Job(lambda: pipe(texts, second_text="ban bara dira", batch_size=16), [model])


@pattern("transformers docs, Web server inference: Starlette's queue and dynamic batching", ROWS)
def asyncio_queue_server_with_a_pipeline(rows):
    """A server task takes requests from an asyncio.Queue, batches those that came, puts each answer in its own queue."""
    from transformers import pipeline

    model = bert("BertForSequenceClassification", id2label={0: "neg", 1: "neutral", 2: "pos"})
    texts = words(rows, 120)

    async def server_loop(queue, sizes):
        pipe = pipeline("text-classification", model=model, tokenizer=tokenizer("bert", "right"), device="cpu")
        while True:
            text, answer = await queue.get()
            strings, answers = [text], [answer]
            while True:
                try:
                    text, answer = await asyncio.wait_for(queue.get(), timeout=0.05)
                except asyncio.exceptions.TimeoutError:
                    break
                strings.append(text)
                answers.append(answer)
            sizes.append(len(strings))
            try:
                outs = pipe(strings, batch_size=len(strings))
            except Exception as error:
                outs = [error] * len(strings)
            for answer, out in zip(answers, outs, strict=True):
                await answer.put(out)

    async def client(queue, text):
        answer = asyncio.Queue()
        await queue.put((text, answer))
        return await answer.get()

    async def main():
        queue, sizes = asyncio.Queue(), []
        server = asyncio.create_task(server_loop(queue, sizes))
        found = await asyncio.gather(*(client(queue, text) for text in texts))
        server.cancel()
        for one in found:
            if isinstance(one, Exception):
                raise one
        return found, sizes

    return Job(lambda: asyncio.run(main()), [model])


@pattern("accelerate docs and examples/pytorch/text-classification/run_glue_no_trainer.py: gather_for_metrics", ROWS, rows=30, small=2)
def glue_evaluation_with_accelerate(rows):
    """accelerator.prepare, a collator that pads each batch, predictions and references gathered, accuracy and F1."""
    from accelerate import Accelerator
    from sklearn.metrics import f1_score
    from torch.utils.data import DataLoader
    from transformers import DataCollatorWithPadding

    tok = tokenizer("bert", "right")
    encoded = tok(words(rows, 60), words(rows, 80, seed=1))
    data = [{k: v[i] for k, v in encoded.items()} | {"labels": (i * 7) % 3} for i in range(rows)]
    accelerator, model = Accelerator(cpu=True), bert("BertForSequenceClassification")
    ready, loader = accelerator.prepare(model, DataLoader(data, collate_fn=DataCollatorWithPadding(tok), batch_size=max(1, rows // 2)))

    def call():
        ready.eval()
        predicted, wanted, losses = [], [], 0.0
        for batch in loader:
            with torch.no_grad():
                outputs = ready(**batch)
            losses += outputs.loss.detach().float().item()
            p, w = accelerator.gather_for_metrics((outputs.logits.argmax(dim=-1), batch["labels"]))
            predicted += p.tolist()
            wanted += w.tolist()
        accuracy = sum(p == w for p, w in zip(predicted, wanted, strict=True)) / len(wanted)
        return {"accuracy": accuracy, "f1": float(f1_score(wanted, predicted, average="macro")), "loss": losses / len(loader), "predictions": predicted}

    return Job(call, [model])


@pattern("peft docs, Soft prompts: prompt tuning, inference", ROWS, exact=True)
def prompt_tuning_generate(rows):
    """PeftModel with 8 virtual tokens: generate(input_ids=..., attention_mask=...), decoded."""
    from peft import PromptTuningConfig, TaskType, get_peft_model

    base = llama(eager=True, eos=6)
    torch.manual_seed(9)
    model = get_peft_model(base, PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=8)).eval()
    tok, texts = tokenizer(), words(rows, 110)

    def call():
        batch = tok(texts, return_tensors="pt", padding=True)
        with torch.no_grad():
            out = model.generate(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], max_new_tokens=8, do_sample=False)
        return tok.batch_decode(out.detach().cpu().numpy(), skip_special_tokens=True)

    return Job(call, [model])


@pattern("peft docs, disable_adapter; trl's reference without a second model", ROWS)
def adapter_against_its_base(rows):
    """The same batch with the LoRA, with another one by set_adapter, and within model.disable_adapter(): KL to the base."""
    from peft import LoraConfig, get_peft_model

    config = dict(r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    model = get_peft_model(llama(eager=True), LoraConfig(**config))
    torch.manual_seed(12)
    model.add_adapter("other", LoraConfig(**config))
    model.eval()
    batch = tokenizer(side="right")(words(rows, 150), return_tensors="pt", padding=True, return_token_type_ids=False)

    def logps():
        return model(**batch, use_cache=False).logits.log_softmax(-1)

    def call():
        found, mask = {}, batch["attention_mask"]
        with torch.inference_mode():
            with model.disable_adapter():
                base = logps()
            for name in ("default", "other"):
                model.set_adapter(name)
                kl = F.kl_div(base, logps(), log_target=True, reduction="none").sum(-1)
                found[name] = (kl * mask).sum(-1) / mask.sum(-1)
        return found

    return Job(call, [model])


def _harness(batch_size, model, **options):
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=model, tokenizer=tokenizer("t5" if "backend" in options else "decoder"), batch_size=batch_size, max_length=256, device="cpu", **options)


@pattern("lm-evaluation-harness docs, New task guide and simple_evaluate: a task of one's own as a dict over a JSON file", ROWS)
def lm_eval_simple_evaluate_own_task(rows):
    """simple_evaluate(model=HFLM, tasks=[{...multiple_choice...}]): acc and acc_norm, and the samples' responses."""
    import lm_eval

    folder = pathlib.Path(tempfile.mkdtemp())
    lines = [{"q": q, "choices": words(2, 6, seed=50 + i), "gold": i % 2} for i, q in enumerate(words(max(1, rows // 2), 150))]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, lines)))
    task = {
        "task": "own", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(folder / "data.jsonl")}, "cache_dir": str(folder)}, "test_split": "test",
        "output_type": "multiple_choice", "doc_to_text": "{{q}}", "doc_to_choice": "{{choices}}", "doc_to_target": "{{gold}}", "num_fewshot": 0,
        "metric_list": [{"metric": m, "aggregation": "mean", "higher_is_better": True} for m in ("acc", "acc_norm")],
    }
    model = llama(eager=True, eos=6)
    lm = _harness(rows, model)

    def call():
        found = lm_eval.simple_evaluate(model=lm, tasks=[task], bootstrap_iters=0, log_samples=True, random_seed=1)
        scores = {k: v for k, v in found["results"]["own"].items() if isinstance(v, float)}
        return scores, [sample["filtered_resps"] for sample in found["samples"]["own"]]

    return Job(call, [model])


@pattern("lm-evaluation-harness, HFLM with backend=\"seq2seq\" (T5 and Flan-T5 evaluations)", ROWS)
def lm_eval_seq2seq_loglikelihood(rows):
    """loglikelihood of an encoder-decoder model: contexts to the encoder, continuations to the decoder."""
    from lm_eval.api.instance import Instance

    model = t5()
    lm = _harness(16, model, backend="seq2seq")
    pairs = list(zip(words(rows, 160), words(rows, 8, seed=3), strict=True))

    def call():
        asked = [Instance(request_type="loglikelihood", doc={}, arguments=a, idx=i) for i, a in enumerate(pairs)]
        return lm.loglikelihood(asked, disable_tqdm=True)

    return Job(call, [model])
