"""How fast PyTorch trains the same model: the yardstick for `make bench`. Needs PyTorch.

    python3 tests/pytorch_speed.py --layers 8 --d-model 512 --heads 8 --d-ff 1536 --seq-len 256 --threads 2
    python3 tests/pytorch_speed.py --model smollm-1.7b --seq-len 2048 --device cuda --dtype bf16 --compile

With several models one process measures all, and PyTorch starts once. A step is --micro-batches times forward and backward, then clipping and AdamW (PyTorch's fused one). Attention
is PyTorch's fused one: on a GPU in bf16 FlashAttention-2 and then cuDNN's, a line each; what PyTorch is
compared with is the faster. --compile compiles a layer, once for all of them, and the loss. A micro-batch
that doesn't fit into memory is halved. Printed are medians over the steps after the warm-up. FLOPs are (6 N +
12 L h s) a token: N the parameters without the embedding table, L layers, h the model's width, s the sequence
length. So attention is not halved for causality, as in torchtitan and in this project. llm.c halves it (6 L h
s): the second number counts so."""

import argparse
import contextlib
import functools
import gc
import itertools
import statistics
import sys
import time

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from pytorch_reference import Config, Llama, adamw, micro_batch_loss

WARM_UP_STEPS = 5
PEAKS = {"H100": 989.4e12, "H200": 989.4e12, "A100": 312e12}  # FLOP/s of dense products in bf16
TYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.float32}  # of the weights
# As in common/options/options.cc.
MODELS = {
    "smollm-135m": dict(layers=30, d_model=576, heads=9, kv_heads=3, d_ff=1536, vocab_size=49152),
    "smollm-1.7b": dict(layers=24, d_model=2048, heads=32, kv_heads=32, d_ff=8192, vocab_size=49152),
    "llama-3.2-1b": dict(layers=16, d_model=2048, heads=32, kv_heads=8, d_ff=8192, vocab_size=128256),
}


def read_options():
    parser = argparse.ArgumentParser()
    sizes = dict(
        layers=8,
        d_model=64,
        heads=8,
        kv_heads=None,
        d_ff=192,
        vocab_size=256,
        seq_len=128,
        micro_batch_size=4,
        steps=50,
        threads=None,
    )
    for name, default in sizes.items():
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=default)
    parser.add_argument(
        "--dtype", choices=TYPES, default="fp32", help="bf16: autocast, the weights stay fp32"
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument(
        "--micro-batches", type=int, nargs="+", default=[1], help="of a step: each is measured"
    )
    parser.add_argument(
        "--model",
        choices=MODELS,
        nargs="+",
        default=[None],
        help="the sizes of presets, instead of the six of a model",
    )
    return parser.parse_args()


def build_step(options):
    """The model, and a function that makes one training step on a random batch."""
    config = Config(
        options.layers, options.d_model, options.heads, options.kv_heads, options.d_ff, options.vocab_size
    )
    attention = functools.partial(
        F.scaled_dot_product_attention, is_causal=True, enable_gqa=config.kv_heads != config.heads
    )
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

    def step(micro_batches):
        for _ in range(micro_batches):
            loss_of().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if options.device == "cuda":
            torch.cuda.synchronize()

    return model, step


def measure(options, attention):
    torch.manual_seed(1)
    model, step = build_step(options)
    counted = sum(p.numel() for p in model.parameters()) - model.model.embed_tokens.weight.numel()
    of_attention = (
        6 * options.layers * options.d_model * options.seq_len
    )  # FLOPs a token, halved for causality
    for micro_batches in options.micro_batches:
        seconds = []
        warm_up = WARM_UP_STEPS if micro_batches == options.micro_batches[0] else 1  # all is compiled
        for _ in range(warm_up + options.steps):
            begin = time.perf_counter()
            step(micro_batches)
            seconds.append(time.perf_counter() - begin)
        median = statistics.median(seconds[warm_up:])
        tokens = micro_batches * options.micro_batch_size * options.seq_len
        flops = [tokens * (6 * counted + n * of_attention) / median for n in (2, 1)]
        device = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
        peak = next(
            (peak for name, peak in PEAKS.items() if name in device and options.dtype == "bf16"), None
        )
        mfu = ", MFU {:.1f} % ({:.1f} % halved)".format(*(100 * f / peak for f in flops)) if peak else ""
        compiled = " compiled" if options.compile else ""
        print(
            f"PyTorch {torch.__version__} {device} {options.name or ''} {options.dtype}{compiled}, attention {attention}, "
            f"{torch.get_num_threads()} threads, {micro_batches} micro-batches of {options.micro_batch_size} x "
            f"{options.seq_len}: {median * 1e3:.2f} ms a step, {tokens / median:.0f} tokens/s, "
            f"{flops[0] / 1e12:.4f} TFLOP/s ({flops[1] / 1e12:.4f} halved){mfu}",
            flush=True,
        )


def release():
    torch.compiler.reset()  # the attention that was chosen is compiled in
    gc.collect()  # a compiled layer refers to itself
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def main():
    options = read_options()
    if options.threads:
        torch.set_num_threads(options.threads)
    kinds = {"of PyTorch's choice": contextlib.nullcontext}
    if options.device == "cuda" and options.dtype == "bf16":
        kinds = {
            name: functools.partial(sdpa_kernel, backend)
            for name, backend in (
                ("FlashAttention", SDPBackend.FLASH_ATTENTION),
                ("cuDNN", SDPBackend.CUDNN_ATTENTION),
            )
        }
    measured = 0
    given = dict(vars(options))
    for model, (name, choose) in itertools.product(options.model, kinds.items()):
        vars(options).update(given | MODELS.get(model, {}), name=model)
        options.kv_heads = options.kv_heads or options.heads
        for size in [options.micro_batch_size // 2**n for n in range(options.micro_batch_size.bit_length())]:
            options.micro_batch_size = size
            try:
                with choose():
                    measure(options, name)
                measured += 1
                break
            except torch.cuda.OutOfMemoryError:
                print(f"attention {name}: micro-batches of {size} do not fit")
            except RuntimeError as error:  # a kind that is not there
                print(f"attention {name}: not measured: {str(error).splitlines()[0]}")
                break
            finally:
                release()
    sys.exit(measured == 0)


if __name__ == "__main__":
    main()
