"""Text to tokens: make tokens TEXT=FILE VOCAB=4096. Trains a byte-level BPE, or takes an existing tokenizer, and writes
tokens.bin, tokenizer.json and tokenizer_config.json into a folder. A token has 16 bits (nanoGPT's form) or, where the
vocabulary has more than 65,536, 32 bits after llm.c's header. make text: the other way, of what --sample prints."""

import array
import json
import pathlib
import shutil
import sys

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

LLMC_32_BIT, VERSION, MOST = 20240801, 7, 2**31 - 1
AT_ONCE = 1 << 20  # characters


def end(line):
    print(line, file=sys.stderr)
    sys.exit(2)


def pieces(path):
    """The text, in pieces that end with a line."""
    try:
        with open(path, encoding="utf-8", newline="") as file:
            while lines := file.readlines(AT_ONCE):
                yield "".join(lines)
    except (OSError, UnicodeDecodeError) as error:
        end(f"TEXT: {path} is not valid; expected a text in UTF-8 ({error})")


def trained(text, vocabulary):
    if not vocabulary.isdigit() or not 257 <= int(vocabulary) <= 1_000_000:
        end(f"VOCAB: {vocabulary} is not valid; expected a whole number from 257 to 1000000")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=int(vocabulary), initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(pieces(text), trainer)
    return tokenizer


def main(text, vocabulary, existing, to):
    folder = pathlib.Path(to)
    if not folder.is_dir():
        end(f"TO: {to} is not valid; expected a folder")
    tokenizer = loaded(existing) if existing else trained(text, vocabulary)
    size = tokenizer.get_vocab_size()
    wide, count = size > 1 << 16, 0
    part = folder / "tokens.bin.part"
    with open(part, "wb") as file:
        file.write(bytes(1024 if wide else 0))
        for piece in pieces(text):
            tokens = array.array("I" if wide else "H", tokenizer.encode(piece, add_special_tokens=False).ids)
            count += len(tokens)
            tokens.tofile(file)
        if wide:
            if count > MOST:
                part.unlink()
                end(f"TEXT: {text} has {count} tokens; expected at most {MOST} where they have 32 bits")
            file.seek(0)
            array.array("i", [LLMC_32_BIT, VERSION, count]).tofile(file)
    part.rename(folder / "tokens.bin")
    config = pathlib.Path(existing).with_name("tokenizer_config.json") if existing else None
    if config and config.exists() and config.parent.resolve() != folder.resolve():
        shutil.copy(config, folder)
    elif not existing:
        (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}) + "\n")
    tokenizer.save(str(folder / "tokenizer.json"))
    print(f"{folder / 'tokens.bin'}: {count:,} tokens, vocabulary {size:,}; beside it tokenizer.json")


def loaded(path):
    try:
        return Tokenizer.from_file(path)
    except Exception as error:  # the library raises no other type
        end(f"TOKENIZER: {path} is not valid; expected a tokenizer.json ({error})")


if sys.argv[1] == "--text":  # of the numbers in the last line, as --sample prints them
    words = (sys.stdin.read().splitlines() or [""])[-1].split()
    if not words or not all(word.isdigit() for word in words):
        end("text: the last line has no tokens; expected what --sample prints")
    print(loaded(sys.argv[2]).decode([int(word) for word in words]))
else:
    main(*sys.argv[1:])
