"""Embeddings by hand, late interaction, sparse vectors, reranking; sentence-transformers around encode."""

import tempfile

import numpy
import oomguard
import torch
from parts import VOCAB, bert, llama, t5, tokenizer, words
from registry import Job, pattern

F = torch.nn.functional
ROWS = "the model's calls are split by rows; the same results"


@pattern("intfloat/e5-mistral-7b-instruct model card (also Qwen3-Embedding's): last_token_pool", ROWS)
def last_token_pooling_and_scores(rows):
    """Queries with an instruction and documents in one batch, left padded; pooled, normalized, (q @ d.T) * 100."""
    model, tok = llama(eager=True).model, tokenizer()
    queries, documents = words(rows // 4 or 1, 20), words(rows - (rows // 4 or 1), 160, seed=1)

    def last_token_pool(states, mask):
        if mask[:, -1].sum() == mask.shape[0]:
            return states[:, -1]
        return states[torch.arange(states.shape[0]), mask.sum(dim=1) - 1]

    def call():
        texts = [f"this is {query} ?" for query in queries] + documents
        batch = tok(texts, max_length=4096, padding=True, truncation=True, return_tensors="pt", return_token_type_ids=False)
        with torch.no_grad():
            outputs = model(**batch)
        embeddings = F.normalize(last_token_pool(outputs.last_hidden_state, batch["attention_mask"]), p=2, dim=1)
        return ((embeddings[: len(queries)] @ embeddings[len(queries) :].T) * 100).tolist()

    return Job(call, [model])


class Embedder:
    """A service: CLS vectors of a BERT, normalized, as FlagEmbedding's FlagModel does it by hand."""

    def __init__(self, model, tok):
        self.model, self.tok = model, tok

    @torch.no_grad()
    def encode(self, texts):
        """One normalized vector for each text."""
        batch = self.tok(texts, padding=True, truncation=True, max_length=512, return_tensors="pt")
        return F.normalize(self.model(**batch)[0][:, 0], p=2, dim=1).cpu().numpy()


@pattern("BAAI/bge-large-en-v1.5 model card: Using HuggingFace Transformers; oomguard docs: methods", ROWS)
def cls_embeddings_of_a_service_method(rows):
    """A class with a method under @oomguard.guard: [CLS] vectors as numpy, queries @ passages.T."""
    model = bert("BertModel")
    texts, queries = words(rows, 160), words(3, 12, seed=5)

    def run(**hooks):
        kind = type("Guarded", (Embedder,), {"encode": oomguard.guard(**hooks)(Embedder.encode)}) if hooks else Embedder
        service = kind(model, tokenizer("bert", "right"))
        passages = service.encode(texts)
        return passages, service.encode(queries) @ passages.T

    return Job(run, [model], run)


@pattern("colbert-ir/colbertv2.0 and Jina ColBERT discussions: MaxSim with plain transformers", ROWS)
def late_interaction_max_sim(rows):
    """Token vectors of queries and documents through a projection; einsum, max over document tokens, sum over the query's."""
    torch.manual_seed(3)
    model, project, tok = bert("BertModel"), torch.nn.Linear(32, 8, bias=False), tokenizer("bert", "right")
    queries, documents = words(2, 8, seed=7), words(rows, 160)

    def embed(texts):
        batch = tok(texts, padding=True, truncation=True, return_tensors="pt")
        vectors = F.normalize(project(model(**batch).last_hidden_state), p=2, dim=-1)
        return vectors * batch["attention_mask"].unsqueeze(-1), batch["attention_mask"]

    def call():
        with torch.inference_mode():
            asked, _ = embed(queries)
            found, mask = embed(documents)
            scores = torch.einsum("qid,pjd->qpij", asked, found).masked_fill(mask[None, :, None] == 0, -1e4)
            return scores.max(dim=-1).values.sum(dim=-1)

    return Job(call, [model, project])


@pattern("naver/splade-cocondenser-ensembledistil discussions and Pinecone, SPLADE for sparse vector search", ROWS)
def splade_terms_by_hand(rows):
    """max(log1p(relu(logits)) * mask), then a dict of terms and weights for each text."""
    model, tok = bert("BertForMaskedLM"), tokenizer("bert", "right")
    texts = words(rows, 160)

    def call():
        tokens = tok(texts, return_tensors="pt", padding=True, truncation=True)
        with torch.no_grad():
            output = model(**tokens)
        vectors = torch.max(torch.log1p(torch.relu(output.logits)) * tokens["attention_mask"].unsqueeze(-1), dim=1)[0]
        names = {i: word for word, i in tok.get_vocab().items()}
        return [{names.get(int(i), str(int(i))): round(float(v[i]), 4) for i in v.nonzero().squeeze(-1)} for v in vectors]

    return Job(call, [model])


@pattern("Qwen/Qwen3-Reranker-0.6B model card: Transformers usage, process_inputs and compute_logits", ROWS)
def reranker_by_yes_and_no_logits(rows):
    """Prefix and suffix tokens around each pair, tokenizer.pad, the last position's yes and no, softmax."""
    model, tok = llama(eager=True), tokenizer()
    yes, no = tok.convert_tokens_to_ids("yes"), tok.convert_tokens_to_ids("no")
    prefix, suffix = tok.encode("<s> this is", add_special_tokens=False), tok.encode(". </s>", add_special_tokens=False)
    pairs = [f"this {q} is {d} ." for q, d in zip(words(rows, 12), words(rows, 140, seed=1), strict=True)]

    def process_inputs(texts):
        inputs = tok(texts, padding=False, truncation="longest_first", return_attention_mask=False, return_token_type_ids=False, max_length=2048)
        inputs["input_ids"] = [prefix + ids + suffix for ids in inputs["input_ids"]]
        return tok.pad(inputs, padding=True, return_tensors="pt")

    @torch.no_grad()
    def compute_logits(inputs):
        scores = model(**inputs).logits[:, -1, :]
        scores = torch.stack([scores[:, no], scores[:, yes]], dim=1)
        return F.log_softmax(scores, dim=1)[:, 1].exp().tolist()

    def call():
        scores = compute_logits(process_inputs(pairs))
        return scores, sorted(range(len(scores)), key=lambda i: -scores[i])

    return Job(call, [model])


@pattern("castorini/monot5-base-msmarco and pygaggle: true and false logits of T5's first step", ROWS)
def mono_t5_by_decoder_input_ids(rows):
    """t5(input_ids, attention_mask, decoder_input_ids=start).logits[:, 0, [false, true]] in log_softmax."""
    model, tok = t5(), tokenizer("t5", "right")
    texts = [f"this {q} example {d} is" for q, d in zip(words(rows, 12), words(rows, 140, seed=1), strict=True)]

    def call():
        batch = tok(texts, return_tensors="pt", padding=True, return_token_type_ids=False)
        start = torch.full((len(texts), 1), model.config.decoder_start_token_id, dtype=torch.long)
        with torch.no_grad():
            logits = model(**batch, decoder_input_ids=start).logits[:, 0, :]
        probs = F.log_softmax(logits[:, [48, 47]], dim=-1)[:, 1]
        return probs.exp().tolist(), torch.argsort(probs, descending=True).tolist()

    return Job(call, [model])


@pattern("datasets docs, Search index / transformers docs, DPR: embeddings of a data set with map", ROWS)
def dpr_index_with_dataset_map(rows):
    """Dataset.map(batched=True) with DPRContextEncoder's pooler_output, a DPRQuestionEncoder, inner products, top k."""
    from datasets import Dataset
    from transformers import DPRConfig, DPRContextEncoder, DPRQuestionEncoder

    torch.manual_seed(0)
    config = DPRConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=VOCAB, pad_token_id=0)
    config._attn_implementation = "eager"
    passages, questions, tok = DPRContextEncoder(config).eval(), DPRQuestionEncoder(config).eval(), tokenizer("bert", "right")
    data = Dataset.from_dict({"line": words(rows, 150)})

    def embed(examples):
        batch = tok(examples["line"], return_tensors="pt", padding=True, return_token_type_ids=False)
        return {"embeddings": passages(**batch)[0].numpy()}

    def call():
        torch.set_grad_enabled(False)
        try:
            indexed = data.map(embed, batched=True, batch_size=1000, load_from_cache_file=False, new_fingerprint=f"d{rows}")
            asked = questions(**tok(words(2, 10, seed=9), return_tensors="pt", padding=True, return_token_type_ids=False)).pooler_output
        finally:
            torch.set_grad_enabled(True)
        scores = asked.numpy() @ numpy.array(indexed["embeddings"], dtype="float32").T
        return scores, indexed[numpy.argsort(-scores[0])[:3].tolist()]["line"]

    return Job(call, [passages, questions])


