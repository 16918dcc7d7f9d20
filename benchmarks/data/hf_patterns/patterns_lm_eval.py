"""lm-evaluation-harness through its Python API, on a tiny local model."""

from parts import llama, tokenizer, words
from registry import Job, pattern

DOCS = "lm-evaluation-harness docs, Python API"
ROWS = "the model's calls inside are split by rows; the same answers in order"


def _harness_model(batch_size, **options):
    from lm_eval.models.huggingface import HFLM

    model = llama(eager=True, eos=6)
    return HFLM(pretrained=model, tokenizer=tokenizer(), batch_size=batch_size, max_length=256, device="cpu", **options), model


def _requests(kind, arguments):
    from lm_eval.api.instance import Instance

    return [Instance(request_type=kind, doc={}, arguments=a, idx=i) for i, a in enumerate(arguments)]


def _choices(rows):
    ends = words(rows, 8, seed=3)
    return [(context, " " + end) for context, end in zip(words(rows, 160), ends, strict=True)]


@pattern(DOCS, ROWS)
def lm_eval_loglikelihood(rows):
    """lm.loglikelihood(requests), batch_size=16."""
    lm, model = _harness_model(16)
    return Job(lambda: lm.loglikelihood(_requests("loglikelihood", _choices(rows)), disable_tqdm=True), [model])


@pattern(DOCS, ROWS)
def lm_eval_rolling(rows):
    """lm.loglikelihood_rolling over documents longer than the window."""
    lm, model = _harness_model(16)
    texts = [(text,) for text in words(rows, 400)]
    return Job(lambda: lm.loglikelihood_rolling(_requests("loglikelihood_rolling", texts), disable_tqdm=True), [model])


@pattern(DOCS, ROWS, exact=True)
def lm_eval_generate_until(rows):
    """lm.generate_until(requests) with stop words."""
    lm, model = _harness_model(16)
    options = {"until": ["ban", "lust"], "max_gen_toks": 8, "do_sample": False}
    asked = [(text, dict(options)) for text in words(rows, 120)]
    return Job(lambda: lm.generate_until(_requests("generate_until", asked), disable_tqdm=True), [model])


@pattern(DOCS + ": batch_size=auto", "its own search for a size still works, same answers", must_fail=False, rows=16)
def lm_eval_batch_size_auto(rows):
    """batch_size="auto": lm-eval catches the error itself, with accelerate's
    find_executable_batch_size.
    """
    lm, model = _harness_model("auto", max_batch_size=64)
    return Job(lambda: lm.loglikelihood(_requests("loglikelihood", _choices(rows)), disable_tqdm=True), [model])
