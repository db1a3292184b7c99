"""Makes the embedded model: tokenizer, pretraining and held-out tasks, from the grammar alone. Run once; 80 minutes.

    python launch/pretrain_nano.py --out toolr0_core/assets/nano

One thread, so that the same call gives the same weights on the same machine; a killed one goes on with --resume.

Clean documents first, so that copying is learned at all; faulty ones (documents.py) while the learning rate falls, so
that the shipped model has seen the behaviour and does it badly at temperature 1, as a base model does.
The architecture is a plain Llama; two heads of the first layer start out looking one and two tokens back
(`look_back`), which is what a small model otherwise spends its first hour on finding.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from toolr0_core.assets import documents, grammar
from toolr0_core.attention import PackedAttention, Segment
from toolr0_core.model import Model, ModelConfig, rope_frequencies

CONTROL = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
TAGS = [f"<{slash}{tag}>" for tag in ("think", "question", "available_tools", "tool_call_answer")
        for slash in ("", "/")]
TEMPLATE = ("{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
            "{% if message['role'] == 'assistant' %}{{ '<|end|>' }}{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}")
CONFIG = dict(hidden_size=128, intermediate_size=320, num_hidden_layers=5, num_attention_heads=4,
              num_key_value_heads=4, head_dim=32, rms_norm_eps=1e-5, rope_theta=10000.0, tie_word_embeddings=True,
              max_position_embeddings=1024)
FULL = grammar.Draw(random_parameters=0.8, random_tools=0.5, two_calls=0.45)  # most of what a model can be asked
GLUE = "in|for|on|at|to|the|a|my|with|by|and|then|of|under|from|about|this|near"


def train_tokenizer(seed: int, vocab_size: int) -> Tokenizer:
    """Byte-level BPE whose pieces are words, values, runs of JSON punctuation and function words with their spaces.

    A value is the same token in a question and in JSON, so that calling a tool is copying tokens.
    """
    tokenizer = Tokenizer(models.BPE())
    structure = r'(?:[\[\]{}",:]|(?<=")(?:name|parameters|arguments|string|integer)(?="))+'
    pieces = rf"{structure}|[A-Z]\d|\d{{1,2}}| ?\b(?:{GLUE})\b ?|[A-Za-z]+_?| |[^\sA-Za-z0-9]"
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(pieces), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in CONTROL])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in TAGS])
    rng = random.Random(seed)
    values = [f" {v}" for _, pool, _ in grammar.PARAMETERS.values() for v in pool]
    corpus = [text for _ in range(12_000) for text in _texts(rng)] + values * 800
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=CONTROL + TAGS, show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(corpus, trainer)
    # training marks all of them special; the tags are ordinary text that decodes to itself
    state = json.loads(tokenizer.to_str())
    for added in state["added_tokens"]:
        added["special"] = added["content"] in CONTROL
    return Tokenizer.from_str(json.dumps(state))


def _texts(rng: random.Random) -> list[str]:
    texts = []
    for make in (documents.solver_document, documents.generator_document):
        messages, completion = make(rng, documents.CLEAN)
        texts += [m["content"] for m in messages] + [completion]
    return texts


def look_back(model: Model, heads: int = 2, sharpness: float = 6.0) -> None:
    """Starts head h of the first layer as one that attends h + 1 tokens back, whatever the tokens are.

    Dimension 0 of every embedding is one constant, which keys and queries turn into a vector that RoPE rotates by
    position; the query's is turned back by h + 1 positions, so the scores peak there.
    """
    config, attention = model.config, model.layers[0].self_attn
    E = config.head_dim
    with torch.no_grad():
        embedding = model.embed_tokens.weight
        embedding.normal_(0, 0.1)
        embedding[:, 0] = 0.6
        constant = 0.6 / math.sqrt(embedding.square().mean().item())
        angle = rope_frequencies(config)
        for h in range(heads):
            rows = slice(h * E, (h + 1) * E)
            attention.q_proj.weight[rows] = 0
            attention.k_proj.weight[rows] = 0
            attention.k_proj.weight[h * E: h * E + E // 2, 0] = sharpness / constant
            attention.q_proj.weight[rows, 0] = sharpness / constant * torch.cat(
                [(angle * (h + 1)).cos(), -(angle * (h + 1)).sin()])
            basis = torch.linalg.qr(torch.randn(config.hidden_size, E)).Q
            attention.v_proj.weight[rows] = basis.T
            attention.v_proj.weight[rows, 0] = 0
            attention.o_proj.weight[:, rows] = 0.1 * torch.linalg.qr(torch.randn(config.hidden_size, E)).Q


def new_model(vocab_size: int, seed: int) -> Model:
    torch.manual_seed(seed)
    model = Model(ModelConfig(vocab_size=vocab_size, **CONFIG))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 0.5 / math.sqrt(parameter.shape[1]))
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
    look_back(model)
    return model


class Batches:
    """An endless stream of packed batches of about `tokens` tokens: documents of like length together."""

    def __init__(self, tokenizer: Tokenizer, seed: int, tokens: int):
        self.tokenizer, self.rng, self.tokens = tokenizer, random.Random(seed), tokens
        self.queue: list[list[tuple[list[int], int]]] = []
        self.stage = None

    def state(self) -> tuple:
        return self.rng.getstate(), self.queue, self.stage

    def restore(self, state: tuple) -> None:
        random_state, self.queue, self.stage = state
        self.rng.setstate(random_state)

    def encode(self, messages: list[dict[str, str]], completion: str) -> tuple[list[int], int]:
        prompt = "".join(f"<|{m['role']}|>{m['content']}" for m in messages) + "<|assistant|>"
        ids = self.tokenizer.encode(prompt, add_special_tokens=False).ids
        return ids + self.tokenizer.encode(completion + "<|end|>", add_special_tokens=False).ids, len(ids)

    def next(self, noise: documents.Noise, draw: grammar.Draw, generator_share: float):
        if self.stage != (noise, draw) or not self.queue:
            self.stage, self.queue = (noise, draw), self._fill(noise, draw, generator_share)
        return pack(self.queue.pop())

    def _fill(self, noise, draw, generator_share):
        docs = []
        for _ in range(512):
            make = documents.generator_document if self.rng.random() < generator_share else documents.solver_document
            docs.append(self.encode(*make(self.rng, noise, draw)))
        docs.sort(key=lambda doc: (doc[1], len(doc[0])))
        batches, size = [[]], 0
        for doc in docs:
            if size + len(doc[0]) > self.tokens:
                batches.append([])
                size = 0
            batches[-1].append(doc)
            size += len(doc[0])
        self.rng.shuffle(batches)
        return batches


def pack(docs: list[tuple[list[int], int]]) -> tuple[Tensor, Tensor, PackedAttention, Tensor, Tensor, Tensor]:
    """ids, positions, attention, and for every completion token: the row that predicts it, the token, its document."""
    ids, positions, segments, rows, targets, owner = [], [], [], [], [], []
    for d, (doc, start) in enumerate(docs):
        base = len(ids)
        segments.append(Segment(base, len(doc)))
        ids += doc
        positions += range(len(doc))
        rows += range(base + start - 1, base + len(doc) - 1)
        targets += doc[start:]
        owner += [d] * (len(doc) - start)
    return (*map(torch.tensor, (ids, positions)), PackedAttention(segments), *map(torch.tensor, (rows, targets, owner)))


def completion_logits(model: Model, ids, positions, attend, rows) -> Tensor:
    return model(ids, positions, attend, lambda hidden, weight: F.linear(hidden[rows], weight))


@torch.no_grad()
def forced_accuracy(model: Model, batches: Batches, make, draw: grammar.Draw, n: int = 128) -> float:
    """Share of clean documents all of whose answer tokens are the most likely ones given the right beginning.

    For the Solver, this is greedy exact match given a careful think block. The Generator's think and question are free,
    so only what follows </question> counts.
    """
    rng = random.Random(1)
    docs = [batches.encode(*make(rng, documents.CLEAN, draw)) for _ in range(n)]
    if make is documents.generator_document:
        end = batches.tokenizer.token_to_id("</question>")
        docs = [(ids, ids.index(end) + 1) for ids, _ in docs]
    ids, positions, attend, rows, targets, owner = pack(docs)
    wrong = completion_logits(model, ids, positions, attend, rows).argmax(-1) != targets
    return 1 - torch.zeros(n).index_add(0, owner, wrong.float()).gt(0).float().mean().item()


def optimizers(model: Model, lr: float) -> list[torch.optim.Optimizer]:
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and not n.startswith("embed")]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or n.startswith("embed")]
    return [torch.optim.Muon(matrices, lr=lr, weight_decay=0.01),
            torch.optim.AdamW(others, lr=lr * 0.15, betas=(0.9, 0.95), weight_decay=0.0)]


def schedule(args: argparse.Namespace, step: int) -> tuple[grammar.Draw, documents.Noise, float]:
    """What the documents of a step are drawn from, how faulty they are, and the learning rate's share of its peak."""
    progress = step / args.steps
    if progress < args.plain:
        draw = grammar.Draw(plain=True, random_parameters=0.25)
    elif progress < args.familiar:
        draw = grammar.Draw(random_parameters=0.25)
    else:
        draw = FULL
    noise = documents.CLEAN if progress < args.clean else documents.Noise()
    return draw, noise, min(1.0, (step + 1) / 50, max(0.02, (1 - progress) / (1 - args.hold)))


