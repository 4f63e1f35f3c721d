"""From options to the parts of a run: data, model, optimizer.

Owns: how the parts are made and how they fit each other. Must not know: the training loop, metrics, checkpoints.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from simplefsdp import MixedPrecisionPolicy, sharded_parameters, simple_fsdp
from simplefsdp.llama.checkpointing import apply_activation_checkpointing
from simplefsdp.llama.config import LlamaConfig, get_config
from simplefsdp.llama.corpus import load_corpus
from simplefsdp.llama.data import Loader, build_loader
from simplefsdp.llama.hf import load_hf
from simplefsdp.llama.hf_config import config_from_hf
from simplefsdp.llama.launch import check_sharding_factor
from simplefsdp.llama.model import Llama
from simplefsdp.llama.options import TrainOptions, UsageError
from simplefsdp.llama.sources import DataError
from simplefsdp.llama.tokenizer import load_tokenizer
from simplefsdp.llama.world import World

CUBLAS_WORKSPACE = ":4096:8"
"""What cuBLAS needs to be deterministic (CUDA documentation, "cuBLAS reproducibility")."""


@dataclass(frozen=True)
class Inputs:
    """What the options name, found and read: everything in which a user can be mistaken.

    Args:
        config: the model's shape.
        train: batches of one optimizer step each, endless.
        evaluation: held-out batches of one forward each; `None` if the run does not evaluate.
        corpus_tokens: tokens of the data, held-out ones included.
    """

    config: LlamaConfig
    train: Loader
    evaluation: Loader | None
    corpus_tokens: int


def read_inputs(options: TrainOptions, world: World) -> Inputs:
    """Reads configuration, tokenizer and data; no collective, so that a rank may fail alone.

    Raises:
        UsageError: one line on what cannot be used.
    """
    recipe = options.recipe
    check_sharding_factor(options, world.size)
    if options.compile and options.compile_backend not in torch.compiler.list_backends(exclude_tags=()):
        usual = ", ".join(torch.compiler.list_backends())
        raise UsageError(
            f"--compile-backend {options.compile_backend}: torch.compile has {usual} and, to debug, aot_eager"
        )
    try:
        config = config_from_hf(options.hf) if options.hf is not None else get_config(options.model)
        if recipe.seq_len > config.max_seq_len:
            raise UsageError(
                f"--seq-len {recipe.seq_len}: the model attends to at most {config.max_seq_len} tokens"
            )
        tokenizer = load_tokenizer(_find_tokenizer(options))
        if options.hf is None and tokenizer.vocab_size > config.vocab_size:
            config = dataclasses.replace(config, vocab_size=tokenizer.vocab_size)
        corpus = load_corpus(
            tokenizer, options.data, text_field=options.text_field, cache_dir=options.data_cache
        )
        evaluates = recipe.eval_every > 0
        make_loader = functools.partial(
            build_loader,
            corpus,
            seq_len=recipe.seq_len,
            dp_rank=world.rank,
            dp_world=world.size,
            seed=options.seed,
            val_fraction=options.val_fraction if evaluates else 0.0,
            vocab_size=config.vocab_size,
            pin_memory=world.device.type == "cuda",
        )
        forward_batch = recipe.local_batch * world.size
        return Inputs(
            config,
            train=make_loader(global_batch=forward_batch * options.accumulation),
            evaluation=make_loader(global_batch=forward_batch, split="val") if evaluates else None,
            corpus_tokens=len(corpus.tokens),
        )
    except (DataError, ValueError, OSError) as error:
        raise UsageError(str(error)) from error


def describe(options: TrainOptions, inputs: Inputs, world: World) -> dict[str, str]:
    """Returns the facts that a run's header shows, name to text."""
    config, loader = inputs.config, inputs.train
    tokens = loader.global_batch * options.recipe.seq_len
    batch = f"{tokens:,} tokens per step: {count_ranks(world.size)} x {options.recipe.local_batch} sequences"
    if options.accumulation > 1:
        batch += f" x {options.accumulation} passes"
    source = ", ".join(options.data) if options.data else "Python's own documentation"
    held_out = f", the last {options.val_fraction:.0%} held out" if inputs.evaluation is not None else ""
    return {
        "model": f"{options.run_name}: {_count(config.n_parameters)} parameters, {config.n_layers} layers, "
        f"width {config.dim}",
        "ranks": f"{world.size} on {_device_name(world)}, {_describe_mesh(options, world)}",
        "precision": "bf16 compute, fp32 storage and reductions" if uses_bf16(options, world) else "fp32",
        "compiler": options.compile_backend if options.compile else "off",
        "batch": f"{batch} x {options.recipe.seq_len} tokens",
        "data": f"{source}: {inputs.corpus_tokens:,} tokens{held_out}",
    }


def make_deterministic() -> None:
    """Restricts torch to deterministic kernels; before CUDA is first used."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", CUBLAS_WORKSPACE)
    torch.use_deterministic_algorithms(True)


def uses_bf16(options: TrainOptions, world: World) -> bool:
    """Whether `--precision` means bf16 compute on this device."""
    return options.precision == "bf16" or (options.precision == "auto" and world.device.type == "cuda")


def build_model(options: TrainOptions, config: LlamaConfig, world: World) -> Llama:
    """Builds the model without memory, shards it, and gives each rank its part of the initial weights.

    Returns:
        The sharded model, not compiled.

    Raises:
        UsageError: on every rank, if the weights to start from cannot be used.
    """
    with torch.device("meta"):
        model = Llama(config)
    apply_activation_checkpointing(model, options.activation_checkpointing)
    policy = (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        if uses_bf16(options, world)
        else MixedPrecisionPolicy()
    )
    simple_fsdp(
        model,
        init_device_mesh(world.device.type, (world.size,), mesh_dim_names=("dp",)),
        sharding_factor=options.sharding_factor,
        mp_policy=policy,
        reshard_after_forward=options.reshard_after_forward,
    )
    model.to_empty(device=world.device)
    torch.manual_seed(options.seed)
    if options.hf is None:
        with sharded_parameters(model):
            model.init_weights()
        return model
    error = None
    try:
        load_hf(model, options.hf)
    except (ValueError, OSError) as mistake:
        error = f"--hf {options.hf}: {mistake}"
    world.agree(error)
    return model


def build_optimizer(options: TrainOptions, model: nn.Module) -> torch.optim.AdamW:
    """Makes fused AdamW; matrices decay, norms and other vectors do not."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": options.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=options.recipe.lr, betas=options.betas, fused=True
    )


def count_ranks(number: int) -> str:
    """Returns "1 rank", "2 ranks", ..."""
    return f"{number} rank" + ("s" if number != 1 else "")


def _find_tokenizer(options: TrainOptions) -> Path | None:
    """The tokenizer asked for, else the one beside imported weights, else bytes."""
    if options.tokenizer is None and options.hf is not None and (options.hf / "tokenizer.json").is_file():
        return options.hf
    return options.tokenizer


def _describe_mesh(options: TrainOptions, world: World) -> str:
    factor = options.sharding_factor or world.size
    if factor == 1:
        return "parameters replicated" if world.size > 1 else "nothing to shard"
    replicas = world.size // factor
    return f"parameters sharded over {factor}" + (f", {replicas} replicas" if replicas > 1 else "")


def _device_name(world: World) -> str:
    return torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "CPU"


def _count(number: int) -> str:
    for unit, symbol in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= unit:
            return f"{number / unit:.2f} {symbol}"
    return str(number)
