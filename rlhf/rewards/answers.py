"""The final answer of a text, and whether two answers are equal. Uses only text and numbers.

docs/evaluation.md has the rule, tests/rewards/test_answers.py the table of equal and different answers.
"""

from __future__ import annotations

import re
import unicodedata
from decimal import Decimal
from fractions import Fraction
from typing import NamedTuple

# --- numbers ---------------------------------------------------------------------------------------------------------

# A number in a text of `normalized`: sign, dollar, fraction or decimal number, exponent. A hyphen directly after a
# word, a closing bracket or a percent sign is not a sign: in "3-4" the last number is 4. Brackets may stand between a
# sign and its number: -(1/2). A comma separates thousands in proper groups (1,000), otherwise decimals (0,5), and
# numbers if there are several (1,2,3).
NUMBER = re.compile(
    r"""(?:(?<![\w)\]}%])(?P<sign>[+-])(?:(?<![|!°][+-])(?:\\left)?\(+(?P<inner>[+-]?)\(*)?)?\$?
    (?:(?:(?<![\w.,/])(?P<whole>\d+)\ (?=\d\d?/))?(?<![\w.,/])(?P<top>\d+)/(?P<bottom>0*[1-9]\d*)(?![\w/]|[.,]\d)
      |(?P<english>[1-9]\d{0,2}(?:,\d{3})+(?!\d)(?:\.\d*)?)
      |(?P<european>(?:[1-9]\d{0,2}(?:(?:\.\d{3})+,\d+|(?:\.\d{3}){2,})|(?<!\d)(?<!\d,)\d+,\d+)(?![.,]?\d))
      |(?P<plain>\d+(?:\.\d*)?|(?<![\w.])\.\d+))
    (?P<exponent>e[+-]?\d{1,3}(?!\d))?""",
    re.VERBOSE,
)
# an end that may become another number if the text continues: "12", "12,", "1/2", "12e", "10{,", "\frac{1}{2"
UNFINISHED = re.compile(
    r"(?<![\d.,/])(?:[\d.,/]|(?<=[\d.])e[+-]?|(?<=[\d,])(?:\\[,!]?|\{,?\}?|[\u00a0\u2009\u202f])|\\frac\{[^{}]*+\}?+(?:\{[^{}]*+)?+)+\Z"
)
GROUP_MARK = re.compile(r"(?<=\d)(?:\{,\}|,?\\!|\\,|[\u00a0\u2009\u202f])(?=\d{3}(?!\d))")  # LaTeX, thin spaces
NUMERIC_FRACTION = re.compile(
    r"(?:(?<![\w.,/^}])(?P<whole>\d{1,20}) ?)?"
    r"\\frac(?:\{(?P<top>-?\d{1,20})\}\{(?P<bottom>-?\d{1,20})\}|(?P<two>\d\d))"
)
SIMILAR = str.maketrans(
    {
        **dict.fromkeys("\u2010\u2011\u2012\u2013\u2212", "-"),
        **dict.fromkeys("\u2044\u2215", "/"),
        **dict.fromkeys("\u00d7\u00b7\u22c5", "*"),
        **dict.fromkeys("\u2018\u2019", "'"),
        **dict.fromkeys("\u201c\u201d", '"'),
        **{"\u066a": "%", "\u066b": ".", "\u066c": ","},
    }
)


def number_at_end(text: str, ended: bool = True) -> Fraction | None:
    """Return the last number in a text, None if it has none.

    A number may have a sign, a dollar sign, thousands separators, decimals and an exponent, or be a fraction (1/2). A
    hyphen directly after a letter, a digit, a percent sign or a closing bracket is not a sign.

    If the text was cut off (`ended` is False), an end that may become another number is ignored: "12", "12," "12."
    "1,2" "1/2" and "12e". A number with anything else after it, such as a space, a percent sign or a letter, is
    complete.
    """
    text = normalized(text)
    found = list(NUMBER.finditer(text if ended else UNFINISHED.sub("", text)))
    return _value(found[-1]) if found else None


