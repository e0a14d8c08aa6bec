"""Reads the commands of a shell script without running anything: variables, arrays, defaults, arithmetic, conditions.

What published training scripts are made of is understood: assignments, arrays with ``+=``, both kinds of quotes, lines
that go on, ``${NAME:-default}``, ``$((A*B))``, ``if`` over ``[[ ]]`` and ``-z``, comments, here-documents. Nothing is
executed, opened or looked up: ``$(command)``, arguments of the script and unset variables stay unresolved, and so does
a word that holds one (``is_unresolved``). Loops, functions and ``case`` are left out, and said.
"""

from __future__ import annotations

import ast
import operator
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from memo_sim.contract.errors import BadInput

OPEN = "\ue000"
"""Surrounds the name of what is unresolved, inside a word; no script has this character."""

_BLANK, _HELD = "\ue001", "\ue002"
"""Stand for a blank of what is unresolved, and for one in quotes of a default, while a value is split."""
_ALL = re.compile(r'"\$(?:@|\{(\w+)\[@\]\})"', re.ASCII)
"""All of an array, or of the script's arguments, each as it is: nothing at all where there are none."""

MOST_WORDS = 200_000
"""More are no training script; arrays that double themselves would fill memory."""
MOST_DEPTH = 40

_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\+?)=", re.ASCII)
_HEREDOC = re.compile(r"<<-?\s*(['\"]?)(\w+)\1", re.ASCII)
_DECLARING = ("export", "local", "readonly", "declare", "typeset")
_SKIPPED = {"for": "done", "while": "done", "until": "done", "case": "esac", "select": "done"}
_ENDS = (";", "\n", "&", "&&", "||", "|", ";;")


@dataclass
class Script:
    """What a script says: its commands with their words, its variables, and what was left out."""

    commands: list[list[str]] = field(default_factory=list)
    variables: dict[str, list[str]] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    undecided: list[str] = field(default_factory=list)
    """Names on which conditions depend that could not be told, in their order."""


def is_unresolved(word: str) -> bool:
    """Return whether a word holds something that only running the script would tell."""
    return OPEN in word


def shown(word: str) -> str:
    """Return a word with what is unresolved as the script has it: ``$NAME``."""
    return re.sub(f"{OPEN}([^{OPEN}]*){OPEN}", lambda match: f"${match[1]}", word)


def unresolved_in(word: str) -> list[str]:
    """Return the names of what is unresolved in a word."""
    return re.findall(f"{OPEN}([^{OPEN}]*){OPEN}", word)


def read_script(text: str, given: Mapping[str, str], *, where: str) -> Script:
    """Return the commands of a script; ``given`` has values of variables, which win over the script's own.

    Raises:
        BadInput: when a quote, an array or an expansion never ends, or the script is larger than any.
    """
    return _Reader(_without_documents(text), given, where).run()


def _without_documents(text: str) -> str:
    """Return the script without the bodies of here-documents."""
    lines, kept, end = text.replace("\r\n", "\n").split("\n"), list[str](), ""
    for line in lines:
        if end:
            end = "" if line.strip() == end else end
            continue
        match = None if line.lstrip().startswith("#") or "<<<" in line else _HEREDOC.search(line)
        end = match[2] if match else ""
        kept.append(line[: match.start()] + line[match.end() :] if match else line)
    return "\n".join(kept)


