"""model, attention and weights against transformers, on random tiny configurations of every family."""

import json

import pytest
import tokenizers
import torch
import transformers

from toolr0_core import model as models
from toolr0_core.attention import PackedAttention, Segment
from toolr0_core.weights import ModelError, check_model, export_model

BASE = dict(vocab_size=101, hidden_size=48, intermediate_size=96, num_hidden_layers=3, num_attention_heads=6,
            max_position_embeddings=256, bos_token_id=1, eos_token_id=2, initializer_range=0.2)
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32, "rope_theta": 5000.0}
FAMILIES = {
    "llama": transformers.LlamaConfig(**BASE, num_key_value_heads=6, tie_word_embeddings=False),
    "llama, grouped, tied (SmolLM2)": transformers.LlamaConfig(**BASE, num_key_value_heads=2, tie_word_embeddings=True),
    "llama 3 scaling": transformers.LlamaConfig(**BASE, num_key_value_heads=3, rope_parameters=LLAMA3),
    "qwen2": transformers.Qwen2Config(**BASE, num_key_value_heads=2, tie_word_embeddings=True),
    "qwen2, untied": transformers.Qwen2Config(**BASE, num_key_value_heads=3, tie_word_embeddings=False),
    "qwen3": transformers.Qwen3Config(**BASE, num_key_value_heads=2, head_dim=16, tie_word_embeddings=True),
}


def saved(config, path, **options):
    torch.manual_seed(0)
    reference = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():  # biases and norms start as 0 and 1, which would hide a swapped one
        for p in reference.parameters():
            if p.ndim == 1:
                p.add_(torch.randn_like(p) * 0.3)
    reference.save_pretrained(path, **options)
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a")).save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages[0]['content'] }}"}))
    return reference


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers_and_export_returns_to_it(family, tmp_path):
    reference = saved(FAMILIES[family], tmp_path / "in")
    ours = models.load(tmp_path / "in")
    ids = torch.randint(101, (2, 90))
    with torch.no_grad():
        expected = reference(ids).logits
        assert (ours.logits(ids) - expected).abs().max() < 1e-5 * max(1, expected.abs().max())
    export_model(ours.state_dict(), ours.config, tmp_path / "in", tmp_path / "out")
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        assert torch.equal(back(ids).logits, expected)


def test_a_sharded_index_is_read(tmp_path):
    reference = saved(FAMILIES["qwen2, untied"], tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    ids = torch.randint(101, (1, 9))
    with torch.no_grad():
        assert torch.allclose(models.load(tmp_path).logits(ids), reference(ids).logits, atol=1e-5)
    next(tmp_path.glob("model-00002-*.safetensors")).unlink()
    with pytest.raises(ModelError, match="model-00002"):
        check_model(tmp_path)


def damage(change):
    def apply(path):
        config = json.loads((path / "config.json").read_text())
        change(config)
        (path / "config.json").write_text(json.dumps(config))
    return apply


@pytest.mark.parametrize("break_it, named", [
    (lambda p: (p / "config.json").unlink(), "config.json"), (lambda p: (p / "config.json").write_text("{"), "config.json"),
    (lambda p: (p / "model.safetensors").unlink(), "model.safetensors"),
    (lambda p: (p / "model.safetensors").write_bytes(b"xx"), "model.safetensors"),
    (lambda p: (p / "tokenizer.json").unlink(), "tokenizer.json"),
    (damage(lambda c: c.update(model_type="mamba")), "mamba"), (damage(lambda c: c.update(hidden_size=60)), "embed_tokens"),
    (damage(lambda c: c.update(num_hidden_layers=9)), "layers.3"),
    (damage(lambda c: c.update(rope_parameters={"rope_type": "yarn"})), "yarn")])
def test_a_broken_directory_is_named_in_one_line(break_it, named, tmp_path):
    saved(FAMILIES["qwen3"], tmp_path)
    check_model(tmp_path)
    break_it(tmp_path)
    with pytest.raises(ModelError, match=named) as error:
        check_model(tmp_path)
    assert "\n" not in str(error.value)


def test_a_shared_prompt_equals_separate_sequences(tiny):
    model, ids = tiny(qk_norm=True, qkv_bias=True), torch.randint(97, (2, 14))
    ids[1, :6] = ids[0, :6]
    with torch.no_grad():
        expected = model.logits(ids)
        stream = torch.cat([ids[0], ids[1, 6:]])
        positions = torch.cat([torch.arange(14), torch.arange(6, 14)])
        attend = PackedAttention([Segment(0, 6), Segment(6, 8, (0, 6)), Segment(14, 8, (0, 6))])
        got = model(stream, positions, attend, torch.nn.functional.linear)
    assert torch.allclose(got[:14], expected[0], atol=1e-5) and torch.allclose(got[14:], expected[1, 6:], atol=1e-5)


def test_a_token_never_sees_what_comes_after_it(tiny):
    model, ids = tiny(), torch.randint(97, (1, 12))
    changed = ids.clone()
    changed[0, 7] += 1
    with torch.no_grad():
        assert torch.allclose(model.logits(ids)[0, :7], model.logits(changed)[0, :7], atol=1e-6)
        assert not torch.allclose(model.logits(ids)[0, 7:], model.logits(changed)[0, 7:], atol=1e-3)