def _value(found: re.Match[str]) -> Fraction:
    """Return the number that NUMBER matched."""
    part = found.groupdict(default="")
    if part["top"]:
        value = Fraction(Decimal(part["whole"] or 0)) + Fraction(Decimal(part["top"])) / Fraction(
            Decimal(part["bottom"])
        )
    else:
        european = part["european"].replace(".", "").replace(",", ".")
        value = Fraction(Decimal(part["english"].replace(",", "") or european or part["plain"]))
    value *= Fraction(10) ** int(part["exponent"][1:] or 0)
    negative = (part["sign"] == "-") != (part["inner"] == "-")
    return -value if negative else value


def normalized(text: str) -> str:
    """Return a text in lower case, with keyboard characters for similar ones, and its numbers without LaTeX.

    Digits of other scripts, full-width letters and ligatures become plain ones, and invisible characters disappear.
    Superscripts and subscripts stay: 5 to the power of 2 is not 52.
    """
    text = "".join(map(_plain_character, unicodedata.normalize("NFC", text))).translate(SIMILAR)
    text = re.sub(r"\\[dt]frac", r"\\frac", unicodedata.normalize("NFC", text.casefold()))
    return NUMERIC_FRACTION.sub(_one_fraction, GROUP_MARK.sub(",", text))


def _plain_character(character: str) -> str:
    if character.isascii():
        return character
    category = unicodedata.category(character)
    decomposition = unicodedata.decomposition(character)
    if category in ("Cf", "Nd"):
        return "" if category == "Cf" else str(unicodedata.decimal(character))
    if decomposition.startswith("<fraction>"):
        return "\\frac{{{}}}{{{}}}".format(*unicodedata.normalize("NFKC", character).split("\u2044"))
    kept = character.isspace() or decomposition.startswith(("<super>", "<sub>"))
    return character if kept else unicodedata.normalize("NFKC", character)


def _one_fraction(found: re.Match[str]) -> str:
    """Return a LaTeX fraction or mixed number as one fraction, such as (3/2)."""
    top, bottom = map(int, (found["top"], found["bottom"]) if found["top"] else found["two"])
    top += int(found["whole"] or 0) * bottom
    return f"({-top if bottom < 0 else top}/{abs(bottom)})"


# --- the final answer of a text --------------------------------------------------------------------------------------

BOXED = re.compile(r"\\boxed\s*\{")
BRACE = re.compile(r"\\.|[{}]", re.DOTALL)


def final_answer(text: str, ended: bool = True) -> str | None:
    """Return the content of the last `\\boxed{}` of a text, else the line after its last `####`, else the whole text.

    A line after `####` that is not a number and has more text below may be a Markdown heading: it counts only if
    there is no other one. If the text was cut off (`ended` is False), an answer that may continue does not count: a
    line without its end, and the whole text. None: there is no answer.
    """
    boxed = _last_boxed(text)
    if boxed is not None:
        return boxed
    marked = [part.strip() for part in (text if ended else text[: text.rfind("\n") + 1]).split("####")[1:]]
    lines = [(part.splitlines()[0], "\n" in part or i + 1 < len(marked)) for i, part in enumerate(marked) if part]
    if lines:
        answers = [line for line, more in lines if not more or parse_answer(line).number is not None]
        return (answers or [line for line, _ in lines])[-1]
    return text if ended else None


def _last_boxed(text: str) -> str | None:
    """Return what the last `\\boxed{...}` contains; None if there is none, or if it has no end."""
    starts = [found.end() for found in BOXED.finditer(text)]
    depth = 1
    for brace in BRACE.finditer(text, starts[-1]) if starts else ():
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return text[starts[-1] : brace.start()]
    return None


# --- equal answers ---------------------------------------------------------------------------------------------------

