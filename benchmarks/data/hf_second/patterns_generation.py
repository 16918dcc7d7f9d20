"""generate in other forms: biases, beams with scores, chats with tools, retrieval, translation there and back."""

import collections

import torch
from parts import WORDS, bart, bert, llama, prompts, t5, tokenizer, words
from registry import ANY_SAFE, Job, pattern

F = torch.nn.functional
ROWS = "split by rows; every token the same"


@pattern("transformers docs, Utilities for generation: NoBadWordsLogitsProcessor, SequenceBiasLogitsProcessor", ROWS, exact=True)
def bad_words_and_sequence_bias(rows):
    """generate(bad_words_ids=[...], sequence_bias={...}, suppress_tokens, exponential_decay_length_penalty)."""
    model, batch, tok = llama(eos=6), prompts(rows), tokenizer()
    bad = [tok.encode(w, add_special_tokens=False) for w in ("ban bara", "host", "lun kera")]
    bias = {tuple(tok.encode("dira", add_special_tokens=False)): 0.4, tuple(tok.encode("fon foran", add_special_tokens=False)): -3.0}
    options = dict(bad_words_ids=bad, sequence_bias=bias, suppress_tokens=[1, 2, 3, 4], exponential_decay_length_penalty=(4, 1.02))
    return Job(lambda: tok.batch_decode(model.generate(**batch, **options, max_new_tokens=12, do_sample=False)), [model])


@pattern("transformers docs, compute_transition_scores, and the forum's Generation probabilities thread: beam search", ROWS, exact=False)
def beam_scores_reconstructed(rows):
    """num_beams=3, output_scores, return_dict_in_generate: sequences_scores against transition scores of the beams."""
    model, batch = llama(), prompts(rows)

    def call():
        out = model.generate(**batch, max_new_tokens=5, num_beams=3, do_sample=False, return_dict_in_generate=True, output_scores=True)
        scores = model.compute_transition_scores(out.sequences, out.scores, out.beam_indices, normalize_logits=False)
        length = (scores < 0).sum(1)
        return out.sequences, out.sequences_scores, scores.sum(1) / length

    return Job(call, [model])


@pattern("trl docs, Best of N sampling; OpenAssistant/reward-model-deberta-v3 model card", ROWS + "; the reward model's calls too")
def best_of_n_by_a_reward_model(rows):
    """num_return_sequences=4 with a seed, decoded, scored by a classifier, the best answer of each prompt."""
    model, reward, tok, judge = llama(), bert("BertForSequenceClassification", labels=1), tokenizer(), tokenizer("bert", "right")
    texts = words(rows, 64)

    def call():
        torch.manual_seed(3)
        batch = tok(texts, return_tensors="pt", padding=True, return_token_type_ids=False)
        out = model.generate(**batch, do_sample=True, top_k=0, top_p=0.95, num_return_sequences=4, max_new_tokens=8)
        answers = tok.batch_decode(out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
        pairs = judge([t for t in texts for _ in range(4)], answers, padding=True, return_tensors="pt")
        with torch.inference_mode():
            scores = reward(**pairs).logits[:, 0].view(-1, 4)
        return [answers[4 * i + int(best)] for i, best in enumerate(scores.argmax(-1))], scores

    return Job(call, [model, reward])


@pattern("transformers docs, Tool use: apply_chat_template(tools=...) and a second turn with the tool's answer", ROWS, exact=True)
def chats_with_a_tool_in_two_turns(rows):
    """A batch of conversations: generate, append the tool call and its answer, render again, generate again."""

    def current_weather(city: str):
        """Get the weather of a city.

        Args:
            city: the city
        """
        return city

    template = (
        "{% if tools %}this is {% for t in tools %}{{ t['function']['parameters']['required'][0] }} {% endfor %}. {% endif %}"
        "{% for m in messages %}<s> {% if m['tool_calls'] %}{{ m['tool_calls'][0]['function']['arguments']['city'] }}{% else %}{{ m['content'] }}{% endif %} </s> {% endfor %}"
        "{% if add_generation_prompt %}<s> {% endif %}"
    )
    model, tok = llama(eos=6), tokenizer(chat_template=template)
    chats = [[{"role": "user", "content": text}] for text in words(rows, 64)]

    def turn(messages):
        options = dict(tools=[current_weather], add_generation_prompt=True, return_dict=True, return_tensors="pt", padding=True)
        inputs = tok.apply_chat_template(messages, **options, tokenizer_kwargs={"return_token_type_ids": False})
        out = model.generate(**inputs, max_new_tokens=8, do_sample=False)
        return tok.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)

    def call():
        first = turn(chats)
        longer = []
        for chat, said in zip(chats, first, strict=True):
            city = (said.split() or ["ban"])[0]
            asked = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "current_weather", "arguments": {"city": city}}}]}
            longer.append([*chat, asked, {"role": "tool", "content": WORDS[len(said) % 9]}])
        return first, turn(longer)

    return Job(call, [model])


