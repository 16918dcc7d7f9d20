"""Layers, attentions, logit lens, probes, hooks; models of the user's own."""

import dataclasses

import torch
from parts import VOCAB, bert, llama, prompts, tokenizer, words
from registry import ANY_SAFE, Job, pattern

F = torch.nn.functional
ROWS = "split by rows; the same results"


@pattern("Chris McCormick, BERT word embeddings tutorial: stack of hidden_states, sum of the last four layers", ROWS)
def word_vectors_of_the_last_four_layers(rows):
    """output_hidden_states=True, torch.stack, permute; sums of the last four layers, one vector for the second word."""
    model, tok = bert("BertModel", num_hidden_layers=4, intermediate_size=128), tokenizer("bert", "right")
    texts = words(rows, 160)

    def call():
        batch = tok(texts, padding=True, return_tensors="pt")
        with torch.no_grad():
            states = model(**batch, output_hidden_states=True).hidden_states
        summed = torch.stack(states[-4:], dim=0).sum(dim=0)
        mask = batch["attention_mask"].unsqueeze(-1)
        return summed[:, 2], (summed * mask).sum(1) / mask.sum(1), len(states)

    return Job(call, [model])


@pattern("Attention rollout (Abnar and Zuidema) and bertviz-like notebooks: output_attentions=True", ROWS)
def attention_rollout(rows):
    """Mean of the heads plus identity, normalized, layers multiplied: what [CLS] looks at in each text."""
    model, tok = bert("BertModel", intermediate_size=4096, hidden_act="gelu"), tokenizer("bert", "right")
    texts = words(rows, 40)

    def call():
        batch = tok(texts, padding=True, return_tensors="pt")
        with torch.no_grad():
            attentions = model(**batch, output_attentions=True).attentions
        rollout = None
        for layer in attentions:
            mean = layer.mean(dim=1) + torch.eye(layer.size(-1))
            mean = mean / mean.sum(dim=-1, keepdim=True)
            rollout = mean if rollout is None else mean @ rollout
        seen = rollout[:, 0]
        return seen, [tok.convert_ids_to_tokens(int(ids[i])) for ids, i in zip(batch["input_ids"], seen[:, 1:].argmax(-1) + 1, strict=True)]

    return Job(call, [model])


@pattern("nostalgebraist, interpreting GPT: the logit lens; LogitLens4LLMs", ROWS)
def logit_lens(rows):
    """Each layer's hidden state at the last token through model.model.norm and model.lm_head: top token, its rank in the end."""
    model, batch, tok = llama(eager=True, num_hidden_layers=3), prompts(rows, 160), tokenizer()

    def call():
        with torch.no_grad():
            outputs = model(**batch, output_hidden_states=True)
            final, found = outputs.logits[:, -1], []
            for state in outputs.hidden_states[:-1]:
                logits = model.lm_head(model.model.norm(state[:, -1]))
                top = logits.argmax(-1)
                rank = (final > final.gather(-1, top[:, None])).sum(-1)
                found.append({"tokens": tok.convert_ids_to_tokens(top.tolist()), "p": logits.softmax(-1).max(-1).values, "rank": rank})
        return found

    return Job(call, [model])


@pattern("Natural Language Processing with Transformers, chapter 2: extract_hidden_states and a logistic regression", ROWS, small=4)
def linear_probe_on_hidden_states(rows):
    """data.map(extract_hidden_states, batched=True) over tensors in torch format, then scikit-learn fit and predict."""
    import numpy
    from datasets import Dataset
    from sklearn.linear_model import LogisticRegression

    model, tok = bert("BertModel"), tokenizer("bert", "right")
    encoded = dict(tok(words(rows, 150), padding=True, truncation=True))
    data = Dataset.from_dict(encoded | {"label": [i % 2 for i in range(rows)]})
    data.set_format("torch", columns=["input_ids", "attention_mask", "label"])

    def extract_hidden_states(batch):
        inputs = {k: v.to("cpu") for k, v in batch.items() if k in tok.model_input_names}
        with torch.no_grad():
            last = model(**inputs).last_hidden_state
        return {"hidden_state": last[:, 0].cpu().numpy()}

    def call():
        hidden = data.map(extract_hidden_states, batched=True, load_from_cache_file=False, new_fingerprint=f"h{rows}")
        x, y = numpy.array(hidden["hidden_state"]), numpy.array(hidden["label"])
        probe = LogisticRegression(max_iter=50, C=0.1).fit(x, y)
        return x, [round(p, 3) for p in probe.predict_proba(x)[:, 1].tolist()]

    return Job(call, [model])


