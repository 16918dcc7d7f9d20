"""Whisper: generate in every form, and the speech recognition pipeline."""

import numpy
import torch
from parts import SPECIAL, WORDS
from registry import ANY_SAFE, Job, pattern

RATE = 16000
MELS = 16
SPEECH = "split by rows: the same tokens, or a clear no"


def _whisper(first=len(SPECIAL) + len(WORDS) + 10):
    """A tiny Whisper with 30-second windows, and timestamps after the words."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    torch.manual_seed(0)
    sizes = dict(d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4)
    config = WhisperConfig(
        **sizes, encoder_ffn_dim=64, decoder_ffn_dim=64, vocab_size=first + 1502, num_mel_bins=MELS, max_target_positions=64,
        pad_token_id=0, bos_token_id=5, eos_token_id=6, decoder_start_token_id=5, suppress_tokens=None, begin_suppress_tokens=None,
    )
    model = WhisperForConditionalGeneration(config).eval()
    settings = model.generation_config
    settings.no_timestamps_token_id = first
    settings.alignment_heads = [[0, 0], [1, 1]]
    settings.is_multilingual = False
    settings.max_initial_timestamp_index = 50
    settings.pad_token_id = 0
    settings.eos_token_id = 6
    settings.decoder_start_token_id = 5
    settings.forced_decoder_ids = None
    settings.max_length = 40
    settings.return_timestamps = False
    return model


def _whisper_tokenizer():
    """A WhisperTokenizer of single bytes, with its special tokens and timestamps."""
    from tokenizers import AddedToken, pre_tokenizers
    from transformers import WhisperTokenizer

    tok = WhisperTokenizer(vocab={c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[])
    names = "endoftext startoftranscript en translate transcribe startoflm startofprev nospeech notimestamps".split()
    tok.pad_token = "<|endoftext|>"
    tok.add_tokens([f"<|{name}|>" for name in names], special_tokens=True)
    tok.add_tokens([AddedToken(f"<|{i * 0.02:.2f}|>", special=False) for i in range(1501)])
    return tok


def _audio(rows, seconds):
    rng = numpy.random.default_rng(0)
    return [rng.standard_normal(int(seconds * RATE)).astype("float32") for _ in range(rows)]


def _features(audio, **options):
    from transformers import WhisperFeatureExtractor

    extractor = WhisperFeatureExtractor(feature_size=MELS)
    found = extractor(audio, sampling_rate=RATE, return_tensors="pt", return_attention_mask=True, **options)
    # as .to("cuda") would
    return {name: value.clone(memory_format=torch.contiguous_format) for name, value in found.items()}


@pattern("transformers docs, Whisper", SPEECH, ANY_SAFE, rows=6, exact=True)
def whisper_generate(rows):
    """A batch of short recordings."""
    model = _whisper()
    inputs = _features(_audio(rows, 5))
    return Job(lambda: model.generate(**inputs, max_new_tokens=12, do_sample=False), [model])


@pattern("transformers docs, Whisper: long-form", SPEECH, ANY_SAFE, rows=6, exact=True)
def whisper_long_form(rows):
    """Recordings of 45 seconds, return_timestamps, each with its own seek."""
    model = _whisper()
    inputs = _features(_audio(rows, 45), truncation=False, padding="longest")
    return Job(lambda: model.generate(**inputs, return_timestamps=True, max_new_tokens=12, do_sample=False), [model])


@pattern("transformers docs, Whisper: word timestamps", SPEECH, ANY_SAFE, rows=6)
def whisper_word_timestamps(rows):
    """return_token_timestamps=True: a dict with sequences and token_timestamps."""
    model = _whisper()
    inputs = _features(_audio(rows, 5))

    def call():
        return model.generate(**inputs, return_token_timestamps=True, return_timestamps=True, max_new_tokens=12, do_sample=False)

    return Job(call, [model])


@pattern("transformers docs, "
         "Whisper: encoder outputs "
         "reused", "split by rows: the same hidden states", ("equal",), rows=6)
def whisper_encoder(rows):
    """model.get_encoder()(input_features): features of speech."""
    model = _whisper()
    inputs = _features(_audio(rows, 5))

    def call():
        with torch.inference_mode():
            return model.get_encoder()(inputs["input_features"]).last_hidden_state.mean(1)

    return Job(call, [model])


@pattern("transformers docs, Audio classification", "split by rows: the same logits", rows=12)
def wav2vec2_classification(rows):
    """Wav2Vec2ForSequenceClassification over padded recordings."""
    from transformers import Wav2Vec2Config, Wav2Vec2FeatureExtractor, Wav2Vec2ForSequenceClassification

    torch.manual_seed(0)
    conv = dict(conv_dim=(16, 16, 16), conv_stride=(5, 4, 4), conv_kernel=(10, 8, 4), num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=2)
    sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, num_labels=4)
    model = Wav2Vec2ForSequenceClassification(Wav2Vec2Config(**sizes, **conv, feat_extract_norm="layer")).eval()
    inputs = Wav2Vec2FeatureExtractor()(_audio(rows, 0.8), sampling_rate=RATE, return_tensors="pt", padding=True)

    def call():
        with torch.no_grad():
            return model(**inputs).logits

    return Job(call, [model])


@pattern("transformers docs, "
         "AutomaticSpeechRecognitionPipeline", SPEECH, ANY_SAFE, rows=6, exact=True)
def speech_recognition_pipeline(rows):
    """pipe(list of arrays, batch_size=6) with a CTC model, chunk_length_s."""
    from transformers import Wav2Vec2Config, Wav2Vec2CTCTokenizer, Wav2Vec2FeatureExtractor, Wav2Vec2ForCTC, pipeline
    import json
    import tempfile

    torch.manual_seed(0)
    conv = dict(conv_dim=(16, 16, 16), conv_stride=(5, 4, 4), conv_kernel=(10, 8, 4), num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=2)
    sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, vocab_size=32)
    model = Wav2Vec2ForCTC(Wav2Vec2Config(**sizes, **conv, feat_extract_norm="layer", pad_token_id=0)).eval()
    with tempfile.NamedTemporaryFile("w", suffix=".json", delete=False) as file:
        json.dump({s: i for i, s in enumerate(["<pad>", "<s>", "</s>", "<unk>", "|", *"abcdefghijklmnopqrstuvwxyz'"])}, file)
    tok = Wav2Vec2CTCTokenizer(file.name)
    pipe = pipeline("automatic-speech-recognition", model=model, tokenizer=tok, feature_extractor=Wav2Vec2FeatureExtractor(return_attention_mask=True), device="cpu")
    audio = _audio(rows, 2)
    return Job(lambda: pipe([dict(raw=a.copy(), sampling_rate=RATE) for a in audio], batch_size=6, chunk_length_s=1), [model])


@pattern("transformers docs, "
         "AutomaticSpeechRecognitionPipeline", SPEECH, ANY_SAFE, rows=6, exact=True)
def whisper_pipeline(rows):
    """pipe(arrays, batch_size=6, generate_kwargs=...)."""
    from transformers import WhisperFeatureExtractor, pipeline

    tok = _whisper_tokenizer()
    model = _whisper(first=tok.convert_tokens_to_ids("<|notimestamps|>"))
    extractor = WhisperFeatureExtractor(feature_size=MELS)
    pipe = pipeline("automatic-speech-recognition", model=model, tokenizer=tok, feature_extractor=extractor, device="cpu")
    audio = _audio(rows, 5)
    keep = dict(max_new_tokens=12, do_sample=False)
    return Job(lambda: pipe([dict(raw=a.copy(), sampling_rate=RATE) for a in audio], batch_size=6, generate_kwargs=keep), [model])
