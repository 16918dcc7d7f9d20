"""Detection, segmentation, depth, captions, questions, video and documents."""

import numpy
import torch
from parts import VOCAB, tokenizer, words
from registry import Job, pattern

ROWS = "split by rows; the same results"
SIZES = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)


def _images(rows, size=40):
    from PIL import Image

    pixels = numpy.random.default_rng(0).integers(0, 255, (rows, size, size, 3), dtype=numpy.uint8)
    return [Image.fromarray(p) for p in pixels]


def _eager(config):
    config._attn_implementation = "eager"
    return config


@pattern("transformers docs, Object detection: inference, post_process_object_detection", ROWS)
def object_detection_post_processed(rows):
    """YOLOS: model(**inputs), post_process_object_detection(outputs, threshold, target_sizes): boxes of each image."""
    from transformers import YolosConfig, YolosForObjectDetection
    from transformers.models.yolos.image_processing_pil_yolos import YolosImageProcessorPil

    torch.manual_seed(0)
    config = _eager(YolosConfig(**SIZES, image_size=[48, 48], patch_size=4, num_detection_tokens=12, num_labels=4))
    model, processor = YolosForObjectDetection(config).eval(), YolosImageProcessorPil(size={"height": 48, "width": 48})
    images = _images(rows, 48)

    def call():
        with torch.no_grad():
            inputs = processor(images=images, return_tensors="pt")
            outputs = model(pixel_values=inputs["pixel_values"])
            sizes = torch.tensor([[image.size[1], image.size[0]] for image in images])
            return processor.post_process_object_detection(outputs, threshold=0.2, target_sizes=sizes)

    return Job(call, [model])


@pattern("transformers docs, Semantic segmentation: inference; SegFormer model card", ROWS)
def semantic_segmentation_upsampled(rows):
    """SegFormer logits at a quarter of the size, interpolated, argmax: a map for each image."""
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    torch.manual_seed(0)
    config = SegformerConfig(hidden_sizes=[8, 16, 32, 32], depths=[1, 1, 1, 1], num_attention_heads=[1, 2, 4, 4], decoder_hidden_size=64, num_labels=3)
    model, pixels = SegformerForSemanticSegmentation(config).eval(), torch.randn(rows, 3, 96, 96)

    def call():
        with torch.no_grad():
            logits = model(pixel_values=pixels).logits
        upsampled = torch.nn.functional.interpolate(logits, size=(64, 64), mode="bilinear", align_corners=False)
        return [part.numpy().astype("uint8") for part in upsampled.argmax(dim=1)]

    return Job(call, [model])


@pattern("transformers docs, Monocular depth estimation, and the DPT model card", ROWS)
def depth_maps_as_images(rows):
    """DPT: predicted_depth, bicubic interpolation, each map scaled to 0..255 as a PIL image's array."""
    from PIL import Image
    from transformers import DPTConfig, DPTForDepthEstimation

    torch.manual_seed(0)
    sizes = SIZES | dict(num_hidden_layers=4, backbone_out_indices=[0, 1, 2, 3], neck_hidden_sizes=[8, 8, 16, 16], fusion_hidden_size=16)
    config = _eager(DPTConfig(**sizes, image_size=64, patch_size=8, is_hybrid=False))
    model, pixels = DPTForDepthEstimation(config).eval(), torch.randn(rows, 3, 64, 64)

    def call():
        with torch.no_grad():
            depth = model(pixels).predicted_depth
        prediction = torch.nn.functional.interpolate(depth.unsqueeze(1), size=(40, 40), mode="bicubic", align_corners=False).squeeze(1)
        found = []
        for one in prediction.numpy():
            scaled = (one * 255 / numpy.max(one)).astype("float32")
            found.append((one, Image.fromarray(scaled.astype("uint8")).size))
        return found

    return Job(call, [model])