@pattern("PyTorch forum and transformers issues: activations of a layer by register_forward_hook", "a hook of the user's own sees its batch in parts: not split; never activations of some rows only", ANY_SAFE)
def activations_by_a_forward_hook(rows):
    """A hook on a layer's MLP stores output.mean(1); read after the call."""
    model, batch, seen = llama(eager=True), prompts(rows, 160), {}

    def keep(module, inputs, output):
        seen["mlp"] = output.detach().mean(1)

    def call():
        handle = model.model.layers[1].mlp.register_forward_hook(keep)
        try:
            with torch.no_grad():
                logits = model(**batch).logits[:, -1]
        finally:
            handle.remove()
        return logits, seen["mlp"]

    return Job(call, [model])


class SentimentClassifier(torch.nn.Module):
    """A plain module around a BERT: dropout and a linear layer on the pooled output."""

    def __init__(self, body, labels):
        super().__init__()
        self.bert, self.drop, self.out = body, torch.nn.Dropout(p=0.3), torch.nn.Linear(body.config.hidden_size, labels)

    def forward(self, input_ids, attention_mask):
        """Logits of the classes."""
        return self.out(self.drop(self.bert(input_ids=input_ids, attention_mask=attention_mask).pooler_output))


@pattern("Curiousily, Sentiment analysis with BERT and transformers: get_predictions over a DataLoader", ROWS, rows=32, small=2)
def plain_module_around_a_bert(rows):
    """nn.Module with a BertModel inside; texts, predictions, probabilities and labels of a loader, stacked."""
    from torch.utils.data import DataLoader, Dataset

    torch.manual_seed(4)
    model, tok = SentimentClassifier(bert("BertModel"), 3).eval(), tokenizer("bert", "right")
    texts = words(rows, 150)

    class Reviews(Dataset):
        """Texts, tokenized one at a time to a fixed length."""

        def __len__(self):
            return len(texts)

        def __getitem__(self, i):
            found = tok(texts[i], max_length=160, padding="max_length", truncation=True, return_tensors="pt")
            return {"review_text": texts[i], "input_ids": found["input_ids"].flatten(), "attention_mask": found["attention_mask"].flatten(), "targets": torch.tensor(i % 3)}

    loader = DataLoader(Reviews(), batch_size=max(1, rows // 2))

    def call():
        said, predictions, probabilities, real = [], [], [], []
        with torch.no_grad():
            for d in loader:
                outputs = model(input_ids=d["input_ids"], attention_mask=d["attention_mask"])
                said.extend(d["review_text"])
                predictions.extend(torch.max(outputs, dim=1)[1])
                probabilities.extend(F.softmax(outputs, dim=1))
                real.extend(d["targets"])
        return said, torch.stack(predictions), torch.stack(probabilities), torch.stack(real)

    return Job(call, [model])


class Block(torch.nn.Module):
    """Attention and a feed-forward layer, as tutorials write them."""

    def __init__(self, width, heads=4):
        super().__init__()
        self.heads, self.qkv, self.proj = heads, torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.first, self.second = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.mlp = torch.nn.Sequential(torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width))

    def forward(self, x, mask):
        """States of the same shape."""
        rows, length, width = x.shape
        q, k, v = self.qkv(self.first(x)).view(rows, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / (width // self.heads) ** 0.5
        scores = scores.masked_fill(mask[:, None, None, :] == 0, float("-inf"))
        x = x + self.proj((scores.softmax(dim=-1) @ v).transpose(1, 2).reshape(rows, length, width))
        return x + self.mlp(self.second(x))


def _own(head):
    """A PreTrainedModel of the user's own over a few blocks, with ``head`` as its forward."""
    from transformers import PretrainedConfig, PreTrainedModel

    class TinyConfig(PretrainedConfig):
        """The sizes."""

        model_type = "tiny-own"

        def __init__(self, width=32, layers=2, vocab=VOCAB, **kwargs):
            self.width, self.layers, self.vocab = width, layers, vocab
            super().__init__(**kwargs)

    class TinyModel(PreTrainedModel):
        """Embeddings, encoder, head."""

        config_class = TinyConfig

        def __init__(self, config):
            super().__init__(config)
            self.embed = torch.nn.Embedding(config.vocab, config.width, padding_idx=0)
            self.blocks = torch.nn.ModuleList(Block(config.width) for _ in range(config.layers))
            self.classifier = torch.nn.Linear(config.width, config.num_labels)
            self.post_init()

        def _pool(self, input_ids, attention_mask):
            states = self.embed(input_ids)
            for block in self.blocks:
                states = block(states, attention_mask)
            mask = attention_mask.unsqueeze(-1).to(states.dtype)
            return states, (states * mask).sum(1) / mask.sum(1)

        forward = head

    torch.manual_seed(0)
    return TinyModel(TinyConfig(num_labels=3)).eval()


@pattern("transformers docs, Customizing models (custom PretrainedConfig and PreTrainedModel, trust_remote_code)", ROWS)
def own_pretrained_model_with_its_own_output(rows):
    """A PreTrainedModel of the user's own whose forward returns a ModelOutput dataclass of the user's own."""
    from transformers.utils import ModelOutput

    @dataclasses.dataclass
    class TinyOutput(ModelOutput):
        """Logits, vectors and the padded states."""

        logits: torch.FloatTensor | None = None
        embeddings: torch.FloatTensor | None = None
        last_hidden_state: torch.FloatTensor | None = None

    def forward(self, input_ids=None, attention_mask=None, **kwargs):
        states, pooled = self._pool(input_ids, attention_mask)
        return TinyOutput(logits=self.classifier(pooled), embeddings=F.normalize(pooled, dim=-1), last_hidden_state=states)

    model = _own(forward)
    batch = tokenizer("bert", "right")(words(rows, 160), return_tensors="pt", padding=True, return_token_type_ids=False)

    def call():
        with torch.no_grad():
            outputs = model(**batch)
        return outputs.logits.softmax(-1), outputs.embeddings, outputs["last_hidden_state"].sum(-1)

    return Job(call, [model])


@pattern("DPR and SimCSE training code: a dual encoder whose forward gives in-batch similarities", "the result is rows x rows: every row against every other: not split; never blocks of it", ANY_SAFE)
def own_model_with_in_batch_similarities(rows):
    """A PreTrainedModel whose logits are (rows, rows); retrieval accuracy within the batch."""

    def forward(self, input_ids=None, attention_mask=None, **kwargs):
        _, pooled = self._pool(input_ids, attention_mask)
        vectors = F.normalize(pooled, dim=-1)
        return {"logits": vectors @ vectors.T / 0.05, "embeddings": vectors}

    model = _own(forward)
    batch = tokenizer("bert", "right")(words(rows, 160), return_tensors="pt", padding=True, return_token_type_ids=False)

    def call():
        with torch.no_grad():
            outputs = model(**batch)
        return outputs["logits"], outputs["logits"].fill_diagonal_(-1e4).argmax(-1).tolist()

    return Job(call, [model])
