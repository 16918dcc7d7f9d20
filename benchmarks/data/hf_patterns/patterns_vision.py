"""Images beside text: Qwen2-VL, LLaVA, ViT, CLIP."""

import torch
from parts import VOCAB, words, tokenizer
from registry import ANY_SAFE, Job, pattern

TEXT = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=VOCAB)
PER_IMAGE = "rows split with their own images, or a clear no; never another row's image"


def _qwen2_vl(rows, max_patches=14):
    """A tiny Qwen2-VL, and a left-padded batch whose images differ in size."""
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    torch.manual_seed(0)
    text = TEXT | dict(max_position_embeddings=2048, rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 1, 1]), pad_token_id=0, bos_token_id=5, eos_token_id=None)
    vision = dict(depth=2, embed_dim=32, hidden_size=32, num_heads=2, mlp_ratio=2, patch_size=4, spatial_merge_size=2, temporal_patch_size=2, in_channels=3)
    ids = dict(image_token_id=60, video_token_id=61, vision_start_token_id=58, vision_end_token_id=59)
    config = Qwen2VLConfig(text_config=text, vision_config=vision, **ids)
    config._attn_implementation = "eager"
    model = Qwen2VLForConditionalGeneration(config).eval()
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None
    grids = [(1, max_patches - 2 * (i % 3), max_patches) for i in range(rows)]
    prompts = [[58] + [60] * (h * w // 4) + [59] + list(range(7, 15 + i % 4)) for i, (_, h, w) in enumerate(grids)]
    width = max(map(len, prompts))
    input_ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    pixels = torch.randn(sum(h * w for _, h, w in grids), 3 * 2 * 4 * 4)
    batch = dict(input_ids=input_ids, attention_mask=(input_ids != 0).long(), pixel_values=pixels, image_grid_thw=torch.tensor(grids))
    batch["mm_token_type_ids"] = (input_ids == 60).long()
    return model, batch


@pattern("transformers docs, Qwen2-VL: batch inference", PER_IMAGE, ANY_SAFE, rows=12, exact=True)
def qwen2_vl_generate(rows):
    """generate with pixel_values and image_grid_thw, images of different sizes."""
    model, batch = _qwen2_vl(rows)
    return Job(lambda: model.generate(**batch, max_new_tokens=6, do_sample=False), [model])


@pattern("transformers docs, Qwen2-VL", PER_IMAGE, ANY_SAFE, rows=12)
def qwen2_vl_forward(rows):
    """model(**batch).logits with images."""
    model, batch = _qwen2_vl(rows)

    def call():
        with torch.inference_mode():
            return model(**batch, use_cache=False).logits

    return Job(call, [model])


@pattern("transformers docs, Qwen2-VL", "two images in one row and none in another: rows keep theirs, or a clear no", ANY_SAFE, rows=8, small=4, exact=True)
def qwen2_vl_uneven_images(rows):
    """The number of images is the number of rows, and yet they do not belong one to one."""
    model, batch = _qwen2_vl(rows, 12)
    one = [58] + [60] * 36 + [59]
    per_row = [2, 0, 1, 1] * (rows // 4)
    prompts = [one * n + list(range(7, 15 + i % 3)) for i, n in enumerate(per_row)]
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    grid = torch.tensor([[1, 12, 12]] * rows)
    pixels = torch.randn(rows * 144, 96, generator=torch.Generator().manual_seed(3))
    batch = dict(input_ids=ids, attention_mask=(ids != 0).long(), pixel_values=pixels, image_grid_thw=grid, mm_token_type_ids=(ids == 60).long())
    return Job(lambda: model.generate(**batch, max_new_tokens=6, do_sample=False), [model])


@pattern("transformers docs, LLaVA: batched inference", PER_IMAGE, ANY_SAFE, rows=12, exact=True)
def llava_generate(rows):
    """generate with one image for each row."""
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    torch.manual_seed(0)
    vision = CLIPVisionConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, image_size=40, patch_size=4, projection_dim=32)
    text = LlamaConfig(**TEXT, pad_token_id=0, bos_token_id=5, eos_token_id=None)
    model = LlavaForConditionalGeneration(LlavaConfig(vision_config=vision, text_config=text, image_token_index=60)).eval()
    model.generation_config.pad_token_id = 0
    ids = torch.tensor([[0] * (3 - i % 4) + [60] * 100 + list(range(7, 17 + i % 4)) for i in range(rows)])
    batch = dict(input_ids=ids, attention_mask=(ids != 0).long(), pixel_values=torch.randn(rows, 3, 40, 40))
    return Job(lambda: model.generate(**batch, max_new_tokens=6, do_sample=False), [model])


@pattern("transformers docs, ViT", "split by rows: logits as before")
def vit_forward(rows):
    """ViTForImageClassification(pixel_values).logits.argmax."""
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    model = ViTForImageClassification(ViTConfig(**sizes, image_size=40, patch_size=4, num_labels=5)).eval()
    pixels = torch.randn(rows, 3, 40, 40)

    def call():
        with torch.no_grad():
            output = model(pixel_values=pixels)
        return output, output.logits.argmax(-1)

    return Job(call, [model])


def _clip():
    from transformers import CLIPConfig, CLIPModel, CLIPTextConfig, CLIPVisionConfig

    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    text = CLIPTextConfig(**sizes, vocab_size=VOCAB, max_position_embeddings=160, eos_token_id=6, pad_token_id=0, bos_token_id=5)
    vision = CLIPVisionConfig(**sizes, image_size=40, patch_size=4)
    config = CLIPConfig(text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=16)
    config._attn_implementation = "eager"
    return CLIPModel(config).eval()


def _captions(rows):
    return tokenizer("t5", "right")(words(rows, 120), return_tensors="pt", padding=True, return_token_type_ids=False)


@pattern("transformers docs, CLIP: get_text_features", "split by rows: the same features")
def clip_text_features(rows):
    """model.get_text_features(**inputs)."""
    model = _clip()
    batch = _captions(rows)

    def call():
        with torch.inference_mode():
            return model.get_text_features(**batch)

    return Job(call, [model])


@pattern("transformers docs, CLIP: get_image_features", "split by rows: the same features")
def clip_image_features(rows):
    """model.get_image_features(pixel_values)."""
    model = _clip()
    pixels = torch.randn(rows, 3, 40, 40)

    def call():
        with torch.inference_mode():
            return model.get_image_features(pixel_values=pixels)

    return Job(call, [model])


@pattern("transformers docs, CLIP: logits_per_image", "every image with every text: the full matrix, or a clear no", ANY_SAFE)
def clip_every_image_with_every_text(rows):
    """model(**inputs).logits_per_image with as many texts as images."""
    model = _clip()
    batch = _captions(rows)
    pixels = torch.randn(rows, 3, 40, 40)

    def call():
        with torch.no_grad():
            output = model(**batch, pixel_values=pixels)
        return output.logits_per_image.softmax(1), output.logits_per_text

    return Job(call, [model])
