"""Hugging Face models with random weights, used as they come: a Llama, and a GPT-2 with tied weights."""

from __future__ import annotations

import pytest
import torch

from simplefsdp import MixedPrecisionPolicy, full_parameters, simple_fsdp
from tests.helpers.meshes import mesh

pytest.importorskip("transformers")

VOCABULARY = 61


def _build(kind: str) -> torch.nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    if kind == "llama":
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=32,
            use_cache=False,
        )
        return LlamaForCausalLM(config)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=32,
        n_embd=32,
        n_layer=1,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)


def _tokens(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, VOCABULARY, (2, 8), generator=generator)


def _train(rank: int, world: int, kind: str, directory: str):
    reference, model = _build(kind), _build(kind)
    simple_fsdp(model, mesh(world))
    tied = kind == "gpt2"
    assert (model.lm_head._parameters["weight"] is model.get_input_embeddings()._parameters["weight"]) == tied
    assert list(model.state_dict()) == list(reference.state_dict())
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (model, reference)]
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = model(input_ids=_tokens(step, rank), labels=_tokens(step, rank)).loss
        loss.backward()
        losses = [reference(input_ids=_tokens(step, r), labels=_tokens(step, r)).loss for r in range(world)]
        (sum(losses) / world).backward()
        torch.testing.assert_close(loss, losses[rank])
        for optimizer in optimizers:
            optimizer.step()
    for (name, param), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(
            param.full_tensor(), expected.data, atol=1e-5, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
        )
    with torch.no_grad():
        prompt = torch.arange(4)[None]
        ours = model.generate(prompt, max_new_tokens=4, do_sample=False, pad_token_id=0)
        assert torch.equal(
            ours, reference.generate(prompt, max_new_tokens=4, do_sample=False, pad_token_id=0)
        )
    if rank == 0:
        reference.save_pretrained(f"{directory}/reference")
    with full_parameters(model):
        if rank == 0:
            model.save_pretrained(f"{directory}/ours")
    if rank == 0:
        again = type(reference).from_pretrained(f"{directory}/ours")
        torch.testing.assert_close(again(prompt).logits, reference(prompt).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_hugging_face_models_train_generate_and_export(workers, tmp_path, kind):
    workers(2).run(_train, kind, str(tmp_path), timeout=100)


def _compile(rank: int, world: int, kind: str):
    reference, model = _build(kind), _build(kind)
    simple_fsdp(model, mesh(world), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    tokens = _tokens(0, rank)
    # Without labels: the loss of transformers logs, which Dynamo does not trace.
    logits = compiled(input_ids=tokens).logits
    logits.float().square().mean().backward()
    assert logits.dtype == torch.bfloat16
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    torch.testing.assert_close(logits.float(), reference(input_ids=tokens).logits, atol=0.05, rtol=0.05)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_hugging_face_models_compile_whole_in_mixed_precision(workers, kind):
    workers(2).run(_compile, kind, timeout=150)
