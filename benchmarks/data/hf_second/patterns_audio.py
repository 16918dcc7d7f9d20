"""Speech: CTC by hand, audio classification, speakers, languages, translation, speech from text."""

import json
import tempfile

import numpy
import torch
from parts import VOCAB
from registry import ANY_SAFE, Job, pattern

RATE = 16000
ROWS = "split by rows; the same results"
CONV = dict(conv_dim=(48, 32, 32), conv_stride=(5, 4, 4), conv_kernel=(10, 8, 4), num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=2)
SIZES = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)


def _audio(rows, seconds, ragged=False):
    rng = numpy.random.default_rng(0)
    lengths = [int(seconds * RATE) - (1100 * (i % 5) if ragged else 0) for i in range(rows)]
    return [rng.standard_normal(length).astype("float32") for length in lengths]


@pattern("transformers docs, Automatic speech recognition; facebook/wav2vec2-base-960h model card: Evaluation", ROWS, rows=12)
def ctc_decoded_by_hand(rows):
    """processor(audio, padding="longest"), model(input_values, attention_mask).logits, argmax, batch_decode."""
    from transformers import Wav2Vec2Config, Wav2Vec2CTCTokenizer, Wav2Vec2FeatureExtractor, Wav2Vec2ForCTC, Wav2Vec2Processor

    torch.manual_seed(0)
    model = Wav2Vec2ForCTC(Wav2Vec2Config(**SIZES, **CONV, vocab_size=32, feat_extract_norm="layer", pad_token_id=0)).eval()
    with tempfile.NamedTemporaryFile("w", suffix=".json", delete=False) as file:
        json.dump({s: i for i, s in enumerate(["<pad>", "<s>", "</s>", "<unk>", "|", *"abcdefghijklmnopqrstuvwxyz'"])}, file)
    processor = Wav2Vec2Processor(Wav2Vec2FeatureExtractor(return_attention_mask=True), Wav2Vec2CTCTokenizer(file.name))
    audio = _audio(rows, 1, ragged=True)

    def call():
        inputs = processor(audio, sampling_rate=RATE, return_tensors="pt", padding="longest")
        with torch.no_grad():
            logits = model(inputs.input_values, attention_mask=inputs.attention_mask).logits
        ids = torch.argmax(logits, dim=-1)
        return ids, processor.batch_decode(ids)

    return Job(call, [model])


@pattern("transformers docs, AudioClassificationPipeline; superb/wav2vec2-base-superb-ks model card", ROWS, rows=16)
def audio_classification_pipeline(rows):
    """pipe(list of arrays, top_k=2, batch_size=16) with recordings of different lengths."""
    from transformers import Wav2Vec2Config, Wav2Vec2FeatureExtractor, Wav2Vec2ForSequenceClassification, pipeline

    torch.manual_seed(0)
    model = Wav2Vec2ForSequenceClassification(Wav2Vec2Config(**SIZES, **CONV, num_labels=4, feat_extract_norm="layer")).eval()
    pipe = pipeline("audio-classification", model=model, feature_extractor=Wav2Vec2FeatureExtractor(return_attention_mask=True), device="cpu")
    audio = _audio(rows, 0.8, ragged=True)
    return Job(lambda: pipe([a.copy() for a in audio], top_k=2, batch_size=16), [model])


@pattern("microsoft/wavlm-base-plus-sv model card: speaker verification", ROWS, rows=12)
def speaker_verification(rows):
    """WavLMForXVector embeddings, normalized; cosine similarity of every pair of recordings against a threshold."""
    from transformers import Wav2Vec2FeatureExtractor, WavLMConfig, WavLMForXVector

    torch.manual_seed(0)
    xvector = dict(tdnn_dim=(32, 32, 64), tdnn_kernel=(5, 3, 1), tdnn_dilation=(1, 2, 1), xvector_output_dim=16)
    model = WavLMForXVector(WavLMConfig(**SIZES, **CONV, **xvector, feat_extract_norm="layer", num_labels=4)).eval()
    inputs = Wav2Vec2FeatureExtractor(return_attention_mask=True)(_audio(rows, 0.8), sampling_rate=RATE, padding=True, return_tensors="pt")

    def call():
        with torch.no_grad():
            embeddings = model(**inputs).embeddings
        embeddings = torch.nn.functional.normalize(embeddings, dim=-1).cpu()
        similarity = torch.nn.functional.cosine_similarity(embeddings[:, None], embeddings[None], dim=-1)
        return similarity, (similarity > 0.86).tolist()

    return Job(call, [model])


