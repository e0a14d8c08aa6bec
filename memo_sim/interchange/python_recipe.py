"""A Python recipe of a framework as settings: its calls and assignments are read, nothing of it is run.

    training=TrainingConfig(seq_len=8 * 1024)    ->  training.seq_len 8192, training() "TrainingConfig"
    config.training.seq_len = 4096               ->  training.seq_len 4096

A name with ``()`` behind it says which class or function made a value; arguments without a name count from 0.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Mapping
from typing import Any

from memo_sim.contract.errors import BadInput

MADE_BY = "()"
_DEEPEST = 50
_MOST_NUMBER = 10**18
Values = dict[str, Any]


def functions_of(text: str, where: str) -> dict[str, ast.FunctionDef]:
    """Return the recipes of a file, its functions without parameters, by name.

    Raises:
        BadInput: when the text is no Python.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about numbers and escapes in a text that is not ours
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise BadInput("not a Python file", where=where, got=str(error), hint="give the recipe's file") from None
    return {
        node.name: node
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and not (node.args.args or node.args.kwonlyargs)
    }


def settings_of(name: str, functions: Mapping[str, ast.FunctionDef]) -> Values:
    """Return what the recipe ``name`` returns, with dotted names; calls of other recipes of the file are followed.

    A call of a recipe that is not in the file is left as its name, under ``()``.
    """
    return _Reader(functions).returned(functions[name], 0)


class _Reader:
    def __init__(self, functions: Mapping[str, ast.FunctionDef]) -> None:
        self.functions = functions

    def returned(self, function: ast.FunctionDef, depth: int) -> Values:
        known = dict[str, Any]()
        for statement in function.body:
            if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
                targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
                for target in targets:
                    self._assign(target, self._value(statement.value, known, depth), known)
            elif isinstance(statement, ast.Return) and statement.value is not None:
                value = self._value(statement.value, known, depth)
                return value if isinstance(value, dict) else {}
        return {}

    def _assign(self, target: ast.expr, value: Any, known: dict[str, Any]) -> None:
        """Store ``a = value``, or ``a.b.c = value`` in what ``a`` is; what was there under that name goes."""
        path = list[str]()
        while isinstance(target, ast.Attribute):
            path.append(target.attr)
            target = target.value
        if not isinstance(target, ast.Name):
            return
        if not path:
            known[target.id] = value
            return
        holder = known.setdefault(target.id, {})
        if isinstance(holder, dict):
            _put(holder, ".".join(reversed(path)), value)

    def _value(self, node: ast.expr, known: Mapping[str, Any], depth: int) -> Any:
        if depth > _DEEPEST:
            return ast.unparse(node)
        value: Any
        match node:
            case ast.Constant():
                value = node.value
            case ast.Name():
                value = known.get(node.id, node.id)
                value = dict(value) if isinstance(value, dict) else value
            case ast.Call():
                value = self._called(node, known, depth)
            case ast.List() | ast.Tuple():
                value = [self._value(item, known, depth + 1) for item in node.elts]
            case ast.UnaryOp(op=ast.USub()):
                value = self._value(node.operand, known, depth + 1)
                value = -value if _is_number(value) else ast.unparse(node)
            case ast.BinOp():
                value = self._computed(node, known, depth)
            case _:
                value = ast.unparse(node)
        return value

    def _called(self, node: ast.Call, known: Mapping[str, Any], depth: int) -> Any:
        made_by = ast.unparse(node.func)
        if made_by in self.functions and not node.args and not node.keywords:
            return self.returned(self.functions[made_by], depth + 1)
        found: Values = {MADE_BY: made_by}
        given = [(str(index), value) for index, value in enumerate(node.args)]
        for name, value in [*given, *((word.arg, word.value) for word in node.keywords if word.arg)]:
            _put(found, name, self._value(value, known, depth + 1))
        return found

    def _computed(self, node: ast.BinOp, known: Mapping[str, Any], depth: int) -> Any:
        one, other = (self._value(side, known, depth + 1) for side in (node.left, node.right))
        if _is_number(one) and _is_number(other):
            match node.op:
                case ast.Mult() if abs(one * other) < _MOST_NUMBER:
                    return one * other
                case ast.Add():
                    return one + other
                case ast.Sub():
                    return one - other
                case ast.FloorDiv() if other:
                    return one // other
                case ast.Pow() if 0 <= other <= 64 and abs(one) <= 1024:
                    return one**other
        return ast.unparse(node)


def _put(holder: Values, name: str, value: Any) -> None:
    """Store a value, and one that was made by a call as its parts, in place of what was there."""
    for key in [key for key in holder if key == name or key.startswith((f"{name}.", f"{name}{MADE_BY}"))]:
        del holder[key]
    if not isinstance(value, dict):
        holder[name] = value
        return
    for key, part in value.items():
        holder[f"{name}{key}" if key == MADE_BY else f"{name}.{key}"] = part


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
