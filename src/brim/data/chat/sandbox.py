"""Run chat templates within bounds, with what transformers lets them use.

A template comes with a base model and is foreign code. Jinja's sandbox keeps it from Python's internals. The bounds
keep it from running or growing without end; they count work, not time, so that a template fits on every machine or on
none.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from string import Formatter
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_STEPS = 1_000_000  # passes of loops and calls of macros in one rendering


MAX_CHARACTERS = 1 << 24  # of one rendering, and of any text on the way to it


_MAX_BITS = 4096  # of a whole number


_MAX_PARTS = 1 << 20  # values in a list or mapping, 16 characters of a text within it being one more


_PART_CHARACTERS = 20  # that a part takes at most as text: 16, with quotes and a comma


_COLLECTIONS: tuple[type[Any], ...] = (list, tuple, set, type({}.keys()), type({}.values()), type({}.items()))


_PERCENT = re.compile(r"%(?:\([^)]*\))?([-+ #0-9.*]*)")  # what `%` fills in, and how wide


_DIGITS = re.compile(r"\d+")


_INTERCEPTED = frozenset({"+", "*", "**", "%"})


_BOUNDED_FILTERS = (
    *("string", "join", "pprint", "format", "escape", "e", "forceescape", "urlencode", "xmlattr", "replace"),
    *("center", "indent", "wordwrap", "urlize", "batch", "slice", "sum"),
)


_GIVEN_BY_JINJA = (jinja2.Environment, Context, nodes.EvalContext)


class TemplateFault(Exception):
    """The template cannot be rendered; the text says why."""


class Refusal(TemplateFault):
    """The template itself says that it does not take the conversation."""


class Overreach(TemplateFault):
    """The template does what no template may, whatever the conversation."""


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Run templates in Jinja's sandbox, within bounds. today: the day of `strftime_now`."""

    intercepted_binops = _INTERCEPTED

    def __init__(self, *, today: datetime.date) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_PassThrough, loopcontrols], finalize=_require_bounded
        )
        self._today = today
        self._steps_left = 0
        del self.globals["lipsum"]
        self.globals.update(raise_exception=_raise, strftime_now=self._strftime, namespace=_OpenNamespace, dict=_Dict())
        self.filters.update({name: _checked(name, self.filters[name]) for name in _BOUNDED_FILTERS})
        self.filters.update(tojson=_tojson, random=_refuse_chance)

    def run(self, template: jinja2.Template, variables: Mapping[str, Any]) -> str:
        """Render a template once. Raises TemplateFault."""
        self._steps_left = MAX_STEPS
        parts, num_characters = [], 0
        try:
            for part in template.generate(**variables):
                parts.append(part)
                num_characters += len(part)
                if num_characters > MAX_CHARACTERS:
                    raise Overreach(f"it writes more than {MAX_CHARACTERS:,} characters")
        except TemplateFault:
            raise
        except Exception as error:  # a template can trip over anything
            raise _fault(error) from None
        return "".join(parts)

    def compiled(self, source: str) -> jinja2.Template:
        """Return the template of a text. Raises TemplateFault, with the line."""
        with _compiling():
            return self.from_string(source)

    def parsed(self, source: str) -> nodes.Template:
        """Parse a text into its syntax tree. Raises TemplateFault, with the line."""
        with _compiling():
            return self.parse(source)

    @property
    def step(self) -> None:
        """Count one more step; a property, since compiled templates read it in a fraction of a call's time."""
        self._steps_left -= 1
        if self._steps_left < 0:
            raise Overreach(f"it does not come to an end within {MAX_STEPS:,} passes of its loops")

    def joined(self, *values: Any) -> str:
        """Join the operands of `~`."""
        for value in values:
            _require_bounded(value)
        return str(_require_bounded("".join(map(str, values))))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Parse a text, and put a step into each loop and macro, and `~` under bounds."""
        tree = super()._parse(source, name, filename)
        repeated: tuple[Any, ...] = (nodes.For, nodes.Macro, nodes.CallBlock)
        for node in tree.find_all(repeated):
            node.body.insert(0, nodes.ExprStmt(nodes.EnvironmentAttribute("step"), lineno=node.lineno))
        _Bounding().visit(tree)
        tree.set_environment(self)
        return tree

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and type(left) is type(right) is str:  # most of what templates do, and so done at once
            return _bounded_text(left + right)
        _require_small(operator, left, right)
        return _require_bounded(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        # Named as in Jinja, so that no name of a template's own arguments is taken.
        method = getattr(__obj, "__wrapped__", __obj)  # Jinja wraps `format`
        text = getattr(method, "__self__", None)
        if getattr(method, "__name__", "") in ("encode", "to_bytes"):
            raise Overreach("it makes bytes, which no template needs")
        if isinstance(text, str):
            if method.__name__ == "join" and args:
                args = (list(args[0]), *args[1:])
            _require_room(method.__name__, text, args, kwargs)
        return _bounded_text(super().call(__context, __obj, *args, **kwargs))

    def unsafe_undefined(self, obj: Any, attribute: str) -> jinja2.Undefined:
        """Refuse the attribute; Jinja's own undefined value would be written as nothing at all."""
        raise SecurityError(f"it reaches for {attribute!r} of a {type(obj).__name__}, which a template may not")

    def _strftime(self, format: str) -> str:
        _require_room("%", format, (), {})
        return datetime.datetime.combine(self._today, datetime.time()).strftime(format)


