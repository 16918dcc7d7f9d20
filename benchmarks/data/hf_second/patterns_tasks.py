"""Text task guides and example scripts: question answering, NER, multiple choice, summaries, long documents."""

import collections

import numpy
import torch
from parts import WORDS, bart, bert, pieces, tokenizer, words
from registry import Job, pattern

ROWS = "the model's calls are split by rows; the same results"


@pattern("transformers examples/pytorch/question-answering/utils_qa.py and the LLM course, chapter 7: question answering", ROWS)
def qa_windows_and_n_best(rows):
    """Contexts in overlapping windows (return_overflowing_tokens), n-best spans over a document's windows, char offsets."""
    tok, model = pieces(), bert("BertForQuestionAnswering", labels=2)
    questions, contexts = words(rows, 8), words(rows, 90, seed=1)
    options = dict(truncation="only_second", max_length=160, stride=40, return_overflowing_tokens=True, return_offsets_mapping=True)

    def call():
        inputs = tok(questions, contexts, padding="max_length", return_tensors="pt", **options)
        owner, offsets = inputs.pop("overflow_to_sample_mapping").tolist(), inputs.pop("offset_mapping").tolist()
        kinds = [inputs.sequence_ids(i) for i in range(len(owner))]
        with torch.no_grad():
            outputs = model(**inputs)
        starts, ends = outputs.start_logits.cpu().numpy(), outputs.end_logits.cpu().numpy()
        windows = collections.defaultdict(list)
        for feature, example in enumerate(owner):
            windows[example].append(feature)
        predictions = {}
        for example in range(len(questions)):
            answers = []
            for f in windows[example]:
                for s in numpy.argsort(starts[f])[-1:-9:-1].tolist():
                    for e in numpy.argsort(ends[f])[-1:-9:-1].tolist():
                        if kinds[f][s] != 1 or kinds[f][e] != 1 or e < s or e - s + 1 > 30:
                            continue
                        text = contexts[example][offsets[f][s][0] : offsets[f][e][1]]
                        answers.append({"text": text, "score": starts[f][s] + ends[f][e]})
            predictions[str(example)] = max(answers, key=lambda a: a["score"]) if answers else {"text": "", "score": 0.0}
        return predictions

    return Job(call, [model])


@pattern("transformers docs, Token classification, and examples/pytorch/token-classification/run_ner.py: word_ids", ROWS)
def ner_labels_of_words(rows):
    """Pre-split words, is_split_into_words=True, the first piece of each word gives its label."""
    model = bert("BertForTokenClassification", labels=5, id2label=dict(enumerate(["O", "B-PER", "I-PER", "B-LOC", "I-LOC"])))
    tok, sentences = pieces(), [text.split() for text in words(rows, 85)]

    def call():
        inputs = tok(sentences, is_split_into_words=True, truncation=True, padding=True, return_tensors="pt")
        with torch.no_grad():
            predictions = model(**inputs).logits.argmax(dim=2)
        found = []
        for i, sentence in enumerate(sentences):
            labels, before = [], None
            for position, word in enumerate(inputs.word_ids(batch_index=i)):
                if word is not None and word != before:
                    labels.append(model.config.id2label[predictions[i][position].item()])
                before = word
            found.append(list(zip(sentence, labels, strict=True)))
        return found

    return Job(call, [model])


@pattern("transformers docs, Multiple choice: SWAG", ROWS + ", the loss a mean over rows")
def multiple_choice_with_labels(rows):
    """BertForMultipleChoice: input_ids (rows, 4, length); loss, accuracy, the choices."""
    tok, model = tokenizer("bert", "right"), bert("BertForMultipleChoice")
    first = [text for text in words(rows, 40) for _ in range(4)]
    flat = tok(first, words(rows * 4, 40, seed=1), padding=True, truncation=True, return_tensors="pt")
    batch = {k: v.view(rows, 4, -1) for k, v in flat.items()}
    labels = torch.arange(rows) % 4

    def call():
        with torch.no_grad():
            outputs = model(**batch, labels=labels)
        predicted = outputs.logits.argmax(dim=-1)
        return outputs.loss.item(), (predicted == labels).float().mean().item(), predicted

    return Job(call, [model])