class _Reader:
    """Plays the statements that it understands; the position is that of the next token."""

    def __init__(self, text: str, given: Mapping[str, str], where: str) -> None:
        self.where, self.text = where, text
        self.given = given
        self.script = Script(variables={name: [value] for name, value in given.items()})
        self.tokens = list(self._tokens())
        self.at = 0
        self.words = 0

    def bad(self, what: str) -> BadInput:
        return BadInput(what, where=self.where, hint="give the command line itself")

    # -- tokens -------------------------------------------------------------------------------------------------------

    def _tokens(self) -> Iterator[str | tuple[str, str, list[str]]]:
        """Yield operators, raw words, and arrays as (name, "+" or "", raw elements)."""
        text, at = self.text, 0
        while at < len(text):
            char = text[at]
            if char in " \t" or text.startswith("\\\n", at):
                at += 1 + (char == "\\")
            elif char == "#" and (at == 0 or text[at - 1] in " \t\n;()"):
                at = self._end_of_line(at)
            elif char in "\n;&|":
                two = text[at : at + 2]
                operator_ = two if two in ("&&", "||", ";;") else char
                yield operator_
                at += len(operator_)
            elif char in "()":
                yield char
                at += 1
            else:
                end = self._word_end(at)
                word = text[at:end]
                match = _ASSIGNED.fullmatch(word)
                if match and text[end : end + 1] == "(":
                    elements, end = self._array(end + 1)
                    yield match[1], match[2], elements
                else:
                    yield word
                at = end

    def _end_of_line(self, at: int) -> int:
        end = self.text.find("\n", at)
        return len(self.text) if end < 0 else end

    def _array(self, at: int) -> tuple[list[str], int]:
        elements, text = list[str](), self.text
        while at < len(text):
            if text[at] in " \t\n" or text.startswith("\\\n", at):
                at += 1 + (text[at] == "\\")
            elif text[at] == "#":
                at = self._end_of_line(at)
            elif text[at] == ")":
                return elements, at + 1
            else:
                end = self._word_end(at, stops=" \t\n)")
                elements.append(text[at:end])
                at = max(end, at + 1)
        raise self.bad("an array of the script never ends")

    def _word_end(self, at: int, stops: str = " \t\n;&|()") -> int:
        text = self.text
        while at < len(text) and text[at] not in stops and not text.startswith("\\\n", at):
            at = self._past(at)
        return at

    def _past(self, at: int, depth: int = 0) -> int:  # noqa: PLR0912 - one branch per unit
        """Return the position behind one unit of a word: a quoted text, an expansion, or a character."""
        text, char = self.text, self.text[at]
        if depth > MOST_DEPTH:
            raise self.bad("the script nests deeper than any")
        if char == "\\":
            return at + 2
        if char == "'":
            return self._find("'", at + 1) + 1
        if char == "`":
            return self._find("`", at + 1) + 1
        if char == '"':
            at += 1
            while at < len(text) and text[at] != '"':
                at = self._past(at, depth + 1) if text[at] in "\\$`" else at + 1
            if at >= len(text):
                raise self.bad("a quote of the script never ends")
            return at + 1
        if char == "$" and text[at + 1 : at + 2] in ("(", "{"):
            opened, closed = text[at + 1], ")" if text[at + 1] == "(" else "}"
            at, open_ = at + 2, 1
            while at < len(text) and open_:
                if text[at] == opened:
                    open_, at = open_ + 1, at + 1
                elif text[at] == closed:
                    open_, at = open_ - 1, at + 1
                else:
                    at = self._past(at, depth + 1)
            if open_:
                raise self.bad("an expansion of the script never ends")
            return at
        return at + 1

    def _find(self, char: str, at: int) -> int:
        found = self.text.find(char, at)
        if found < 0:
            raise self.bad("a quote of the script never ends")
        return found

    # -- statements ---------------------------------------------------------------------------------------------------

    def run(self) -> Script:
        self._statements(until=(), active=True)
        return self.script

    def _statements(self, until: tuple[str, ...], *, active: bool, depth: int = 0) -> str:
        """Play statements up to one of the words ``until``; return that word."""
        if depth > MOST_DEPTH:
            raise self.bad("the script nests deeper than any")
        while self.at < len(self.tokens):
            token = self.tokens[self.at]
            if isinstance(token, str) and token in until:
                self.at += 1
                return token
            if token in _ENDS or token in ("(", ")", "{", "}", "then", "do", "!"):
                self.at += 1
            elif token == "if":
                self.at += 1
                self._if(active, depth)
            elif isinstance(token, str) and token in _SKIPPED:
                self._skip(token)
            elif token == "function" or self._defines():
                self._skip_function()
            else:
                self._simple(active)
        return ""

    def _if(self, active: bool, depth: int) -> None:
        done, word = False, "if"
        while word in ("if", "elif"):
            truth = self._condition() if active and not done else False
            word = self._statements(("elif", "else", "fi"), active=active and not done and truth, depth=depth + 1)
            done = done or truth
        if word == "else":
            self._statements(("fi",), active=active and not done, depth=depth + 1)

    def _condition(self) -> bool:
        """Return whether the tests up to ``then`` hold; one that cannot be told counts as false, and is said."""
        tests, result, join = list[str](), None, "||"
        while self.at < len(self.tokens) and self.tokens[self.at] != "then":
            token = self.tokens[self.at]
            self.at += 1
            inside = "[[" in tests and "]]" not in tests
            if token in ("&&", "||") and not inside:
                result = self._joined_truth(result, join, self._test(tests))
                tests, join = [], str(token)
            elif isinstance(token, str) and token not in ("\n", ";"):
                tests.append(token)
        return bool(self._joined_truth(result, join, self._test(tests)))

    @staticmethod
    def _joined_truth(first: bool | None, join: str, second: bool | None) -> bool | None:
        if join == "&&":
            return bool(first) and bool(second)
        return bool(first) or bool(second)

    def _test(self, tests: list[str]) -> bool | None:  # noqa: PLR0911 - one return per test
        words = [word for word in tests if word not in ("[", "[[", "]", "]]", "test")]
        if "&&" in words or "||" in words:
            at = next(i for i, word in enumerate(words) if word in ("&&", "||"))
            return self._joined_truth(self._test(words[:at]), words[at], self._test(words[at + 1 :]))
        if words and words[0] == "!":
            inner = self._test(words[1:])
            return None if inner is None else not inner
        values = [" ".join(self.expand(word)) for word in words]
        known = not any(map(is_unresolved, values))
        match values:
            case ["-z", value]:
                return value == "" or (is_unresolved(value) and value.count(OPEN) == 2 and self._is_variable(value))
            case ["-n", value]:
                return known and value != ""
            case ["-e" | "-f" | "-r" | "-s", value]:  # a script tests for the files that it needs
                self.script.left_out.append(f"a condition, {values[0]} {shown(value)}: memo assumes the file is there")
                return True
            case [left, "=" | "==", right] if known:
                return left == right
            case [left, "!=", right] if known:
                return left != right
            case [left, sign, right] if known and sign in _COMPARED:
                try:
                    return _COMPARED[sign](int(left), int(right))
                except ValueError:
                    pass
        self.script.left_out.append(f"a condition that only running it would tell: {' '.join(tests)[:80]}")
        self.script.undecided += [name for value in values for name in unresolved_in(value)]
        return None

    @staticmethod
    def _is_variable(value: str) -> bool:
        """Return whether an unresolved value is one variable alone, which is empty where nothing sets it."""
        return _NAME.fullmatch(value.strip(OPEN)) is not None

    def _skip(self, word: str) -> None:
        end, depth, start = _SKIPPED[word], 0, self.at
        while self.at < len(self.tokens):
            token = self.tokens[self.at]
            depth += isinstance(token, str) and token in _SKIPPED and _SKIPPED[token] == end
            depth -= token == end
            self.at += 1
            if not depth:
                break
        told = " ".join(token for token in self.tokens[start : start + 6] if isinstance(token, str) and token != "\n")
        self.script.left_out.append(f"{word} ... {end}: {told}"[:80])

    def _defines(self) -> bool:
        following = self.tokens[self.at + 1 : self.at + 3]
        return isinstance(self.tokens[self.at], str) and following == ["(", ")"]

    def _skip_function(self) -> None:
        name = self.tokens[self.at + (self.tokens[self.at] == "function")]
        while self.at < len(self.tokens) and self.tokens[self.at] != "{":
            self.at += 1
        depth = 0
        while self.at < len(self.tokens):
            depth += (self.tokens[self.at] == "{") - (self.tokens[self.at] == "}")
            self.at += 1
            if not depth:
                break
        self.script.left_out.append(f"the function {name}")

    def _simple(self, active: bool) -> None:
        """Play one command, or the assignments that it consists of."""
        words = list[str]()
        while self.at < len(self.tokens) and self.tokens[self.at] not in _ENDS:
            token = self.tokens[self.at]
            self.at += 1
            if isinstance(token, tuple):
                if active:
                    self._assign(token[0], token[1], [field_ for raw in token[2] for field_ in self.expand(raw)])
            elif token not in ("(", ")"):
                words.append(token)
        if not active:
            return
        while words and (words[0] in _DECLARING or _ASSIGNED.match(words[0])):
            match = _ASSIGNED.match(words[0])
            if match:
                self._assign(match[1], match[2], [" ".join(self.expand(words[0][match.end() :], quoted=True))])
            words = words[1:]
            while words and words[0].startswith("-") and not words[0].startswith("--"):
                words = words[1:]
        fields = [field_ for word in words for field_ in self.expand(word)]
        if fields:
            self.script.commands.append(fields)

    def _assign(self, name: str, plus: str, values: list[str]) -> None:
        if name in self.given:
            return
        if plus and name in self.script.variables:
            before = self.script.variables[name]
            values = [*before, *values] if len(before) != 1 or len(values) != 1 else [before[0] + values[0]]
        self._count(len(values) + sum(map(len, values)) // 64)
        self.script.variables[name] = values

    def _count(self, words: int) -> None:
        self.words += words
        if self.words > MOST_WORDS:
            raise self.bad("the script makes more words than any")

    # -- expansions ---------------------------------------------------------------------------------------------------

    def expand(self, raw: str, *, quoted: bool = False, depth: int = 0) -> list[str]:  # noqa: PLR0912
        """Return the fields of a raw word; ``quoted``: one, as on the right of an assignment."""
        if depth > MOST_DEPTH:
            raise self.bad("the script nests deeper than any")
        all_of = _ALL.fullmatch(raw)
        if all_of is not None and not self.script.variables.get(all_of[1] or "@"):
            return []
        fields, current, started, at, inside = list[str](), "", False, 0, False
        while at < len(raw):
            char = raw[at]
            if char == "'" and not inside:
                end = raw.find("'", at + 1)
                current, started, at = current + raw[at + 1 : end], True, end + 1
            elif char == '"':
                inside, started, at = not inside, True, at + 1
            elif raw.startswith("\\\n", at):
                at += 2
            elif char == "\\":
                kept = "\\" if inside and raw[at + 1 : at + 2] not in ("$", "`", '"', "\\") else ""
                current, started, at = f"{current}{kept}{raw[at + 1 : at + 2]}", True, at + 2
            elif char in "$`":
                values, at = self._expansion(raw, at, depth)
                if not values:  # "$@" of a script without arguments, and an empty array: no word at all
                    continue
                if inside or quoted:
                    whole = [*values] if inside and len(values) > 1 and not quoted else [" ".join(values)]
                    current, started = current + whole[0], True
                    for value in whole[1:]:
                        fields.append(current)
                        current = value
                else:
                    parts = [part for value in values for part in _split(value)]
                    for number, part in enumerate(parts):
                        if number:
                            fields.append(current)
                            current = ""
                        current, started = current + part, True
            else:
                current, started, at = current + char, True, at + 1
        if started:
            fields.append(current)
        self._count(len(fields) + sum(map(len, fields)) // 64)
        return [field_.replace(_HELD, " ") for field_ in fields]

    def _expansion(self, raw: str, at: int, depth: int) -> tuple[list[str], int]:  # noqa: PLR0911
        """Return the values of the expansion that begins at ``at``, and the position behind it."""
        if raw[at] == "`":
            end = raw.find("`", at + 1)
            return [self._unresolved("(...)")], (len(raw) if end < 0 else end) + 1
        if raw.startswith("$((", at):
            end = _closing(raw, at + 1, "(", ")")
            return [self._arithmetic(raw[at + 3 : end - 2], depth)], end
        if raw.startswith("$(", at):
            return [self._unresolved("(...)")], _closing(raw, at + 1, "(", ")")
        if raw.startswith("${", at):
            end = _closing(raw, at + 1, "{", "}")
            return self._braced(raw[at + 2 : end - 1], depth), end
        match = _NAME.match(raw, at + 1)
        if match:
            return self._value(match[0]), match.end()
        if raw[at + 1 : at + 2] and raw[at + 1] in "0123456789@*#?$!":
            name = raw[at + 1]
            return ([] if name in "@*" and name not in self.given else self._value(name)), at + 2
        return ["$"], at + 1

    def _braced(self, inside: str, depth: int) -> list[str]:  # noqa: PLR0911 - one return per form
        match = re.match(r"(#?)([A-Za-z_]\w*|[0-9]+|[@*])(\[[@*]\])?", inside, re.ASCII)
        if not match:
            return [self._unresolved(inside)]
        count, name, rest = match[1], match[2], inside[match.end() :]
        if count:
            return [str(len(self.script.variables.get(name, [])))]
        if not rest:
            return self._value(name)
        known = name in self.script.variables
        empty = not known or self.script.variables[name] in ([], [""])
        for sign in (":-", ":=", "-", "="):
            if rest.startswith(sign):
                if not (empty if sign[0] == ":" else not known):
                    return self._value(name)
                return [self._default(rest[len(sign) :], depth)]
        if rest.startswith((":+", "+")):
            return [] if empty else [self._default(rest.lstrip(":+"), depth)]
        return [self._unresolved(inside)] if not rest.startswith((":?", "?")) else self._value(name)

    def _default(self, raw: str, depth: int) -> str:
        """Return a default with its fields apart: blanks that its own quotes hold do not split it."""
        return " ".join(field_.replace(" ", _HELD) for field_ in self.expand(raw, depth=depth + 1))

    def _value(self, name: str) -> list[str]:
        return self.script.variables[name] if name in self.script.variables else [self._unresolved(name)]

    def _unresolved(self, name: str) -> str:
        return f"{OPEN}{name.replace(OPEN, '')}{OPEN}"

    def _arithmetic(self, text: str, depth: int) -> str:
        plain = " ".join(self.expand(text, quoted=True, depth=depth + 1))
        named = _NAME.sub(lambda match: " ".join(self._value(match[0])), plain) if not is_unresolved(plain) else plain
        if is_unresolved(named):
            return self._unresolved(f"(({shown(named)}))")
        try:
            with warnings.catch_warnings(action="ignore"):  # of Python about digits before a word
                return str(_whole(ast.parse(named.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
            return self._unresolved(f"(({text}))")


def _split(value: str) -> list[str]:
    """Return the fields of an unquoted value; what is unresolved is one field."""
    joined = re.sub(f"{OPEN}[^{OPEN}]*{OPEN}", lambda match: match[0].replace(" ", _BLANK), value)
    return [part.replace(_BLANK, " ") for part in joined.split()]


def _closing(raw: str, at: int, opened: str, closed: str) -> int:
    """Return the position behind the bracket that closes the one at ``at``."""
    depth = 0
    for index in range(at, len(raw)):
        depth += (raw[index] == opened) - (raw[index] == closed)
        if not depth:
            return index + 1
    return len(raw)


_COMPARED: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-gt": operator.gt,
    "-ge": operator.ge,
    "-lt": operator.lt,
    "-le": operator.le,
}
_OPERATORS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}
_MOST = 2**62


def _whole(node: ast.expr) -> int:
    """Return the value of a whole-number expression.

    Raises:
        ValueError: when it is anything else, or beyond 64 bits.
    """
    match node:
        case ast.Constant(value=int(value)) if abs(value) < _MOST:
            return value
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            value = _OPERATORS[type(op)](_whole(left), _whole(right))
            if abs(value) < _MOST:
                return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_whole(operand)
    raise ValueError("no whole number")
