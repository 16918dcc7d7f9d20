"""Log-likelihoods by hand: tokens, options, preferences, windows, two models against each other."""

import math

import torch
from parts import VOCAB, bert, llama, long_prompt, tokenizer, words
from registry import ANY_SAFE, Job, pattern

F = torch.nn.functional
ROWS = "the model's calls are split by rows; the same numbers"


@pattern("Hugging Face forum, Announcement: GPT-2 / causal LM token probabilities (to_tokens_and_logprobs); transformers issue 26869", ROWS)
def log_probability_of_each_token(rows):
    """log_softmax, gather of the next ids: a list of (token, log-probability) for each text."""
    model, tok = llama(eager=True), tokenizer()
    texts = words(rows, 160)

    def call():
        batch = tok(texts, padding=True, return_tensors="pt", return_token_type_ids=False)
        with torch.no_grad():
            outputs = model(**batch)
        probs = torch.log_softmax(outputs.logits, dim=-1).detach()[:, :-1, :]
        ids = batch["input_ids"][:, 1:]
        gathered = torch.gather(probs, 2, ids[:, :, None]).squeeze(-1)
        return [[(tok.decode([t]), p.item()) for t, p in zip(s, row, strict=True) if int(t) not in tok.all_special_ids] for s, row in zip(ids.tolist(), gathered, strict=True)]

    return Job(call, [model])


@pattern("MMLU by hand (hendrycks/test evaluate.py, many copies): logits of the four option letters at the last token", ROWS)
def option_letters_in_a_data_frame(rows):
    """A pandas frame of questions; df["prediction"], df["probs"] and the accuracy of each subject by groupby."""
    import pandas

    model, tok = llama(eager=True), tokenizer()
    options = tok.convert_tokens_to_ids(["ban", "bara", "batto", "bast"])
    frame = pandas.DataFrame({"question": words(rows, 150), "subject": [("law", "art", "sea")[i % 3] for i in range(rows)], "answer": [i % 4 for i in range(rows)]})

    @torch.no_grad()
    def call():
        df = frame.copy()
        batch = tok(df["question"].tolist(), return_tensors="pt", padding=True, return_token_type_ids=False)
        logits = model(**batch, use_cache=False).logits[:, -1, options].float()
        df["prediction"] = logits.argmax(-1).numpy()
        df["probs"] = logits.softmax(-1).max(-1).values.tolist()
        accuracy = (df["prediction"] == df["answer"]).groupby(df["subject"]).mean().to_dict()
        return df, accuracy

    return Job(call, [model])


