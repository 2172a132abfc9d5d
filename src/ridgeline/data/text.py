"""Where text comes from: files, directories, the running Python's own library, Hugging Face datasets."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import inspect
import json
import os
import platform
import sysconfig
from collections.abc import Iterable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

from ridgeline.paths import cache_dir
from ridgeline.spec.errors import UserError

_SUFFIXES = {".py", ".txt", ".md", ".rst", ".json", ".jsonl", ".c", ".h", ".cpp", ".js", ".ts", ".html", ".tex"}
_LOOKED_AT = 8000
"""Characters at the beginning of a file by which it is text or not, as many as Git looks at."""


def documents(source: str, limit: int | None = None) -> Iterator[str]:
    """The documents of a data source, in a fixed order.

    ``stdlib``: sources and documentation topics of the running Python's standard library; ``stdlib-prose``: its
    documentation in English, and ``stdlib-code``: its code without that; a text file; a directory of text files, of
    which ``.jsonl`` ones may hold records with a ``text``, each a document;
    ``hf:NAME``: the ``text`` column of a Hugging Face dataset's train split;
    several of these with commas between them. ``limit``: characters of each that names no file or directory; None: all.

    Raises :class:`UserError` when there is nothing to read.
    """
    parts = _parts(source)
    if len(parts) > 1:  # one document of each in turn
        rows = zip_longest(*(documents(part, limit) for part in parts))
        yield from (text for row in rows for text in row if text is not None)
        return
    (source,) = parts
    if source.startswith("hf:"):
        yield from cut(_hugging_face(source[3:]), limit)
    elif source in PARTS:
        yield from cut(_part_of_stdlib(source), limit)
    elif source == "stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        skipped = {"site-packages", "test", "tests"}
        files = [p for p in root.rglob("*.py") if not skipped & set(p.relative_to(root).parts)]
        yield from cut(_texts(files, root), limit)
    else:
        (root,) = paths_of(source)
        files = [root]
        if root.is_dir():
            texts = (p for p in root.rglob("*") if p.suffix.lower() in _SUFFIXES)
            files = [p for p in texts if not hidden(p, root) and p.is_file()]
        yield from _texts(files, root)


def hidden(path: Path, root: Path) -> bool:
    """Whether a path below a directory is hidden there, or in a hidden one."""
    return any(part.startswith(".") for part in path.relative_to(root).parts)


def cut(texts: Iterable[str], limit: int | None) -> Iterator[str]:
    """Texts up to ``limit`` characters together, the last one cut there; None: all."""
    for text in texts:
        yield text if limit is None else text[:limit]
        if limit is not None and (limit := limit - len(text)) <= 0:
            return


def _texts(files: list[Path], root: Path) -> Iterator[str]:
    """What files hold, in hash order, which mixes kinds of files, so that a prefix is a fair sample of the whole. Bytes
    that are no UTF-8 become replacement characters; a file in a directory that is no text at all is left out."""

    def place(file: Path) -> bytes:
        name = str(file.relative_to(root)) if file != root else file.name
        return hashlib.md5(name.encode("utf-8", "surrogateescape")).digest()

    for file in sorted(files, key=place):
        try:
            text = file.read_text(encoding="utf-8-sig", errors="replace")
        except OSError as e:
            raise UserError(f"data {file} cannot be read: {e.strerror}") from None
        if "\0" in text[:_LOOKED_AT]:
            if file != root:
                continue
            raise UserError(f"data {file} is not UTF-8 text: there are zero bytes in it", "convert it, or give another")
        yield from filter(str.strip, _documents_in(text, file))


def _documents_in(text: str, file: Path) -> Iterator[str]:
    """The ``text`` of every record of JSON lines, if the first one is an object with it; else the text itself."""
    lines = text.split("\n") if file.suffix.lower() == ".jsonl" else []
    if "text" not in _object(next(filter(str.strip, lines), "")):
        yield text
        return
    for number, line in enumerate(lines, 1):
        if line.strip():
            found = _record(line)
            if found is None:
                raise UserError(f"data {file}:{number} is not a JSON record with a text",
                                "fix the line, or remove it")  # fmt: skip
            yield found


def _object(line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _record(line: str) -> str | None:
    text = _object(line).get("text")
    return text.encode("utf-8", "replace").decode() if isinstance(text, str) else None  # no half surrogate pairs


def paths_of(source: str) -> list[Path]:
    """The files and directories that a data source names, in its order; none of ``stdlib`` and ``hf:NAME``.

    Raises :class:`UserError` for one that does not exist.
    """
    found = []
    for part in _parts(source):
        if part.startswith("hf:") or part in ("stdlib", *PARTS):
            continue
        path = Path(part).expanduser()
        if not path.is_file() and not path.is_dir():
            raise UserError(f"data {part!r} is neither a file nor a directory", "give a path, `stdlib`, or hf:NAME")
        found.append(path)
    return found


def _parts(source: str) -> list[str]:
    """The sources that a source lists with commas; else itself."""
    if "," in source and not Path(source).expanduser().exists():
        return [part.strip() for part in source.split(",") if part.strip()] or [source]
    return [source]


PARTS = ("stdlib-prose", "stdlib-code")
"""Two domains of text that are always available and share no sentence."""


def _part_of_stdlib(source: str) -> Iterator[str]:
    """Documentation topics and docstrings, or code without docstrings and comments; made once per Python version."""
    kept = cache_dir() / "text" / f"{source}-{platform.python_version()}.json"
    if not kept.is_file():
        texts = [t for text in documents("stdlib") if (t := _prose(text) if source == PARTS[0] else _code(text))]
        with contextlib.suppress(OSError):  # a read-only or full disk: made again next time
            kept.parent.mkdir(parents=True, exist_ok=True)
            draft = kept.with_name(f".{kept.name}.{os.getpid()}.new")
            draft.write_text(json.dumps(texts), encoding="utf-8")
            os.replace(draft, kept)
        yield from texts
        return
    yield from json.loads(kept.read_text(encoding="utf-8"))


def _docstrings(tree: ast.AST) -> Iterator[ast.stmt]:
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and body:
            first = body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                yield first


def _parsed(text: str) -> ast.AST | None:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return None


def _prose(text: str) -> str:
    tree = _parsed(text)
    if tree is None:
        return ""
    if "topics = {" in text:  # pydoc's: the language reference as one dictionary of texts
        strings = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
        return "\n\n".join(s for s in strings if len(s) > 200)
    return "\n\n".join(inspect.cleandoc(s.value.value) for s in _docstrings(tree))  # type: ignore[attr-defined]


def _code(text: str) -> str:
    tree = _parsed(text)
    if tree is None or "topics = {" in text:
        return ""
    for statement in _docstrings(tree):
        statement.value = ast.Constant(...)  # type: ignore[attr-defined]
    return ast.unparse(tree)


def _hugging_face(name: str) -> Iterator[str]:
    try:
        import datasets
    except ImportError:
        raise UserError(f"data 'hf:{name}' needs the `datasets` package", "pip install 'ridgeline[data]'") from None
    try:
        rows = datasets.load_dataset(name, split="train", streaming=True)
    except Exception as e:
        raise UserError(f"Hugging Face dataset {name!r} could not be opened: {str(e).splitlines()[0]}") from None
    for row in rows:
        if "text" not in row:
            raise UserError(f"dataset {name!r} has no column 'text'", f"its columns: {', '.join(row)}")
        if row["text"] and row["text"].strip():
            yield row["text"]
