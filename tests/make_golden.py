"""Writes tests/golden/{mha,gqa}.safetensors, against which the tests compare the transformer, in float64.

    python3 tests/make_golden.py            needs PyTorch and NumPy, no GPU
    python3 tests/make_golden.py --check    writes nothing; verifies the files that are there: the gradients
                                            against finite differences, the optimizer against its formulas

The metadata name the version of PyTorch; another one may write files that differ in the last bits.
A file holds, in the format of safetensors, all sizes and settings as metadata, and the tensors
    tokens, targets                 [micro_batches, micro_batch_size, seq_len]; a target of -1 is ignored
    logits                          [micro_batches, micro_batch_size, seq_len, vocab_size], of the first step
    loss, grad_norm                 [optimizer_steps], of the global batch, before the step (and the clipping)
    lr                              [steps], the whole schedule
    weights/NAME                    before the first step
    gradients/NAME                  of the global batch at the first step, before clipping
    weights_after/NAME              after optimizer_steps steps, all on the same batch
Positions are 0, 1, ... in every sequence. Initial weights are exact in bfloat16, so that every precision
starts from the same ones."""

import argparse
import json
import math
import pathlib
import struct
import sys

import torch

from pytorch_reference import IGNORED, Config, Llama, adamw, micro_batch_loss

FOLDER = pathlib.Path(__file__).parent / "golden"

# Sizes that are no round numbers, so that a wrong stride or a mistaken size shows.
MODEL = dict(layers=2, d_model=24, heads=4, d_ff=20, vocab_size=37)
KV_HEADS = {"mha": 4, "gqa": 2}
BATCH = dict(micro_batches=2, micro_batch_size=2, seq_len=11)
TRAINING = dict(
    optimizer_steps=3,
    steps=6,
    lr=0.01,
    min_lr=0.001,
    warmup_steps=2,
    weight_decay=0.1,
    beta1=0.9,
    beta2=0.95,
    adam_eps=1e-8,
    grad_clip=0.5,
)


def learning_rate(step, lr, min_lr, warmup_steps, steps):
    """Linear warm-up to lr, then half a cosine down towards min_lr."""
    if step < warmup_steps:
        return lr * (step + 1) / warmup_steps
    progress = (step - warmup_steps) / (steps - warmup_steps)
    return min_lr + (lr - min_lr) * 0.5 * (1 + math.cos(math.pi * progress))


def schedule():
    t = TRAINING
    return [learning_rate(s, t["lr"], t["min_lr"], t["warmup_steps"], t["steps"]) for s in range(t["steps"])]


def random_model(config):
    """Weights large enough that attention is far from uniform, and norms that are not one."""
    model = Llama(config).double()
    with torch.no_grad():
        for p in model.parameters():
            noise = torch.randn(p.shape, dtype=torch.float64)
            p.copy_((1 + 0.2 * noise if p.ndim == 1 else noise / math.sqrt(p.shape[1])).bfloat16())
        model.model.embed_tokens.weight.mul_(4)
    return model


def random_batch():
    shape = tuple(BATCH.values())
    text = torch.randint(MODEL["vocab_size"], (*shape[:2], shape[2] + 1))
    tokens, targets = text[..., :-1].contiguous(), text[..., 1:].contiguous()
    # A different number in each micro-batch: a mean over each of them would differ from that over all.
    targets[0, 0, 3] = targets[0, 1, -1] = IGNORED
    targets[1, 0, :5] = targets[1, 1, 7] = IGNORED
    return tokens, targets


def accumulate(model, tokens, targets):
    """Leaves the global batch's gradient in .grad. Returns the logits of its micro-batches, and its loss."""
    model.zero_grad()
    positions = torch.arange(tokens.shape[-1])
    target_tokens = (targets != IGNORED).sum()
    all_logits, loss = [], 0.0
    for i in range(len(tokens)):
        logits = model(tokens[i], positions)
        share = micro_batch_loss(logits, targets[i], target_tokens)
        share.backward()
        loss += share.item()
        all_logits.append(logits.detach())
    return torch.stack(all_logits), loss


def copies(model, prefix, of=lambda p: p):
    return {f"{prefix}/{name}": of(p).detach().clone() for name, p in model.named_parameters()}


def train(model, tokens, targets):
    """Everything that a file holds."""
    t = TRAINING
    optimizer = adamw(model, t["lr"], t["weight_decay"], betas=(t["beta1"], t["beta2"]), eps=t["adam_eps"])
    result = {"tokens": tokens, "targets": targets, **copies(model, "weights")}
    losses, norms = [], []
    for step in range(t["optimizer_steps"]):
        logits, loss = accumulate(model, tokens, targets)
        if step == 0:
            result |= {"logits": logits, **copies(model, "gradients", lambda p: p.grad)}
        losses.append(loss)
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), t["grad_clip"]).item())
        for group in optimizer.param_groups:
            group["lr"] = schedule()[step]
        optimizer.step()
    lists = {"loss": losses, "grad_norm": norms, "lr": schedule()}
    result |= {name: torch.tensor(values, dtype=torch.float64) for name, values in lists.items()}
    return result | copies(model, "weights_after")


TYPES = {"F64": torch.float64, "I64": torch.int64}