@pattern("HellaSwag evaluation in karpathy/build-nanogpt and llm.c: average loss of the completion region", ROWS, rows=32, small=4)
def completion_with_the_lowest_loss(rows):
    """Four candidate endings a question, right padded with a mask of the ending; sum and mean of losses, argmin."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=VOCAB, n_positions=256, bos_token_id=5, eos_token_id=6)
    config._attn_implementation = "eager"
    model, tok = GPT2LMHeadModel(config).eval(), tokenizer()
    contexts = [tok.encode(text, add_special_tokens=False) for text in words(rows // 4, 120)]
    endings = [tok.encode(text, add_special_tokens=False) for text in words(rows, 12, seed=8)]
    tokens, mask = torch.zeros((rows, 140), dtype=torch.long), torch.zeros((rows, 140))
    for i, ending in enumerate(endings):
        row = contexts[i // 4] + ending
        tokens[i, : len(row)] = torch.tensor(row)
        mask[i, len(row) - len(ending) : len(row)] = 1

    def call():
        with torch.no_grad():
            logits = model(tokens).logits
        shifted, target = logits[..., :-1, :].contiguous(), tokens[..., 1:].contiguous()
        losses = F.cross_entropy(shifted.view(-1, shifted.size(-1)), target.view(-1), reduction="none").view(rows, -1)
        masked = losses * mask[..., 1:]
        sums, means = masked.sum(dim=1), masked.sum(dim=1) / mask[..., 1:].sum(dim=1)
        return sums.view(-1, 4).argmin(-1).tolist(), means.view(-1, 4).argmin(-1).tolist(), means

    return Job(call, [model])


@pattern("DPO (eric-mitchell/direct-preference-optimization, trl's concatenated_forward): log-probabilities of policy and reference", ROWS)
def preference_log_ratios_of_two_models(rows):
    """Chosen and rejected concatenated; get_batch_logps with -100 labels from both models; rewards, margins, accuracy."""
    policy, reference = llama(eager=True), llama(eager=True, seed=1)
    tok = tokenizer(side="right")
    texts = words(rows // 2 or 1, 150) + words(rows // 2 or 1, 150, seed=1)
    batch = tok(texts, return_tensors="pt", padding=True, return_token_type_ids=False)
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    labels[:, :90] = -100

    def get_batch_logps(logits):
        target = labels[:, 1:].clone()
        keep = target != -100
        target[target == -100] = 0
        per_token = torch.gather(logits[:, :-1].log_softmax(-1), dim=2, index=target.unsqueeze(2)).squeeze(2)
        return (per_token * keep).sum(-1)

    def call():
        half = len(texts) // 2
        with torch.no_grad():
            ours = get_batch_logps(policy(batch["input_ids"], attention_mask=batch["attention_mask"]).logits.to(torch.float32))
            theirs = get_batch_logps(reference(batch["input_ids"], attention_mask=batch["attention_mask"]).logits.to(torch.float32))
        rewards = 0.1 * (ours - theirs)
        margin = rewards[:half] - rewards[half:]
        return {"chosen": rewards[:half], "rejected": rewards[half:], "margins": margin.mean().item(), "accuracy": (margin > 0).float().mean().item(), "loss": -F.logsigmoid(margin)}

    return Job(call, [policy, reference])


@pattern("transformers examples/pytorch/language-modeling/run_clm_no_trainer.py: group_texts and the evaluation loop", ROWS + ", the loss a mean over tokens", rows=32, small=2)
def grouped_blocks_perplexity_loop(rows):
    """Texts joined and cut into blocks, labels = input_ids, gather_for_metrics(loss.repeat(batch)), exp of the mean."""
    from accelerate import Accelerator
    from datasets import Dataset
    from torch.utils.data import DataLoader
    from transformers import default_data_collator

    model, tok, block = llama(eager=True), tokenizer(), 128

    def group_texts(examples):
        joined = [token for ids in examples["input_ids"] for token in ids]
        cut = [joined[i : i + block] for i in range(0, len(joined) // block * block, block)][:rows]
        return {"input_ids": cut, "attention_mask": [[1] * block] * len(cut), "labels": cut}

    texts = Dataset.from_dict({"text": words(3 * rows, 80)})
    tokenized = texts.map(lambda e: {"input_ids": tok(e["text"])["input_ids"]}, batched=True, remove_columns=["text"], load_from_cache_file=False, new_fingerprint=f"t{rows}")
    blocks = tokenized.map(group_texts, batched=True, batch_size=10_000, load_from_cache_file=False, new_fingerprint=f"g{rows}", remove_columns=tokenized.column_names)
    accelerator = Accelerator(cpu=True)
    ready, loader = accelerator.prepare(model, DataLoader(blocks, collate_fn=default_data_collator, batch_size=max(1, rows // 2)))

    def call():
        ready.eval()
        losses = []
        for batch in loader:
            with torch.no_grad():
                outputs = ready(**batch)
            losses.append(accelerator.gather_for_metrics(outputs.loss.repeat(len(batch["input_ids"]))))
        losses = torch.cat(losses)
        mean = torch.mean(losses)
        return mean.item(), math.exp(mean), losses

    return Job(call, [model])


@pattern("minicons / surprisal scripts: one long text as a batch of overlapping windows", ROWS)
def surprisal_in_batched_windows(rows):
    """ids.unfold(windows, stride) as one batch; each token's surprisal from the window that gives it most context."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=VOCAB, n_positions=256, bos_token_id=5, eos_token_id=6)
    config._attn_implementation = "eager"
    model, window, stride = GPT2LMHeadModel(config).eval(), 160, 80
    ids = long_prompt(window + stride * (rows - 1))

    def call():
        windows = ids[0].unfold(0, window, stride).contiguous()
        with torch.inference_mode():
            logits = model(windows).logits
        nll = F.cross_entropy(logits[:, :-1].transpose(1, 2), windows[:, 1:], reduction="none")
        surprisal = torch.cat([nll[0], nll[1:, -stride:].reshape(-1)]) / math.log(2)
        return surprisal, surprisal.mean().exp2().item()

    return Job(call, [model])


