"""Groups of keys made into frozen dataclasses. Every mistake raises UsageError that names the key with its group."""

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Mapping
from typing import Any

from nemo_v4_indexer.training.errors import UsageError


def require(ok: bool, key: str, expected: str, value: Any) -> None:
    if not ok:
        raise UsageError(f"{key} must be {expected}, got {value!r}")


def at_least(section: str, config: Any, minimum: int | float, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        require(value is None or value >= minimum, f"{section}.{name}", f"at least {minimum}", value)


def section_of(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    require(isinstance(values[name], Mapping), name, "a group of keys", values[name])
    return values[name]


def library_section(cls: Any, values: Mapping[str, Any], name: str, parent: str = "") -> Any:
    try:
        return cls.from_dict(section_of(values, name))
    except (TypeError, ValueError) as error:
        key = str(error).removeprefix(f"{name}.")  # the library names its keys from its own root
        known = key.startswith(tuple(field.name for field in dataclasses.fields(cls)))
        raise UsageError(f"{parent}{name}{'.' if known else ': '}{key}") from error


def refuse_unknown(values: Mapping[str, Any], known: list[str], prefix: str) -> None:
    for key in values:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {prefix}{close[0]}?" if close else f"known: {', '.join(known)}"
            raise UsageError(f"unknown key {prefix}{key}; {hint}")


def dataclass_section(cls: Any, values: Mapping[str, Any], section: str) -> Any:
    fields = {field.name: field for field in dataclasses.fields(cls)}
    refuse_unknown(values, list(fields), f"{section}.")
    hints = typing.get_type_hints(cls)
    for name, field in fields.items():
        if name not in values and field.default is dataclasses.MISSING:
            raise UsageError(f"{section}.{name} is missing")
    return cls(**{name: typed(value, hints[name], f"{section}.{name}") for name, value in values.items()})


def typed(value: Any, hint: Any, key: str) -> Any:
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if value is None and type(None) in options:
        return None
    kind = options[0]
    expected = {int: "an integer", float: "a number", bool: "true or false", str: "a text"}[kind]
    if type(None) in options:
        expected += " or null"
    if kind is float and isinstance(value, str):  # YAML 1.1 reads 3e-3 as a text
        try:
            value = float(value)
        except ValueError:
            require(False, key, expected, value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    require(isinstance(value, kind) and (kind is bool or not isinstance(value, bool)), key, expected, value)
    require(kind is not float or math.isfinite(value), key, "a finite number", value)
    return value
