"""Instruction data: records of a JSON or JSON-lines file → text whose answers are marked, by a chat template.

Four kinds of record are read, told apart by their keys: chat (``messages``, or ``conversations`` as ShareGPT writes
them, with the ``tools`` that may be called), Alpaca (``instruction``, ``input``, ``output``), ``prompt`` and
``completion`` (texts, or both messages), and plain ``text``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ridgeline.spec.errors import UserError
from ridgeline.spec.json_file import read_json

if TYPE_CHECKING:
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser

TEMPLATES = {
    "chatml": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "llama2": (
        "{% set told = namespace(system='') %}{% for m in messages %}"
        "{% if m.role == 'system' %}{% set told.system = '<<SYS>>\n' ~ m.content ~ '\n<</SYS>>\n\n' %}"
        "{% elif m.role == 'user' %}{{ bos_token }}[INST] {{ told.system }}{{ m.content }} [/INST]"
        "{% set told.system = '' %}"
        "{% else %} {{ m.content }} {{ eos_token }}{% endif %}{% endfor %}"
    ),
    "alpaca": (
        "{% for m in messages %}"
        "{% if m.role == 'system' %}{{ m.content }}\n\n"
        "{% elif m.role == 'user' %}### Instruction:\n{{ m.content }}\n\n"
        "{% else %}### Response:\n{{ m.content }}{{ eos_token }}\n\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}### Response:\n{% endif %}"
    ),
}
"""Chat templates by name, for checkpoints that bring none."""

_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}


@dataclass(frozen=True)
class Example:
    """A text and the parts of it, as (start, end) in characters, that the model is trained to produce."""

    text: str
    learned: tuple[tuple[int, int], ...]
    ends: bool = True
    """Whether an end-of-text token is appended and trained on (a chat template writes its own)."""


class BadRecord(ValueError):
    """A record that is not an example; the message says why."""


@dataclass
class Template:
    """A Jinja chat template, as Hugging Face writes them in ``tokenizer_config.json``."""

    source: str
    name: str
    tokens: dict[str, str] = field(default_factory=dict)
    """Special tokens that templates ask for: ``bos_token``, ``eos_token``, …"""

    def __post_init__(self) -> None:
        from jinja2 import TemplateError, nodes
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def refuse(message: str) -> None:
            raise TemplateError(message)

        env = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _generation()]
        )
        env.globals["raise_exception"] = refuse
        env.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        env.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
        try:
            self._template = env.from_string(self.source)
            tree = env.parse(self.source)
        except TemplateError as e:
            raise UserError(f"chat template {self.name} is not valid Jinja: {e}", "fix it, or give another") from None
        self.reads_parts = _loops_over_content(tree)
        """Whether messages may have a list of parts as content."""
        self.reads_thinking = any(found.attr == "thinking" for found in tree.find_all(nodes.Getattr))
        """Whether it has gpt-oss's name of what others call reasoning."""
        self.knows_developer = any(found.value == "developer" for found in tree.find_all(nodes.Const))
        """Whether it has OpenAI's newer name of what others know as system."""

    def render(self, messages: list[dict[str, Any]], prompt: bool = False, **variables: Any) -> str:
        """The text of ``messages``; with ``prompt`` it ends where the assistant's turn begins. ``variables``: more
        variables of the template. Raises BadRecord."""
        known = {"tools": None, "documents": None, **self.tokens, **variables}  # templates ask whether they are None
        try:
            return self._template.render(messages=messages, add_generation_prompt=prompt, **known)
        except Exception as e:  # templates are programs, and their error messages arbitrary
            raise BadRecord(f"the chat template does not take it: {e}") from None

    def example(
        self, messages: list[dict[str, Any]], learned_from: int = 0, tools: list[dict[str, Any]] | None = None
    ) -> Example:
        """The whole conversation, with the assistant's turns (including their closing tokens) marked as answers: those
        from message ``learned_from`` on. Raises BadRecord, also for tools and calls that the template leaves out."""
        text = self.render(messages, tools=tools)
        silent = [{k: v for k, v in m.items() if k != "tool_calls"} for m in messages]
        if silent != messages and self._writes(text, silent, tools):
            raise BadRecord("the chat template does not write tool calls: give another --template")
        if tools and self._writes(text, messages, None):
            raise BadRecord("the chat template does not show tools to the model: give another --template")
        spans = []
        for i, message in enumerate(messages):
            if message["role"] != "assistant" or i < learned_from:
                continue
            before = self.render(messages[:i], prompt=True, tools=tools)
            upto = self.render(messages[: i + 1], tools=tools)
            start = len(before) if upto.startswith(before) else len(self.render(messages[:i], tools=tools))
            if not text.startswith(upto[:start]) or not text.startswith(upto.rstrip()):
                raise BadRecord("the chat template changes earlier messages when later ones follow")
            spans.append((start, min(len(upto), len(text))))
        if not spans:
            raise BadRecord("no message is the assistant's: there is nothing to learn")
        return Example(text, tuple(spans), ends=False)

    def _writes(self, text: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> bool:
        """Whether ``messages`` are written as ``text``, too; a template that refuses them looks at what they lack."""
        try:
            return text == self.render(messages, tools=tools)
        except BadRecord:
            return False


def _loops_over_content(tree: nodes.Template) -> bool:
    """Whether a template goes through the parts of a message's ``content``, or through some of them."""
    from jinja2 import nodes

    def read(part: nodes.Node | None) -> bool:
        if isinstance(part, nodes.Filter):
            return read(part.node)
        if isinstance(part, nodes.Getitem):
            if isinstance(part.arg, nodes.Slice):
                return read(part.node)
            return isinstance(part.arg, nodes.Const) and part.arg.value == "content"
        return getattr(part, "attr" if isinstance(part, nodes.Getattr) else "name", None) == "content"

    return any(read(loop.iter) for loop in tree.find_all(nodes.For))


def _generation() -> type[Extension]:
    """Jinja's ``{% generation %} … {% endgeneration %}``, by which Hugging Face's templates mark what the assistant
    says. Here it writes what is in it."""
    from jinja2 import nodes
    from jinja2.ext import Extension

    class Generation(Extension):
        tags = {"generation"}

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    return Generation


def find_template(named: str | None, checkpoint: str | None) -> Template | None:
    """The template of that name, text or file; without one, the checkpoint's own; None when it has none.

    Raises :class:`UserError` for a name or file that does not exist.
    """
    tokens = special_tokens(checkpoint)
    if named in TEMPLATES:
        return Template(TEMPLATES[named], named, tokens)
    if named and ("{{" in named or "{%" in named):
        return Template(named, "--chat-template", tokens)
    if named:
        file = Path(named)
        if not file.is_file():
            known = ", ".join(TEMPLATES)
            raise UserError(f"no chat template {named!r}", f"give a Jinja file, a template, or one of: {known}")
        return Template(file.read_text(encoding="utf-8"), named, tokens)
    if checkpoint is None:
        return None
    file = Path(checkpoint) / "chat_template.jinja"
    if file.is_file():
        return Template(file.read_text(encoding="utf-8"), str(file), tokens)
    found = tokenizer_config(checkpoint).get("chat_template")
    if isinstance(found, list):  # several, by name
        found = next((t.get("template") for t in found if t.get("name") == "default"), None)
    return Template(found, f"of {checkpoint}", tokens) if isinstance(found, str) else None


def tokenizer_config(checkpoint: str | None) -> dict[str, Any]:
    """``tokenizer_config.json`` of a checkpoint directory; empty when there is none."""
    return read_json(Path(checkpoint) / "tokenizer_config.json") if checkpoint else {}


def special_tokens(checkpoint: str | None) -> dict[str, str]:
    """Texts of the checkpoint's special tokens by name (``eos_token``, …)."""
    config = tokenizer_config(checkpoint)
    texts = {k: v["content"] if isinstance(v, dict) else v for k, v in config.items() if k.endswith("_token")}
    return {"bos_token": "", "eos_token": "", **{k: v for k, v in texts.items() if isinstance(v, str)}}


def records(file: Path, skip_bad: bool = False) -> Iterator[tuple[str, Any]]:
    """(place, record) of a JSON-lines file, or of a JSON file that holds a list; ``place`` is file and line.

    A line that is not JSON raises :class:`UserError` naming it, or with ``skip_bad`` comes as a :class:`BadRecord`.
    """
    if not file.is_file():
        raise UserError(f"no data file {file}", "give a .jsonl or .json file")
    text = file.read_text(encoding="utf-8-sig", errors="replace")
    if text.lstrip().startswith("["):
        try:
            listed = json.loads(text)
        except ValueError as e:
            raise UserError(f"{file} is not a JSON list: {e}", "fix it, or write one record a line (.jsonl)") from None
        yield from ((f"{file}: record {i}", record) for i, record in enumerate(listed, 1))
        return
    for number, line in enumerate(text.split("\n"), 1):  # a JSON text may hold Unicode's other line separators
        if not line.strip():
            continue
        place = f"{file}:{number}"
        try:
            yield place, json.loads(line)
        except (ValueError, RecursionError) as e:
            if not skip_bad:
                raise UserError(
                    f"{place}: not JSON: {e}", "fix the line, or leave such lines out: --skip-bad"
                ) from None
            yield place, BadRecord(f"not JSON: {e}")


def read_examples(
    file: Path, template: Template | None, skip_bad: bool = False
) -> tuple[list[Example], list[tuple[str, str]]]:
    """The examples of a data file, and (place, reason) of every record left out, which needs ``skip_bad``.

    Raises :class:`UserError` at the first bad record otherwise, and when chat messages meet no template.
    """
    examples: list[Example] = []
    bad: list[tuple[str, str]] = []
    for place, record in records(file, skip_bad):
        try:
            if isinstance(record, BadRecord):
                raise record
            examples.append(_readable(_example(record, template, place)))
        except BadRecord as e:
            if not skip_bad:
                fix = "fix the record, or leave such records out: --skip-bad"
                raise UserError(f"{place}: {e}", fix) from None
            bad.append((place, str(e)))
    if not examples:
        raise UserError(f"{file} holds no usable example", bad[0][1] if bad else "write one record a line")
    return examples, bad


def _readable(example: Example) -> Example:
    """The example, unless tokenizers cannot read it."""
    try:
        example.text.encode()
    except UnicodeEncodeError as e:
        raise BadRecord(f"its text holds half of a surrogate pair, {example.text[e.start]!a}") from None
    return example


def _example(record: Any, template: Template | None, place: str) -> Example:
    if not isinstance(record, dict):
        raise BadRecord(f"a record must be an object, not {type(record).__name__}")
    found = next((record[key] for key in ("messages", "conversations") if record.get(key) is not None), None)
    context = record.get("prompt")
    learned_from = 0
    if isinstance(context, list) and isinstance(record.get("completion"), list):
        found, learned_from = context + record["completion"], len(context)
    if found is not None:
        if template is None:
            raise UserError(
                f"{place}: chat messages need a chat template, and the checkpoint has none",
                f"give --template FILE.jinja, or one of: {', '.join(TEMPLATES)}",
            )
        messages = _messages(found, template.reads_parts)
        if isinstance(system := record.get("system"), str) and system and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": system})
            learned_from += 1
        return template.example(messages, learned_from, _tools(record.get("tools")))
    if "instruction" in record:
        instruction, given, output = (_text(record, k, k != "input") for k in ("instruction", "input", "output"))
        prompt = f"{instruction}\n\n{given}" if given else instruction
        if template is not None:
            return template.example([{"role": "user", "content": prompt}, {"role": "assistant", "content": output}])
        context = f"### Input:\n{given}\n\n" if given else ""
        prompt = f"### Instruction:\n{instruction}\n\n{context}### Response:\n"
        return Example(prompt + output, ((len(prompt), len(prompt) + len(output)),))
    if "prompt" in record:
        prompt, output = _text(record, "prompt"), _text(record, "completion")
        return Example(prompt + output, ((len(prompt), len(prompt) + len(output)),))
    if "text" in record:
        text = _text(record, "text")
        return Example(text, ((0, len(text)),))
    have = ", ".join(map(str, record)) or "none"
    raise BadRecord(f"it has no messages, no instruction, no prompt and no text; its keys: {have}")


def _text(record: dict[str, Any], key: str, needed: bool = True) -> str:
    value = record.get(key)
    if value is None and not needed:
        return ""
    if not isinstance(value, str) or (needed and not value):
        raise BadRecord(f"{key!r} is {'missing' if value is None else 'not a non-empty text'}")
    return value


def _messages(found: Any, in_parts: bool) -> list[dict[str, Any]]:
    """Messages as templates take them, with all their further fields; ``in_parts``: a user's or an assistant's content
    that comes in parts stays so."""
    if not isinstance(found, list) or not found:
        raise BadRecord("messages must be a list of at least one message")
    out = []
    for i, m in enumerate(found, 1):
        if not isinstance(m, dict):
            raise BadRecord(f"message {i} is not an object")
        role, content = m.get("role", m.get("from")), m.get("content", m.get("value"))
        further = {k: v for k, v in m.items() if k not in ("role", "from", "content", "value") and v is not None}
        calls = further.pop("tool_calls", None)
        if calls:
            further["tool_calls"] = _calls(calls, i)
            content = "" if content is None else content
        if isinstance(content, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in content):
            as_list = in_parts and role in ("user", "assistant")
            content = content if as_list else "\n".join(p["text"] for p in content)
        elif not isinstance(content, str):
            content = None
        if not isinstance(role, str) or content is None:
            raise BadRecord(f"message {i} needs a role and a content, both text")
        out.append({"role": _ROLES.get(role, role), "content": content, **further})
    return out


def _calls(found: Any, message: int) -> list[dict[str, Any]]:
    """Calls of functions as templates take them: their arguments, which the OpenAI API has as text, as an object."""
    calls = []
    try:
        for call in found:
            function = {**call["function"]}
            if isinstance(function.get("arguments"), str):
                function["arguments"] = json.loads(function["arguments"].strip() or "{}")
            elif function.get("arguments") is None:
                function["arguments"] = {}
            if not function["name"] or not isinstance(function["arguments"], dict):
                raise ValueError
            calls.append({**call, "function": function})
    except (KeyError, TypeError, ValueError):
        what = 'each {"function": {"name": …, "arguments": …}}, with arguments that are JSON'
        raise BadRecord(f"message {message} needs tool_calls that are {what}") from None
    return calls


def _tools(found: Any) -> list[dict[str, Any]] | None:
    """The functions that may be called, a list or its JSON; None: none."""
    if isinstance(found, str):
        try:
            found = json.loads(found.strip() or "[]")
        except ValueError as e:
            raise BadRecord(f"tools are not JSON: {e}") from None
    if not found:
        return None
    if not isinstance(found, list) or not all(isinstance(tool, dict) for tool in found):
        raise BadRecord("tools must be a list of objects")
    return found
