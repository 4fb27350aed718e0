"""Megatron-Bridge's own classes, with stand-ins for the packages that only the NeMo container has compiled."""

import importlib.machinery
import importlib.util
import sys
import types
from unittest.mock import MagicMock

COMPILED = ("transformer_engine", "megatron.energon", "modelopt")


class Module(types.ModuleType):
    """Holds a class for every capitalised name, for Bridge's classes to inherit from, and a mock for every other."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        anything = {"__init__": lambda self, *_, **__: None, "__class_getitem__": classmethod(lambda cls, item: cls)}
        value = type(name, (), anything) if name[0].isupper() else MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class StandIn:
    """Imports a `Module` for each of the missing packages and for everything inside them."""

    def __init__(self, names):
        self.names = names

    def find_spec(self, name, path=None, target=None):
        if any(name == root or name.startswith(f"{root}.") for root in self.names):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = Module(spec.name)
        module.__version__ = "2.9.0"
        return module

    def exec_module(self, module):
        pass


def _missing(name):
    try:
        return importlib.util.find_spec(name) is None
    except ModuleNotFoundError:
        return True


if not _missing("megatron.bridge"):
    sys.meta_path.insert(0, StandIn([name for name in COMPILED if _missing(name)]))