@pattern("transformers docs, Image similarity / Image feature extraction; Hugging Face blog, Image similarity with datasets", ROWS, rows=24)
def image_retrieval_with_dinov2(rows):
    """CLS embeddings of candidates and queries (two calls), cosine similarity, top k of each query."""
    from transformers import Dinov2Config, Dinov2Model

    torch.manual_seed(0)
    model = Dinov2Model(_eager(Dinov2Config(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, mlp_ratio=2, image_size=56, patch_size=4))).eval()
    candidates, queries = torch.randn(rows, 3, 56, 56), torch.randn(max(1, rows // 4), 3, 56, 56)

    def embed(pixels):
        with torch.no_grad():
            return model(pixel_values=pixels).last_hidden_state[:, 0].cpu()

    def call():
        library, asked = embed(candidates), embed(queries)
        scores = torch.nn.functional.cosine_similarity(asked[:, None, :], library[None, :, :], dim=-1)
        best = scores.topk(min(3, rows), dim=-1)
        return scores, best.indices.tolist()

    return Job(call, [model])


@pattern("nlpconnect/vit-gpt2-image-captioning model card; transformers docs, Vision encoder-decoder models", ROWS, exact=True)
def captions_by_vit_and_gpt2(rows):
    """VisionEncoderDecoderModel.generate(pixel_values, max_length=16, num_beams=4), then batch_decode and strip."""
    from transformers import GPT2Config, VisionEncoderDecoderConfig, VisionEncoderDecoderModel, ViTConfig

    torch.manual_seed(0)
    encoder = ViTConfig(**SIZES, image_size=64, patch_size=4)
    decoder = GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=VOCAB, n_positions=64, add_cross_attention=True, is_decoder=True, bos_token_id=5, eos_token_id=6)
    config = VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder, decoder_start_token_id=5, pad_token_id=0, eos_token_id=6)
    config._attn_implementation = "eager"
    model, tok, pixels = VisionEncoderDecoderModel(config).eval(), tokenizer(), torch.randn(rows, 3, 64, 64)

    def call():
        ids = model.generate(pixels, max_length=16, num_beams=4)
        return [text.strip() for text in tok.batch_decode(ids, skip_special_tokens=True)]

    return Job(call, [model])


@pattern("Salesforce/blip-vqa-base model card; transformers docs, Visual question answering", ROWS, exact=True)
def visual_question_answering_with_blip(rows):
    """BlipForQuestionAnswering.generate(**inputs): one image and one padded question a row."""
    from transformers import BlipConfig, BlipForQuestionAnswering

    torch.manual_seed(0)
    text = SIZES | dict(vocab_size=VOCAB, encoder_hidden_size=32, max_position_embeddings=64, bos_token_id=5, eos_token_id=3, pad_token_id=0, sep_token_id=3, projection_dim=16)
    vision = SIZES | dict(image_size=64, patch_size=4, projection_dim=16)
    model = BlipForQuestionAnswering(_eager(BlipConfig(text_config=text, vision_config=vision, projection_dim=16))).eval()
    tok = tokenizer("bert", "right")
    batch = tok(words(rows, 12), padding=True, return_tensors="pt", return_token_type_ids=False)
    pixels = torch.randn(rows, 3, 64, 64)

    def call():
        with torch.no_grad():
            out = model.generate(pixel_values=pixels, **batch, max_new_tokens=8)
        return tok.batch_decode(out, skip_special_tokens=True)

    return Job(call, [model])


@pattern("transformers docs, Video classification: VideoMAE", ROWS)
def video_classification(rows):
    """pixel_values (rows, frames, 3, height, width): the top two labels of each clip."""
    from transformers import VideoMAEConfig, VideoMAEForVideoClassification

    torch.manual_seed(0)
    config = VideoMAEConfig(**SIZES, image_size=32, patch_size=8, num_frames=16, tubelet_size=2, num_labels=6)
    model, clips = VideoMAEForVideoClassification(_eager(config)).eval(), torch.randn(rows, 16, 3, 32, 32)

    def call():
        with torch.no_grad():
            logits = model(pixel_values=clips).logits
        best = logits.softmax(-1).topk(2)
        return [[{"label": model.config.id2label[i], "score": s} for i, s in zip(a, b, strict=True)] for a, b in zip(best.indices.tolist(), best.values.tolist(), strict=True)]

    return Job(call, [model])


@pattern("transformers docs, LayoutLM: LayoutLMForTokenClassification (FUNSD notebooks)", ROWS)
def layout_token_classification(rows):
    """input_ids with bbox (rows, length, 4): labels of the tokens that are not padding, with their boxes."""
    from transformers import LayoutLMConfig, LayoutLMForTokenClassification

    torch.manual_seed(0)
    config = _eager(LayoutLMConfig(**SIZES, vocab_size=VOCAB, max_position_embeddings=256, num_labels=7, pad_token_id=0))
    model, tok = LayoutLMForTokenClassification(config).eval(), tokenizer("bert", "right")
    batch = tok(words(rows, 150), padding=True, return_tensors="pt", return_token_type_ids=True)
    corner = torch.randint(0, 480, (*batch["input_ids"].shape, 2))
    boxes = torch.cat([corner, corner + 100], -1) * batch["attention_mask"].unsqueeze(-1)

    def call():
        with torch.no_grad():
            outputs = model(input_ids=batch["input_ids"], bbox=boxes, attention_mask=batch["attention_mask"], token_type_ids=batch["token_type_ids"])
        labels = outputs.logits.argmax(-1)
        return [list(zip(l[m == 1].tolist(), b[m == 1].tolist(), strict=True)) for l, b, m in zip(labels, boxes, batch["attention_mask"], strict=True)]

    return Job(call, [model])