def write_safetensors(path, tensors, metadata):
    """Format: length of the header (u64, little-endian), the header (JSON), the data."""
    names = {dtype: name for name, dtype in TYPES.items()}
    header, data = {"__metadata__": {key: str(value) for key, value in metadata.items()}}, b""
    for name, tensor in tensors.items():
        raw = tensor.contiguous().numpy().tobytes()
        header[name] = {
            "dtype": names[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the data stay aligned
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def read_safetensors(path):
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header, data = json.loads(content[8 : 8 + length]), bytearray(content[8 + length :])
    metadata = header.pop("__metadata__")
    return {
        name: torch.frombuffer(data[begin:end], dtype=TYPES[t["dtype"]]).view(t["shape"])
        for name, t in header.items()
        for begin, end in [t["data_offsets"]]
    }, metadata


def relative_error(a, b):
    return (torch.linalg.vector_norm(a - b) / torch.linalg.vector_norm(b)).item()


def finite_difference_error(model, golden):
    """The largest relative error of <gradient, direction>, for one random direction of each parameter."""

    def loss():
        return accumulate(model, golden["tokens"], golden["targets"])[1]

    worst, h = 0.0, 1e-3
    for name, p in model.named_parameters():
        weights, direction = p.data, torch.randn(p.shape, dtype=torch.float64)
        at = {}
        for i in (-3, -2, -1, 1, 2, 3):
            p.data = weights + i * h * direction
            at[i] = loss()
        p.data = weights
        slope = (45 * (at[1] - at[-1]) - 9 * (at[2] - at[-2]) + (at[3] - at[-3])) / (60 * h)  # error O(h^6)
        expected = (golden[f"gradients/{name}"] * direction).sum().item()
        worst = max(worst, abs(slope - expected) / abs(expected))
    return worst


def adamw_error(model, golden):
    """The largest relative error of weights_after against clipping and AdamW written out."""
    t = TRAINING
    parameters = dict(model.named_parameters())
    m = {name: torch.zeros_like(p) for name, p in parameters.items()}
    v = {name: torch.zeros_like(p) for name, p in parameters.items()}
    for step in range(t["optimizer_steps"]):
        accumulate(model, golden["tokens"], golden["targets"])
        norm = math.sqrt(sum((p.grad**2).sum().item() for p in parameters.values()))
        clip = min(1.0, t["grad_clip"] / (norm + 1e-6))
        lr = golden["lr"][step].item()
        for name, p in parameters.items():
            g = p.grad * clip
            m[name] = t["beta1"] * m[name] + (1 - t["beta1"]) * g
            v[name] = t["beta2"] * v[name] + (1 - t["beta2"]) * g**2
            m_hat, v_hat = m[name] / (1 - t["beta1"] ** (step + 1)), v[name] / (1 - t["beta2"] ** (step + 1))
            decay = t["weight_decay"] if p.ndim == 2 else 0.0
            p.data = p.data - lr * (m_hat / (v_hat.sqrt() + t["adam_eps"]) + decay * p.data)
    return max(relative_error(p.data, golden[f"weights_after/{name}"]) for name, p in parameters.items())


def check(path, config):
    """Compares what the file holds with what follows from the weights and tokens that it holds."""
    golden, _ = read_safetensors(path)
    model = Llama(config).double()
    model.load_state_dict({name: golden[f"weights/{name}"].clone() for name, _ in model.named_parameters()})

    log_p = golden["logits"].log_softmax(dim=-1)
    counted = golden["targets"] != IGNORED
    loss = -log_p[counted].gather(1, golden["targets"][counted][:, None]).mean()
    norm = torch.cat([g.flatten() for name, g in golden.items() if name.startswith("gradients/")]).norm()
    logits, _ = accumulate(model, golden["tokens"], golden["targets"])
    errors = {
        "logits": (relative_error(logits, golden["logits"]), 1e-13),
        "loss": (relative_error(loss, golden["loss"][0]), 1e-13),
        "grad_norm": (relative_error(norm, golden["grad_norm"][0]), 1e-13),
        "gradients": (finite_difference_error(model, golden), 1e-9),
        "weights_after": (adamw_error(model, golden), 1e-12),
    }
    for what, (error, allowed) in errors.items():
        print(
            f"{path.name}: {what:13} relative error {error:.1e}, allowed {allowed:.0e}"
            + ("" if error <= allowed else "  WRONG")
        )
    return all(error <= allowed for error, allowed in errors.values())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true", help="verify the files instead of writing them")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # sums in one order
    good = True
    for name, kv_heads in KV_HEADS.items():
        path, config = FOLDER / f"{name}.safetensors", Config(**MODEL, kv_heads=kv_heads)
        torch.manual_seed(kv_heads)
        if arguments.check:
            good &= check(path, config)
            continue
        tensors = train(random_model(config), *random_batch())
        metadata = {**vars(config), **BATCH, **TRAINING, "pytorch": torch.__version__}
        write_safetensors(path, tensors, metadata)
        print(
            f"{path}: {path.stat().st_size} bytes, loss {tensors['loss'].tolist()}, "
            f"gradient norm {tensors['grad_norm'].tolist()}"
        )
    sys.exit(not good)


if __name__ == "__main__":
    main()
