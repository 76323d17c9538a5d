"""How fast PyTorch trains the same model: the yardstick for `make bench`. Needs PyTorch.

    python3 tests/pytorch_speed.py --layers 8 --d-model 512 --heads 8 --d-ff 1536 --seq-len 256 --threads 2
    python3 tests/pytorch_speed.py --model smollm-1.7b --seq-len 2048 --device cuda --dtype bf16 --compile

A step is one micro-batch forward and backward, clipping, and AdamW, with PyTorch's fused attention (on a GPU in
bf16: flash attention, or an error) and optimizer. --compile compiles a layer, once for all of them, and the loss.
A micro-batch that doesn't fit into memory is halved. Printed are medians over the steps after the warm-up. FLOPs
are (6 N + 12 L h s) a token: N the parameters without the embedding table, L layers, h the model's width, s the
sequence length; attention is not halved for causality, as in torchtitan (llm.c halves it: 6 L h s).
"""

import argparse
import contextlib
import functools
import gc
import statistics
import time

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from pytorch_reference import Config, Llama, adamw, micro_batch_loss

WARM_UP_STEPS = 5
TYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.float32}  # of the weights
# As in common/options/options.cc.
MODELS = {
    "smollm-135m": dict(layers=30, d_model=576, heads=9, kv_heads=3, d_ff=1536, vocab_size=49152),
    "smollm-1.7b": dict(layers=24, d_model=2048, heads=32, kv_heads=32, d_ff=8192, vocab_size=49152),
    "llama-3.2-1b": dict(layers=16, d_model=2048, heads=32, kv_heads=8, d_ff=8192, vocab_size=128256),
}


def read_options():
    parser = argparse.ArgumentParser()
    sizes = dict(layers=8, d_model=64, heads=8, kv_heads=None, d_ff=192, vocab_size=256, seq_len=128,
                 micro_batch_size=4, steps=50, threads=None)
    for name, default in sizes.items():
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=default)
    parser.add_argument("--dtype", choices=TYPES, default="fp32", help="bf16: autocast, the weights stay fp32")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--model", choices=MODELS, help="the sizes of a preset, instead of the six of a model")
    options = parser.parse_args()
    vars(options).update(MODELS.get(options.model, {}))
    options.kv_heads = options.kv_heads or options.heads
    return options


def build_step(options):
    """The model, and a function that makes one training step on a random batch."""
    config = Config(options.layers, options.d_model, options.heads, options.kv_heads, options.d_ff,
                    options.vocab_size)
    attention = functools.partial(F.scaled_dot_product_attention, is_causal=True,
                                  enable_gqa=config.kv_heads != config.heads)
    model = Llama(config, attention).to(options.device, TYPES[options.dtype])
    loss_function = micro_batch_loss
    if options.compile:
        loss_function = torch.compile(loss_function, dynamic=False)
        for layer in model.model.layers:
            layer.compile(dynamic=False)
    optimizer = adamw(model, lr=1e-3, weight_decay=0.1, betas=(0.9, 0.95), fused=True)
    shape = (options.micro_batch_size, options.seq_len)
    tokens, targets = torch.randint(options.vocab_size, (2, *shape), device=options.device)
    positions = torch.arange(options.seq_len, device=options.device)

    def loss_of():
        with torch.autocast(options.device, torch.bfloat16, enabled=options.dtype == "bf16"):
            return loss_function(model(tokens, positions), targets, targets.numel())

    flash = options.device == "cuda" and options.dtype == "bf16"

    def step():
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if flash else contextlib.nullcontext():
            loss = loss_of()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if options.device == "cuda":
            torch.cuda.synchronize()

    return model, step


def measure(options):
    torch.manual_seed(1)
    model, step = build_step(options)
    seconds = []
    for _ in range(WARM_UP_STEPS + options.steps):
        begin = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - begin)
    median = statistics.median(seconds[WARM_UP_STEPS:])
    tokens = options.micro_batch_size * options.seq_len
    counted = sum(p.numel() for p in model.parameters()) - model.model.embed_tokens.weight.numel()
    flops = tokens * (6 * counted + 12 * options.layers * options.d_model * options.seq_len)
    compiled = " compiled" if options.compile else ""
    print(f"PyTorch {torch.__version__} {options.device} {options.dtype}{compiled}, "
          f"{torch.get_num_threads()} threads, micro-batches of {options.micro_batch_size} x {options.seq_len}: "
          f"{median * 1e3:.2f} ms a step, {tokens / median:.0f} tokens/s, "
          f"{flops / median / 1e12:.4f} TFLOP/s")


def main():
    options = read_options()
    if options.threads:
        torch.set_num_threads(options.threads)
    while True:
        try:
            return measure(options)
        except torch.cuda.OutOfMemoryError:
            if options.micro_batch_size == 1:
                raise
        options.micro_batch_size //= 2
        torch.compiler.reset()
        gc.collect()  # a compiled layer refers to itself
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
