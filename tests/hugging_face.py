"""Against Hugging Face's transformers: its models are read by our programs, which must have its logits, loss
and gradients; and it reads what our programs have saved. python hugging_face.py BUILDS; the last line is "N
passed, N failed". BUILDS has the folders cpu-fp32 and cpu-fp64."""

import contextlib
import json
import math
import os
import pathlib
import subprocess
import sys
import tempfile

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

SEQUENCE = 24
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# Heads, key and value heads, their size, tied, files, rope scaling, type of the file. With heads of 64 some
# frequencies lie between those that Llama 3's scaling leaves and those that it divides; with heads of 8 none
# does.
CASES = [
    (4, 4, 8, False, "10GB", None, torch.float32),
    (4, 2, 8, False, "20KB", None, torch.float32),
    (4, 1, 8, True, "10GB", None, torch.float32),
    (6, 3, 8, True, "20KB", LLAMA3_ROPE, torch.float32),
    (4, 2, 8, False, "10GB", LLAMA3_ROPE, torch.float64),
    (4, 2, 8, False, "10GB", None, torch.bfloat16),
    (2, 1, 8, False, "10GB", None, torch.float16),
    (2, 1, 64, False, "10GB", LLAMA3_ROPE, torch.float32),
]
TOLERANCE = {"fp32": 1e-5, "fp64": 1e-10}
logging.disable_progress_bar()
builds, passed, failed = pathlib.Path(sys.argv[1]), 0, 0


def expect(good, what):
    global passed, failed
    passed, failed = passed + bool(good), failed + (not good)
    print(("ok      " if good else "FAILED  ") + what, flush=True)


def difference(ours, theirs):
    """Relative, in the Frobenius norm."""
    ours, theirs = ours.double(), theirs.double()
    return ((ours - theirs).norm() / theirs.norm()).item()


@contextlib.contextmanager
def in_doubles():
    """Transformers computes norms, angles and probabilities in fp32 whatever the model is. Here they are
    fp64."""
    kept = torch.float32, torch.Tensor.float
    torch.float32, torch.Tensor.float = torch.float64, torch.Tensor.double
    try:
        yield
    finally:
        torch.float32, torch.Tensor.float = kept


def loss_and_logits(model, tokens):
    logits = model.lm_head(model.model(tokens[None, :-1]).last_hidden_state)[0]
    return F.cross_entropy(logits, tokens[1:]), logits


def run(precision, program, *options, ranks=1):
    command = [str(builds / f"cpu-{precision}" / program), *map(str, options)]
    if ranks > 1:
        command = ["mpirun", "-n", str(ranks), *command]
    environment = {**os.environ, "UCX_LOG_LEVEL": "error", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, env=environment)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}: status {done.returncode}\n{done.stderr.decode()}")
    return done.stdout


def write_tokens(path, tokens):
    """One window of tokens, so that every sequence of a batch is this one."""
    path.write_bytes(b"".join(t.to_bytes(2, "little") for t in tokens.tolist()))


def ours(folder, precision, model, tokens):
    """(loss, logits, gradients) of one sequence. The gradient is what a step of SGD with rate 1 subtracts."""
    data, log, save = folder / "tokens.bin", folder / "log", folder / f"one-step-{precision}"
    write_tokens(data, tokens)
    batch = [
        "--load-weights",
        model,
        "--data",
        data,
        "--seq-len",
        SEQUENCE,
        "--micro-batch-size",
        1,
        "--global-batch-size",
        1,
    ]
    logits = torch.frombuffer(bytearray(run(precision, "logits", *batch)), dtype=torch.float64).reshape(
        SEQUENCE, -1
    )
    run(
        precision,
        "01_single_gpu",
        *batch,
        "--optimizer",
        "sgd",
        "--lr",
        1,
        "--warmup-steps",
        0,
        "--weight-decay",
        0,
        "--grad-clip",
        0,
        "--steps",
        1,
        "--save",
        save,
        "--log-json",
        log,
    )
    loss = next(line["loss"] for line in map(json.loads, log.read_text().splitlines()) if "step" in line)
    return loss, logits, load_file(save / "step_000001/model.safetensors")


