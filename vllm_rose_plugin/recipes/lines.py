"""YAML with the line of every key, so that a fault found late can still name where it stands."""

from pathlib import Path
from typing import Any

import yaml

from vllm_rose_plugin.recipes.finding import Finding, Keys, RecipeError

Lines = dict[Keys, int]
"""The 1-based line of each key (and list entry), by the way to it."""


def read_yaml(path: Path) -> tuple[Any, Lines]:
    """The data of one YAML document and the line of every key in it.

    Raises:
        RecipeError: no such file, not YAML, a key given twice, a key that isn't text, or a value that JSON doesn't have
            (a date).
    """
    try:
        text = path.read_text(encoding="utf-8")
    except IsADirectoryError as error:
        raise _fault(path, 0, (), "is a folder", "a file", f"name its files, such as {path}/*.yaml") from error
    except (OSError, UnicodeDecodeError) as error:
        said = error.strerror if isinstance(error, OSError) else error
        raise _fault(path, 0, (), f"can't be read: {said}", "a UTF-8 file", "name an existing file") from error
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        lines: Lines = {(): 1}
        return (None if node is None else _build(node, (), lines, loader, path)), lines
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        at = getattr(error, "position", 0)  # a character that YAML forbids has no mark
        line = mark.line + 1 if mark else text.count("\n", 0, at) + 1
        problem = f"is not YAML: {getattr(error, 'problem', None) or str(error).splitlines()[0]}"
        raise _fault(path, line, (), problem, "one YAML document", "mend the syntax on this line") from error
    except RecursionError:
        problem = "holds itself (an alias inside its anchor), or nests too deeply"
        raise _fault(path, 0, (), problem, "values written out", "remove the alias") from None


def _build(node: yaml.Node, keys: Keys, lines: Lines, loader: yaml.SafeLoader, path: Path) -> Any:
    if isinstance(node, yaml.MappingNode):
        mapping: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if key_node.tag == "tag:yaml.org,2002:merge":  # two places for one value would leave its line in doubt
                raise _fault(path, line, keys, "merges with <<", "keys written out", "use an overlay, or repeat them")
            key = loader.construct_object(key_node)
            if not isinstance(key, str):
                cure = f'write "{key_node.value}"' if isinstance(key_node, yaml.ScalarNode) else "write text"
                raise _fault(path, line, keys, f"has the key {key!r}", "text as keys", cure)
            if key in mapping:
                raise _fault(path, line, (*keys, key), "is given twice", "each key once", "remove one of them")
            lines[(*keys, key)] = line
            mapping[key] = _build(value_node, (*keys, key), lines, loader, path)
        return mapping
    if isinstance(node, yaml.SequenceNode):
        for index, entry in enumerate(node.value):
            lines[(*keys, index)] = entry.start_mark.line + 1
        return [_build(entry, (*keys, index), lines, loader, path) for index, entry in enumerate(node.value)]
    try:
        value = loader.construct_object(node)
    except ValueError as error:  # 2026-13-01 looks like a date
        problem = f"is no value: {error}"
    else:
        if value is None or isinstance(value, str | int | float):
            return value
        problem = f"is read as a {type(value).__name__}"
    legal, cure = "text, a number, true or false", f'write "{node.value}"'
    raise _fault(path, node.start_mark.line + 1, keys, problem, legal, cure)


def _fault(path: Path, line: int, keys: Keys, problem: str, legal: str, cure: str) -> RecipeError:
    return RecipeError([Finding(file=path, line=line, keys=keys, value=None, problem=problem, legal=legal, cure=cure)])