Unit = tuple[tuple[frozenset[str], str], ...]  # of "km/h^2": the kinds that each name may mean, and its power
# One kind per entry. A name may mean several kinds: "pound" is a mass, and money.
KINDS = (
    *(
        "mm millimeter",
        "cm centimeter",
        "m meter",
        "km kilometer",
        "in inch inches",
        "ft foot feet",
        "yd yard",
        "mi mile",
    ),
    *("mg milligram", "g gram", "kg kilogram", "t tonne", "ton", "oz ounce", "lb pound", "ml milliliter"),
    *("l liter", "gal gallon", "ms millisecond", "s sec second", "min minute", "h hr hour", "day", "week", "month"),
    *("yr year", "$ us$ usd dollar", "€ eur euro", "£ gbp pound", "¥ jpy yen", "₹ inr rupee", "¢ cent", "% percent"),
    *("unit", "° deg degree", "°c celsius", "°f fahrenheit"),
)
SHORT_UNITS = {"mph": "mi/h", "kmh": "km/h", "kph": "km/h"}
MARKS = [  # what stands around an answer, or is LaTeX for something else -> what is left
    (re.compile(r"\A#{1,6} +"), ""),
    (re.compile(r"(?<![\w*])\*\*(?=[^\s*])([^*]+)(?<=\S)\*\*(?![\w*])"), r"\1"),
    (re.compile(r"\A(\*{1,3}|`+|\"|')(?=\S)((?:(?!\1).)+)(?<=\S)\1\Z"), r"\2"),
    (re.compile(r"\A(__?)([-+$]?[\d.,]+)\1\Z"), r"\2"),
    (re.compile(r"(?<![\w\\$])(\$\$?)((?:[^$\\]|\\.)+)\1(?![\w$])"), r"\2"),
    (re.compile(r"\\[()\[\]!]|\\(?:left|right|displaystyle)(?![a-z])"), ""),
    (re.compile(r"\\[,;: ]|\\q?quad(?![a-z])"), " "),
    (re.compile(r"\\(?:text(?:bf|it|rm)?|math(?:bf|rm)|mbox)\s*\{([^{}]*)\}"), r" \1 "),
    (re.compile(r"\\(?:times|cdot)(?![a-z])"), "*"),
    (re.compile(r"\^\{?\\circ\}?"), "°"),
    (re.compile(r"([\^_])\{([-+]?\w+)\}(?!\w)"), r"\1\2"),
]
RAISED = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻]+")
LOWERED = re.compile("[₀₁₂₃₄₅₆₇₈₉]+")
OPTIONAL_SPACE = re.compile(
    r" (?=[-+*/^=<>(){}\[\],;:|°%\\])|(?<=[-+*/^=<>(){}\[\],;:|°%\\]) |(?<=\d) (?=[a-z])|(?<=[a-z]) (?=\d)"
)
WITH_UNIT = re.compile(
    r"""(?P<sign>[-+]?)\ ?(?P<front>us\$|usd|eur|gbp|[$€£¥₹]|)\ ?(?P<inner>[-+]?)
    (?:(?P<fraction>(?:\d+\ (?=\d\d?/))?\d+/\d+)
      |(?:(?P<factor>[\d.,]+)\ ?[x*]\ ?)?10\^(?P<power>[-+]?\d{1,3})
      |(?P<groups>[1-9]\d{0,2}(?P<between>[ '])\d{3}(?:(?P=between)\d{3})*(?:[.,]\d+)?)
      |(?P<decimal>[\d.,]+(?:e[-+]?\d{1,3})?))
    (?P<space>\ ?)(?P<unit>.*)""",
    re.VERBOSE,
)


class Answer(NamedTuple):
    """An answer without its marks, with its number and unit if it is a number. `text` is None for a number with
    thousands separators: 1,234 is not the list 1, 234."""

    text: str | None
    number: Fraction | None = None
    unit: Unit = ()