@pattern("Back translation with MarianMT (nlpaug, Kaggle, forum)", ROWS + ", two models in turn", exact=True)
def back_translation_by_two_marians(rows):
    """English to French with beams, two returned; then back, greedy."""
    from transformers import MarianConfig, MarianMTModel

    def marian(seed):
        torch.manual_seed(seed)
        sizes = dict(d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64)
        config = MarianConfig(**sizes, vocab_size=64, pad_token_id=0, eos_token_id=6, decoder_start_token_id=0, max_position_embeddings=256, forced_eos_token_id=None)
        config._attn_implementation = "eager"
        return MarianMTModel(config).eval()

    there, back, tok = marian(0), marian(1), tokenizer("t5", "right")
    texts = words(rows, 100)

    def translate(model, sentences, **options):
        batch = tok(sentences, return_tensors="pt", padding=True, truncation=True, return_token_type_ids=False)
        return tok.batch_decode(model.generate(**batch, max_new_tokens=10, do_sample=False, **options), skip_special_tokens=True)

    def call():
        french = translate(there, texts, num_beams=4, num_return_sequences=2, bad_words_ids=[[0]])
        return french, translate(back, [f"{t} {f}" for t, f in zip([t for t in texts for _ in range(2)], french, strict=True)], bad_words_ids=[[0]])

    return Job(call, [there, back])


@pattern("transformers docs, Generation: decoder_input_ids as a prompt of the decoder; Donut and Pix2Struct scripts", ROWS, exact=True)
def decoder_prompts_of_each_row(rows):
    """BART generate with decoder_input_ids: another task prompt for each row."""
    model, tok = bart(), tokenizer("t5", "right")
    batch = tok(words(rows, 130), return_tensors="pt", padding=True, return_token_type_ids=False)
    start = torch.tensor([[6, 7 + i % 9, 20 + i % 4] for i in range(rows)])
    return Job(lambda: model.generate(**batch, decoder_input_ids=start, max_new_tokens=8, num_beams=2, do_sample=False), [model])


@pattern("Hugging Face cookbook, Simple RAG by hand: embed, retrieve, generate", ROWS + ", two models")
def retrieval_augmented_generation(rows):
    """Mean vectors of questions and passages, the two best passages in each prompt, generate, strip the prompt."""
    encoder, model, tok, side = bert("BertModel"), llama(eager=True, eos=6), tokenizer(), tokenizer("bert", "right")
    passages, questions = words(rows * 2, 60), words(rows, 14, seed=3)

    def embed(texts):
        batch = side(texts, padding=True, return_tensors="pt")
        with torch.no_grad():
            states = encoder(**batch).last_hidden_state
        mask = batch["attention_mask"].unsqueeze(-1)
        return F.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)

    def call():
        found = (embed(questions) @ embed(passages).T).topk(2, dim=-1).indices
        prompts = [f"<s> {passages[a]} . {passages[b]} . {q} ?" for q, (a, b) in zip(questions, found.tolist(), strict=True)]
        batch = tok(prompts, return_tensors="pt", padding=True, return_token_type_ids=False)
        out = model.generate(**batch, max_new_tokens=8, do_sample=False)
        return [{"passages": p, "answer": a} for p, a in zip(found.tolist(), tok.batch_decode(out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True), strict=True)]

    return Job(call, [encoder, model])


