"""Checks and per-layer rules shared by the configuration classes. Standard library only.

A check is a function `(key, value) -> normalised value` that raises ValueError naming the key, what was given and
what was expected. Mappings and sequences are recognised by behaviour, so OmegaConf containers pass as they are.
"""

import difflib
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from numbers import Integral, Real
from typing import Any, ClassVar, Self

Check = Callable[[str, Any], Any]

RULE_PARTS = ("prefix", "pattern", "suffix", "mtp")
RULE_FORM = "a whole number, a list with one whole number per layer, or a map {prefix, pattern, suffix, mtp} of lists"

# What other tools call these settings, so that a borrowed key is answered with ours.
FOREIGN_KEYS = {
    name: ours
    for ours, names in {
        "compress_ratio": ("csa_compress_ratios", "compress_ratios"),
        "topk": ("index_topk", "dsa_indexer_topk"),
        "n_heads": ("index_n_heads", "dsa_indexer_n_heads", "num_attention_heads"),
        "head_dim": ("index_head_dim", "dsa_indexer_head_dim"),
        "window": ("sliding_window", "window_size"),
        "num_layers": ("num_hidden_layers",),
        "num_mtp_layers": ("num_nextn_predict_layers", "mtp_num_layers"),
        "original_max_position": ("original_max_position_embeddings",),
        "rope.theta": ("compress_rope_theta", "rope_theta"),
        "rope.dim": ("qk_rope_head_dim",),
        "rope": ("rope_scaling",),
        "loss.coeff": ("dsa_indexer_loss_coeff", "loss_coeff"),
    }.items()
    for name in names
}


class FrozenMap(Mapping):
    """Read-only, hashable and picklable map; values must be hashable. Equal to any mapping with the same items."""

    __slots__ = ("_items",)

    def __init__(self, items: Mapping | Iterable[tuple] = ()):
        self._items = dict(items)

    def __getitem__(self, key):
        return self._items[key]

    def __iter__(self):
        return iter(self._items)

    def __len__(self):
        return len(self._items)

    def __hash__(self):
        return hash(frozenset(self._items.items()))

    def __repr__(self):
        return repr(self._items)

    def __reduce__(self):
        return FrozenMap, (dict(self._items),)


class ConfigBase:
    """Checked construction, `from_dict` and `to_dict` for the frozen configuration dataclasses.

    Fields whose metadata come from `by` are normalised when the object is built, however it is built.
    """

    __slots__ = ()
    PREFIX: ClassVar[str] = ""

    def __post_init__(self):
        for item in fields(self):
            if check := item.metadata.get("check"):
                object.__setattr__(self, item.name, check(self.PREFIX + item.name, getattr(self, item.name)))
        self.check_together()

    def check_together(self) -> None:
        """Rules that involve several fields; raises ValueError."""

    @classmethod
    def from_dict(cls, mapping: Mapping) -> Self:
        """Build from any mapping; ValueError for an unknown or missing key and for every value out of form."""
        name = cls.PREFIX.rstrip(".") or cls.__name__
        if not isinstance(mapping, Mapping):
            raise wrong(name, mapping, "a map of settings")
        known = [item.name for item in fields(cls)]
        reject_unknown(name, mapping, known)
        for item in fields(cls):
            if item.default is MISSING and item.default_factory is MISSING and item.name not in mapping:
                raise ValueError(f"{cls.PREFIX}{item.name} is missing and has no default; {name} needs it")
        return cls(**{key: mapping[key] for key in known if key in mapping})

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, numbers and strings: `from_dict(to_dict(c)) == c`, safe for YAML and JSON."""
        return plain(self)


def by(check: Check) -> dict[str, Check]:
    """Field metadata that sends the field's value through `check(key, value)`."""
    return {"check": check}


def plain(value: Any) -> Any:
    """Dataclasses and maps become dicts with string keys (one spelling for YAML, JSON and dotted overrides)."""
    if is_dataclass(value):
        return {item.name: plain(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if is_list(value) else value


def wrong(key: str, value: Any, expected: str, *, layer: int | None = None) -> ValueError:
    """The error every check raises: key, layer, expected form, and what was given."""
    where = "" if layer is None else f" (layer {layer})"
    kind = "" if value is None or isinstance(value, bool) else f" ({type(value).__name__})"
    return ValueError(f"{key}{where} must be {expected}, got {_show(value)}{kind}{_hint(value)}")


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def _hint(value: Any) -> str:
    if isinstance(value, str):
        text = value.strip()
        if re.search(r"\]\s*\*|\*\s*\[|\]\s*\+", text):
            return "; text is not expanded: write the list out, e.g. [0, 0, 4, 4], or a pattern, e.g. {pattern: [0, 4]}"
        if text.lower() in ("true", "false", "null", "none", "yes", "no", "on", "off"):
            return f"; this is text: write {text.lower()} without quotes"
        if re.fullmatch(r"[-+]?\d+", text) or text.startswith("["):
            return f"; this is text: write {text} without quotes"
        if re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", text):
            return f"; this is text (plain YAML reads 1e-3 so): write {float(text)!r} without quotes"
    if isinstance(value, float) and value.is_integer():
        return f"; write {int(value)}"
    return ""


def is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)


def closest(key: Any, known: Sequence[str]) -> str:
    """`; did you mean 'topk'?` or an empty string."""
    name = str(key)
    guess = FOREIGN_KEYS.get(name.lower())
    if guess is None or guess.split(".")[0] not in known:
        guess = next(iter(difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.5)), None)
    return f"; did you mean {guess!r}?" if guess else ""


