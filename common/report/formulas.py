"""Formulas of the notes, as MathML. The notes write them as a terminal shows them: (n-1)/n · F <= 1. A block
of indented lines that are no commands is set with fractions, and so is a cell of a table; in a sentence a
formula stays on its line."""

import html
import re

LETTER = r"[A-Za-zΑ-ΡΤ-ω]"
NAME = rf"(?:d[KQVWxyz]|{LETTER})"  # of a number in a sentence: n, dx
TOKEN = re.compile(
    rf"\s*(\d[\d.,]*(?<![.,])|log1p|Σ_\w+|(?:{LETTER}{{2,}}-)?{LETTER}+(?:_\w+)?[₀-₉ᵢⱼᵀᵗ']*|<=|>=|[-+·/=<>^()|,√Σ×≤≥])"
)
WORDS = {"exp", "log", "max", "heads", "kv", "tokens"}  # that stand in formulas of single letters
COMMAND = re.compile(r"^\$ |\w+_\w+_\w+")
NO_FORMULA = re.compile(
    r"^\d[\d.,]*( s$|k|e-\d+)\b|\(\d+ s\)|tokens/s|(?<!lo)[A-Za-z]\d|\d x \d"
)  # measured; names: h100, not log1p
SYMBOLS = {"<=": "≤", ">=": "≥", "-": "−"}


def tokens_of(text):
    """None if this is no formula."""
    tokens, at, text = [], 0, text.strip()
    if NO_FORMULA.search(text):
        return None
    while at < len(text):
        match = TOKEN.match(text, at)
        if not match:
            return None
        tokens.append(match[1])
        at = match.end()
    depth = 0
    for token in tokens:
        depth += (token == "(") - (token == ")")
        if depth < 0:
            return None
    is_name = [bool(re.match(LETTER, token)) for token in tokens]
    is_word = [
        name and len(re.match(rf"{LETTER}+", token)[0]) > 1 and token not in WORDS
        for name, token in zip(is_name, tokens)
    ]
    is_prose = any(a and (b or then == "a") for a, b, then in zip(is_word, is_word[1:], tokens[1:]))
    if depth or is_prose or tokens[-1] in "+-·/=<>^,Σ√×":
        return None
    return tokens


def atom(token):
    if token[0].isdigit():
        return f"<mn>{token}</mn>"
    if not re.match(LETTER + "|Σ_", token):
        return f"<mo>{html.escape(SYMBOLS.get(token, token))}</mo>"
    name, _, index = token.partition("_")
    name = f"<mi>{name}</mi>"
    return f"<msub>{name}<mi>{index}</mi></msub>" if index else name


def spaced(items):
    """What stands beside each other is multiplied: a little space between, but not in exp(x)."""
    out = [items[0][0]] if items else []
    for before, item in zip(items, items[1:]):
        is_call = re.match(r"<mrow><mo[^>]*>\(", item[0]) and re.search("<mi>[^<]{2,}</mi>$", before[0])
        space = before[2] and item[2] and not is_call or before[0] == "<mo>,</mo>"
        out += ["<mspace width='.25em'/>" if space else "", item[0]]
    return "".join(out)


def mathml(tokens, fractions):
    """The formula of these tokens; with fractions a / b stands as one."""
    at = 0

    def operand():
        """A name, a number, or what is in brackets, with its power: (MathML, MathML without brackets)."""
        nonlocal at
        token = tokens[at]
        at += 1
        if token == "(":
            inner = row(")")
            at += 1
            mo = "<mo>" if "<mfrac>" in inner else "<mo stretchy='false'>"
            whole, bare = f"<mrow>{mo}(</mo>{inner}{mo})</mo></mrow>", f"<mrow>{inner}</mrow>"
        else:
            whole = bare = atom(token)
        if at < len(tokens) and tokens[at] == "^":
            at += 1
            power = operand()[1]
            whole = bare = f"<msup>{whole}{power}</msup>"
        return whole, bare

    def row(end):
        nonlocal at
        items = []  # (MathML, MathML without brackets, is it an operand)
        while at < len(tokens) and tokens[at] != end:
            token = tokens[at]
            if token == "/" and fractions and items and items[-1][2]:
                at += 1
                # All factors before it are above the line: the notes write a · b / c for (a b) / c.
                above = []
                while items and (items[-1][2] or items[-1][0] == "<mo>·</mo>"):
                    above.insert(0, items.pop())
                first = above[0][1] if len(above) == 1 else spaced(above)
                whole = f"<mfrac><mrow>{first}</mrow>{operand()[1]}</mfrac>"
                items.append((whole, whole, True))
            elif token == "(" or re.match(LETTER + r"|\d", token):
                items.append((*operand(), True))
            else:
                at += 1
                items.append((atom(token), atom(token), False))
        return spaced(items)

    return row(None)


def pieces(text):
    """(tokens or None, text): the text, cut where a formula may end."""
    cut, depth, begin = [], 0, 0
    for at, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0 and letter in ",;:" and text[at + 1 : at + 2] in (" ", ""):
            cut += [text[begin:at], text[at]]
            begin = at + 1
    return [(tokens_of(piece), piece) for piece in [*cut, text[begin:]] if piece.strip()]