@pattern("LLM course / minGPT-like tutorials: greedy search written as a loop over model(ids)", ROWS, exact=True)
def greedy_loop_without_a_cache(rows):
    """GPT-2, left padding, position_ids from the mask's cumsum; next tokens appended, ended rows padded, eight steps."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=256, bos_token_id=5, eos_token_id=6)
    config._attn_implementation = "eager"
    model, batch = GPT2LMHeadModel(config).eval(), prompts(rows, 140)

    @torch.no_grad()
    def call():
        ids, mask = batch["input_ids"], batch["attention_mask"]
        alive = torch.ones(len(ids), dtype=torch.long)
        for _ in range(8):
            positions = (mask.cumsum(-1) - 1).clamp(min=0)
            logits = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits[:, -1, :]
            token = logits.argmax(-1) * alive
            alive = alive * (token % 7 != 0).long()
            ids, mask = torch.cat([ids, token[:, None]], -1), torch.cat([mask, torch.ones_like(token[:, None])], -1)
        return ids

    return Job(call, [model])


@pattern("Self-consistency (Wang et al.) scripts: the same prompts many times, sampled, majority vote", ROWS + "; the draws too", exact=True)
def majority_vote_over_repeated_prompts(rows):
    """Each prompt four times in one batch, do_sample with typical_p and min_p, Counter over the first words."""
    model, tok = llama(eos=6), tokenizer()
    texts = [text for text in words(rows // 4 or 1, 64) for _ in range(4)][:rows]

    def call():
        torch.manual_seed(21)
        batch = tok(texts, return_tensors="pt", padding=True, return_token_type_ids=False)
        out = model.generate(**batch, do_sample=True, temperature=0.7, typical_p=0.95, min_p=0.02, max_new_tokens=8)
        said = tok.batch_decode(out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
        votes = [collections.Counter(s.split()[0] if s.split() else "" for s in said[i : i + 4]) for i in range(0, len(said), 4)]
        return [sorted(v.items()) for v in votes], said

    return Job(call, [model])


@pattern("transformers docs, T5 / issues on encoder_outputs: the encoder runs once, generate(encoder_outputs=...) twice", "encoder_outputs handed to generate: not split; never another token", ANY_SAFE, exact=True, keeps=1.0)
def generate_from_encoder_outputs(rows):
    """model.get_encoder()(**inputs), then generate(encoder_outputs=..., attention_mask=...) with many beams, two ways."""
    model, tok = t5(), tokenizer("t5", "right")
    batch = tok(words(rows, 48), return_tensors="pt", padding=True, return_token_type_ids=False)

    def call():
        from transformers.modeling_outputs import BaseModelOutput

        with torch.no_grad():
            states = model.get_encoder()(**batch).last_hidden_state
        found = []
        for penalty in (0.8, 1.4):
            outputs = BaseModelOutput(last_hidden_state=states.clone())
            found.append(model.generate(encoder_outputs=outputs, attention_mask=batch["attention_mask"], num_beams=8, length_penalty=penalty, max_new_tokens=10, do_sample=False))
        return found

    return Job(call, [model])


@pattern("transformers docs, Half precision: dtype=torch.bfloat16; Llama model cards", ROWS, exact=True)
def bfloat16_generate(rows):
    """A bfloat16 model, left-padded prompts, greedy; the decoded answers."""
    model, tok = llama().to(torch.bfloat16), tokenizer()
    torch.manual_seed(5)
    with torch.no_grad():
        model.lm_head.weight.normal_(std=1.0)
    batch = prompts(rows)

    def call():
        with torch.inference_mode():
            out = model.generate(**batch, max_new_tokens=8, do_sample=False)
        return tok.batch_decode(out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)

    return Job(call, [model])