def _sentence_transformer():
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer

    folder = tempfile.mkdtemp()
    bert("BertModel").save_pretrained(folder)
    tokenizer("bert", "right").save_pretrained(folder)
    inner = Transformer(folder, model_kwargs={"attn_implementation": "eager"})
    modules = [inner, Pooling(32, pooling_mode="cls"), Normalize()]
    return SentenceTransformer(modules=modules, device="cpu", prompts={"query": "this is ", "document": "example "})


@pattern("sentence-transformers docs, Semantic Search: encode_query, encode_document, util.semantic_search", ROWS)
def semantic_search(rows):
    """Queries and a corpus with their prompts, the hits of each query."""
    from sentence_transformers import util

    model = _sentence_transformer()
    corpus, queries = words(rows, 130), words(3, 10, seed=2)

    def call():
        found = model.encode_document(corpus, batch_size=32, convert_to_tensor=True)
        asked = model.encode_query(queries, convert_to_tensor=True)
        return util.semantic_search(asked, found, top_k=min(4, rows)), model.similarity(asked, found)

    return Job(call, [model])


@pattern("sentence-transformers docs, Sparse Encoder: encode, similarity, decode", ROWS)
def sparse_encoder_encode_and_decode(rows):
    """SparseEncoder of MLMTransformer and SpladePooling: sparse rows made dense, similarity, top terms."""
    from sentence_transformers import SparseEncoder
    from sentence_transformers.sparse_encoder.modules import MLMTransformer, SpladePooling

    folder = tempfile.mkdtemp()
    bert("BertForMaskedLM").save_pretrained(folder)
    tokenizer("bert", "right").save_pretrained(folder)
    model = SparseEncoder(modules=[MLMTransformer(folder, model_kwargs={"attn_implementation": "eager"}), SpladePooling("max")], device="cpu")
    texts = words(rows, 150)

    def call():
        vectors = model.encode(texts, batch_size=32)
        return vectors.to_dense(), model.similarity(vectors, vectors), model.decode(vectors, top_k=3)

    return Job(call, [model])


@pattern("sentence-transformers docs, Evaluation: InformationRetrievalEvaluator", ROWS)
def information_retrieval_evaluator(rows):
    """evaluator(model): NDCG, MRR and MAP over queries and a corpus."""
    from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator

    model = _sentence_transformer()
    corpus = {f"d{i}": text for i, text in enumerate(words(rows, 130))}
    queries = {f"q{i}": text for i, text in enumerate(words(4, 10, seed=2))}
    relevant = {f"q{i}": {f"d{(i * 3) % rows}", f"d{(i * 5 + 1) % rows}"} for i in range(4)}
    evaluator = InformationRetrievalEvaluator(queries, corpus, relevant, batch_size=32, write_csv=False)
    return Job(lambda: evaluator(model), [model])