@pattern("Contrastive decoding (Li et al.) and knowledge distillation guides: two models' distributions over one batch", ROWS)
def expert_against_amateur(rows):
    """Log-ratio of an expert's and an amateur's next tokens within the plausible ones, and KL by row over the mask."""
    expert, amateur, tok = llama(eager=True), llama(eager=True, seed=1, num_hidden_layers=1), tokenizer(side="right")
    batch = tok(words(rows, 160), return_tensors="pt", padding=True, return_token_type_ids=False)

    def call():
        with torch.no_grad():
            strong = expert(**batch, use_cache=False).logits.log_softmax(-1)
            weak = amateur(**batch, use_cache=False).logits.log_softmax(-1)
        kl = F.kl_div(weak, strong, log_target=True, reduction="none").sum(-1)
        kl = (kl * batch["attention_mask"]).sum(-1) / batch["attention_mask"].sum(-1)
        last = batch["attention_mask"].sum(-1) - 1
        s, w = strong[torch.arange(rows), last], weak[torch.arange(rows), last]
        plausible = s >= s.max(-1, keepdim=True).values + math.log(0.1)
        return (s - w).masked_fill(~plausible, -float("inf")).argmax(-1), kl

    return Job(call, [expert, amateur])


@pattern("Kaggle kernels and the forum: an ensemble of fine-tuned classifiers, the mean of the probabilities", ROWS)
def ensemble_of_three_classifiers(rows):
    """Three models in a list over one batch; weighted mean of softmax, disagreement, hard vote."""
    models = [bert("BertForSequenceClassification"), bert("BertForSequenceClassification", hidden_act="relu"), bert("BertForSequenceClassification", num_hidden_layers=1)]
    for seed, model in enumerate(models):
        torch.manual_seed(20 + seed)
        torch.nn.init.normal_(model.classifier.weight)
    batch = tokenizer("bert", "right")(words(rows, 160), return_tensors="pt", padding=True)

    def call():
        with torch.no_grad():
            probs = torch.stack([F.softmax(model(**batch).logits, dim=-1) for model in models])
        mean = (probs * torch.tensor([0.5, 0.3, 0.2])[:, None, None]).sum(0)
        return mean, probs.var(dim=0).mean(-1), probs.argmax(-1).mode(dim=0).values

    return Job(call, models)


@pattern("Gal and Ghahramani, MC dropout with transformers (Stack Overflow, forum): model.train() under no_grad, several passes", "model.train(): dropout's draws are those of the whole batch: not split", ANY_SAFE)
def monte_carlo_dropout(rows):
    """Eight stochastic passes of a classifier in train mode, their mean and spread."""
    model = bert("BertForSequenceClassification")
    batch = tokenizer("bert", "right")(words(rows, 160), return_tensors="pt", padding=True)

    def call():
        torch.manual_seed(11)
        model.train()
        try:
            with torch.no_grad():
                passes = torch.stack([model(**batch).logits.softmax(-1) for _ in range(8)])
        finally:
            model.eval()
        return passes.mean(0), passes.std(0)

    return Job(call, [model])


@pattern("transformers docs, KV cache strategies: prefill a cache (prefix caching) with copy.deepcopy", "past_key_values given to a plain call: not split; never another logit", ANY_SAFE, keeps=1.0)
def continuations_scored_on_a_prefix_cache(rows):
    """One prompt's cache, deep copied and repeated for the rows; continuations in one call with past_key_values."""
    import copy

    from transformers import DynamicCache

    model, prompt = llama(eager=True), long_prompt(100)
    endings = torch.cat([long_prompt(120, seed=i + 1) for i in range(rows)])

    def call():
        with torch.no_grad():
            prefix = model(prompt, past_key_values=DynamicCache(config=model.config)).past_key_values
            cache = copy.deepcopy(prefix)
            cache.batch_repeat_interleave(rows)
            logits = model(endings, past_key_values=cache).logits
        found = logits[:, :-1].log_softmax(-1).gather(-1, endings[:, 1:, None]).squeeze(-1)
        return found.sum(-1)

    return Job(call, [model])