def check_case(number, heads, kv_heads, size, tied, files, rope, dtype):
    torch.manual_seed(number)
    config = LlamaConfig(
        hidden_size=heads * size,
        intermediate_size=56,
        num_hidden_layers=3,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=98,
        rope_theta=1e4 * (number + 1),
        rope_scaling=rope,
        tie_word_embeddings=tied,
        rms_norm_eps=1e-5,
        initializer_range=(heads * size) ** -0.5,
        torch_dtype=dtype,
    )
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        LlamaForCausalLM(config).to(dtype).save_pretrained(folder / "model", max_shard_size=files)
        tokens = torch.randint(0, 98, (SEQUENCE + 1,))
        for precision, tolerance in TOLERANCE.items():
            wide = precision == "fp64"
            model = LlamaForCausalLM.from_pretrained(
                folder / "model",
                attn_implementation="eager",
                torch_dtype=torch.float64 if wide else torch.float32,
            )
            with in_doubles() if wide else contextlib.nullcontext():
                if wide:  # its angles, too
                    weights, model = model.state_dict(), LlamaForCausalLM(model.config).double()
                    model.load_state_dict(weights)
                loss, logits = loss_and_logits(model, tokens)
                loss.backward()
            our_loss, our_logits, after = ours(folder, precision, folder / "model", tokens)
            where = f"{precision}, {heads} heads of {size}, {kv_heads} kv, {'tied' if tied else 'untied'}, {files}, {dtype}, {'llama3' if rope else 'plain'} rope"
            apart = max(abs(our_loss - loss.item()) / loss.item(), difference(our_logits, logits))
            expect(apart < tolerance, f"loss and logits, {where}: {apart:.1e}")
            apart = 0
            for parameter_name, parameter in model.named_parameters():
                gradient = parameter.detach() - after[parameter_name]
                if tied and parameter_name == "model.embed_tokens.weight":  # ours are two matrices
                    gradient += parameter.detach() - after["lm_head.weight"]
                apart = max(apart, difference(gradient, parameter.grad))
            expect(apart < tolerance, f"gradients, {where}: {apart:.1e}")


def check_saved(ranks, program, *options):
    """Transformers opens what our program has trained, and has its loss."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        tokens = torch.randint(0, 98, (SEQUENCE + 1,))
        write_tokens(folder / "tokens.bin", tokens)
        save = folder / "saved"
        run(
            "fp32",
            program,
            "--layers",
            4,
            "--d-model",
            32,
            "--heads",
            4,
            "--kv-heads",
            2,
            "--vocab-size",
            98,
            "--seq-len",
            SEQUENCE,
            "--data",
            folder / "tokens.bin",
            "--micro-batch-size",
            2,
            "--global-batch-size",
            8,
            "--steps",
            20,
            "--lr",
            0.01,
            "--save",
            save,
            *options,
            ranks=ranks,
        )
        model = LlamaForCausalLM.from_pretrained(save / "step_000020")
        with torch.no_grad():
            loss, logits = loss_and_logits(model, tokens)
        our_loss, our_logits, _ = ours(folder, "fp32", save / "step_000020", tokens)
        apart = max(abs(our_loss - loss.item()) / loss.item(), difference(our_logits, logits))
        expect(
            apart < TOLERANCE["fp32"],
            f"{program} on {ranks} ranks: transformers has our loss, {our_loss:.4f}: {apart:.1e}",
        )
        expect(our_loss < 0.5 * math.log(98), f"{program} on {ranks} ranks: and the model has learned")
        new = model.generate(tokens[None, :4], max_new_tokens=SEQUENCE - 4, do_sample=False, pad_token_id=0)
        expect(
            (new[0] == tokens[:SEQUENCE]).float().mean() > 0.9,
            f"{program} on {ranks} ranks: generate writes the text",
        )


for number, case in enumerate(CASES):
    check_case(number, *case)
check_saved(1, "01_single_gpu")
check_saved(4, "07_combined_5d", "--tp", 2, "--pp", 2)
check_saved(2, "03_zero", "--zero-stage", 3)
print(f"{passed} passed, {failed} failed")
sys.exit(failed > 0)
