"""Text to tokens: make tokens TEXT=FILE VOCAB=4096. Trains a byte-level BPE, or takes an existing tokenizer,
and writes tokens.bin, tokenizer.json and tokenizer_config.json into a folder. A token has 16 bits (nanoGPT's
form) or, where the vocabulary has more than 65,536, 32 bits after llm.c's header. make text: the other way,
of what --sample prints."""

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


def must_be_file(option, path, expected):
    """A pipe could be read once only, and some devices for ever."""
    if not pathlib.Path(path).is_file():
        end(f"{option}: {path} is not valid; expected {expected}, which is a regular file")


def pieces(path):
    """The text, in pieces that end with a line."""
    must_be_file("TEXT", path, "a text in UTF-8")
    try:
        with open(path, encoding="utf-8", newline="") as file:
            while lines := file.readlines(AT_ONCE):
                yield "".join(lines)
    except (OSError, UnicodeDecodeError) as error:
        end(f"TEXT: {path} is not valid; expected a text in UTF-8 ({error})")


def trained(text, vocabulary):
    if not vocabulary.isdecimal() or not 257 <= int(vocabulary) <= 1_000_000:
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
    size = max(tokenizer.get_vocab().values(), default=-1) + 1  # some numbers may have no token
    try:
        count = write(folder, text, tokenizer, existing, wide=size > 1 << 16)
        config = pathlib.Path(existing).with_name("tokenizer_config.json") if existing else None
        if config and config.exists() and config.parent.resolve() != folder.resolve():
            shutil.copy(config, folder)
        elif not existing:
            own = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"})
            (folder / "tokenizer_config.json").write_text(own + "\n")
        (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    except OSError as error:
        end(f"TO: {to} is not valid; expected a folder that can be written ({error})")
    print(f"{folder / 'tokens.bin'}: {count:,} tokens, vocabulary {size:,}; beside it tokenizer.json")


def write(folder, text, tokenizer, existing, wide):
    """tokens.bin. Returns how many tokens it has."""
    count, part = 0, folder / "tokens.bin.part"
    with open(part, "wb") as file:
        file.write(bytes(1024 if wide else 0))
        for piece in pieces(text):
            try:
                tokens = tokenizer.encode(piece, add_special_tokens=False).ids
            except Exception as error:  # the library raises no other type
                end(f"TOKENIZER: {existing} is not valid; expected one that has tokens for {text} ({error})")
            count += len(tokens)
            array.array("I" if wide else "H", tokens).tofile(file)
        if count == 0 or wide and count > MOST:
            end(
                f"TEXT: {text} has {count} tokens; expected at least one, and at most {MOST} where they have 32 bits"
            )
        if wide:
            file.seek(0)
            array.array("i", [LLMC_32_BIT, VERSION, count]).tofile(file)
    part.rename(folder / "tokens.bin")
    return count


def loaded(path):
    must_be_file("TOKENIZER", path, "a tokenizer.json")
    try:
        tokenizer = Tokenizer.from_file(path)
    except Exception as error:
        end(f"TOKENIZER: {path} is not valid; expected a tokenizer.json ({error})")
    tokenizer.no_truncation()  # the text is whole, and nothing else
    tokenizer.no_padding()
    return tokenizer


if sys.argv[1] == "--text":  # of the numbers in the last line, as --sample prints them
    words = (sys.stdin.buffer.read().decode(errors="replace").splitlines() or [""])[-1].split()
    if not words or not all(word.isdecimal() for word in words):
        end("text: the last line has no tokens; expected what --sample prints")
    tokenizer, tokens = loaded(sys.argv[2]), [int(word) for word in words]
    if unknown := set(tokens) - set(tokenizer.get_vocab().values()):
        end(f"text: {min(unknown)} is no token of {sys.argv[2]}; expected those of the run's tokenizer")
    print(tokenizer.decode(tokens))
else:
    main(*sys.argv[1:])