@contextmanager
def _compiling() -> Iterator[None]:
    try:
        yield
    except TemplateFault:
        raise
    except jinja2.TemplateSyntaxError as error:
        raise TemplateFault(f"line {error.lineno:,}: {error.message}") from None
    except Exception as error:  # what the compiler works out beforehand can trip over anything
        raise _fault(error) from None


class _PassThrough(Extension):
    """Accept `{% generation %}`, with which some templates mark the assistant's text; its contents are just written."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own declaration)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Bounding(jinja2.visitor.NodeTransformer):
    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        joined = nodes.Call(nodes.EnvironmentAttribute("joined"), node.nodes, [], None, None)
        return joined.set_lineno(node.lineno)


class _Dict:
    """Offer `dict(…)` and `dict.fromkeys(…)` without the class itself."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Any, value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


class _OpenNamespace(Namespace):
    """Hold a template's own variables, none of them hidden."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"it sets the hidden attribute {name!r} of a namespace")
        super().__setitem__(name, value)


def _raise(message: str) -> None:
    raise Refusal(str(message))


def _refuse_chance(*_: Any) -> None:
    raise Overreach("it draws by chance (the filter `random`), so that a row would not be the same text twice")


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Return JSON as it is, where Jinja's own filter would escape it for HTML."""
    num_parts, num_indents = _size(value)
    if indent is not None:
        _require_at_most((len(indent) if isinstance(indent, str) else int(indent)) * (1 + num_indents))
    _require_at_most(num_parts * max(map(len, separators or ("",))))
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _checked(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter whose values and result are bounded."""

    @functools.wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        at = 1 if isinstance(args[0], _GIVEN_BY_JINJA) else 0
        value, others = args[at], args[at + 1 :]
        if name in ("join", "sum"):
            value = list(value)
        for each in (value, *others, *kwargs.values()):
            _require_bounded(each)
        if name == "pprint":
            _require_at_most(_size(value)[1])
        _require_room("%" if name == "format" else name, value if name == "join" else str(value), others, kwargs)
        return _bounded_text(function(*args[:at], value, *args[at + 1 :], **kwargs))

    return bounded


def _require_small(operator: str, left: Any, right: Any) -> None:
    """Refuse an operation before it is done where its result alone would be too much."""
    if operator == "%" and isinstance(left, str):
        _require_room("%", left, right if isinstance(right, tuple) else (right,), {})
    if operator not in ("*", "**"):
        return
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * max(right, 1) if operator == "**" else left.bit_length() + right.bit_length()
        if bits > _MAX_BITS:
            raise Overreach("it computes a number that is too large")
    for many, one in ((left, right), (right, left)):
        if isinstance(many, int) and isinstance(one, str | list | tuple):
            _require_at_most(many * len(one) * (1 if isinstance(one, str) else MAX_CHARACTERS // _MAX_PARTS))


def _require_room(name: str, text: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse a method or filter of a text before it is called where what it adds is too long.

    args, kwargs: its arguments. Every text is bounded, so that it is enough to look at what makes a longer one of it.
    """
    values = [*args, *kwargs.values()]
    width = max((abs(value) for value in values if isinstance(value, int)), default=8)
    longest = max((len(value) for value in values if isinstance(value, str)), default=1)
    if name in ("center", "ljust", "rjust", "zfill"):
        _require_at_most(width * longest)
    elif name in ("expandtabs", "indent"):
        _require_at_most(max(width, longest) * (1 + text.count("\n") + text.count("\t")))
    elif name == "replace":
        given = {**dict(zip(("old", "new"), args, strict=False)), **kwargs}
        old, new = (str(_require_bounded(given.get(key))) for key in ("old", "new"))
        _require_at_most(text.count(old) * len(new))
    elif name in ("wordwrap", "urlize"):
        _require_at_most(len(text) * longest)
    elif name == "translate":
        parts = [part for table in args for part in _held_by(table)[1] if isinstance(part, str)]
        _require_at_most(len(text) * max(map(len, parts), default=1))
    elif name in ("batch", "slice"):
        _require_at_most(width * _PART_CHARACTERS)
    elif name == "join":
        parts, *others = [text, *values] if isinstance(text, list) else [*values, text]
        separator = max(map(_num_characters, others), default=0)
        _require_at_most(sum(separator + _num_characters(part) for part in parts))
    elif name in ("%", "format", "format_map"):
        specs = _PERCENT.findall(text) if name == "%" else [spec or "" for _, _, spec, _ in Formatter().parse(text)]
        if any("{" in spec for spec in specs):  # a width from among the values
            raise _too_long()
        longest = max(map(_num_characters, values), default=_PART_CHARACTERS)
        widths = (width * spec.count("*") + sum(map(int, _DIGITS.findall(spec))) for spec in specs)
        _require_at_most(len(specs) * longest + sum(widths))


def _require_at_most(num_characters: int) -> None:
    if num_characters > MAX_CHARACTERS:
        raise _too_long()


def _too_long() -> Overreach:
    return Overreach(f"it makes a text of more than {MAX_CHARACTERS:,} characters")


def _num_characters(value: Any) -> int:
    """Return how many characters the text of a value has at most, but for signs that are escaped within a list."""
    return len(value) if isinstance(value, str) else _size(value)[0] * _PART_CHARACTERS


def _bounded_text(value: Any) -> Any:
    if isinstance(value, str) and len(value) > MAX_CHARACTERS:
        raise _too_long()
    return value


def _require_bounded(value: Any) -> Any:
    """Return the value, unless its text would be too long."""
    if not isinstance(value, str):
        _size(value)
    return _bounded_text(value)


def _size(value: Any) -> tuple[int, int]:
    """Return how many parts a value has, and how deep all of them lie, taken together. Refuses one of too many parts.

    Lists of lists can hold the same one many times over: each is looked at once a level, and counted so many times.
    """
    num_parts, indents, depth = 1, 0, 0
    level = {id(value): (value, 1)}  # the parts at a depth, and how many times each is there
    while level:
        below: dict[int, tuple[Any, int]] = {}
        for each, times in level.values():
            indents += depth * times
            num_held, held = _held_by(each)
            num_parts += times * (num_held + _num_sixteens(each))
            if num_parts > _MAX_PARTS:
                raise _too_long()
            for part in held:
                below[id(part)] = (part, times + below.get(id(part), (None, 0))[1])
        level, depth = below, depth + 1
    return num_parts, indents


def _held_by(value: Any) -> tuple[int, Iterable[Any]]:
    """Return the values that show in the text of another one, and their number."""
    if isinstance(value, _OpenNamespace):
        value = value._Namespace__attrs
    if isinstance(value, dict):
        return 2 * len(value), chain.from_iterable(value.items())
    return (len(value), value) if isinstance(value, _COLLECTIONS) else (0, ())


def _num_sixteens(value: Any) -> int:
    """Return how often 16 characters go into a text or a whole number."""
    if isinstance(value, str):
        return len(value) >> 4
    return value.bit_length() // 48 if isinstance(value, int) else 0


def _fault(error: Exception) -> TemplateFault:
    if isinstance(error, SecurityError):
        return Overreach(str(error))
    if isinstance(error, RecursionError):
        return TemplateFault("it is nested too deeply")
    if isinstance(error, MemoryError):
        return Overreach("it needs more memory than there is")
    if isinstance(error, OverflowError):
        return Overreach(_line(error))
    if isinstance(error, jinja2.TemplateError):
        return TemplateFault(_line(error))
    return TemplateFault(f"{type(error).__name__}: {_line(error)}")


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