@pattern("transformers examples/pytorch/summarization/run_summarization_no_trainer.py: the evaluation loop", ROWS, rows=32, small=2)
def summaries_in_an_accelerate_loop(rows):
    """accelerator.unwrap_model(model).generate in a loop, pad_across_processes, gather_for_metrics, rouge."""
    from accelerate import Accelerator
    from rouge_score.rouge_scorer import RougeScorer
    from torch.utils.data import DataLoader
    from transformers import DataCollatorForSeq2Seq

    tok, model = tokenizer("t5", "right"), bart()
    articles = tok(words(rows, 120), return_token_type_ids=False)["input_ids"]
    summaries = tok(words(rows, 10, seed=4), return_token_type_ids=False)["input_ids"]
    items = [{"input_ids": a, "attention_mask": [1] * len(a), "labels": s} for a, s in zip(articles, summaries, strict=True)]
    accelerator = Accelerator(cpu=True)
    loader = DataLoader(items, collate_fn=DataCollatorForSeq2Seq(tok, model=model, label_pad_token_id=-100), batch_size=max(1, rows // 2))
    ready, loader = accelerator.prepare(model, loader)
    scorer = RougeScorer(["rouge1", "rougeL"])

    def call():
        ready.eval()
        texts, scores = [], []
        for batch in loader:
            with torch.no_grad():
                tokens = accelerator.unwrap_model(ready).generate(batch["input_ids"], attention_mask=batch["attention_mask"], max_length=12, num_beams=2)
                tokens = accelerator.pad_across_processes(tokens, dim=1, pad_index=tok.pad_token_id)
                labels = accelerator.pad_across_processes(batch["labels"], dim=1, pad_index=tok.pad_token_id)
                tokens, labels = accelerator.gather_for_metrics((tokens, labels))
                labels = numpy.where(labels.cpu().numpy() != -100, labels.cpu().numpy(), tok.pad_token_id)
                said, wanted = tok.batch_decode(tokens.cpu().numpy(), skip_special_tokens=True), tok.batch_decode(labels, skip_special_tokens=True)
            texts += said
            scores += [{k: v.fmeasure for k, v in scorer.score(w, s).items()} for w, s in zip(wanted, said, strict=True)]
        return texts, {k: float(numpy.mean([s[k] for s in scores])) for k in scores[0]}

    return Job(call, [model])


@pattern("Salazar et al., Masked language model scoring, and the tutorials on a sentence's perplexity with BertForMaskedLM (openillumi.com, en-bert-perplexity-fast-huggingface)", ROWS, rows=96, small=6)
def pseudo_log_likelihood_of_one_sentence(size):
    """One sentence repeated once for each of its tokens, the diagonal masked, all rows in one call."""
    tok, model = tokenizer("bert", "right"), bert("BertForMaskedLM")
    ids = tok(words(1, 96), return_tensors="pt")["input_ids"]

    def call():
        repeated = ids.repeat(size, 1)
        mask = torch.ones(ids.size(-1) - 1).diag(1)[:size]
        masked = repeated.masked_fill(mask == 1, tok.mask_token_id)
        with torch.inference_mode():
            logits = model(masked).logits
        rows, places = torch.arange(size), torch.arange(1, size + 1)
        scores = logits[rows, places].log_softmax(-1).gather(-1, ids[0, places].unsqueeze(-1)).squeeze(-1)
        return scores.sum().item(), torch.exp(-scores.mean()).item(), scores

    return Job(call, [model])


@pattern("facebook/bart-large-mnli model card: With manual PyTorch", ROWS, small=2)
def nli_zero_shot_by_hand(rows):
    """Premise and hypothesis in BartForSequenceClassification; softmax over contradiction and entailment."""
    from transformers import BartConfig, BartForSequenceClassification

    torch.manual_seed(0)
    sizes = dict(d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64)
    config = BartConfig(**sizes, vocab_size=64, max_position_embeddings=512, pad_token_id=0, bos_token_id=5, eos_token_id=6, num_labels=3)
    config._attn_implementation = "eager"
    model, tok = BartForSequenceClassification(config).eval(), tokenizer("t5", "right")
    premises = words(rows // 2, 110)

    def call():
        pairs = [f"{p} this example is {label} ." for p in premises for label in WORDS[:2]]
        batch = tok(pairs, return_tensors="pt", padding=True, truncation=True, return_token_type_ids=False)
        with torch.no_grad():
            logits = model(**batch)[0]
        probs = logits[:, [0, 2]].softmax(dim=1)[:, 1].view(len(premises), 2)
        return [{"premise": p, "label": WORDS[int(row.argmax())], "p": row.tolist()} for p, row in zip(premises, probs, strict=True)]

    return Job(call, [model])


@pattern("Hugging Face forum, Classifying long documents: return_overflowing_tokens with stride, the mean over chunks", ROWS)
def long_documents_in_strided_chunks(rows):
    """overflow_to_sample_mapping; probabilities of a document are the mean of its chunks'."""
    tok, model = tokenizer("bert", "right"), bert("BertForSequenceClassification")
    texts = words(rows, 400)
    texts[1:2] = [" ".join(text.split()[:30]) for text in texts[1:2]]

    def call():
        inputs = tok(texts, max_length=128, stride=32, truncation=True, return_overflowing_tokens=True, padding="max_length", return_tensors="pt")
        owner = inputs.pop("overflow_to_sample_mapping")
        with torch.no_grad():
            probs = model(**inputs).logits.softmax(-1)
        total = torch.zeros(len(texts), probs.size(-1)).index_add_(0, owner, probs)
        mean = total / torch.bincount(owner, minlength=len(texts)).unsqueeze(-1)
        return mean, mean.argmax(-1).tolist()

    return Job(call, [model])


@pattern("datasets docs, Process: Batch processing, and Use with PyTorch; multi-label guide of the forum", ROWS)
def dataset_map_with_multi_label_model(rows):
    """Dataset.map(batched=True) that tokenizes, calls the model and writes sigmoid scores and labels as columns."""
    from datasets import Dataset

    tok, model = tokenizer("bert", "right"), bert("BertForSequenceClassification", labels=4, problem_type="multi_label_classification")
    data = Dataset.from_dict({"text": words(rows, 150), "id": list(range(rows))})

    def predict(batch):
        inputs = tok(batch["text"], padding=True, truncation=True, return_tensors="pt")
        with torch.no_grad():
            scores = torch.sigmoid(model(**inputs).logits)
        return {"scores": scores.numpy(), "labels": [[i for i, p in enumerate(row) if p > 0.5] for row in scores.tolist()]}

    def call():
        return data.map(predict, batched=True, batch_size=64, load_from_cache_file=False, new_fingerprint=f"x{rows}").to_dict()

    return Job(call, [model])