def same_answer(one: Answer, other: Answer) -> bool:
    """True if two answers are the same number or the same text. Units must be equal if both have one."""
    same = one.number is not None and one.number == other.number and _fit(one.unit, other.unit)
    return same or (one.text is not None and one.text == other.text)


def _fit(one: Unit, other: Unit) -> bool:
    """True if two units may be equal, or one of them is missing."""
    pairs = zip(one, other, strict=False)
    return not one or not other or (len(one) == len(other) and all(a & b and p == q for (a, p), (b, q) in pairs))


def parse_answer(text: str) -> Answer:
    """Return a final answer without Markdown, LaTeX and one period at its end, and its number if it is one."""
    plain = " ".join(normalized(text).split())
    bare = RAISED.sub(lambda m: "^" + _digits(m[0]), LOWERED.sub(lambda m: "_" + _digits(m[0]), plain))
    bare = _without_marks(_without_marks(bare).removesuffix("."))
    if not bare:  # nothing but marks: "." is not an empty answer
        return Answer(plain)
    short = OPTIONAL_SPACE.sub("", bare)
    plain_number = re.sub(r" ?\(([-+]?\d+/\d+)\)", r" \1", bare)
    plain_number = re.sub(r"\A([-+] ?)\( ?([^()]+)\)\Z", r"\1\2", plain_number)  # -(5)
    found = WITH_UNIT.fullmatch(plain_number.strip())
    number, unit = (_number(found), _unit(found)) if found else (None, None)
    if number is None or unit is None:
        return Answer(short)
    return Answer(None if re.search(r",\d{3}", short) else short, number, unit)


def _without_marks(text: str) -> str:
    before = None
    while before != text:
        before = text
        for mark, left in MARKS:
            text = " ".join(mark.sub(left, text).split())
    return re.sub(r"\\([$%#&_{}])", r"\1", text)


def _digits(characters: str) -> str:
    """Return raised or lowered digits as plain ones."""
    return unicodedata.normalize("NFKC", characters).translate(SIMILAR)


def _number(found: re.Match[str]) -> Fraction | None:
    """Return the number that WITH_UNIT matched; None if its separators are not those of one number."""
    part = found.groupdict(default="")
    grouped = part["groups"].replace(part["between"] or " ", "")
    value = NUMBER.fullmatch(part["fraction"] or part["decimal"] or grouped or part["factor"] or "1")
    if value is None or (part["sign"] and part["inner"]):
        return None
    number = _value(value) * Fraction(10) ** int(part["power"] or 0)
    return -number if "-" in (part["sign"], part["inner"]) else number


def _unit(found: re.Match[str]) -> Unit | None:
    """Return the unit that WITH_UNIT matched, () without one; None if it is not known.

    A unit of one letter needs a space before it: 5m may be a product.
    """
    text = re.sub(r"\b(sq|cu)(?:uare|bic)? (\w+)", lambda m: f"{m[2]}^{2 if m[1] == 'sq' else 3}", found["unit"])
    text = re.sub(r" ?(?:/|\bper\b) ?", "/", found["front"] + SHORT_UNITS.get(text, text)).replace(" ^", "^")
    parts = [part.partition("^") for part in text.split("/")] if text else []
    kinds = [UNITS.get(_singular(name), frozenset()) for name, _, _ in parts]
    joined = parts and len(parts[0][0]) == 1 and parts[0][0].isalpha() and not found["space"]
    if joined or not all(kinds) or any(power not in ("", "2", "3") for _, _, power in parts):
        return None
    return tuple((kind, power) for kind, (_, _, power) in zip(kinds, parts, strict=True))


def _singular(name: str) -> str:
    name = name.replace("metre", "meter").replace("litre", "liter")
    return name.removesuffix("s") if len(name) > 2 else name


UNITS = {_singular(name): frozenset(k for k in KINDS if name in k.split()) for kind in KINDS for name in kind.split()}