@pattern("openai/whisper, whisper/decoding.py detect_language, written with transformers: logits of the first decoder step", ROWS, rows=8)
def whisper_language_by_first_logits(rows):
    """model(input_features, decoder_input_ids=[[sot]] * n).logits[:, 0], other than languages masked, softmax."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    torch.manual_seed(0)
    sizes = dict(d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64)
    ids = dict(vocab_size=120, num_mel_bins=16, max_source_positions=500, max_target_positions=32, pad_token_id=0, bos_token_id=5, eos_token_id=6, decoder_start_token_id=5)
    config = WhisperConfig(**sizes, **ids)
    config._attn_implementation = "eager"
    model = WhisperForConditionalGeneration(config).eval()
    features, languages = torch.randn(rows, 16, 1000), {"<|en|>": 100, "<|de|>": 101, "<|fr|>": 102, "<|ja|>": 103}

    def call():
        start = torch.full((len(features), 1), model.config.decoder_start_token_id)
        with torch.no_grad():
            logits = model(features, decoder_input_ids=start).logits[:, 0]
        outside = torch.ones(logits.size(-1), dtype=torch.bool)
        outside[list(languages.values())] = False
        probs = logits.masked_fill(outside, -float("inf")).softmax(-1)
        return [{name: probs[i, token].item() for name, token in languages.items()} for i in range(len(features))]

    return Job(call, [model])


@pattern("transformers docs, Speech2Text: generate from input_features and attention_mask; facebook/s2t-small-librispeech-asr", ROWS, rows=12, exact=True)
def speech2text_generate(rows):
    """Speech2TextForConditionalGeneration.generate with padded filter banks."""
    from transformers import Speech2TextConfig, Speech2TextForConditionalGeneration

    torch.manual_seed(0)
    sizes = dict(d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64)
    ids = dict(vocab_size=VOCAB, pad_token_id=0, bos_token_id=5, eos_token_id=6, decoder_start_token_id=6)
    config = Speech2TextConfig(**sizes, **ids, input_feat_per_channel=20, conv_channels=32, max_source_positions=600, max_target_positions=32)
    config._attn_implementation = "eager"
    model, features = Speech2TextForConditionalGeneration(config).eval(), torch.randn(rows, 480, 20)
    mask = torch.ones(rows, 480, dtype=torch.long)
    for i in range(rows):
        mask[i, 480 - 30 * (i % 4) :] = 0
    features = features * mask.unsqueeze(-1)

    def call():
        return model.generate(input_features=features, attention_mask=mask, max_new_tokens=10, num_beams=1, do_sample=False)

    return Job(call, [model])


@pattern("facebook/mms-tts-eng model card and transformers docs, VITS: set_seed, model(**inputs).waveform", "draws random numbers within the call: not split; never another waveform", ANY_SAFE, rows=12, keeps=1.0)
def vits_speech_of_a_batch(rows):
    """VitsModel over padded texts after set_seed(555); waveforms and their lengths."""
    from transformers import VitsConfig, VitsModel, set_seed

    torch.manual_seed(0)
    flow = dict(flow_size=32, spectrogram_bins=33, ffn_dim=64, duration_predictor_filter_channels=32, prior_encoder_num_flows=2, posterior_encoder_num_wavenet_layers=2, prior_encoder_num_wavenet_layers=2)
    vocoder = dict(upsample_initial_channel=32, upsample_rates=[4, 4], upsample_kernel_sizes=[8, 8], resblock_kernel_sizes=[3], resblock_dilation_sizes=[[1, 3]])
    model = VitsModel(VitsConfig(vocab_size=40, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, **flow, **vocoder)).eval()
    ids = torch.randint(1, 40, (rows, 40), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    for i in range(rows):
        mask[i, 40 - 3 * (i % 4) :] = 0

    def call():
        set_seed(555)
        with torch.no_grad():
            outputs = model(input_ids=ids * mask, attention_mask=mask)
        return outputs.waveform, outputs.sequence_lengths

    return Job(call, [model])
