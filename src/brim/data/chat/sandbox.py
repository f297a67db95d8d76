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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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


_MAX_PARTS = 1 << 20  # values in a list or mapping that becomes text


_WIDE = re.compile(r"\d{6}")  # a format's width


_WIDE_PERCENT = re.compile(r"%(\([^)]*\))?[-+ #0]*(\*|\d{6}|\d*\.(\*|\d{6}))")


_INTERCEPTED = frozenset({"+", "*", "**", "%"})


_BOUNDED_FILTERS = (
    *("string", "join", "pprint", "format", "escape", "e", "forceescape", "urlencode", "xmlattr", "replace"),
    *("center", "indent", "wordwrap"),
)


_PADDING = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs"})


_GIVEN_BY_JINJA = (jinja2.Environment, Context, nodes.EvalContext)


class TemplateFault(Exception):
    """The template cannot be rendered; the text says why."""


class Refusal(TemplateFault):
    """The template itself says that it does not take the conversation."""


class Overreach(TemplateFault):
    """The template does what no template may, whatever the conversation."""


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with bounds. today: what `strftime_now` tells."""

    intercepted_binops = _INTERCEPTED

    def __init__(self, *, today: datetime.date) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_PassThrough, loopcontrols], finalize=_require_bounded
        )
        self._today = today
        self._steps_left = 0
        del self.globals["lipsum"]
        self.globals.update(raise_exception=_raise, strftime_now=self._strftime, namespace=_OpenNamespace, dict=_Dict())
        self.filters.update({name: _checked(self.filters[name]) for name in _BOUNDED_FILTERS})
        self.filters.update(tojson=_tojson, random=_refuse_chance)

    def run(self, template: jinja2.Template, variables: Mapping[str, Any]) -> str:
        """The text of one rendering. Raises TemplateFault."""
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
        """The template of a text. Raises TemplateFault, with the line."""
        with _compiling():
            return self.from_string(source)

    def parsed(self, source: str) -> nodes.Template:
        """The syntax tree of a text. Raises TemplateFault, with the line."""
        with _compiling():
            return self.parse(source)

    @property
    def step(self) -> None:
        """One more; a property, since compiled templates read it in a fraction of a call's time."""
        self._steps_left -= 1
        if self._steps_left < 0:
            raise Overreach(f"it does not come to an end within {MAX_STEPS:,} passes of its loops")

    def joined(self, *values: Any) -> str:
        """What `~` makes of its operands."""
        for value in values:
            _require_bounded(value)
        return str(_require_bounded("".join(map(str, values))))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """The syntax tree with a step in each loop and macro, and `~` under bounds."""
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
        if isinstance(text, str):
            _require_small_method(text, method.__name__, args)
        return _bounded_text(super().call(__context, __obj, *args, **kwargs))

    def unsafe_undefined(self, obj: Any, attribute: str) -> jinja2.Undefined:
        """Jinja's own would print as nothing at all."""
        raise SecurityError(f"it reaches for {attribute!r} of a {type(obj).__name__}, which a template may not")

    def _strftime(self, format: str) -> str:
        if _WIDE.search(format):
            raise _too_long()
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
    """`{% generation %}`, with which some templates mark the assistant's text: what is in it is written, no more."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own declaration)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Bounding(jinja2.visitor.NodeTransformer):
    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("joined", node.nodes).set_lineno(node.lineno)


class _Dict:
    """`dict(…)` and `dict.fromkeys(…)` without the class itself."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Any, value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


class _OpenNamespace(Namespace):
    """A template's own variables, none of them hidden."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"it sets the hidden attribute {name!r} of a namespace")
        super().__setitem__(name, value)


def _call(name: str, arguments: list[nodes.Expr]) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name), arguments, [], None, None)


def _raise(message: str) -> None:
    raise Refusal(str(message))


def _refuse_chance(*_: Any) -> None:
    raise Overreach("it draws by chance (the filter `random`), so that no row would be twice the same")


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """JSON as it is, where Jinja's own filter would escape it for HTML."""
    _require_bounded(value)
    _require_narrow([indent])
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _checked(filter_function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter whose values, widths and result are bounded."""

    @functools.wraps(filter_function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        values = [value for value in (*args, *kwargs.values()) if not isinstance(value, _GIVEN_BY_JINJA)]
        _require_narrow(values)
        for value in values:
            _require_bounded(value)
        if filter_function is jinja2.filters.do_format and _WIDE_PERCENT.search(str(values[0])):
            raise _too_long()
        if filter_function is jinja2.filters.do_replace:
            _require_small_replacement(str(values[0]), *values[1:3])
        return _bounded_text(filter_function(*args, **kwargs))

    return bounded


def _require_small(operator: str, left: Any, right: Any) -> None:
    """Refuse an operation before it is done where its result alone would be too much."""
    if operator == "+":
        return
    if operator == "%":
        if isinstance(left, str) and _WIDE_PERCENT.search(left):
            raise _too_long()
        return
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * max(right, 1) if operator == "**" else left.bit_length() + right.bit_length()
        if bits > _MAX_BITS:
            raise Overreach("it computes a number that is too large")
        return
    for many, one in ((left, right), (right, left)):
        if isinstance(many, int) and isinstance(one, str | list | tuple) and many * len(one) > MAX_CHARACTERS:
            raise _too_long()


def _require_narrow(values: Any) -> None:
    if any(isinstance(value, int) and value > 99_999 for value in values):
        raise Overreach("it asks for more than 99,999 spaces")


def _require_small_method(text: str, name: str, arguments: Sequence[Any]) -> None:
    """Refuse a text's method before it is called where it would make too long a text."""
    if name in _PADDING:
        _require_narrow(arguments)
    elif name in ("format", "format_map"):
        _require_narrow_fields(text)
    elif name == "replace":
        _require_small_replacement(text, *arguments[:2])
    elif name == "join" and arguments and isinstance(arguments[0], list | tuple):
        _require_small_sum(text, arguments[0])


def _require_small_replacement(text: str, old: Any = "", new: Any = "") -> None:
    if isinstance(old, str) and isinstance(new, str) and len(text) + text.count(old) * len(new) > MAX_CHARACTERS:
        raise _too_long()


def _require_small_sum(separator: str, values: Sequence[Any]) -> None:
    if sum(len(value) + len(separator) for value in values if isinstance(value, str)) > MAX_CHARACTERS:
        raise _too_long()


def _require_narrow_fields(format: str) -> None:
    """Refuse `{:999999999}`, and `{:{width}}`, whose width stands among the values."""
    for _, _, spec, _ in Formatter().parse(format):
        if spec and ("{" in spec or _WIDE.search(spec)):
            raise _too_long()


def _too_long() -> Overreach:
    return Overreach(f"it makes a text of more than {MAX_CHARACTERS:,} characters")


def _bounded_text(value: Any) -> Any:
    if isinstance(value, str) and len(value) > MAX_CHARACTERS:
        raise _too_long()
    return value


def _require_bounded(value: Any) -> Any:
    """The value, unless its text would be too long: lists of lists can hold the same one many times over."""
    if isinstance(value, list | tuple | dict):
        left = [_MAX_PARTS]
        _count(value, left)
        return value
    return _bounded_text(value)


def _count(value: Any, left: list[int]) -> None:
    left[0] -= 1
    if isinstance(value, str):
        left[0] -= len(value) >> 4
    if left[0] < 0:
        raise _too_long()
    if isinstance(value, dict):
        for key, item in value.items():
            _count(key, left)
            _count(item, left)
    elif isinstance(value, list | tuple):
        for item in value:
            _count(item, left)


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