def reject_unknown(name: str, mapping: Mapping, known: Sequence[str]) -> None:
    """ValueError for the first key of `mapping` that is not in `known`, with the closest known name."""
    for key in mapping:
        if key not in known:
            raise ValueError(
                f"{name} has an unknown key {key!r} (value {_show(mapping[key])}){closest(key, known)}"
                f"; known keys: {', '.join(known)}"
            )


def whole(minimum: int, *, maximum: int | None = None, form: str = "") -> Check:
    """A whole number in [minimum, maximum]; no bool, no float, no text."""
    limits = f">= {minimum}" if maximum is None else f"between {minimum} and {maximum}"
    expected = form or f"a whole number {limits}"

    def check(key, value, layer=None):
        fits = isinstance(value, Integral) and not isinstance(value, bool)
        if not fits or value < minimum or (maximum is not None and value > maximum):
            raise wrong(key, value, expected, layer=layer)
        return int(value)

    return check


def real(minimum: float, *, above: bool = False, allow_none: str = "") -> Check:
    """A finite number >= minimum (> minimum when `above`); `allow_none` says what None means, empty refuses it."""
    expected = f"a finite number {'>' if above else '>='} {minimum:g}"
    expected += f" or null ({allow_none})" if allow_none else ""

    def check(key, value):
        if value is None and allow_none:
            return None
        fits = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
        if not fits or value < minimum or (above and value == minimum):
            raise wrong(key, value, expected)
        return float(value)

    return check


def flag(*, allow_none: str = "") -> Check:
    """True or False, nothing else; `allow_none` says what None means, empty refuses it."""

    def check(key, value):
        if isinstance(value, bool) or (value is None and allow_none):
            return value
        raise wrong(key, value, f"true, false or null ({allow_none})" if allow_none else "true or false")

    return check


def choice(*names: str) -> Check:
    def check(key, value):
        if isinstance(value, str) and value in names:
            return value
        near = closest(value, names) if isinstance(value, str) else ""
        raise ValueError(f"{wrong(key, value, 'one of ' + ', '.join(names))}{near}")

    return check


def nested(cls: type[ConfigBase]) -> Check:
    """An instance of `cls` or a map of its settings."""

    def check(key, value):
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise wrong(key, value, f"a map with the keys {', '.join(item.name for item in fields(cls))}")
        return cls.from_dict(value)

    return check


def rule(minimum: int) -> Check:
    """One setting for all layers: a number, a list, or a pattern map. Returns int, tuple or FrozenMap of tuples."""
    entry = whole(minimum)

    def entries(key, value, first_layer=None):
        if not is_list(value):
            raise wrong(key, value, f"a list of whole numbers >= {minimum}")
        return tuple(
            entry(f"{key}[{i}]", item, None if first_layer is None else first_layer + i) for i, item in enumerate(value)
        )

    def check(key, value):
        if isinstance(value, Mapping):
            reject_unknown(key, value, RULE_PARTS)
            parts = FrozenMap({name: entries(f"{key}.{name}", value[name]) for name in RULE_PARTS if name in value})
            if not parts.get("pattern"):
                raise wrong(f"{key}.pattern", value.get("pattern"), "a list with at least one whole number")
            return parts
        if is_list(value):
            return entries(key, value, first_layer=1)
        return whole(minimum, form=f"{RULE_FORM}, each >= {minimum}")(key, value)

    return check


def expand(key: str, value: Any, num_layers: int, num_mtp_layers: int) -> tuple[int, ...]:
    """Entries of a normalised rule, one per layer, decoder layers first. ValueError when the lengths do not fit."""
    total = num_layers + num_mtp_layers
    count = f"{num_layers} decoder + {num_mtp_layers} multi-token-prediction layers"
    if isinstance(value, int):
        return (value,) * total
    if isinstance(value, tuple):
        if len(value) != total:
            raise ValueError(f"{key} has {len(value)} entries, expected {total}: one per layer, {count}, in this order")
        return value
    prefix, pattern, suffix, mtp = (value.get(part, ()) for part in RULE_PARTS)
    room = num_layers - len(prefix) - len(suffix)
    if room < 0 or room % len(pattern):
        raise ValueError(
            f"{key}: a pattern of {len(pattern)} entries cannot fill {num_layers} decoder layers less prefix "
            f"({len(prefix)}) and suffix ({len(suffix)}): {room} layers remain, expected a multiple of {len(pattern)}"
        )
    if len(mtp) != num_mtp_layers:
        raise ValueError(
            f"{key}.mtp has {len(mtp)} entries, expected {num_mtp_layers}: one per multi-token-prediction layer"
        )
    return prefix + pattern * (room // len(pattern)) + suffix + mtp


def layer_overrides(**settings: Check) -> Check:
    """Map of 1-based layer number (int or digits) to a map of `settings`. Returns FrozenMap, sorted by number."""

    def check(key, value):
        if value is None:  # what YAML reads for a bare `layers:`
            return FrozenMap()
        if not isinstance(value, Mapping):
            raise wrong(key, value, "a map from layer number to settings, e.g. {3: {topk: 64}}")
        out = {}
        for name, item in value.items():
            digits = isinstance(name, str) and re.fullmatch(r"[1-9]\d*", name, re.ASCII)
            number = int(name) if digits else name
            whole(1, form="keyed by the global layer number, counted from 1")(key, number)
            if number in out:
                raise ValueError(f"{key} has layer {number} twice, as a number and as text: write it once, quoted")
            if not isinstance(item, Mapping) or not item:
                raise wrong(f"{key}.{number}", item, f"a map of {', '.join(settings)}", layer=number)
            reject_unknown(f"{key}.{number}", item, tuple(settings))
            out[int(number)] = FrozenMap({k: settings[k](f"{key}.{number}.{k}", v, number) for k, v in item.items()})
        return FrozenMap(sorted(out.items()))

    return check