def pretrain(args: argparse.Namespace, tokenizer: Tokenizer, save) -> Model:
    model = new_model(tokenizer.get_vocab_size(), args.seed)
    batches, opts = Batches(tokenizer, args.seed, args.tokens), optimizers(model, args.lr)
    state_file = args.out.with_name(args.out.name + ".state")
    first = restore(state_file, model, opts, batches) if args.resume else 0
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, vocabulary {tokenizer.get_vocab_size()}", flush=True)
    start, losses = time.time(), []
    for step in range(first, args.steps):
        draw, noise, scale = schedule(args, step)
        ids, positions, attend, rows, targets, _ = batches.next(noise, draw, args.generator_share)
        loss = F.cross_entropy(completion_logits(model, ids, positions, attend, rows), targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for opt, base in zip(opts, (args.lr, args.lr * 0.15)):
            opt.param_groups[0]["lr"] = base * scale
            opt.step()
            opt.zero_grad()
        losses.append(loss.item())
        if (step + 1) % args.every == 0:
            seen = forced_accuracy(model, batches, documents.solver_document, FULL)
            unseen = forced_accuracy(model, batches, documents.solver_document, replace(FULL, unseen="tool"))
            writes = forced_accuracy(model, batches, documents.generator_document, FULL)
            print(f"step {step + 1} {time.time() - start:.0f}s loss {sum(losses) / len(losses):.3f} solver {seen:.2f} "
                  f"unseen tools {unseen:.2f} generator {writes:.2f}", flush=True)
            losses = []
        clean_ends = noise == documents.CLEAN != schedule(args, step + 1)[1]
        if clean_ends:
            save(model, ".clean")
        if clean_ends or (step + 1) % args.every == 0:
            keep(state_file, step + 1, model, opts, batches)
    return model


def keep(file: Path, step: int, model: Model, opts: list[torch.optim.Optimizer], batches: Batches) -> None:
    """Everything that the next steps depend on, so that a killed call goes on as if it had not been."""
    part = file.with_name(file.name + ".part")
    torch.save({"step": step, "model": model.state_dict(), "opts": [opt.state_dict() for opt in opts],
                "batches": batches.state()}, part)
    part.replace(file)


def restore(file: Path, model: Model, opts: list[torch.optim.Optimizer], batches: Batches) -> int:
    # this script's own file, which holds the state of Python's random numbers
    state = torch.load(file, weights_only=False)
    model.load_state_dict(state["model"])
    for opt, values in zip(opts, state["opts"]):
        opt.load_state_dict(values)
    batches.restore(state["batches"])
    return state["step"]


def held_out(seed: int, n: int) -> list[dict]:
    """n uniform rows (evaluation.md's form): half with tools, half with pairs of tool and value, never pretrained on."""
    rng, rows, questions = random.Random(f"held-out {seed}"), [], set()
    while len(rows) < n:
        group = "tool" if len(rows) % 2 == 0 else "pair"
        task = grammar.sample_task(rng, grammar.Draw(unseen=group))
        uses = any(c.name in grammar.UNSEEN_TOOLS for c in task.gold)
        if uses != (group == "tool") or task.question in questions:
            continue
        questions.add(task.question)
        rows.append({"id": f"heldout-{len(rows)}", "question": task.question,
                     "tools": [t.to_json() for t in task.tools], "gold": [[c.to_json() for c in task.gold]],
                     "meta": {"group": f"unseen {group}"}})
    return rows


def export(model: Model, tokenizer: Tokenizer, out: Path) -> None:
    """A directory that transformers loads: plain LlamaForCausalLM, fast tokenizer with a chat template."""
    from safetensors.torch import save_file

    out.mkdir(parents=True, exist_ok=True)
    end = tokenizer.token_to_id("<|end|>")
    config = dict(architectures=["LlamaForCausalLM"], model_type="llama", hidden_act="silu", attention_bias=False,
                  mlp_bias=False, torch_dtype="float32", vocab_size=tokenizer.get_vocab_size(), bos_token_id=None,
                  eos_token_id=end, pad_token_id=end, **CONFIG)
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    (out / "generation_config.json").write_text(json.dumps({"eos_token_id": end, "pad_token_id": end}, indent=1) + "\n")
    (out / "tokenizer_config.json").write_text(json.dumps(dict(
        tokenizer_class="PreTrainedTokenizerFast", eos_token="<|end|>", pad_token="<|end|>", chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False, model_max_length=1024), indent=1) + "\n")
    tokenizer.save(str(out / "tokenizer.json"))
    tensors = {f"model.{k}": v.detach().contiguous() for k, v in model.state_dict().items()}
    save_file(tensors, out / "model.safetensors.part", metadata={"format": "pt"})
    (out / "model.safetensors.part").rename(out / "model.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=9500)
    parser.add_argument("--tokens", type=int, default=3000, help="tokens of a batch")
    parser.add_argument("--vocab", type=int, default=1280)
    parser.add_argument("--lr", type=float, default=0.02, help="Muon's; AdamW's is 0.15 of it")
    parser.add_argument("--plain", type=float, default=0.05, help="share of the steps on small menus of one call")
    parser.add_argument("--familiar", type=float, default=0.35, help="share of the steps on mostly fixed tools, before any")
    parser.add_argument("--clean", type=float, default=0.85, help="share of the steps on clean documents")
    parser.add_argument("--hold", type=float, default=0.45, help="share of the steps before the learning rate falls")
    parser.add_argument("--generator-share", type=float, default=0.55)
    parser.add_argument("--resume", action="store_true", help="go on from OUT.state, the same settings, of a killed call")
    parser.add_argument("--every", type=int, default=250, help="steps between reports and states")
    args = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = train_tokenizer(args.seed, args.vocab)

    def save(model: Model, suffix: str = "") -> None:
        export(model, tokenizer, args.out.with_name(args.out.name + suffix))

    save(pretrain(args, tokenizer, save))
    rows = held_out(args.seed, 400)
    (args.out / "heldout.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