def set_line(text):
    def set_text(piece):
        if piece.strip() in SYMBOLS:
            return atom(piece.strip())
        return f"<mtext>{html.escape(piece.strip())}{'&#160;' if piece in ',;:' else ''}</mtext>"

    return "".join(mathml(tokens, True) if tokens else set_text(piece) for tokens, piece in pieces(text))


def block(text):
    """Of an indented block the formulas; None if it has none."""
    lines = [re.split("(?<![= ])  +(?![ =<>])", line) for line in text.rstrip().split("\n") if line.strip()]
    if COMMAND.search(text) or not any(
        tokens and len(tokens) > 2 for line in lines for part in line for tokens, _ in pieces(part)
    ):
        return None
    rows = "".join(
        "<mtr>" + "".join(f"<mtd>{set_line(part)}</mtd>" for part in line) + "</mtr>" for line in lines
    )
    return f'<div class="formula" tabindex="0" role="math"><math><mtable displaystyle="true">{rows}</mtable></math></div>'


def is_plain(tokens):
    """Whether it is of single letters, so that it is no text."""
    names = [re.match(rf"d(?=[KQVWxyz])|{LETTER}+", token) for token in tokens]
    single = [name[0] for name in names if name and (len(name[0]) == 1 or name[0] in WORDS)]
    return any(len(name) == 1 for name in single) and len(single) == sum(map(bool, names))


def cell(text):
    """Of a table's cell; None if it is no formula."""
    found = pieces(text)
    plain = [tokens for tokens, _ in found if tokens and len(tokens) > 1 and is_plain(tokens)]
    if not plain or any(tokens and not is_plain(tokens) for tokens, _ in found):
        return None
    return "".join(
        (
            f"{piece[: len(piece) - len(piece.lstrip())]}<math displaystyle='true'>{mathml(tokens, True)}</math>"
            if tokens and tokens in plain
            else html.escape(piece)
        )
        for tokens, piece in found
    )


IN_SENTENCE = re.compile(
    rf" ?(?:\d[\d.,]*(?<![.,])(?:e-?\d+)?|(?:{NAME}(?:_\w+)?[₀-₉ᵢⱼᵀᵗ']*|Σ_\w|exp|log|max)(?![A-Za-z0-9])|&lt;=|&gt;=|[-+·/=()Σ×])|,(?= )"
)


def sentence(text):
    """In a sentence: names of one letter, and what operators join."""
    out, done = [], 0
    for start in re.finditer(r"(?<![\w’'/.-])[\w(]", text):
        if start.start() < done:
            continue
        end, tokens, best = start.start(), [], None
        while (found := IN_SENTENCE.match(text, end)) and (
            found[0] != "," or tokens.count("(") > tokens.count(")")
        ):
            tokens.append(html.unescape(found[0].strip()))
            end = found.end()
            if (
                text[end : end + 1] not in ("-", "'", "’")
                and tokens_of(" ".join(tokens))
                and (tokens[-1] not in "aAI" or tokens[-2:-1] in (["+"], ["-"], ["="]))
            ):
                best = list(tokens), end
        if not best or re.match(r" ?(?:[(·/+=^¹²]|&[lg]t;)", text[best[1] :]) or not is_plain(best[0]):
            continue
        tokens, end = best
        if tokens[0] in ("0", "I"):
            continue
        if (
            any(token in "+-·/=×" or token in SYMBOLS for token in tokens[1:])
            or len(tokens) > 1
            and "_" in tokens[0]
        ):
            set_ = f"<math>{mathml(tokens, False)}</math>"
        elif (
            len(tokens) == 1
            and (tokens[0][0] not in "aAI" if "_" in tokens[0] else re.match("[b-zα-ωΨℓ]", tokens[0]))
            and not re.search(r"\d $", text[: start.start()])
        ):
            set_ = f"<math>{atom(tokens[0])}</math>" if "_" in tokens[0] else f"<i>{tokens[0]}</i>"
        else:
            continue
        out += [text[done : start.start()], set_]
        done = end
    return "".join(out) + text[done:]


def page(content):
    """Sets the formulas of a page, which is HTML. Code, links, figures and headings stay as they are."""
    content = re.sub(
        r"<pre><code>(.*?)</code></pre>",
        lambda found: block(html.unescape(found[1])) or found[0],
        content,
        flags=re.DOTALL,
    )
    content = re.sub(
        r"<td([^>]*)>([^<]+)</td>",
        lambda found: f"<td{found[1]}>{cell(html.unescape(found[2])) or found[2]}</td>",
        content,
    )
    out, within = [], 0
    for part in re.split(r"(<[^>]+>)", content):
        if tag := re.match(r"<(/?)(code|pre|a|h\d|svg|math|figure|th|summary|script)\b", part):
            within += -1 if tag[1] else 1
        out.append(part if part.startswith("<") or within else sentence(part))
    return "".join(out)
